"""Scores + TokenTree -> Verdict: one rule for greedy and for sampling (docs/losslessness.md).

Pick one target token at each node; walk from the root while the pick is a child; the last pick is the bonus token. A
pick does not depend on the tree, so the committed tokens are those of plain decoding whatever was drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dartspec.device import Recorder, fetch, send
from dartspec.errors import DartspecError
from dartspec.sampling import GumbelRows, Sampler, pick_together
from dartspec.tree import ancestor_mask, depths
from dartspec.types import Scores, TokenTree, Verdict

MOST_ROW_BYTES = 256 << 20  # float32 logits that are picked from at once


def verify(scores: Scores, tree: TokenTree, sampler: Sampler, history: Sequence[int], every: bool = False) -> Verdict:
    """Walks one sequence's tree, node by node: as many picks as plain decoding would make.

    scores:  (N, V) logits, row i for the token after node i. history: committed tokens; `history[-1]` is the root.
    every:   fill in the picks of all nodes, for drafters that learn from them; -1 where none can be made.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    children = {(parents[i], tokens[i]): i for i in range(len(tokens) - 1, 0, -1)}  # the first of equal siblings wins
    picks = torch.full((len(tokens),), -1, dtype=torch.int32)
    path: list[int] = [0]
    drafted: list[int] = []
    while True:
        node = path[-1]
        pick = sampler.pick(scores.logits[node], history, drafted)
        picks[node] = pick
        child = children.get((node, pick))
        if child is None:
            if every:
                _pick_others(picks, scores, tree, sampler, history)
            return Verdict(path, pick, picks)
        path.append(child)
        drafted.append(pick)


def _pick_others(picks: Tensor, scores: Scores, tree: TokenTree, sampler: Sampler, history: Sequence[int]) -> None:
    """Picks at the nodes off the walk, each on its own path."""
    paths: list[list[int]] = []
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        paths.append([*paths[parent], token] if parent >= 0 else [])
        if picks[node] < 0:
            try:
                picks[node] = sampler.pick(scores.logits[node], history, paths[node])
            except DartspecError:  # no token can follow here: an error only if the walk had come this way
                continue


