"""The report on two texts that differ: where, and how near the two best tokens were."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
from dartspec import drafters
from dartspec.bench.equality import Divergence, first_divergence, ulp
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.sampling import Sampler
from dartspec.target.target import Target
from dartspec.types import SamplingParams

PROMPT = [5, 6, 7, 8]


def written(
    target: Target, params: SamplingParams, method: str = "none", sample: int = 0, **config: object
) -> list[int]:
    module = drafters.get(method)
    drafter = module.load(module.Config(**config), target)
    return [i for c in generate(target, drafter, [Request(PROMPT, params, sample)]) for i in c.ids]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=10),
        SamplingParams(max_tokens=10, temperature=0.5, repetition_penalty=1.2, seed=9),
        SamplingParams(max_tokens=10, temperature=1.5, top_k=20, seed=4),
    ],
)
def test_index_tokens_and_gap(params: SamplingParams) -> None:
    target = Target(tiny.model("llama"))
    a = written(target, params, sample=2)
    assert first_divergence(target, params, PROMPT, a, list(a), sample=2) is None
    with torch.inference_mode():
        logits = target.model(torch.tensor([PROMPT + a[:6]])).logits[0, -1]
    sampler = Sampler(params, tiny.VOCAB, len(PROMPT), 2)
    row = sampler.process(logits, PROMPT + a[:6])
    if params.temperature:
        row = row + sampler._gumbel(len(PROMPT) + 6, len(row), row.device)
    best = row.topk(2)
    assert int(best.indices[0]) == a[6]
    b = [*a[:6], int(best.indices[1]), 0, 0]
    found = first_divergence(target, params, PROMPT, a, b, sample=2)
    assert found is not None
    assert (found.index, found.token_a, found.token_b) == (6, a[6], b[6])
    assert found.gap == pytest.approx(float(best.values[0] - best.values[1]), rel=1e-4)
    unit = 2.0 ** (math.floor(math.log2(float(logits[best.indices].abs().max()))) - 23) / (params.temperature or 1)
    assert found.gap_ulps == pytest.approx(found.gap / unit)
    assert found.gap_ulps > 1000  # in float32 such a divergence would be a bug


def test_an_answer_that_ends_earlier_diverges_there() -> None:
    target = Target(tiny.model("llama"))
    params = SamplingParams(max_tokens=6)
    a = written(target, params)
    found = first_divergence(target, params, PROMPT, a, a[:4])
    assert found is not None
    assert (found.index, found.token_a, found.token_b) == (4, a[4], None)
    assert first_divergence(target, params, PROMPT, [], []) is None


def test_one_surviving_token_has_an_infinite_gap() -> None:
    target = Target(tiny.model("llama"))
    params = SamplingParams(temperature=1, top_k=1, seed=1)
    found = first_divergence(target, params, PROMPT, [1], [2])
    assert found is not None
    assert found.gap == found.gap_ulps == math.inf


def test_sampling_without_the_seed_is_refused() -> None:
    with pytest.raises(DartspecError, match="seed"):
        first_divergence(Target(tiny.model("llama")), SamplingParams(temperature=1), PROMPT, [1], [2])


def test_ulp_of_each_dtype() -> None:
    assert ulp(torch.tensor(1.0)) == 2.0**-23
    assert ulp(torch.tensor(-20.0)) == 2.0**-19
    assert ulp(torch.tensor(1.5, dtype=torch.bfloat16)) == 2.0**-7
    assert ulp(torch.tensor(16.0, dtype=torch.bfloat16)) == 2.0**-3
    assert ulp(torch.tensor(0.0)) > 0


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_divergences_are_within_rounding(seed: int) -> None:
    """No equality is promised here; what is: a divergence lies at a near tie. The negative control is above."""
    target = Target(tiny.model("llama", dtype=torch.bfloat16, seed=seed))
    for params in (SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=1.0, seed=seed)):
        a = written(target, params)
        text = (*PROMPT, *a)
        b = written(target, params, "oracle", texts=(text,), rate=0.8, length=5, branches=2)
        found = first_divergence(target, params, PROMPT, a, b)
        assert found is None or (isinstance(found, Divergence) and found.gap_ulps <= 8), found
