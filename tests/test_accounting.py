"""Every metric from records made by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartspec.accounting import Metrics, SpeedUp, loop_start
from dartspec.types import RoundRecord


def record(drafted: int, accepted: int, committed: int, ms: float = 1.0, batch: int = 1) -> RoundRecord:
    return RoundRecord(drafted, accepted, committed, ms, 2 * ms, 4 * ms, 8 * ms, batch)


ROUNDS = [record(8, 3, 4), record(8, 0, 1), record(8, 2, 3), record(4, 3, 2)]  # the last one was cut by a stop
METRICS = Metrics(ROUNDS, prefill_ms=100.0, num_prompt_tokens=7, num_new_tokens=11)


def test_tokens_a_round() -> None:
    assert METRICS.A == 8 / 4
    assert METRICS.M == 10 / 4
    assert METRICS.mean_acceptance_length == 3.0  # vLLM's: 1 + A, before the stop cut
    assert METRICS.draft_acceptance_rate == 8 / 28
    assert METRICS.acceptance_histogram == [1, 0, 1, 2]
    assert METRICS.num_rounds == METRICS.num_spec_steps == 4
    assert METRICS.num_new_tokens == 1 + sum(r.num_committed for r in ROUNDS)


def test_times_are_sums_and_the_prefill_stands_apart() -> None:
    assert (METRICS.draft_ms, METRICS.search_ms, METRICS.verify_ms, METRICS.other_ms) == (4, 8, 16, 32)
    assert METRICS.decode_ms == 60 == sum(r.round_ms for r in ROUNDS)
    assert METRICS.ms_per_round == 15
    assert METRICS.ms_per_token == 6
    assert METRICS.tokens_per_s == pytest.approx(1000 / 6)


def test_a_shared_round_is_paid_once() -> None:
    """Two sequences of a batch of two: merged, each second of the machine is counted once."""
    one = Metrics([record(8, 1, 2, 10.0, batch=2)], num_new_tokens=3)
    merged = Metrics.merged([one, one])
    assert merged.decode_ms == 150.0
    assert merged.ms_per_token == 150 / 4
    assert merged.num_new_tokens == 6
    assert one.num_rounds == 1  # merging changes no part


def test_a_merge_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    long, short = Metrics([record(1, 0, 1)] * 9), Metrics([record(1, 1, 11)])
    merged = Metrics.merged([long, short])
    assert merged.M == 2.0
    assert merged.M != (long.M + short.M) / 2


def test_before_counts_whole_rounds_within_the_first_tokens() -> None:
    # tokens known after the prefill and each round: 1, 5, 6, 9, 11
    assert [METRICS.before(n).num_rounds for n in (0, 1, 4, 5, 6, 8, 9, 10, 11, 99)] == [0, 0, 0, 1, 2, 2, 3, 3, 4, 4]
    assert METRICS.before(8).num_new_tokens == 6
    assert METRICS.before(99).M == METRICS.M


def test_nothing_measured_is_zero_everywhere() -> None:
    empty = Metrics()
    assert empty.A == empty.M == empty.tokens_per_s == empty.ms_per_round == empty.draft_acceptance_rate == 0
    assert empty.acceptance_histogram == [0]
    assert Metrics.merged([]).num_rounds == 0
    json.dumps(empty.to_dict())


def test_the_dictionary_is_json_and_agrees() -> None:
    out = json.loads(json.dumps(METRICS.to_dict()))
    assert out["A"] == METRICS.A
    assert out["M"] == METRICS.M
    assert out["num_spec_steps"] == 4
    assert sum(out["ms_per_round"].values()) == pytest.approx(METRICS.ms_per_round)


def test_speed_up_is_m_times_plain_over_round() -> None:
    plain = Metrics([RoundRecord(0, 0, 1, 0.0, 0.0, 9.0, 1.0)] * 5)
    s = SpeedUp.of(plain, METRICS)
    assert (s.M, s.plain_ms, s.round_ms, s.verify_ms) == (2.5, 10.0, 15.0, 4.0)
    assert s.speed_up == pytest.approx(2.5 * 10 / 15) == pytest.approx(plain.ms_per_token / METRICS.ms_per_token)
    assert s.bound == 2.5 * 10 / 4
    assert s.round_in_steps == 1.5
    assert "1.67x" in str(s)


def test_plain_decoding_against_itself_is_one() -> None:
    plain = Metrics([RoundRecord(0, 0, 1, 0.1, 0.0, 9.0, 1.0)] * 5)
    assert SpeedUp.of(plain, plain).speed_up == pytest.approx(1.0)


def slow_loop_start(ids: list[int], n: int) -> int | None:
    """Plain twin: where an n-gram stands that stood at two earlier places."""
    for i in range(len(ids) - n + 1):
        if sum(ids[j : j + n] == ids[i : i + n] for j in range(i)) == 2:
            return i
    return None


@given(ids=st.lists(st.integers(0, 2), max_size=30), n=st.integers(1, 4))
def test_loop_start_equals_its_twin(ids: list[int], n: int) -> None:
    assert loop_start(ids, n) == slow_loop_start(ids, n)


def test_a_period_of_five_is_a_loop_once_a_sixteen_gram_stood_twice_before() -> None:
    head = list(range(100, 120))
    assert loop_start(head + [1, 2, 3, 4, 5] * 10) == 20 + 2 * 5
    assert loop_start(list(range(500))) is None
