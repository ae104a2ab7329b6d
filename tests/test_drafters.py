"""The folder of methods, and the two that need no weights."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from dartspec import drafters
from dartspec.drafters import oracle, prompt_lookup
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.tree import check
from dartspec.types import Committed, Drafter, SamplingParams, TokenTree


def test_every_file_is_a_method_and_offers_the_contract() -> None:
    files = {p.stem for p in Path(drafters.__path__[0]).glob("*.py") if not p.stem.startswith("_")}
    assert set(drafters.names()) == files >= {"none", "prompt_lookup", "oracle"}
    for name in drafters.names():
        module = drafters.get(name)
        assert dataclasses.is_dataclass(module.Config)
        assert module.Config.__dataclass_params__.frozen
        assert callable(module.load)


def test_names_may_be_written_with_hyphens_and_unknown_ones_are_refused_with_a_list() -> None:
    assert drafters.get("prompt-lookup") is drafters.get("prompt_lookup")
    with pytest.raises(DartspecError, match=r"unknown drafter 'eagle9'; there are: .*none, oracle, prompt_lookup"):
        drafters.get("eagle9")
    for name in ("", "__init__", "../none", "none.py"):
        with pytest.raises(DartspecError, match="unknown drafter"):
            drafters.get(name)


def committed(ids: list[int], n_new: int | None = None, slot: int = 0) -> Committed:
    return Committed(slot, torch.tensor(ids), len(ids) - 1 if n_new is None else n_new, None)


def paths(tree: TokenTree) -> list[list[int]]:
    """Tokens of every root-to-node path, root left out, in node order."""
    out: list[list[int]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        out.append([*out[parent], token] if parent >= 0 else [])
    return out[1:]


def leaves(tree: TokenTree) -> list[list[int]]:
    found = paths(tree)
    return [p for p in found if not any(q[:-1] == p for q in found)]


def lookup(eos: frozenset[int] = frozenset(), num_tokens: int = 1000, **config: Any) -> prompt_lookup.PromptLookup:
    return prompt_lookup.PromptLookup(prompt_lookup.Config(**config), num_tokens, eos)


def propose(drafter: Drafter, ids: list[int], budget: int = 50) -> TokenTree:
    (tree,) = drafter.propose([committed(ids)], [budget])
    check(tree)
    assert int(tree.tokens[0]) == ids[-1]
    assert tree.num_drafts <= budget
    return tree


# -- prompt lookup ---------------------------------------------------------------------------------------------------


def test_what_followed_the_same_words_is_proposed() -> None:
    tree = propose(lookup(length=3), [1, 2, 3, 4, 5, 9, 1, 2])
    assert leaves(tree) == [[3, 4, 5]]


def test_the_longest_suffix_comes_first_then_newer_places() -> None:
    text = [7, 1, 2, 40, 8, 1, 2, 50, 9, 1, 2, 60, 7, 1, 2]
    found = leaves(propose(lookup(length=1, num_continuations=3), text))
    assert found == [[40], [60], [50]]  # after (7, 1, 2); then after (1, 2), newest first
    assert leaves(propose(lookup(length=1, num_continuations=1), text)) == [[40]]
    assert leaves(propose(lookup(length=1), text, budget=2)) == [[40], [60]]


def test_common_beginnings_share_nodes() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2]
    tree = propose(lookup(length=2), text)
    assert leaves(tree) == [[3, 5], [3, 4]]
    assert tree.num_drafts == 3


def test_the_end_of_the_text_does_not_find_itself() -> None:
    assert propose(lookup(), [1, 2]).num_drafts == 0
    assert propose(lookup(min_ngram=1), [1, 2, 3]).num_drafts == 0
    assert leaves(propose(lookup(min_ngram=1, length=4), [5, 5])) == [[5]]  # one earlier 5, followed by one 5


def test_nothing_shorter_than_the_shortest_suffix_counts() -> None:
    text = [1, 2, 9, 1, 3, 9, 4, 1]
    assert propose(lookup(min_ngram=2), text).num_drafts == 0
    assert propose(lookup(min_ngram=1), text).num_drafts > 0


def test_copying_ends_with_the_text_and_at_end_of_text() -> None:
    assert leaves(propose(lookup(length=9), [1, 2, 3, 1, 2])) == [[3, 1, 2]]
    assert leaves(propose(lookup(frozenset({3}), length=9), [1, 2, 3, 4, 1, 2])) == [[3]]


def test_ids_beyond_the_tokenizers_are_never_drafted() -> None:
    assert leaves(propose(lookup(num_tokens=50, length=9), [1, 2, 3, 77, 4, 1, 2])) == [[3]]
    assert propose(lookup(num_tokens=50), [1, 2, 77, 4, 1, 2]).num_drafts == 0


def test_no_budget_no_nodes() -> None:
    assert propose(lookup(), [1, 2, 3, 1, 2], budget=0).num_drafts == 0


def test_slots_do_not_mix_and_reset_forgets() -> None:
    drafter = lookup(length=1)
    a, b = drafter.propose([committed([1, 2, 3, 1, 2], slot=4), committed([1, 2, 8, 1, 2], slot=9)], [5, 5])
    assert (leaves(a), leaves(b)) == ([[3]], [[8]])
    drafter.reset([4])
    (a,) = drafter.propose([committed([1, 2, 6, 1, 2], slot=4)], [5])
    assert leaves(a) == [[6]]
    (b,) = drafter.propose([committed([1, 2, 8, 1, 2, 8], 1, slot=9)], [5])
    assert leaves(b) == [[1]]
    drafter.reset([4, 9, 123])  # an unknown slot is nothing to forget


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 3), min_size=2, max_size=40), cut=st.integers(1, 39), budget=st.integers(0, 12))
def test_told_bit_by_bit_or_at_once_the_tree_is_the_same(ids: list[int], cut: int, budget: int) -> None:
    at_once, in_steps = lookup(min_ngram=1), lookup(min_ngram=1)
    for end in range(min(cut, len(ids) - 1), len(ids) + 1, 3):
        if end >= 1:
            in_steps.propose([committed(ids[:end])], [budget])
    (b,) = in_steps.propose([committed(ids)], [budget])
    a = propose(at_once, ids, budget)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    # every proposal did occur behind an equal last token
    for path in paths(a):
        n = len(path) + 1
        assert any(ids[j : j + n] == [ids[-1], *path] for j in range(len(ids) - n + 1))


@pytest.mark.parametrize("config", [{"min_ngram": 0}, {"min_ngram": 5}, {"num_continuations": 0}, {"length": 0}])
def test_configs_that_cannot_draft_are_refused(config: dict[str, int]) -> None:
    with pytest.raises(DartspecError, match="prompt_lookup needs"):
        prompt_lookup.Config(**config)


# -- the oracle ------------------------------------------------------------------------------------------------------

TEXT = tuple(range(10, 30))


def knowing(**config: Any) -> Drafter:
    return oracle.load(oracle.Config(**{"texts": (TEXT,), **config}), Target(tiny.model("llama")))


def test_always_right_holds_the_truth_and_wrong_siblings() -> None:
    tree = propose(knowing(rate=1.0, length=3, branches=2), list(TEXT[:5]))
    assert [15, 16, 17] in leaves(tree)
    assert tree.num_drafts == 3 * 3
    assert sum(p == [15] for p in paths(tree)) == 1


def test_never_right_holds_no_truth_at_all() -> None:
    for start in range(1, 15):
        tree = propose(knowing(rate=0.0, length=3, branches=2), list(TEXT[:start]))
        assert tree.num_drafts == 2
        assert [TEXT[start]] not in paths(tree)


def test_sometimes_right_is_right_at_its_rate() -> None:
    drafter = knowing(rate=0.5, length=1, branches=1)
    hits = sum([TEXT[5]] in paths(propose(drafter, list(TEXT[:5]))) for _ in range(400))
    assert 150 < hits < 250


def test_an_unknown_text_has_no_drafts() -> None:
    assert propose(knowing(), [3, 4]).num_drafts == 0
    assert propose(knowing(), list(TEXT)).num_drafts == 0  # known, and at its end


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_a_rate_that_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(DartspecError, match="rate"):
        oracle.Config(rate=rate)


# -- the page on adding one ------------------------------------------------------------------------------------------


def test_the_example_of_the_page_is_found_by_its_name_and_lossless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code block of docs/add-a-drafter.md, saved as a file of the folder: nothing else is edited."""
    page = (Path(__file__).parent.parent / "docs" / "add-a-drafter.md").read_text(encoding="utf-8")
    code = page.split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "latest.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "dartspec.drafters.latest", raising=False)
    assert "latest" in drafters.names()
    module = drafters.get("latest")
    target = Target(tiny.model("llama"))
    params = SamplingParams(max_tokens=40, repetition_penalty=0.8)  # below 1: a text that repeats itself
    requests = [Request(p, params) for p in ([5, 6, 5, 6], [9, 8, 7])]

    def run(drafter: Drafter) -> tuple[list[list[int]], float]:
        out: list[list[int]] = [[], []]
        accepted = 0
        for chunk in generate(target, drafter, requests, batch=2):
            out[chunk.index] += chunk.ids
            accepted += chunk.num_accepted
        return out, accepted

    plain, _ = run(drafters.get("none").load(drafters.get("none").Config(), target))
    drafted, accepted = run(module.load(module.Config(), target))
    assert drafted == plain
    assert accepted > 0
    assert leaves(propose(module.load(module.Config(length=2), target), [1, 2, 3, 1])) == [[2, 3]]
    with pytest.raises(DartspecError, match="length of at least 1"):
        module.Config(length=0)
    sys.modules.pop("dartspec.drafters.latest")
