"""`bench compare`: what changed, what is noise, and what cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dartspec.bench.compare import compare
from dartspec.cli.main import app
from dartspec.errors import DartspecError
from test_bench import made

Speed = Callable[[int], float]


def result(
    d: Speed, plain: Speed = lambda _k: 10.0, *, rounds: int = 50, num: int = 12, **config: Any
) -> dict[str, Any]:
    """A result over `num` prompts; `d` and `plain` give the milliseconds a token of each prompt."""
    records = []
    for k in range(num):
        records.append(made("plain", f"p{k}", 100, 100, 100 * plain(k)))
        records.append(made("dart@8", f"p{k}", rounds, 100, 100 * d(k)))
    settings = {"max_tokens": 128, "methods": ["plain", "dart@8"], **config}
    return {"config": settings, "records": records, "rows": [], "provenance": {"commit": "a", "cpu": "x"}}


def noisy(ms: float, seed: int) -> Speed:
    values = ms * np.random.default_rng(seed).normal(1, 0.05, 12)
    return lambda k: float(values[k])


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "same"), (1.3, "worse"), (0.7, "better"), (1.005, "same")])
def test_changes_beyond_noise_are_told_from_noise(factor: float, verdict: str) -> None:
    c = compare(result(noisy(5, 1)), result(noisy(5 * factor, 2)))
    assert c["rows"][0]["verdict"] == verdict
    assert c["rows"][0]["speed_up"][0] == pytest.approx(1 / factor, rel=0.05)


def test_a_slower_machine_is_no_regression() -> None:
    c = compare(result(lambda k: 5.0 + k), result(lambda k: 2 * (5.0 + k), lambda _k: 20.0))
    assert c["rows"][0]["speed_up"] == [1.0, 1.0, 1.0]
    assert c["rows"][0]["tokens_per_s"] == [0.5, 0.5, 0.5]
    assert c["num_worse"] == 0


def test_nothing_changed_rarely_fails() -> None:
    """The same speed measured twice, 60 times, with honest noise: at most one in twenty is called a change."""
    verdicts = [
        compare(result(noisy(5, 2 * k)), result(noisy(5, 2 * k + 1)), 0.0)["rows"][0]["verdict"] for k in range(60)
    ]
    assert sum(v != "same" for v in verdicts) <= 6  # twelve prompts: the percentile interval is a little narrow


def test_fewer_tokens_a_round_are_worse_where_nothing_was_timed() -> None:
    before, after = result(lambda _k: 5.0), result(lambda _k: 5.0, rounds=60)
    for r in (before, after):
        r["records"] = [x for x in r["records"] if x["method"] != "plain"]
    row = compare(before, after)["rows"][0]
    assert "speed_up" not in row
    assert (row["M"][0], row["verdict"]) == (pytest.approx(50 / 60, abs=1e-4), "worse")


def test_a_text_that_parts_is_worse_whatever_the_speed() -> None:
    before, after = result(lambda _k: 5.0), result(lambda _k: 1.0)
    after["records"][3]["parted"] = 7
    row = compare(before, after)["rows"][0]
    assert (row["verdict"], row["num_unequal"]) == ("worse", [0, 1])


def test_only_common_prompts_count() -> None:
    before, after = result(lambda _k: 5.0, num=12), result(lambda k: 5.0 if k < 4 else 50.0, num=8)
    before["records"] = before["records"][:8]
    row = compare(before, after)["rows"][0]
    assert (row["num_units"], row["verdict"]) == (4, "same")


def test_three_prompts_are_too_few_to_judge_speed_but_not_texts() -> None:
    before, after = result(lambda _k: 5.0, num=3), result(lambda _k: 50.0, num=3)
    assert compare(before, after)["rows"][0]["verdict"] == "too few"
    after["records"][1]["parted"] = 0
    assert compare(before, after)["rows"][0]["verdict"] == "worse"


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(DartspecError, match="max_tokens is 128 in the first result and 64"):
        compare(result(lambda _k: 5.0), result(lambda _k: 5.0, max_tokens=64))
    other = result(lambda _k: 5.0)
    for r in other["records"]:
        r["method"] = r["method"].replace("@8", "@4")
    with pytest.raises(DartspecError, match="no row in common"):
        compare(result(lambda _k: 5.0), other)


def test_the_verb_fails_on_a_regression_only(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(result(lambda _k: 5.0)))
    b.write_text(json.dumps(result(lambda _k: 7.0)))
    worse = CliRunner().invoke(app, ["bench", "compare", str(a), str(b)])
    assert worse.exit_code == 1
    assert json.loads(worse.stdout.splitlines()[-1])["num_worse"] == 1
    assert CliRunner().invoke(app, ["bench", "compare", str(b), str(a)]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "compare", str(a), str(b), "--tolerance", "0.5"]).exit_code == 0
    b.write_text("[]")
    broken = CliRunner().invoke(app, ["bench", "compare", str(a), str(b)])
    assert broken.exit_code == 2
    assert "is no result of dartspec bench" in broken.stderr
