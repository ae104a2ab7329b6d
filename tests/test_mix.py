"""Drafts from the index alone, and two drafters' trees under one budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

import tiny
from dartspec.drafters import index as index_module
from dartspec.drafters import lookahead, mix, none, prompt_lookup
from dartspec.drafters._paths import join
from dartspec.drafters.index import IndexDrafter
from dartspec.drafters.mix import Mix
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.ngram import NgramIndex
from dartspec.target.target import Target
from dartspec.tree import check, root_only
from dartspec.types import Committed, Drafter, SamplingParams, TokenTree

TEXTS = [[5, 6, 7, 8, 9], [5, 6, 7, 3, 2, 4], [6, 7, 8, 4], [7, 8, 60]]


def made_index(texts: Sequence[Sequence[int]] = TEXTS, order: int = 3) -> NgramIndex:
    return NgramIndex.build(
        texts, order=order, vocab_size=tiny.VOCAB, fingerprint="f", name="t", description="d", exact=True
    )


def target(eos: Sequence[int] = (), num_tokens: int | None = None) -> Target:
    return Target(tiny.model("llama"), num_tokens, frozenset(eos))


def committed(ids: list[int], new: int | None = None, slot: int = 0) -> Committed:
    return Committed(slot, torch.tensor(ids), len(ids) - 1 if new is None else new, None)


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Path -> score."""
    check(tree)
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        out.append((*out[parent], token) if parent >= 0 else ())
    return dict(zip(out[1:], tree.scores.tolist()[1:], strict=True))


# -- the index alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("budget", [1, 3, 100])
def test_the_tree_is_the_best_of_its_size_under_the_index(order: int, budget: int) -> None:
    """Against enumeration of every path of three tokens."""
    index, t = made_index(order=order), target(eos=[2])
    drafter = IndexDrafter(index_module.Config(top_k=50, length=3, least=1e-6), index, t)
    (tree,) = drafter.propose([committed([9, 5, 6])], [budget])
    want: dict[tuple[int, ...], float] = {}
    alphabet = sorted({token for text in TEXTS for token in text})
    level: list[tuple[int, ...]] = [()]
    for _ in range(3):
        level = [(*path, v) for path in level for v in alphabet if path[-1:] != (2,)]
        for path in list(level):
            context, last = [9, 5, 6, *path[:-1]][-(order - 1) :], path[-1]
            step = float(index.probabilities(context, [last])[0])
            if step > 0:
                want[path] = want.get(path[:-1], 0.0) + math.log(step)
            else:
                level.remove(path)
    found = paths(tree)
    best = sorted(want.values(), reverse=True)[:budget]
    assert sorted(found.values(), reverse=True) == pytest.approx(best, abs=1e-5)
    assert all(score == pytest.approx(want[path], abs=1e-5) for path, score in found.items())


def test_nothing_follows_an_end_of_text_nor_is_padding_drafted_nor_the_unlikely() -> None:
    t = target(eos=[8], num_tokens=50)
    drafter = IndexDrafter(index_module.Config(), made_index(), t)
    found = paths(drafter.propose([committed([5, 6, 7])], [50])[0])
    assert (8,) in found
    assert not any(8 in p[:-1] or 60 in p for p in found)
    assert drafter.propose([committed([1, 8])], [50])[0].num_drafts == 0  # the text has ended
    assert drafter.propose([committed([40, 41])], [50])[0].num_drafts == 0  # never seen
    likely = IndexDrafter(index_module.Config(least=0.5), made_index(), target())
    assert all(score >= math.log(0.5) for score in paths(likely.propose([committed([5, 6])], [50])[0]).values())


def test_an_index_must_be_named_and_fit(tmp_path) -> None:
    t = target()
    with pytest.raises(DartspecError, match="was given no n-gram index"):
        index_module.load(index_module.Config(), t)
    made_index().save(tmp_path / "x.ngram")
    assert index_module.load(tmp_path / "x.ngram", t).index.order == 3
    assert index_module.load(index_module.Config(), t, index=tmp_path / "x.ngram").index.order == 3
    t.tokenizer_fingerprint = "other"
    with pytest.raises(DartspecError, match="fingerprint is f"):
        index_module.load(tmp_path / "x.ngram", t)
    for wrong in ({"top_k": 0}, {"length": 0}, {"least": 1.0}):
        with pytest.raises(DartspecError, match="index needs"):
            index_module.Config(**wrong)


# -- scored paths --------------------------------------------------------------------------------------------------


def test_joined_paths_share_beginnings_and_keep_the_best() -> None:
    tree = join(1, [([5, 6], [-1.0, -2.0]), ([5, 7], [-0.5, -3.0]), ([8], [-1.5])], 9)
    assert paths(tree) == {(5,): -0.5, (5, 6): -2.0, (5, 7): -3.0, (8,): -1.5}
    assert set(paths(join(1, [([5, 6], [-1.0, -2.0]), ([8], [-1.5])], 2))) == {(5,), (8,)}
    assert join(1, [], 4).num_drafts == 0


# -- the mixture ---------------------------------------------------------------------------------------------------


class Fixed:
    """Always proposes the same path; asks for taps if told so."""

    def __init__(self, path: Sequence[int], scores: Sequence[float], taps: tuple[int, ...] = ()) -> None:
        self.taps, self._path, self._scores = taps, path, scores
        self.seen: list[torch.Tensor | None] = []

    def reset(self, slots: Sequence[int]) -> None:
        pass

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        self.seen += [c.features for c in new]
        return [join(int(c.history[-1]), [(self._path, self._scores)], b) for c, b in zip(new, budget, strict=True)]


