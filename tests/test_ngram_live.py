"""Running and live text: the right counts for each sequence, and never another text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dartspec.drafters.dart import DartDrafter
from dartspec.engine import Request
from dartspec.errors import DartspecError
from dartspec.lattice import SearchConfig, build_tree
from dartspec.ngram import NgramIndex
from dartspec.ngram.build import Tokens
from dartspec.ngram.index import as_ids
from dartspec.ngram.live import LiveText
from dartspec.types import SamplingParams
from test_lossless import PROMPTS, load, run, target, tiny_dart

TOKENS = Tokens(64, "f00d", "toy")


def after(text: LiveText, slot: int, history: list[int], context: list[int], num_prompt: int = 0) -> dict[int, int]:
    return dict(text.counts(slot, history, num_prompt).after(as_ids(context)))


def test_running_text_is_counted_as_it_grows_and_forgotten_with_its_sequence() -> None:
    text = LiveText()
    assert after(text, 0, [1, 2, 3, 1, 2], [1, 2], 4) == {3: 1}
    assert after(text, 0, [1, 2, 3, 1, 2, 4, 1, 2], [1, 2]) == {3: 1, 4: 1}
    assert after(text, 1, [1, 2, 9], [1, 2]) == {9: 1}
    assert after(text, 0, [1, 2, 3, 1, 2, 4, 1, 2, 3], [2]) == {3: 2, 4: 1}
    text.forget([0, 7])
    assert after(text, 0, [5, 1, 2, 6], [1, 2], 3) == {6: 1}
    assert after(text, 0, [5], [1, 2]) == {}  # a history that shrank is another text
    assert text.num_grams == 0


def test_live_text_keeps_what_was_written_and_gives_prompts_back(tmp_path: Path) -> None:
    text = LiveText(live=True, exclude=frozenset({7}))
    assert after(text, 0, [1, 2, 3, 4], [2], 3) == {3: 1}
    assert after(text, 1, [1, 2, 5, 7, 6], [1, 2], 2) == {3: 1, 5: 1}
    with pytest.raises(DartspecError, match="2 sequences are in work"):
        text.save(tmp_path / "x", TOKENS)
    text.forget([0, 1])
    assert after(text, 2, [0], [3], 1) == {4: 1}  # written after the prompt [1, 2, 3]
    assert after(text, 2, [0], [1, 2]) == {5: 1}  # but not the prompt's own
    assert after(text, 2, [0], [5]) == {}  # 7 is excluded
    text.forget([2])
    text.learn([1, 2, 5, 6])
    index = text.save(tmp_path / "x", TOKENS)
    assert index.continuations([1, 2], 1) == [(5, 1.0)]
    assert index.info()["num_tokens"] > 0
    again = text.save(tmp_path / "x", TOKENS)  # joined to what is there
    assert again.info()["num_tokens"] == 2 * index.info()["num_tokens"]
    with pytest.raises(DartspecError, match="fingerprint"):
        text.save(tmp_path / "x", Tokens(64, "beef", "toy"))


def test_a_full_table_forgets_the_old_and_stays_bounded() -> None:
    text = LiveText(live=True, max_grams=500)
    generator = np.random.default_rng(0)
    for _ in range(50):
        text.learn([1, 2, 3, *generator.integers(10, 60_000, 100).tolist()])
        assert text.num_grams <= 500
    assert after(text, 0, [0], [1, 2])[3] > 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 39), st.integers(2, 5))
def test_counts_in_steps_equal_counts_at_once(ids: list[int], step: int, order: int) -> None:
    steps, once = LiveText(order=order), LiveText(order=order)
    for length in range(1, len(ids) + 1, step):
        steps.counts(0, ids[:length], 1)
    a, b = steps.counts(0, ids, 1), once.counts(0, ids, len(ids))
    for n in range(1, order):
        for start in range(len(ids) - n + 1):
            context = as_ids(ids[start : start + n])
            assert sorted(a.after(context)) == sorted(b.after(context))


def test_a_name_from_the_prompt_is_drafted_whole() -> None:
    prompt = [40, 41, 42, 43, 3, 40]  # a rare name in four tokens, and its first token again
    log_probs = torch.full((3, 5), 0.2).log()
    tokens = torch.tensor([[8, 41, 9, 10, 11], [8, 42, 9, 10, 11], [8, 43, 9, 10, 11]], dtype=torch.int32)
    config = SearchConfig(ngram_at_level0=True)
    counts = LiveText().counts(0, prompt, len(prompt))
    for index in (None, NgramIndex.build([[40, 8, 8]], vocab_size=64, fingerprint="", name="", description="")):
        tree = build_tree(40, log_probs, tokens, prompt, 3, index, config, frozenset(), counts)
        assert {41, 42, 43} <= set(tree.tokens.tolist()) or index is not None
        assert 41 in tree.tokens.tolist()
    plain = build_tree(40, log_probs, tokens, prompt, 3, None, config, frozenset())
    assert not {42, 43} & set(plain.tokens.tolist())


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_never_changes(live: bool, temperature: float) -> None:
    model = target()
    requests = [Request(p, SamplingParams(max_tokens=24, temperature=temperature, seed=3)) for p in PROMPTS]
    index = NgramIndex.build(
        [list(range(60)), [5, 6, 7, 8] * 5], vocab_size=128, fingerprint="", name="", description=""
    )
    plain, _ = run(model, load("none", model), requests)
    drafter = tiny_dart(model)
    assert isinstance(drafter, DartDrafter)
    for drafter.index in (None, index):
        drafter.text = LiveText(live=live)
        for batch in (1, 3):
            assert run(model, drafter, requests, batch=batch)[0] == plain
        assert (drafter.text.num_grams > 0) == live
        assert not drafter.text._slots
