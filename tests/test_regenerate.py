"""The target answers prompts itself: what is written, going on after an interruption, and bad input in one sentence."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import tiny_cli
from dartspec.target.target import Target
from dartspec.text import Text
from dartspec.train.regenerate import main, regenerate

PROMPTS = [(f"p{i}", "the thing " * (1 + i % 3) + str(i)) for i in range(9)]


def run(out: Path, prompts: list[tuple[str, str]] = PROMPTS, **changes: int) -> dict[str, dict]:
    text = Text(tiny_cli.tokenizer())
    target = Target(tiny_cli.model(), text.num_tokens, text.eos_token_ids())
    regenerate(target, text, prompts, out, log=io.StringIO(), **{"batch": 4, "max_tokens": 12, **changes})
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({r["id"] for r in rows}) == len(rows)  # nobody is answered twice
    return {r["id"]: r for r in rows}


def test_every_prompt_is_answered_whatever_the_batch(tmp_path: Path) -> None:
    answers = run(tmp_path / "a.jsonl")
    assert set(answers) == {name for name, _ in PROMPTS}
    assert {a["temperature"] for a in answers.values()} == {0.0, 0.7}
    assert all(1 <= len(a["response"]) <= 12 for a in answers.values())
    assert run(tmp_path / "b.jsonl", batch=1) == answers


def test_a_killed_run_goes_on_and_writes_what_an_unbroken_one_would(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.jsonl")
    out = tmp_path / "killed.jsonl"
    run(out, PROMPTS[:5])
    out.write_bytes(out.read_bytes()[:-7])  # killed in the middle of a line
    assert run(out) == whole


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    everyone = {name: len(a["prompt"]) for name, a in run(tmp_path / "all.jsonl").items()}
    limit = sorted(everyone.values())[len(everyone) // 2]
    answers = run(tmp_path / "a.jsonl", max_prompt=limit)
    assert set(answers) == {name for name, length in everyone.items() if length <= limit}
    assert 0 < len(answers) < len(PROMPTS)


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ('{"id": "x"}', [], "line 1 is no prompt"),
        ("not json", [], "line 1 is no prompt"),
        (None, [], "no such file"),
        ('{"id": "x", "turns": ["hi"]}', ["--temperatures", "warm"], "numbers such as 0,0.7"),
        ('{"id": "x", "turns": ["hi"]}', ["--threads", "0"], "--threads is 0"),
    ],
)
def test_bad_input_is_one_sentence_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str | None, options: list[str], said: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    if line is not None:
        prompts.write_text(line + "\n")
    missing = str(tmp_path / "no-model-is-here")
    assert main([str(prompts), "--out", str(tmp_path / "out.jsonl"), "--model", missing, *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_another_kind_of_file_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_cli.save(tmp_path / "model")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "notes.txt"
    prompts.write_text('{"id": "x", "turns": ["hi"]}\n')
    out.write_text("my notes\nwithout an end")
    assert main([str(prompts), "--out", str(out), "--model", str(folder), "--dtype", "float32"]) == 2
    assert "other than answers" in capsys.readouterr().err
    assert out.read_text() == "my notes\nwithout an end"