def test_two_trees_become_one_and_agreement_counts() -> None:
    a, b = Fixed([5, 6], [-1.0, -2.0]), Fixed([5, 7], [-1.0, -1.2])
    made = Mix(mix.Config(), [a, b])
    (tree,) = made.propose([committed([1, 2])], [9])
    found = paths(tree)
    assert set(found) == {(5,), (5, 6), (5, 7)}
    p = math.exp(-1)
    assert found[(5,)] == pytest.approx(math.log(1 - (1 - p) ** 2), abs=1e-5)
    (tree,) = made.propose([committed([1, 2], slot=1)], [2])
    assert set(paths(tree)) == {(5,), (5, 7)}
    assert all(score <= 0 for score in paths(tree).values())


def test_the_part_that_turns_out_right_rises() -> None:
    """Both claim the same; one is right in every round, and soon has the single node that there is."""
    made = Mix(mix.Config(), [Fixed([5], [-1.0]), Fixed([6], [-1.0])])
    ids = [1, 2]
    for _ in range(12):
        made.propose([committed(ids)], [1])
        ids = [*ids, 6, 9]
    assert set(paths(made.propose([committed(ids)], [1])[0])) == {(6,)}
    for _ in range(300):  # and falls again when the text has changed
        made.propose([committed(ids)], [1])
        ids = [*ids, 5, 9]
    assert set(paths(made.propose([committed(ids)], [1])[0])) == {(5,)}


def test_what_lies_deeper_than_the_text_knows_counts_neither_way() -> None:
    made = Mix(mix.Config(), [Fixed([5, 6], [-1.0, -5.0]), Fixed([7], [-9.0])])
    made.propose([committed([1, 2])], [9])
    made.propose([committed([1, 2, 5])], [9])  # 5 was right; of 6 nothing is known
    record = made._records[0]
    assert (record.seen[2], record.right[2]) == (1, 1)
    assert record.seen[10] == 0
    made.propose([committed([1, 2, 5, 4])], [9])  # now 5 was wrong, and so was what hangs at it
    assert record.seen[10] == 1
    assert record.right[10] == 0


def test_each_part_gets_the_features_that_it_asked_for() -> None:
    a, b, c = Fixed([5], [-1.0], (3, 1)), Fixed([6], [-1.0], (2,)), Fixed([7], [-1.0])
    made = Mix(mix.Config(parts=("a", "b", "c")), [a, b, c])
    assert made.taps == (1, 2, 3)
    features = torch.arange(6.0).view(2, 3, 1)
    made.propose([committed([1, 2, 3])._replace(features=features)], [5])
    assert torch.equal(a.seen[0][:, :, 0], torch.tensor([[2.0, 0.0], [5.0, 3.0]]))
    assert torch.equal(b.seen[0][:, :, 0], torch.tensor([[1.0], [4.0]]))
    assert c.seen[0] is None


def test_a_token_outside_one_parts_vocabulary_is_accepted() -> None:
    """The text repeats a token that the index never saw: the copy brings it, the index the rest."""
    t = target()
    prompt = [5, 6, 7, 77, 78, 5, 6, 7]
    parts: list[Drafter] = [
        IndexDrafter(index_module.Config(), made_index(), t),
        prompt_lookup.load(prompt_lookup.Config(), t),
    ]
    (tree,) = Mix(mix.Config(), parts).propose([committed(prompt)], [30])
    assert {(77, 78), (8,)} <= set(paths(tree))
    request = Request(prompt, SamplingParams(temperature=0.8, seed=3, max_tokens=30))

    def text(drafter: Drafter) -> list[int]:
        return [i for chunk in generate(t, drafter, [request], num_nodes=8) for i in chunk.ids]

    assert text(Mix(mix.Config(), parts)) == text(none.Plain())


def test_a_part_that_learns_from_the_targets_picks_gets_them() -> None:
    t = target()
    parts: list[Drafter] = [lookahead.load(lookahead.Config(from_text=False), t), Fixed([5], [-1.0])]
    made = Mix(mix.Config(parts=("lookahead", "fixed")), parts)
    assert made.needs_picks
    assert not Mix(mix.Config(), [Fixed([5], [-1.0]), Fixed([6], [-1.0])]).needs_picks
    request = Request([5, 6, 7], SamplingParams(max_tokens=12))
    assert [i for c in generate(t, made, [request], num_nodes=40) for i in c.ids] == [
        i for c in generate(t, none.Plain(), [request]) for i in c.ids
    ]
    state = parts[0]._states  # type: ignore[attr-defined]
    assert not state  # forgotten at the end
    made.propose([committed([5, 6, 7])], [40])
    (tree,) = made.propose([committed([5, 6, 7, 8])], [40])
    made.propose([committed([5, 6, 7, 8, 9])._replace(tree=tree, picks=tree.tokens + 1)], [40])
    assert parts[0]._states[0].pool  # type: ignore[attr-defined]


def test_parts_are_counted() -> None:
    with pytest.raises(DartspecError, match="two methods or more"):
        mix.Config(parts=("dart",))
    with pytest.raises(DartspecError, match="two methods or more"):
        mix.Config(parts=("dart", "mix"))
    with pytest.raises(DartspecError, match="memory"):
        mix.Config(memory=0)
    with pytest.raises(DartspecError, match=r"names 2 parts \(dart, prompt_lookup\), 0 were given"):
        mix.load(mix.Config(), target())


def test_search_time_is_the_parts_and_its_own() -> None:
    a = Fixed([5], [-1.0])
    made = Mix(mix.Config(), [a, Fixed([6], [-1.0])])
    a.search_ms = 7.0  # type: ignore[attr-defined]
    assert made.search_ms == 7.0
    made.propose([committed([1, 2])], [1])
    assert made.search_ms > 7.0
    assert root_only(2).num_drafts == 0
