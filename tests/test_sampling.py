"""Distributions equal transformers' own processors; picks follow them, from counted noise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dartspec.errors import DartspecError
from dartspec.sampling import Sampler, filter_logits, gumbel, uniform, uniform_torch
from dartspec.types import SamplingParams
from reference.verify_chi_square import p_value

V = 40


def transformers_list(p: SamplingParams) -> LogitsProcessorList:
    """What `model.generate(do_sample=True)` would build, in its order."""
    made = LogitsProcessorList()
    if p.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    made.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        made.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        made.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        made.append(MinPLogitsWarper(p.min_p))
    return made


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    coarse=st.booleans(),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 2, 5, V, 1000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.1, 2.0]),
)
def test_processed_logits_equal_transformers(
    seed: int,
    spread: float,
    coarse: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
) -> None:
    """Bit for bit: -inf in the same places and the same numbers elsewhere. `coarse` logits tie often."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(V, generator=generator)
    if coarse:
        logits = logits.round()
    history = torch.randint(0, V, (12,), generator=generator).tolist()
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    ours = Sampler(params, V, 5).process(logits, history[:8], history[8:])
    theirs = transformers_list(params)(torch.tensor([history]), logits[None].clone())[0]
    assert torch.equal(ours, theirs)
    assert bool(torch.isfinite(ours).any())


def test_greedy_ignores_the_filters() -> None:
    logits = torch.randn(V)
    assert torch.equal(filter_logits(logits, SamplingParams(top_k=1, top_p=0.1, min_p=0.5)), logits)


def test_presence_and_frequency_count_the_output_only_and_the_path_with_it() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    row = Sampler(params, 5, num_prompt=2).process(torch.zeros(5), [0, 1, 2, 2], [3, 2])
    assert row.tolist() == [0.0, 0.0, -0.5 - 3 * 0.25, -0.75, 0.0]


def test_bias_and_processors_come_after_penalties_and_before_temperature() -> None:
    order: list[list[float]] = []

    def note(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        order.append(logits[0].tolist())
        return logits + 1

    params = SamplingParams(temperature=2.0, repetition_penalty=2.0, logit_bias={0: 4.0}, processors=(note, note))
    row = Sampler(params, 2, 1).process(torch.tensor([2.0, -2.0]), [0], [1])
    assert order == [[5.0, -4.0], [6.0, -3.0]]
    assert row.tolist() == [3.5, -1.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_lowest_id(temperature: float) -> None:
    same = Sampler(SamplingParams(temperature=temperature), V, 1, noise=lambda position, size: torch.zeros(size))
    logits = torch.zeros(V)
    logits[7] = logits[9] = 1.0
    assert same.pick(logits, [1]) == 7


def test_a_pick_depends_on_seed_sample_and_position_alone() -> None:
    logits = torch.zeros(V)

    def picks(seed: int, sample: int, history: list[int], padding: int = 0) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1, seed=seed), V, 1, sample)
        wide = torch.cat([logits, torch.full((padding,), 9.0)])
        return [sampler.pick(wide, history, [0] * k) for k in range(24)]

    assert picks(1, 0, [1]) == picks(1, 0, [2])  # not on the tokens, beyond their number
    assert picks(1, 0, [1]) == picks(1, 0, [1], padding=3)
    assert picks(1, 0, [1, 1])[:23] == picks(1, 0, [1])[1:]  # not on how the tokens are split into history and path
    assert picks(1, 0, [1]) != picks(2, 0, [1])
    assert picks(1, 0, [1]) != picks(1, 1, [1])


def test_no_seed_means_a_fresh_one_that_is_told() -> None:
    seeds = {Sampler(SamplingParams(temperature=1), V, 1).seed for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= s < 2**64 for s in seeds)


