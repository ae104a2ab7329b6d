"""The choice of the number of nodes, from times given and measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from dartspec.budget import cached_rows, choose_nodes, interpolate, measure_rows
from dartspec.target.target import Target

POINTS = st.dictionaries(st.integers(1, 60), st.floats(0.1, 100), min_size=1, max_size=8)


@given(points=POINTS, x=st.integers(0, 80))
def test_interpolation_goes_through_its_points_and_stays_between_neighbours(points: dict[int, float], x: int) -> None:
    assert all(interpolate(points, n) == pytest.approx(y) for n, y in points.items())
    below = max((n for n in points if n <= x), default=min(points))
    above = min((n for n in points if n >= x), default=max(points))
    low, high = sorted((points[below], points[above]))
    assert low - 1e-9 <= interpolate(points, x) <= high + 1e-9


@given(times=POINTS, expected=POINTS, round_ms=st.floats(0, 10))
def test_the_choice_is_the_best_of_all_sizes_or_nothing(
    times: dict[int, float], expected: dict[int, float], round_ms: float
) -> None:
    times.setdefault(1, 5.0)
    times.setdefault(30, 20.0)

    def rate(n: int) -> float:
        if n == 0:
            return 1 / interpolate(times, 1)
        return interpolate(expected, n) / (interpolate(times, n + 1) + round_ms)

    chosen = choose_nodes(times, expected, round_ms)
    sizes = range(min(max(expected), max(times) - 1) + 1)
    assert chosen in sizes
    assert rate(chosen) == pytest.approx(max(rate(n) for n in sizes))


def test_nothing_is_drafted_where_drafts_do_not_pay() -> None:
    linear = {1: 10.0, 60: 600.0}
    assert choose_nodes(linear, {1: 1.3, 59: 1.9}, 1.0) == 0
    free = {1: 10.0, 60: 10.0}
    assert choose_nodes(free, {1: 1.3, 59: 2.9}, 1.0) == 59
    assert choose_nodes(free, {1: 1.0, 59: 1.0}, 1.0) == 0
    assert choose_nodes({1: 10.0}, {1: 2.0}, 1.0) == 0  # no row but the root's was measured


def test_rows_are_measured_and_leave_the_target_as_it_was() -> None:
    target = Target(tiny.model("llama"))
    times = measure_rows(target, (1, 3, 5))
    assert sorted(times) == [1, 3, 5]
    assert all(ms > 0 for ms in times.values())


def test_a_context_shorter_than_the_measurement_still_works() -> None:
    short = Target(tiny.model("gpt2", n_positions=40, max_position_embeddings=40))
    assert sorted(measure_rows(short, (1, 5))) == [1, 5]
    tiny_context = Target(tiny.model("gpt2", n_positions=8, max_position_embeddings=8))
    assert all(n < 8 for n in measure_rows(tiny_context, (1, 3, 60)))  # what does not fit is left out


def test_times_are_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def fake(target: Target) -> dict[int, float]:
        calls.append(target)
        return {1: 2.5, 9: 4.0}

    monkeypatch.setattr("dartspec.budget.measure_rows", fake)
    target = Target(tiny.model("llama"))
    folder = tmp_path / "deep" / "er"
    assert cached_rows(target, folder, "k") == {1: 2.5, 9: 4.0}
    assert cached_rows(target, folder, "k") == {1: 2.5, 9: 4.0}
    assert len(calls) == 1
    cached_rows(target, folder, "other")
    assert len(calls) == 2
    assert {p.suffix for p in folder.iterdir()} == {".json"}  # nothing half-written is left behind


@pytest.mark.parametrize("broken", ["", '{"1": 2.5, "9"', "[]", "null", '{"a": 1}', '{"1": "x"}', '{"1": null}', "{}"])
def test_a_broken_file_is_measured_again(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dartspec.budget.measure_rows", lambda target: {1: 2.5})
    (tmp_path / "rows-k.json").write_text(broken)
    assert cached_rows(Target(tiny.model("llama")), tmp_path, "k") == {1: 2.5}
    assert json.loads((tmp_path / "rows-k.json").read_text()) == {"1": 2.5}
