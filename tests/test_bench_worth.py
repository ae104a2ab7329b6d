"""`bench worth`: the answer follows from the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dartspec.bench.worth import answer, best_row, break_even
from dartspec.cli.main import app
from dartspec.errors import DartspecError


def row(suite: str, method: str, speed: list[float] | None = None, **more: Any) -> dict[str, Any]:
    made = {"suite": suite, "method": method, "temperature": 0.0, "batch": 1, "threads": 1, "cpu_ms_per_token": 10.0}
    if speed:
        made |= {"speed_up": speed, "plain_ms": 10.0, "num_prompts": 9, "num_equal": 9, "num_runs": 9}
        made |= {"uncut": {"speed_up": [2.1, 2.0, 2.2]}, "cpu_ms_per_token": 6.0}
    return made | more


def result(low: float = 1.6) -> dict[str, Any]:
    rows = [
        row("a", "plain"), row("a", "d@8", [1.2, 1.1, 1.3]), row("b", "plain"), row("b", "d@8", [3.0, 2.5, 3.5]),
        row("all", "plain"), row("all", "d@8", [2.0, low, 2.5]), row("all", "e@8", [1.5, 1.4, 1.6]),
    ]  # fmt: skip
    return {"kind": "run", "rows": rows}


def test_what_is_saved_repays_what_was_spent() -> None:
    assert break_even(10.0, [2.0, 1.0, 4.0], 1.0) == [3.6e6 / 5, 3.6e6 / 7.5, None]
    assert break_even(10.0, [0.9, 0.8, 1.0], 1.0) == [None, None, None]
    with pytest.raises(DartspecError, match="spent-hours is -1"):
        break_even(10.0, [2.0, 1.0, 4.0], -1)


def test_the_fastest_method_over_all_sets_is_judged() -> None:
    found = answer(result(), spent_hours=2, tokens_per_day=1e6)
    assert (found["method"], found["verdict"], found["speed_up"]) == ("d@8", "yes", [2.0, 1.6, 2.5])
    assert found["break_even_tokens"][0] == pytest.approx(2 * 3.6e6 / 5)
    assert found["break_even_days"] == 1.44
    assert found["cpu_time"] == 0.6
    assert (found["best"][0], found["worst"][0]) == ("b", "a")
    assert best_row(result(), "e@8")["speed_up"][0] == 1.5
    assert answer(result(low=0.9))["verdict"] == "unclear"
    slow = {"kind": "run", "rows": [row("a", "plain"), row("a", "d@8", [0.8, 0.7, 0.9])]}
    assert answer(slow, spent_hours=1)["sentences"][-1] == "The 1 hour of work: never repaid."
    assert answer(slow)["verdict"] == "no"


def test_training_is_repaid_by_what_it_gives_beyond_what_is_free() -> None:
    rows = [
        *result()["rows"],
        row("all", "prompt_lookup,max_ngram=2@8", [1.25, 1.2, 1.3]),
        row("all", "d+prompt_lookup@8", [1.9, 1.8, 2.0]),
        row("all", "prompt_lookup+suffix@8", [1.1, 1.0, 1.2]),
    ]
    found = answer({"kind": "run", "rows": rows}, spent_hours=2)
    assert found["free"] == ["prompt_lookup,max_ngram=2@8", 1.25]
    assert found["break_even_tokens"][0] == pytest.approx(2 * 3.6e6 / (10 / 1.25 - 10 / 2))
    assert "needs no training, writes 1.25 times as fast" in " ".join(found["sentences"])
    slower = [*result()["rows"], row("all", "suffix@8", [0.9, 0.8, 1.0])]
    assert answer({"kind": "run", "rows": slower}, spent_hours=2)["break_even_tokens"][0] == pytest.approx(
        2 * 3.6e6 / 5
    )


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(DartspecError, match="one of bench load"):
        best_row({"kind": "load", "rows": []})
    with pytest.raises(DartspecError, match="no speed-up"):
        best_row({"kind": "run", "rows": [row("a", "d@8")]})
    with pytest.raises(DartspecError, match="no method 'x'; it has d@8, e@8"):
        best_row(result(), "x")
    with pytest.raises(DartspecError, match="expected a result of dartspec bench latency"):
        answer(result(), {"kind": "run"})
    with pytest.raises(DartspecError, match="a JSON object, found list"):
        answer([])  # type: ignore[arg-type]
    for hours in (-1.0, float("nan")):
        with pytest.raises(DartspecError, match="spent_hours is"):
            answer(result(), spent_hours=hours)
    for tokens in (0.0, -5.0, float("inf")):
        with pytest.raises(DartspecError, match="tokens_per_day is"):
            answer(result(), tokens_per_day=tokens)


def test_the_verb_says_it_in_sentences(tmp_path: Path) -> None:
    mine, waits = tmp_path / "mine.json", tmp_path / "waits.json"
    mine.write_text(json.dumps(result()))
    ratios = {"end_ms": {"p50": [1.25, 1.1, 1.4], "p90": [1.1, 1.0, 1.2]}}
    rows = [
        {"rate": 2.0, "service": "plain"},
        {"rate": 2.0, "service": "d@8", "in_progress": 1.5, "against_first": ratios},
    ]
    waits.write_text(json.dumps({"kind": "latency", "rows": rows}))
    done = CliRunner().invoke(app, ["bench", "worth", str(mine), "--latency", str(waits), "--spent-hours", "1"])
    assert done.exit_code == 0, done.output
    said = done.stdout
    assert "2.00 times [1.60, 2.50] as fast" in said
    assert "At 2 requests a second (1.5 at once), d@8" in said
    assert json.loads(said.splitlines()[-1])["latency"][0]["p50"] == [1.25, 1.1, 1.4]
