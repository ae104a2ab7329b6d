"""Verification rules that are wrong, each as it was shipped somewhere or easily could be. Negative controls: the
enumeration must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dartspec.sampling import Sampler
from dartspec.types import Scores, TokenTree, Verdict

FRESH = 1000  # added to a position: a noise vector that no position uses

Rule = Callable[[Scores, TokenTree, Sampler, Sequence[int]], Verdict]


def _walk(
    scores: Scores, tree: TokenTree, sampler: Sampler, history: Sequence[int], key: Callable[[int, int], int]
) -> tuple[list[int], int, bool]:
    """The true walk, but with noise taken at `key(node, position)`. Path, last pick, whether it ended at a leaf."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    path = [0]
    while True:
        node = path[-1]
        drafted = [tokens[i] for i in path[1:]]
        row = sampler.process(scores.logits[node], history, drafted)
        pick = _choose(sampler, row, key(node, len(history) + len(drafted)))
        children = [i for i in range(1, len(tokens)) if parents[i] == node]
        hit = next((i for i in children if tokens[i] == pick), None)
        if hit is None:
            return path, pick, not children
        path.append(hit)


def _choose(sampler: Sampler, row: Tensor, key: int) -> int:
    return int((row + sampler._gumbel(key, len(row), row.device)).argmax())


def _verdict(path: list[int], bonus: int, tree: TokenTree) -> Verdict:
    return Verdict(path, bonus, torch.full((len(tree.tokens),), -1, dtype=torch.int32))


def second_draw_after_a_miss(scores: Scores, tree: TokenTree, sampler: Sampler, history: Sequence[int]) -> Verdict:
    """Where no child was picked, the bonus token is drawn anew: the missed pick's mass is spread over the children."""
    path, pick, leaf = _walk(scores, tree, sampler, history, lambda node, position: position)
    if not leaf:
        drafted = tree.tokens[path[1:]].tolist()
        row = sampler.process(scores.logits[path[-1]], history, drafted)
        pick = _choose(sampler, row, len(history) + len(drafted) + FRESH)
    return _verdict(path, pick, tree)


def bonus_from_the_residual(scores: Scores, tree: TokenTree, sampler: Sampler, history: Sequence[int]) -> Verdict:
    """After a fully accepted path the bonus comes from the last row's parent with the accepted token taken out, as if
    it had been rejected (EAGLE #50)."""
    path, pick, leaf = _walk(scores, tree, sampler, history, lambda node, position: position)
    if leaf and len(path) > 1:
        drafted = tree.tokens[path[1:]].tolist()
        row: Tensor = sampler.process(scores.logits[path[-2]], history, drafted[:-1]).clone()
        row[drafted[-1]] = -torch.inf
        pick = _choose(sampler, row, len(history) + len(drafted))
    return _verdict(path, pick, tree)


def noise_by_node(scores: Scores, tree: TokenTree, sampler: Sampler, history: Sequence[int]) -> Verdict:
    """Noise counted by the node's index: right within a round, but the next round meets the same numbers again."""
    path, pick, _ = _walk(scores, tree, sampler, history, lambda node, position: len(history) + node)
    return _verdict(path, pick, tree)


def most_likely_child(scores: Scores, tree: TokenTree, sampler: Sampler, history: Sequence[int]) -> Verdict:
    """A child is accepted when it is the target's likeliest token, the temperature forgotten (case 4)."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    path = [0]
    while True:
        drafted = [tokens[i] for i in path[1:]]
        row = sampler.process(scores.logits[path[-1]], history, drafted)
        best = int(row.argmax())
        hit = next((i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == best), None)
        if hit is None:
            return _verdict(path, _choose(sampler, row, len(history) + len(drafted)), tree)
        path.append(hit)


def penalties_of_the_root(scores: Scores, tree: TokenTree, sampler: Sampler, history: Sequence[int]) -> Verdict:
    """Every row is penalised for the committed tokens only, not for its own path (case 6)."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    path = [0]
    while True:
        row = sampler.process(scores.logits[path[-1]], history, ())
        pick = _choose(sampler, row, len(history) + len(path) - 1)
        hit = next((i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == pick), None)
        if hit is None:
            return _verdict(path, pick, tree)
        path.append(hit)


ALWAYS_WRONG: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (second_draw_after_a_miss, bonus_from_the_residual, noise_by_node, most_likely_child)
}
