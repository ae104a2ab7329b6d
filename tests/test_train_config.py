"""The training config: one YAML (or JSON) file or flags, strict in names, types and ranges."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dartspec.cli.main import app
from dartspec.cli.train import parse_bytes
from dartspec.errors import DartspecError
from dartspec.train.config import RESUMABLE, TrainConfig, read_values

GOOD: dict[str, Any] = {"target": "t", "data": ["a"], "out": "o"}


def written(folder: Path, text: str, name: str = "c.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    yaml = "target: t\ndata: [a]\nout: o\nlearning_rate: 5e-4\nfinal_learning_rate: 1e-5\ntaps: [1, 2]\nbf16: false\n"
    config = TrainConfig.from_file(written(tmp_path, yaml))
    assert (config.learning_rate, config.final_learning_rate, config.taps, config.bf16) == (5e-4, 1e-5, (1, 2), False)
    saved = written(tmp_path, json.dumps(config.to_dict()), "train.json")
    assert TrainConfig.from_file(saved) == config
    assert TrainConfig.from_file(written(tmp_path, "# all defaults\ntarget: t\ndata: a\nout: o\n")).data == ("a",)


def test_the_configs_of_the_repository_are_read() -> None:
    found = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
    assert found
    for path in found:
        assert TrainConfig.from_file(path).d == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz: 3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("learning-rate: 3", "unknown key 'learning-rate'; did you mean 'learning_rate'?"),
        ("qqq: 3", "unknown key 'qqq'; known are betas"),
        ("steps: many", "steps = 'many': expected a whole number, found str"),
        ("steps: 1.5", "steps = 1.5: expected a whole number, found float"),
        ("steps: true", "steps = True: expected a whole number, found bool"),
        ("gamma: .nan", "gamma = nan: expected a number"),
        ("gamma: 1.5", "gamma = 1.5 is out of range: it must be at most 1"),
        ("threads: 1000000", "threads = 1000000 is out of range: it must be at most 1024"),
        ("gamma: 0", "gamma = 0.0 is out of range: it must be more than 0"),
        ("held_out: 1", "held_out = 1.0 is out of range: it must be less than 1"),
        ("betas: [0.9]", "betas = \\[0.9\\]: two numbers were expected"),
        ("betas: [0.9, 1.0]", "betas = \\(0.9, 1.0\\) is out of range"),
        ("bf16: 1", "bf16 = 1: expected true or false, found int"),
        ("cache:", "cache = None: expected text, found nothing"),
        ("taps: {a: 1}", "taps = .*: expected a list of whole numbers, found dict"),
        ("options: [1]", "options = \\[1\\]: expected a mapping of names to values, found list"),
        ("parallel: tp", "parallel = 'tp': it must be ddp or fsdp2"),
        ("final_learning_rate: 1", "final_learning_rate = 1.0 is out of range: it must be at most learning_rate"),
        ("steps: 3\nsteps: 4", "'steps' stands there twice"),
        ("options: {a: 1, a: 2}", "'a' stands there twice"),
        ("steps: [", "is not YAML"),
        ("- a", "holds a list, expected KEY: VALUE lines"),
    ],
)
def test_what_a_file_may_not_say(text: str, words: str, tmp_path: Path) -> None:
    head = "" if text.startswith("-") else "target: t\ndata: [a]\nout: o\n"
    with pytest.raises(DartspecError, match=words):
        TrainConfig.from_file(written(tmp_path, f"{head}{text}\n"))


def test_what_a_json_file_may_not_say(tmp_path: Path) -> None:
    for text, words in (
        ('{"steps": 1, "steps": 2}', "stands there twice"),
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ('{"lr": 1}', "unknown key 'lr'"),
    ):
        with pytest.raises(DartspecError, match=words):
            read_values(written(tmp_path, text, "c.json"))
    with pytest.raises(DartspecError, match="cannot be read"):
        read_values(tmp_path / "none.yaml")
    with pytest.raises(DartspecError, match=r"training needs a target \(--target\)"):
        TrainConfig.from_dict({"target": "t", "out": "o"})


def test_every_key_says_what_it_is_and_names_in_resumable_exist() -> None:
    for f in fields(TrainConfig):
        assert f.metadata["about"], f.name
    assert {f.name for f in fields(TrainConfig)} >= RESUMABLE


def test_every_key_is_a_flag_and_flags_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TrainConfig] = []

    def stop(config: TrainConfig, *_: Any, **__: Any) -> Path:
        seen.append(config)
        raise DartspecError("far enough")

    monkeypatch.setattr("dartspec.train.run.train", stop)
    loaded: list[dict[str, Any]] = []

    class LM:
        target = None

        class text:  # noqa: N801
            template_hash = None

    def load(target: str, **options: Any) -> Any:
        loaded.append({"target": target, **options})
        return LM

    monkeypatch.setattr("dartspec.api.load", load)
    path = written(tmp_path, "target: t\ndata: [a]\nout: o\nsteps: 7\nlearning_rate: 1e-3\n")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "9")
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["train", *args])

    run("--config", str(path), "--steps", "9", "--data", "x", "--data", "y", "--taps", "1,2,3", "--no-bf16",
        "--init-from", "old", "--betas", "0.8,0.9", "--options", '{"num_blocks": 2}', "--dtype", "float32")  # fmt: skip
    c = seen[-1]
    assert (c.steps, c.data, c.taps, c.bf16, c.init) == (9, ("x", "y"), (1, 2, 3), False, "old")
    assert (c.learning_rate, c.betas, c.options, c.out) == (1e-3, (0.8, 0.9), {"num_blocks": 2}, "o")
    assert loaded[-1]["dtype"] == "float32"
    assert (os.environ.pop("LRU_CACHE_CAPACITY"), os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("64", "9")
    run(str(path), "--set", "steps=11", "--set", "gamma=0.5", "--gamma", "0.7")
    assert (seen[-1].steps, seen[-1].gamma) == (11, 0.7)
    assert loaded[-1]["dtype"] is None
    for args, words in (
        ((str(path), "--config", str(path)), "give one"),
        ((str(path), "--options", "x"), "is not a JSON object"),
        ((str(path), "--memory-limit", "8GB"), "give it with --dry-run"),
        ((str(path), "--dry-run", "--memory-limit", "lots"), "is not a size"),
        ((str(path), "--set", "step=3"), "--set: unknown key 'step'; did you mean 'steps'?"),
    ):
        before = len(seen)
        result = run(*args)
        assert result.exit_code == 2
        assert words in result.stderr
        assert len(seen) == before
    assert run(str(path), "--stepz", "3").exit_code == 2
    shown = run("--help").stdout
    for f in fields(TrainConfig):
        assert "--" + (f.metadata["flag"] or f.name).replace("_", "-") in shown


def test_sizes() -> None:
    assert [parse_bytes(t) for t in ("8GB", "500 MB", "2.5GiB", "100")] == [8e9, 5e8, 2.5 * 2**30, 100]
