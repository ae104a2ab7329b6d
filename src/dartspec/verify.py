"""Scores + TokenTree -> Verdict: one rule for greedy and for sampling (docs/losslessness.md).

Pick one target token at each node; walk from the root while the pick is a child; the last pick is the bonus token. A
pick does not depend on the tree, so the committed tokens are those of plain decoding whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dartspec.sampling import Sampler, no_token
from dartspec.tree import depths
from dartspec.types import Scores, TokenTree, Verdict


def verify(scores: Scores, tree: TokenTree, sampler: Sampler, history: Sequence[int]) -> Verdict:
    """Walks one sequence's tree.

    scores:  (N, V) logits, row i for the token after node i. history: committed tokens; `history[-1]` is the root.

    On the CPU only the nodes on the walk are picked, as many as plain decoding would pick. On an accelerator all rows
    are picked at once, one transfer a round, where the request allows it.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    children = {(parents[i], tokens[i]): i for i in range(len(tokens) - 1, 0, -1)}  # the first of equal siblings wins
    picks = torch.full((len(tokens),), -1, dtype=torch.int32)
    known: list[int] | None = None
    if scores.logits.device.type != "cpu" and not sampler.params.uses_history:
        known = sampler.pick_rows(scores.logits, (len(history) + depths(tree)).tolist())
        picks = torch.tensor(known, dtype=torch.int32)

    path: list[int] = [0]
    drafted: list[int] = []
    while True:
        node = path[-1]
        pick = known[node] if known else sampler.pick(scores.logits[node], history, drafted)
        if pick < 0:
            raise no_token()
        picks[node] = pick
        child = children.get((node, pick))
        if child is None:
            return Verdict(path, pick, picks)
        path.append(child)
        drafted.append(pick)