@pytest.mark.parametrize("params", [SamplingParams(temperature=1), SamplingParams(temperature=0.6, top_k=4, top_p=0.9)])
def test_picks_over_many_seeds_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square at a fixed set of seeds; a wrong sign or a wrong tail of the noise gives p far under 1e-4."""
    logits = torch.tensor([1.0, 0.2, -0.5, 0.9, -2.0, 0.0])
    probabilities = filter_logits(logits, params).softmax(0)
    n, counts = 6000, torch.zeros(6)
    for seed in range(n):
        counts[Sampler(SamplingParams(**{**vars(params), "seed": seed}), 6, 1).pick(logits, [0, 0, 0])] += 1
    alive = probabilities > 0
    assert not counts[~alive].any()
    assert p_value(counts[alive], probabilities[alive]) > 1e-4
    assert p_value(counts[alive], probabilities[alive].roll(1)) < 1e-4  # the test can fail


def test_noise_at_different_positions_and_samples_is_uncorrelated() -> None:
    rows = torch.stack([gumbel(5, sample, position, 4096) for sample in (0, 1) for position in (0, 1, 2)])
    off = torch.corrcoef(rows) - torch.eye(6)
    assert float(off.abs().max()) < 5 / math.sqrt(4096)


def test_the_noise_of_cpu_and_accelerator_is_the_same_bit_for_bit() -> None:
    for size in (1, 2, 3, 4, 5, 50):
        want = uniform(2**63 + 5, 2**40 + 1, 9, size)
        assert torch.equal(want, uniform_torch(2**63 + 5, 2**40 + 1, 9, size, torch.device("cpu")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e-30}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 101}, "logprobs"),
        ({"stop": ("", "a")}, "stop"),
        ({"logit_bias": {3: math.nan}}, "logit_bias"),
    ],
)
def test_bad_parameters_are_refused_by_name(changes: dict, words: str) -> None:
    with pytest.raises(DartspecError, match=words):
        SamplingParams(**changes)


def test_bias_for_a_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DartspecError, match="logit_bias names token 40"):
        Sampler(SamplingParams(logit_bias={V: 1.0}), V, 1)


def test_a_stop_string_given_alone_is_one_string() -> None:
    assert SamplingParams(stop="abc").stop == ("abc",)


def test_a_banned_token_is_never_picked_and_a_forced_one_always() -> None:
    logits = torch.zeros(V)
    logits[3] = 50.0
    banned = Sampler(SamplingParams(temperature=1, logit_bias={3: -math.inf}, top_p=0.9, seed=1), V, 1)
    assert all(banned.pick(logits, [0] * k) != 3 for k in range(1, 60))
    forced = Sampler(SamplingParams(temperature=1, logit_bias={5: 1e4}, seed=1), V, 1)
    assert all(forced.pick(logits, [0] * k) == 5 for k in range(1, 60))


def test_a_prompt_with_ids_beyond_the_tokenizers_can_be_penalised() -> None:
    """A padded vocabulary: ids up to the embedding's rows are legal in a prompt but have no column to penalise."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    row = Sampler(params, V - 4, num_prompt=2).process(torch.ones(V), [V - 1, 3], [4])
    assert row[[3, 4, 5]].tolist() == [0.5, -0.5, 1.0]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1, top_p=0.9, seed=1)])
def test_a_row_that_leaves_no_token_is_an_error_not_token_zero(params: SamplingParams) -> None:
    sampler = Sampler(params, V, 1)
    for value in (-torch.inf, torch.nan):
        with pytest.raises(DartspecError, match="no token can follow"):
            sampler.pick(torch.full((V,), value), [1])


def test_log_probs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(V)
    sampler = Sampler(SamplingParams(temperature=0.5, top_k=1), V - 2, 1)
    value, best = sampler.log_probs(logits, 4, 3)
    want = logits[: V - 2].log_softmax(-1)
    assert value == float(want[4])
    assert [i for i, _ in best] == want.topk(3).indices.tolist()
    assert len(sampler.log_probs(logits, 4, 100)[1]) == V - 2  # as many as there are


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
def test_a_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(top_p: float, scale: float) -> None:
    from dartspec import sampling

    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.float32, torch.bfloat16):  # bfloat16: many equal logits, at the edge too
        row = (torch.randn(8 * sampling.NUCLEUS, generator=generator) * scale).to(dtype).float()
        ordered, index = row.double().sort(stable=True)
        out = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        out[-1] = False
        expected = torch.zeros(len(row), dtype=torch.bool).scatter_(0, index, ~out)
        got = filter_logits(row, SamplingParams(temperature=1.0, top_p=top_p))
        kept = got > -torch.inf
        assert kept.sum() == expected.sum()  # which of equals at the edge stay is nobody's business
        assert torch.equal(row[kept].sort().values, row[expected].sort().values)
        assert torch.equal(got[kept], row[kept])
    nothing = torch.full((8 * sampling.NUCLEUS,), torch.nan)
    assert filter_logits(nothing, SamplingParams(temperature=1.0, top_p=0.5)).isnan().any()


@pytest.mark.parametrize("size", [1, 5, 16, 63, 1000, 4099])
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0, 300.0])
def test_a_pick_from_the_few_that_can_win_is_the_argmax_of_all(size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(size)
    for seed in range(25):
        sampler = Sampler(SamplingParams(temperature=0.7, seed=seed), size, 1, sample=seed % 3)
        row = torch.randn(size, generator=generator) * scale - 3 * scale
        row[torch.rand(size, generator=generator) < 0.3] = -torch.inf
        row[seed % size] = row.max() if bool(row.max() > -torch.inf) else 0.0  # at least one, and often a tie
        history = list(range(1 + seed))
        assert sampler._likely_pick(sampler.process(row, history), len(history)) is not None
        assert sampler.pick(row, history) == int(sampler.perturbed(row, history).argmax())


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_row_without_a_token_to_pick_is_an_error_when_sampling(value: float) -> None:
    sampler = Sampler(SamplingParams(temperature=1, seed=3), 40, 1)
    row = torch.zeros(40)
    row[7 if value != value else slice(None)] = value
    assert sampler._likely_pick(row, 1) is None
    with pytest.raises(DartspecError, match="no token can follow"):
        sampler.pick(row, [0])
