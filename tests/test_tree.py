"""What follows from a tree's parents, and the ways to make small trees."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dartspec import tree as T
from dartspec.errors import DartspecError
from dartspec.types import TokenTree


def make(parents: list[int], scores: list[float] | None = None) -> TokenTree:
    n = len(parents)
    return TokenTree(
        torch.arange(n, dtype=torch.int32),
        torch.tensor(parents, dtype=torch.int32),
        torch.tensor(scores if scores is not None else [0.0] * n, dtype=torch.float32),
    )


@st.composite
def trees(draw: st.DrawFn, max_size: int = 70) -> TokenTree:
    n = draw(st.integers(1, max_size))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]
    scores = draw(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0]), min_size=n, max_size=n))
    return make(parents, scores)


@settings(max_examples=50, deadline=None)
@given(trees())
def test_paths_depths_mask_and_children_agree(tree: TokenTree) -> None:
    T.check(tree)
    depths, mask, children = T.depths(tree), T.ancestor_mask(tree), T.children(tree)
    assert depths.dtype == torch.int64
    assert mask.dtype == torch.bool
    for node in range(len(tree.tokens)):
        path = T.path_to(tree, node)
        assert path[0] == 0
        assert path[-1] == node
        assert all(b in children[a] for a, b in itertools.pairwise(path))
        assert len(path) == depths[node] + 1
        assert mask[node].nonzero().flatten().tolist() == path
    assert sum(map(len, children)) == tree.num_drafts


@settings(max_examples=50, deadline=None)
@given(trees(max_size=20), st.integers(0, 20))
def test_truncate_keeps_the_best_closed_subtree_in_order(tree: TokenTree, budget: int) -> None:
    cut = T.truncate(tree, budget)
    T.check(cut)
    assert cut.num_drafts == min(budget, tree.num_drafts)
    kept = cut.tokens.tolist()  # tokens of `make` are the node numbers
    assert kept == sorted(kept)
    ranks = [min(tree.scores[i].item() for i in T.path_to(tree, n)[1:] or [0]) for n in range(len(tree.tokens))]
    assert [T.path_to(tree, n)[-2:][0] for n in kept] == [kept[p] for p in [0, *cut.parents.tolist()[1:]]]
    assert cut.scores.tolist() == [tree.scores[n].item() for n in kept]
    left_out = [ranks[n] for n in range(1, len(ranks)) if n not in kept]
    assert all(ranks[n] >= max(left_out, default=-9.0) for n in kept[1:])


def test_truncate_never_parts_a_child_that_outscores_its_parent() -> None:
    tree = make([-1, 0, 1, 0], [0.0, -5.0, 9.0, -1.0])
    assert T.truncate(tree, 1).tokens.tolist() == [0, 3]
    assert T.truncate(tree, 2).tokens.tolist() == [0, 1, 3]


def test_chain_root_and_merged_paths() -> None:
    assert T.root_only(7).num_drafts == 0
    chain = T.from_chain([5, 6, 7])
    assert (chain.tokens.tolist(), chain.parents.tolist()) == ([5, 6, 7], [-1, 0, 1])
    merged = T.merge_paths(9, [[1, 2, 3], [1, 2, 4], [2], []], 10)
    assert merged.tokens.tolist() == [9, 1, 2, 3, 4, 2]
    assert merged.parents.tolist() == [-1, 0, 1, 2, 2, 0]
    assert T.truncate(merged, 3).tokens.tolist() == T.merge_paths(9, [[1, 2, 3], [1, 2, 4]], 3).tokens.tolist()
    assert T.merge_paths(9, [[1, 2, 3]], 0).tokens.tolist() == [9]
    for tree in (chain, merged, T.root_only(7)):
        T.check(tree)


@pytest.mark.parametrize(
    ("parents", "message"),
    [([0], "root's parent is 0"), ([-1, 1], "node 1 has parent 1"), ([-1, 0, -1], "node 2 has parent -1"),
     ([-1, 5], "node 1 has parent 5"), ([], "no node")],
)  # fmt: skip
def test_parents_that_are_no_tree_are_refused_everywhere(parents: list[int], message: str) -> None:
    for function in (T.check, T.depths, T.ancestor_mask):
        with pytest.raises(DartspecError, match=message):
            function(make(parents))


def test_check_refuses_dtypes_lengths_tokens_and_nan() -> None:
    good = make([-1, 0])
    for bad, message in (
        (good._replace(tokens=good.tokens.long()), "tree.tokens is torch.int64"),
        (good._replace(scores=good.scores[:1]), "1 scores"),
        (good._replace(tokens=-good.tokens), "token -1"),
        (good._replace(scores=good.scores * float("nan")), "NaN"),
    ):
        with pytest.raises(DartspecError, match=message):
            T.check(bad)
    for call in (lambda: T.truncate(good, -1), lambda: T.merge_paths(0, [], -1), lambda: T.from_chain([])):
        with pytest.raises(DartspecError):
            call()
    with pytest.raises(DartspecError, match="node 2"):
        T.path_to(good, 2)
