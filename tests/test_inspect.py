"""`dartspec inspect` and `dartspec convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dartspec
import tiny_cli
from dartspec.cli.main import app
from test_choosing_drafters import MESSAGES, official


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTSPEC_CACHE", str(tmp_path / "cache"))


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_inspect_says_what_it_is_and_whether_it_would_run(tmp_path: Path) -> None:
    checkpoint, model = official(tmp_path / "dart"), tiny_cli.save(tmp_path / "model", num_hidden_layers=7)
    done = run("inspect", checkpoint, "--json")
    facts = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0
    assert (facts["layout"], facts["method"], facts["positions"]) == ("dart-official", "dart", 4)
    assert "runs" not in facts
    done = run("inspect", checkpoint, "--model", model, "--json")
    facts = json.loads(done.stdout.splitlines()[-1])
    assert (done.exit_code, facts["runs"], facts["why_not"]) == (0, True, None)
    other = tiny_cli.save(tmp_path / "other", num_hidden_layers=7, hidden_size=64)
    done = run("inspect", checkpoint, "--model", other)
    assert done.exit_code == 2
    assert "a hidden size of 32, this target has 64" in " ".join(done.stdout.split())


def test_a_whole_model_is_a_small_model(tmp_path: Path) -> None:
    facts = json.loads(run("inspect", tiny_cli.save(tmp_path), "--model", tmp_path, "--json").stdout.splitlines()[-1])
    assert (facts["method"], facts["runs"]) == ("small_model", True)


def test_a_converted_drafter_is_loaded_and_lossless(tmp_path: Path) -> None:
    checkpoint, model = official(tmp_path / "dart"), tiny_cli.save(tmp_path / "model", num_hidden_layers=7)
    done = run("convert", checkpoint, tmp_path / "ours", "--model", model, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[-1])["method"] == "dart"
    lm = dartspec.load(model, drafter=tmp_path / "ours", dtype="float32", nodes=8)
    assert lm.drafter_name == "dart"
    want = lm.with_drafter("none").generate(MESSAGES, max_tokens=20).ids
    assert lm.generate(MESSAGES, max_tokens=20).ids == want
    assert run("inspect", tmp_path / "ours", "--model", model).exit_code == 0


@pytest.mark.parametrize("verb", ["inspect", "convert"])
def test_what_is_no_checkpoint_is_refused_in_one_sentence(verb: str, tmp_path: Path) -> None:
    done = run(verb, tmp_path, *([tmp_path / "out"] if verb == "convert" else []))
    assert done.exit_code == 2
    assert "no such file" in done.stderr
    assert "Traceback" not in done.output
