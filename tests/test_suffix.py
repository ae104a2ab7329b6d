"""Suffix speculation: places, shares, the choice of a match's length, and bounded memory."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dartspec.drafters.suffix import Config, Suffix
from dartspec.errors import DartspecError
from dartspec.tree import check
from dartspec.types import Committed, TokenTree


def drafter(eos: frozenset[int] = frozenset(), num_tokens: int = 1000, **config: float) -> Suffix:
    return Suffix(Config(**config), num_tokens, eos)  # type: ignore[arg-type]


def propose(d: Suffix, ids: list[int], budget: int = 50, slot: int = 0) -> dict[tuple[int, ...], float]:
    (tree,) = d.propose([Committed(slot, torch.tensor(ids), 1, None)], [budget])
    return paths(tree, ids, budget)


def paths(tree: TokenTree, ids: list[int], budget: int) -> dict[tuple[int, ...], float]:
    check(tree)
    assert int(tree.tokens[0]) == ids[-1]
    assert tree.num_drafts <= budget
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        out.append((*out[parent], token) if parent >= 0 else ())
    return dict(zip(out[1:], tree.scores.tolist()[1:], strict=True))


def test_scores_are_shares_of_the_occurrences() -> None:
    text = [1, 2, 5, 1, 2, 5, 1, 2, 6, 9, 9, 1, 2]
    found = propose(drafter(length=1), text)
    assert found == pytest.approx({(5,): math.log(2 / 4), (6,): math.log(1 / 4)})


def test_a_longer_match_is_surer_and_reaches_further() -> None:
    """After 7 8 1 2 always came 5; after 1 2 alone many things."""
    text = [7, 8, 1, 2, 5, 5, 1, 2, 30, 9, 1, 2, 31, 9, 1, 2, 32, 9, 1, 2, 33, 7, 8, 1, 2]
    assert set(propose(drafter(length=1), text, budget=1)) == {(5,)}
    assert len(propose(drafter(length=1), text)) == 5  # with room for all, they are more likely to hold the next token
    deep = propose(drafter(reach=1.0), text)
    assert max(map(len, deep)) == 4  # four tokens matched


def test_other_texts_of_the_process_are_remembered_once_they_end() -> None:
    d = drafter(length=3)
    propose(d, [1, 2, 3, 4, 5], slot=7)
    assert propose(d, [9, 1, 2]) == {}
    d.reset([7, 0])
    assert set(propose(d, [9, 1, 2])) == {(3,), (3, 4), (3, 4, 5)}
    d.reset([0])
    # no match runs from one text into the next
    propose(d, [6, 6, 1], slot=1)
    d.reset([1])
    assert (9,) not in propose(d, [8, 6, 1])


def test_old_texts_go_and_memory_is_bounded() -> None:
    d = drafter(most_tokens=60)
    for text in range(50):
        propose(d, [10 * text + i for i in range(8)])
        d.reset([0])
        assert len(d._young.ids) + len(d._old.ids) <= 60
        assert sum(map(len, d._young.places.values())) + sum(map(len, d._old.places.values())) <= 60
    assert (492,) in propose(d, [490, 491])
    assert propose(d, [0, 1], slot=1) == {}
    long = list(range(100, 400))
    propose(d, long, slot=2)
    d.reset([2])
    assert len(d._young.ids) <= 30
    assert (399,) in propose(d, [397, 398], slot=3)  # of a text that is too long, the end stays


def test_nothing_behind_an_end_of_text_and_no_padding() -> None:
    assert set(propose(drafter(frozenset({3})), [1, 2, 3, 4, 1, 2])) == {(3,)}
    assert propose(drafter(frozenset({2})), [1, 2, 3, 4, 1, 2]) == {}
    assert set(propose(drafter(num_tokens=50), [1, 2, 3, 77, 4, 1, 2])) == {(3,)}
    assert propose(drafter(), [1, 2, 3, 1, 2], budget=0) == {}
    assert propose(drafter(), [1]) == {}


@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, 3), min_size=3, max_size=40), cut=st.integers(1, 39), budget=st.integers(1, 12))
def test_told_bit_by_bit_or_at_once_and_the_shares_are_right(ids: list[int], cut: int, budget: int) -> None:
    at_once, in_steps = drafter(), drafter()
    for end in range(min(cut, len(ids) - 1), len(ids), 3):
        propose(in_steps, ids[:end], budget)
    found = propose(at_once, ids, budget)
    assert found == propose(in_steps, ids, budget)
    # the first level's shares are those of one length of match, counted plainly
    options = []
    for n in range(2, len(ids)):
        ends = [j for j in range(n, len(ids)) if ids[j - n : j] == ids[-n:]]
        options.append({(v,): math.log(c / (len(ends) + 1)) for v, c in Counter(ids[j] for j in ends).items()})
    first = {path: score for path, score in found.items() if len(path) == 1}
    assert not found or any(all(o.get(p) == pytest.approx(s) for p, s in first.items()) for o in options)


def test_numbers_that_cannot_be_are_refused() -> None:
    for wrong in ({"most_tokens": 1}, {"reach": 0}, {"length": 0}, {"least": 1}):
        with pytest.raises(DartspecError, match="suffix needs"):
            drafter(**wrong)
