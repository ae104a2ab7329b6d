"""The enumeration test: what `verify` commits has exactly the target's distribution, as fractions, for every tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import torch

from dartspec.sampling import Noise, Sampler
from dartspec.tree import root_only
from dartspec.types import SamplingParams, Scores, TokenTree
from dartspec.verify import verify
from reference import verify_wrong
from reference.verify_enumeration import (
    TRIANGLE,
    Cell,
    Law,
    V,
    Weights,
    area,
    cells,
    clip,
    enumerate_rule,
    expected,
    make_tree,
    trees,
)

F = Fraction
LENGTH = 3  # committed tokens looked at
HISTORY = [1, 0]  # prompt [1], then the root, an answer's first token
BASES: list[Weights] = [
    (F(1, 2), F(1, 3), F(1, 6)),
    (F(1, 5), F(1, 5), F(3, 5)),
    (F(2, 7), F(4, 7), F(1, 7)),
]


def base(path: tuple[int, ...]) -> Weights:
    """The fake target: one of three distributions, by the whole path."""
    return BASES[(sum((i + 1) * t for i, t in enumerate(path)) + len(path)) % 3]


class Case:
    """Sampling parameters whose effect on the fake target is rational, and that effect written out by hand."""

    def __init__(self, params: SamplingParams, change: Law, target: Law = base) -> None:
        self.params, self.law, self.target = params, change, target


def frequency(path: tuple[int, ...]) -> Weights:
    """frequency_penalty ln 2 halves a token's weight for every time that the output holds it; the root is output."""
    w = BASES[0]
    return tuple(w[v] / 2 ** ([0, *path].count(v)) for v in range(V))  # type: ignore[return-value]


def repetition(path: tuple[int, ...]) -> Weights:
    """repetition_penalty 2 doubles a negative logit, so it squares the probability of every token seen."""
    w, seen = flat(path), {*HISTORY, *path}
    return tuple(w[v] ** 2 if v in seen else w[v] for v in range(V))  # type: ignore[return-value]


def two_best(path: tuple[int, ...]) -> Weights:
    w = flat(path)
    return tuple(x if x > min(w) else F(0) for x in w)  # type: ignore[return-value]


def flat(path: tuple[int, ...]) -> Weights:
    """A target that only the last token moves, so that what depends on the whole path is the penalty."""
    return BASES[0] if not path or path[-1] else BASES[2]


CASES = {
    "plain": Case(SamplingParams(temperature=1), base),
    "frequency": Case(SamplingParams(temperature=1, frequency_penalty=math.log(2)), frequency, lambda path: BASES[0]),
    "repetition": Case(SamplingParams(temperature=1, repetition_penalty=2), repetition, flat),
    "top_k": Case(SamplingParams(temperature=1, top_k=2), two_best, flat),
}


@cache
def log_weights(w: Weights) -> torch.Tensor:
    return torch.tensor([math.log(x) for x in w], dtype=torch.float32)


def scores(case: Case, tree: TokenTree, committed: tuple[int, ...]) -> Scores:
    """The fake target's rows for a tree that hangs behind `committed` tokens."""
    rows = []
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else committed)
        rows.append(log_weights(case.target(paths[-1])))
    return Scores(torch.stack(rows), None)


def commit(
    case: Case, draft: Callable[[tuple[int, ...], Noise], TokenTree], rule: verify_wrong.Rule = verify
) -> Callable[[Noise], tuple[int, ...]]:
    """Rounds until LENGTH tokens are there; `draft(committed, noise)` makes each round's tree."""

    def run(noise: Noise) -> tuple[int, ...]:
        sampler = Sampler(case.params, V, 1, noise=noise)
        text: tuple[int, ...] = ()
        while len(text) < LENGTH:
            tree = draft(text, noise)
            verdict = rule(scores(case, tree, text), tree, sampler, [*HISTORY, *text])
            text += (*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus)
        return text[:LENGTH]

    return run


def first(tree: TokenTree) -> Callable[[tuple[int, ...], Noise], TokenTree]:
    """This tree in the first round, none later."""
    return lambda text, noise: root_only(text[-1]) if text else tree


def by_depth(case: Case) -> Callable[[int], tuple[Cell, ...]]:
    """Cells of the noise at each position: the joint picks of all paths of that length."""
    at = {}
    for depth in range(LENGTH):
        laws = frozenset(case.law(p) for p in product(range(V), repeat=depth))
        at[len(HISTORY) + depth] = cells(laws)
    anything = (Cell(F(1), torch.zeros(V)),)  # behind the tokens looked at
    return lambda key: at.get(key, anything)


@pytest.mark.parametrize("name", CASES)
def test_every_tree_of_four_nodes_commits_the_targets_distribution(name: str) -> None:
    case = CASES[name]
    want, at = expected(case.law, LENGTH), by_depth(case)
    assert sum(want.values()) == 1
    number = 0
    with torch.inference_mode():
        for tree in trees(4):
            assert enumerate_rule(commit(case, first(tree)), at) == want, tree
            number += 1
    assert number == 1 + 3 + 2 * 9 + 6 * 27