def verify_typical(
    scores: Scores, tree: TokenTree, sampler: Sampler, history: Sequence[int], epsilon: float
) -> Verdict:
    """Medusa's typical acceptance (arXiv 2401.10774, section 3.3.1). LOSSY: the text is not the target's.

    A draft stays where its probability, with the request's temperature and filters, is above
    min(epsilon, sqrt(epsilon) * exp(-entropy)); of the paths that stay the longest is taken, and of equals the first.
    Behind it the target picks as always. Greedily only the likeliest token has a probability: then it is `verify`.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    paths: list[list[int]] = [[0]]
    kept: dict[int, Tensor] = {}  # node whose path stays -> probabilities of what follows it

    def row(node: int) -> Tensor:
        if node not in kept:
            drafted = [tokens[i] for i in paths[node][1:]]
            values = sampler.process(scores.logits[node], history, drafted)
            greedy = sampler.params.temperature == 0
            kept[node] = torch.nn.functional.one_hot(values.argmax(), len(values)) if greedy else values.softmax(-1)
        return kept[node]

    best = 0
    for i in range(1, len(tokens)):
        paths.append([])
        if not paths[parents[i]]:
            continue
        p = row(parents[i]).double()
        entropy = -float(torch.special.xlogy(p, p).sum())
        if float(p[tokens[i]]) > min(epsilon, math.sqrt(epsilon) * math.exp(-entropy)):
            paths[i] = [*paths[parents[i]], i]
            best = i if len(paths[i]) > len(paths[best]) else best
    path = paths[best]
    bonus = sampler.pick(scores.logits[best], history, [tokens[i] for i in path[1:]])
    picks = torch.full((len(tokens),), -1, dtype=torch.int32)
    for node, following in zip(path, [*(tokens[i] for i in path[1:]), bonus], strict=True):
        picks[node] = following
    return Verdict(path, bonus, picks)


class Together:
    """`verify` for all sequences of a round at once, for accelerators: every row is picked, the walk is done on the
    device, and one transfer brings paths and picks back.

    num_tokens: as in `Sampler`. recorder: see `GumbelRows`.
    """

    def __init__(self, num_tokens: int, device: torch.device, recorder: Recorder | None = None) -> None:
        self._num_tokens = num_tokens
        self._noise = GumbelRows(num_tokens, device, recorder)

    def verify(
        self,
        scores: Sequence[Scores],
        trees: Sequence[TokenTree],
        samplers: Sequence[Sampler],
        lengths: Sequence[int],
    ) -> list[Verdict | None]:
        """lengths: committed tokens of each sequence.

        None where `verify` must be asked: the picks depend on the tokens before them (`Sampler.is_pure`), or no token
        could be picked on the walk, which is an error there.
        """
        out: list[Verdict | None] = [None] * len(scores)
        pure = [i for i, sampler in enumerate(samplers) if sampler.is_pure]
        if not pure:
            return out
        picked = [self._picks(part, scores, trees, samplers, lengths) for part in self._parts(pure, trees)]
        some = [trees[i] for i in pure]
        sent = send(_tree_arrays(some), picked[0].device)
        picks = torch.cat(picked)[sent["row"]].int()  # (B, N)
        reached = walk(picks, sent["tokens"], sent["parents"], sent["ancestors"], sent["valid"])
        picks_here, reached_here = fetch(picks, reached.int())
        for b, i in enumerate(pure):
            path = reached_here[b].nonzero()[:, 0].tolist()  # parents come before children, so in order
            bonus = int(picks_here[b, path[-1]])
            if bonus >= 0:
                out[i] = Verdict(path, bonus, picks_here[b, : len(trees[i].tokens)].clone())
        return out

    def _parts(self, pure: Sequence[int], trees: Sequence[TokenTree]) -> list[list[int]]:
        """Sequences whose rows are picked from at once, so that float32 copies of them stay small."""
        most = max(1, MOST_ROW_BYTES // (4 * self._num_tokens))
        parts: list[list[int]] = []
        num_rows = most
        for i in pure:
            n = len(trees[i].tokens)
            if num_rows + n > most:
                parts.append([])
                num_rows = 0
            parts[-1].append(i)
            num_rows += n
        return parts

    def _picks(
        self,
        part: Sequence[int],
        scores: Sequence[Scores],
        trees: Sequence[TokenTree],
        samplers: Sequence[Sampler],
        lengths: Sequence[int],
    ) -> Tensor:
        """(R,) int64 picks of the rows of these sequences, laid end to end."""
        logits = [scores[i].logits for i in part]
        rows = logits[0] if len(part) == 1 else torch.cat(logits)
        counts = [len(trees[i].tokens) for i in part]
        positions = [q for i in part for q in (lengths[i] + depths(trees[i])).tolist()]
        return pick_together(rows, [samplers[i] for i in part], counts, positions, self._noise)


def walk(picks: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor, valid: Tensor) -> Tensor:
    """(B, N) bool: the nodes walked, a path from the root; without a loop over nodes.

    picks, tokens, parents: (B, N) whole numbers; parents[:, 0] is -1. ancestors: (B, N, N) bool, each node and its
    ancestors. valid: (B, N) bool, false for padding.
    """
    parent = parents.clamp(min=0).long()
    agrees = (picks.gather(1, parent) == tokens) & valid
    alike = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    agrees &= ~alike.tril(-1).any(-1)  # the first of equal siblings is walked
    agrees[:, 0] = True
    return valid & ~(ancestors & ~agrees[:, None]).any(-1)


def _tree_arrays(trees: Sequence[TokenTree]) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    """The trees padded to the largest, and each node's row where all trees' rows are laid end to end."""
    B, N = len(trees), max(len(t.tokens) for t in trees)
    tokens, parents = (np.full((B, N), -1, dtype=np.int32) for _ in range(2))
    row = np.zeros((B, N), dtype=np.int64)
    valid, ancestors = np.zeros((B, N), dtype=np.bool_), np.zeros((B, N, N), dtype=np.bool_)
    at = 0
    for b, tree in enumerate(trees):
        n = len(tree.tokens)
        tokens[b, :n], parents[b, :n] = tree.tokens.numpy(), tree.parents.numpy()
        row[b, :n] = np.arange(at, at + n)
        valid[b, :n] = True
        ancestors[b, :n, :n] = ancestor_mask(tree).numpy()
        at += n
    return {"tokens": tokens, "parents": parents, "row": row, "valid": valid, "ancestors": ancestors}
