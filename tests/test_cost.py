"""What rounds cost: times measured, remembered, corrected."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from dartspec.budget import cost
from dartspec.budget.cost import (
    CONTEXT,
    CostModel,
    Times,
    best_threads,
    cached_times,
    interpolate,
    measure,
    measure_rows,
    rising,
)
from dartspec.target.target import Target
from dartspec.types import RoundTimes

POINTS = st.dictionaries(st.integers(1, 60), st.floats(0.1, 100), min_size=1, max_size=8)


def times(verify_ms: float, rows: int, *, draft_ms: float = 0.0, read: int = 0, other_ms: float = 0.0) -> RoundTimes:
    return RoundTimes(draft_ms, 0.0, verify_ms, other_ms, rows, rows, 100, read)


@given(points=POINTS, x=st.integers(0, 80))
def test_interpolation_goes_through_its_points_and_stays_between_neighbours(points: dict[int, float], x: int) -> None:
    assert all(interpolate(points, n) == pytest.approx(y) for n, y in points.items())
    below = max((n for n in points if n <= x), default=min(points))
    above = min((n for n in points if n >= x), default=max(points))
    low, high = sorted((points[below], points[above]))
    assert low - 1e-9 <= interpolate(points, x) <= high + 1e-9


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_the_rising_fit_is_the_projection(values: list[float]) -> None:
    fit = rising(values)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(fit))
    # the residual has no mass on any upper set that the fit could move along (the projection's own conditions)
    left = [v - f for v, f in zip(values, fit, strict=True)]
    assert sum(left) == pytest.approx(0, abs=1e-6)
    assert sum(r * f for r, f in zip(left, fit, strict=True)) == pytest.approx(0, abs=1e-4)
    assert all(sum(left[i:]) <= 1e-6 for i in range(len(left)))


def test_rows_are_measured_and_leave_the_target_as_it_was() -> None:
    target = Target(tiny.model("llama"))
    found = measure_rows(target, (1, 3, 5))
    assert sorted(found) == [1, 3, 5]
    assert 0 < found[1] <= found[3] <= found[5]


def test_a_context_shorter_than_the_measurement_still_works() -> None:
    short = Target(tiny.model("gpt2", n_positions=40, max_position_embeddings=40))
    assert sorted(measure_rows(short, (1, 5))) == [1, 5]
    tiny_context = Target(tiny.model("gpt2", n_positions=8, max_position_embeddings=8))
    assert all(n < 8 for n in measure_rows(tiny_context, (1, 3, 60)))  # what does not fit is left out


def test_times_are_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def fake(target: Target) -> Times:
        calls.append(target)
        return Times({1: 2.5, 9: 4.0}, 0.25)

    monkeypatch.setattr(cost, "measure", fake)
    target = Target(tiny.model("llama"))
    folder = tmp_path / "deep" / "er"
    assert cached_times(target, folder, "k") == ({1: 2.5, 9: 4.0}, 0.25)
    assert cached_times(target, folder, "k") == ({1: 2.5, 9: 4.0}, 0.25)
    assert len(calls) == 1
    cached_times(target, folder, "other")
    cached_times(target, folder, "k", again=True)
    assert len(calls) == 3
    assert {p.suffix for p in folder.iterdir()} == {".json"}  # nothing half-written is left behind


@pytest.mark.parametrize("broken", ["", '{"1": 2.5, "9"', "[]", "null", '{"a": 1}', '{"1": "x"}', '{"1": null}', "{}"])
def test_a_broken_file_is_measured_again(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "measure", lambda target: Times({1: 2.5}))
    (tmp_path / "cost-k.json").write_text(broken)
    assert cached_times(Target(tiny.model("llama")), tmp_path, "k") == ({1: 2.5}, 0.0)
    assert json.loads((tmp_path / "cost-k.json").read_text()) == {"0": 0.0, "1": 2.5}


@pytest.mark.parametrize(
    ("ms", "best"),
    [
        ({1: 10.0, 2: 9.9, 4: 9.8, 6: 9.9}, 1),
        ({1: 10.0, 2: 6.0, 4: 5.9, 6: 9.0}, 2),
        ({1: 9.0, 2: 5.0, 4: 3, 6: 2.0}, 6),
    ],
)
def test_no_more_threads_than_bring_something(
    ms: dict[int, float], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr(cost, "measure_rows", lambda target, rows: {1: ms[used[-1]] / 2, 9: ms[used[-1]] / 2})
    target = Target(tiny.model("llama"))
    assert best_threads(target, used.append, 6, tmp_path, "k") == best
    assert used[-1] == best
    assert set(used) == set(ms)
    used.clear()
    assert best_threads(target, used.append, 6, tmp_path, "k") == best  # remembered
    assert used == [best]


def test_the_curve_goes_on_and_follows_the_machine() -> None:
    model = CostModel(Times({1: 10.0, 11: 20.0}))
    assert model.verify_ms(1, 21).tolist() == pytest.approx([10.0 + n for n in range(21)])
    assert model.verify_ms(4, 3).tolist() == pytest.approx([13.0, 17.0, 21.0])
    for _ in range(200):  # everything takes twice as long, a batch of two four times
        model.observe(times(2 * 15.0, 6), 1, 0)
    assert model.verify_ms(1, 6)[5] == pytest.approx(30.0, rel=0.01)
    assert model.verify_ms(1, 1)[0] == pytest.approx(20.0, rel=0.15)  # not seen, and slower all the same
    assert statistics.median(map(abs, model.errors[-50:])) < 0.01


def test_one_stall_is_not_a_new_machine() -> None:
    model = CostModel(Times({1: 10.0, 11: 20.0}))
    for _ in range(50):
        model.observe(times(10.0, 1), 1, 0)
    model.observe(times(10_000.0, 1), 1, 0)
    assert model.verify_ms(1, 1)[0] < 12
    for _ in range(40):
        model.observe(times(10.0, 1), 1, 0)
    assert model.verify_ms(1, 1)[0] == pytest.approx(10, rel=0.02)


def test_one_number_of_rows_may_differ_from_its_neighbours() -> None:
    model = CostModel(Times({1: 10.0, 11: 20.0}))
    for _ in range(300):  # 8 rows cost more than was measured, 1 row does not
        model.observe(times(17.0 * 1.3, 8), 1, 0)
        model.observe(times(10.0, 1), 1, 0)
    one, eight = model.verify_ms(1, 8)[[0, 7]]
    assert eight / one == pytest.approx(2.21, rel=0.03)


def test_drafting_is_seen_with_what_it_has_to_catch_up_on() -> None:
    model = CostModel(Times({1: 10.0}))
    assert 0 < model.draft_ms(1) < 10  # a guess, so that it is tried
    for k in range(200):
        model.observe(times(10.0, 1, draft_ms=2.0, read=2), 1, 1)
        if k % 10 == 9:
            model.observe(times(10.0, 1, draft_ms=2.0 + 0.5 * 40, read=44), 1, 1)
    assert model.draft_ms(1) == pytest.approx(2.0, rel=0.01)
    assert model.draft_ms(1, 40) == pytest.approx(22.0, rel=0.1)
    assert model.draft_ms(4) == pytest.approx(8.0, rel=0.05)  # not seen: as many times as much
    assert model.draft_ms(0, 0) == 0


@given(seed=st.integers(0, 1000))
def test_noise_does_not_carry_it_away(seed: int) -> None:
    generator = random.Random(seed)
    model = CostModel(Times({1: 10.0, 61: 40.0}))
    for _ in range(300):
        rows = generator.randint(1, 30)
        model.observe(times(model.base_ms(rows) * math.exp(generator.gauss(0, 0.1)), rows), 1, 0)
    for rows in (1, 10, 30):
        assert model.verify_ms(1, 30)[rows - 1] == pytest.approx(model.base_ms(rows), rel=0.2)


def test_rows_cost_more_behind_a_long_context() -> None:
    model = CostModel(Times({1: 10.0, 11: 20.0}, 0.001))
    assert model.verify_ms(2, 2, CONTEXT).tolist() == pytest.approx([11.0, 13.0])
    assert model.verify_ms(2, 2, CONTEXT + 1000).tolist() == pytest.approx([11.0 + 2, 13.0 + 4])
    for _ in range(100):
        model.observe(times(15.0 + 6, 6), 1, 0, CONTEXT + 1000)
    assert model.verify_ms(1, 6)[5] == pytest.approx(15.0, rel=1e-6)  # just what was expected
    assert measure(Target(tiny.model("llama"))).row_key == 0  # its context is too short to tell