def test_a_tree_in_every_round() -> None:
    case = CASES["plain"]
    tree = make_tree([2, 0, 1, 1], [0, 0, 1, 2])

    def draft(text: tuple[int, ...], noise: Noise) -> TokenTree:
        return tree._replace(tokens=torch.tensor([([0, *text])[-1], 2, 0, 1, 1], dtype=torch.int32))

    assert enumerate_rule(commit(case, draft), by_depth(case)) == expected(case.law, LENGTH)


@pytest.mark.parametrize("hit", [True, False])
def test_a_tree_made_from_the_very_noise_that_verifies_it(hit: bool) -> None:
    """A drafter that knows the seed may propose just what will be picked, or just what will not: no independence of
    tree and noise is needed, because the committed text does not depend on the tree."""
    case = CASES["plain"]

    def draft(text: tuple[int, ...], noise: Noise) -> TokenTree:
        row = log_weights(case.target(text)) + noise(len(HISTORY) + len(text), V)
        best = int(row.argmax())
        drafts = [best] if hit else [v for v in range(V) if v != best]
        return TokenTree(
            torch.tensor([([0, *text])[-1], *drafts], dtype=torch.int32),
            torch.tensor([-1] + [0] * len(drafts), dtype=torch.int32),
            torch.zeros(len(drafts) + 1),
        )

    assert enumerate_rule(commit(case, draft), by_depth(case)) == expected(case.law, LENGTH)


# -- negative controls: the enumeration must notice ----------------------------------------------------------------


def fine(case: Case) -> Callable[[int], tuple[Cell, ...]]:
    """Cells fine enough for the wrong rules, which read a vector under laws of other depths or of residuals."""

    @cache
    def at(key: int) -> tuple[Cell, ...]:
        depth = (key if key < verify_wrong.FRESH else key - verify_wrong.FRESH) - len(HISTORY)
        if not 0 <= depth < LENGTH:
            depth = LENGTH - 1
        paths = [p for n in range(depth + 1) for p in product(range(V), repeat=n)]
        laws = {case.law(p) for p in paths}
        if depth == 1:  # residuals are read here only, by the trees below
            laws |= {tuple(F(0) if v == t else w for v, w in enumerate(case.law(()))) for t in range(V)}  # type: ignore[misc]
        return cells(frozenset(laws))

    return at


NOTICED_BY = {
    "second_draw_after_a_miss": make_tree([1], [0]),
    "bonus_from_the_residual": make_tree([1], [0]),
    "noise_by_node": make_tree([0, 1], [0, 0]),
    "most_likely_child": make_tree([1, 0], [0, 0]),
}


@pytest.mark.parametrize("name", verify_wrong.ALWAYS_WRONG)
def test_a_wrong_rule_is_noticed(name: str) -> None:
    case, rule = CASES["plain"], verify_wrong.ALWAYS_WRONG[name]
    want, at = expected(case.law, LENGTH), fine(case)
    tree = NOTICED_BY[name]
    found = enumerate_rule(commit(case, first(tree), rule), at)
    assert sum(found.values()) == 1
    assert found != want
    # the same cells, the same trees and the true rule: equal; without drafts even the wrong rule does no harm
    assert enumerate_rule(commit(case, first(tree)), at) == want
    assert enumerate_rule(commit(case, first(make_tree([], [])), rule), at) == want


def test_a_penalty_that_forgets_the_path_is_noticed() -> None:
    case = CASES["frequency"]
    found = enumerate_rule(commit(case, first(make_tree([1], [0])), verify_wrong.penalties_of_the_root), fine(case))
    assert sum(found.values()) == 1
    assert found != expected(case.law, LENGTH)


# -- the machinery itself --------------------------------------------------------------------------------------------


def test_the_area_where_a_token_is_picked_is_its_probability() -> None:
    for q in (*BASES, (F(1, 2), F(0), F(1, 2))):
        for a in range(V):
            part = TRIANGLE if q[a] else []
            for b in range(V):
                if b != a and part:
                    part = clip(part, a, b, q)
            assert (area(part) if part else 0) == q[a]


def test_joint_cells_have_the_right_marginals_and_are_no_product() -> None:
    found = cells(frozenset(BASES[:2]))
    joint: dict[tuple[int, int], Fraction] = {}
    for cell in found:
        picks = tuple(int((log_weights(q) + cell.gumbel).argmax()) for q in BASES[:2])
        joint[picks] = joint.get(picks, F(0)) + cell.probability
    for v in range(V):
        assert sum(p for (a, _), p in joint.items() if a == v) == BASES[0][v]
        assert sum(p for (_, b), p in joint.items() if b == v) == BASES[1][v]
    assert joint.get((0, 0), F(0)) != BASES[0][0] * BASES[1][0]  # one vector serves both: they are coupled


def test_interior_points_are_far_from_their_cells_edges() -> None:
    """Float32 logits must not decide a cell: the two best perturbed values differ by much more than rounding."""
    for case in CASES.values():
        at = by_depth(case)
        for depth in range(LENGTH):
            for path in product(range(V), repeat=depth):
                law = case.law(path)
                row = torch.tensor([math.log(w) if w else -math.inf for w in law])
                for cell in at(len(HISTORY) + depth):
                    best = (row + cell.gumbel).topk(2).values
                    assert float(best[0] - best[1]) > 1e-3
