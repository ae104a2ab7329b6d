"""Typical acceptance: off unless asked for, warned of, marked, and the paper's rule to the letter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dartspec import DartspecError
from dartspec.accounting import Metrics
from dartspec.sampling import Sampler
from dartspec.tree import from_chain
from dartspec.types import SamplingParams, Scores, TokenTree
from dartspec.verify import verify, verify_typical
from test_settings import MESSAGES, memory, trained

EPSILON = 0.1


def scored(probabilities: list[list[float]]) -> Scores:
    return Scores(torch.tensor(probabilities).clamp(min=1e-9).log(), None)


def sampler(temperature: float = 1.0, **more: Any) -> Sampler:
    return Sampler(SamplingParams(temperature=temperature, seed=1, **more), 4, num_prompt=1)


def test_a_draft_stays_above_the_threshold_and_the_longest_path_is_taken() -> None:
    # two children of the root; the likelier one has no child that stays
    tree = TokenTree(
        torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32),
        torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32),
        torch.zeros(5),
    )
    rows = [
        [0.0, 0.7, 0.3, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [0.2, 0.2, 0.2, 0.4],
        [0.0, 0.0, 0.0, 1.0],
        [1.0, 0.0, 0.0, 0.0],
    ]
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3))
    assert min(EPSILON, math.sqrt(EPSILON) * math.exp(-entropy)) < 0.3
    verdict = verify_typical(scored(rows), tree, sampler(), [0], EPSILON)
    assert verdict.path == [0, 2, 4]
    assert verdict.bonus == 0
    assert verdict.picks.tolist() == [2, -1, 3, -1, 0]


def test_the_threshold_falls_with_the_entropy() -> None:
    tree = from_chain([0, 1])
    flat, sharp = [[0.25, 0.25, 0.25, 0.25]] * 2, [[0.0, 0.04, 0.0, 0.96]] * 2
    # min(0.9, sqrt(0.9) / 4) = 0.237; 0.04 is below min(0.1, sqrt(0.1) * exp(-0.168)) = 0.1
    assert verify_typical(scored(flat), tree, sampler(), [0], 0.9).path == [0, 1]
    assert verify_typical(scored(sharp), tree, sampler(), [0], EPSILON).path == [0]
    # what a filter removes has no probability
    cut = [[0.0, 0.3, 0.0, 0.7]] * 2
    assert verify_typical(scored(cut), tree, sampler(), [0], EPSILON).path == [0, 1]
    assert verify_typical(scored(cut), tree, sampler(top_k=1), [0], EPSILON).path == [0]


def test_greedy_is_the_lossless_rule() -> None:
    torch.manual_seed(0)
    for _ in range(50):
        tree = from_chain([0, *torch.randint(4, (3,)).tolist()])
        scores = Scores(torch.randn(4, 4), None)
        a, b = verify_typical(scores, tree, sampler(0.0), [0], EPSILON), verify(scores, tree, sampler(0.0), [0])
        assert (a.path, a.bonus) == (b.path, b.bonus)


def test_it_is_asked_for_by_name_warned_of_and_marked(tmp_path: Path) -> None:
    lm = memory()
    folder = trained("medusa", lm, tmp_path / "medusa")
    want = lm.generate(MESSAGES, max_tokens=24, temperature=1.0, seed=3)
    same = lm.with_drafter(folder, nodes=8).generate(MESSAGES, max_tokens=24, temperature=1.0, seed=3)
    assert same.ids == want.ids
    assert "lossy" not in same.metrics.to_dict()
    with pytest.warns(UserWarning, match="typical acceptance .* is lossy"):
        lossy = lm.with_drafter(f"{folder},typical=0.001", nodes=8)
    got = lossy.generate(MESSAGES, max_tokens=24, temperature=1.0, seed=3)
    assert got.ids != want.ids  # nearly every draft of a flat distribution stays
    assert got.metrics.A > same.metrics.A
    assert got.metrics.to_dict()["lossy"] is True
    assert Metrics.merged([same.metrics, got.metrics]).lossy
    greedy = lossy.generate(MESSAGES, max_tokens=24)
    assert greedy.ids == lm.generate(MESSAGES, max_tokens=24).ids
    for wrong in ("typical=0.0", "typical=1.5"):
        with pytest.raises(DartspecError, match="a threshold between 0 and 1"):
            lm.with_drafter(f"{folder},{wrong}")
    with (
        pytest.warns(UserWarning, match="lossy"),
        pytest.raises(DartspecError, match="give it alone, without"),
    ):
        lm.with_drafter(f"{folder},typical=0.1+prompt_lookup")
