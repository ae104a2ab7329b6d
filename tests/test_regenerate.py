"""The target answers prompts itself: what is written, going on after an interruption, and bad input in one sentence."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny_cli
from dartspec.cli.main import app
from dartspec.drafters import prompt_lookup
from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.text import Text
from dartspec.train.data import FileInfo, read_examples
from dartspec.train.regenerate import Ask, RefusedError, from_server, from_target, read_asks, regenerate

PROMPTS = [Ask.turn(f"p{i}", "the thing " * (1 + i % 3) + str(i)) for i in range(9)]


def text() -> Text:
    return Text(tiny_cli.tokenizer())


def target() -> Target:
    return Target(tiny_cli.model(), text().num_tokens, text().eos_token_ids())


def run(out: Path, prompts: list[Ask] = PROMPTS, batch: int = 4, **changes: Any) -> dict[str, dict]:
    helped = changes.pop("helped", False)
    one = target()
    helper = (prompt_lookup.load(prompt_lookup.Config(), one), 6) if helped else (None, 0)
    answers = changes.pop("answers", None) or from_target(one, batch, *helper)
    regenerate(answers, text(), prompts, out, log=io.StringIO(), **{"max_tokens": 12, **changes})
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({r["id"] for r in rows}) == len(rows)  # nobody is answered twice
    return {r["id"]: r for r in rows}


def test_every_prompt_is_answered_whatever_the_batch(tmp_path: Path) -> None:
    answers = run(tmp_path / "a.jsonl")
    assert set(answers) == {ask.id for ask in PROMPTS}
    assert {a["temperature"] for a in answers.values()} == {0.0, 0.7}
    assert all(1 <= len(a["response"]) <= 12 for a in answers.values())
    assert run(tmp_path / "b.jsonl", batch=1) == answers
    assert run(tmp_path / "c.jsonl", batch=3, helped=True) == answers
    info = FileInfo.read(tmp_path / "a.jsonl")
    assert info is not None
    assert (info.tokenizer_fingerprint, info.template_hash) == (text().fingerprint, text().template_hash)
    assert info.counts["answer_tokens"] == sum(len(a["response"]) for a in answers.values())


def test_a_prompt_that_comes_again_is_answered_once_and_counted(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    assert run(out, [*PROMPTS, PROMPTS[0], PROMPTS[0]]) == run(tmp_path / "b.jsonl")
    info = FileInfo.read(out)
    assert info is not None
    assert info.dropped == {"a prompt whose id came before": 2}


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


def test_answers_are_cut_where_they_loop(tmp_path: Path) -> None:
    loop = list(range(40, 56))
    rows = run(tmp_path / "a.jsonl", PROMPTS[:2], answers=lambda requests: iter([(0, [1, 2, *loop * 4]), (1, [5, 6])]))
    assert rows["p0"]["response"] == [1, 2, *loop * 2]
    assert rows["p1"]["response"] == [5, 6]
    info = FileInfo.read(tmp_path / "a.jsonl")
    assert info is not None
    assert (info.counts["loops_cut"], info.counts["answer_tokens"]) == (1, 36)
    assert len(read_examples([tmp_path / "a.jsonl"], max_tokens=99, vocab_size=500)) == 2


def test_a_file_begun_otherwise_is_not_gone_on_with(tmp_path: Path) -> None:
    run(tmp_path / "a.jsonl", PROMPTS[:2])
    with pytest.raises(DartspecError, match=r"begun with template arguments \{\}, this run has \{'x': 1\}"):
        run(tmp_path / "a.jsonl", arguments={"x": 1})
    path = FileInfo.path_of(tmp_path / "a.jsonl")
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "answering"}))
    run(tmp_path / "a.jsonl", PROMPTS[:3], temperatures=(1.0,))  # an older file does not say: it is gone on with
    assert json.loads(path.read_text())["answering"] == {}
    path.unlink()
    (tmp_path / "a.jsonl").unlink()
    run(tmp_path / "a.jsonl", PROMPTS[:2])
    with pytest.raises(DartspecError, match=r"begun with temperatures and length \{'temperatures': \[0.0, 0.7\]"):
        run(tmp_path / "a.jsonl", temperatures=(1.0,))


def test_a_prompt_is_what_comes_before_an_answer(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    source = tmp_path / "p.jsonl"
    records = [
        {"id": "x", "messages": messages, "tools": [{"name": "add"}]},
        {"id": 7, "turns": ["first", "second"]},
        {"instruction": "say", "output": "it"},
        {"prompt": "alone"},
    ]
    source.write_text("".join(json.dumps(r) + "\n" for r in records))
    first, turns, made, alone = read_asks([str(source)])
    assert alone.messages == ({"role": "user", "content": "alone"},)
    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert (first.id, first.tools) == ("x", [{"name": "add"}])
    assert (turns.id, turns.messages) == ("7", ({"role": "user", "content": "first"},))
    assert made.messages == ({"role": "user", "content": "say"},)
    assert made.id == list(read_asks([str(source)]))[2].id
    last = next(iter(read_asks([str(source)], last=True)))
    assert [m["role"] for m in last.messages] == ["system", "user", "assistant", "tool"]
    assert last.messages[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    source.write_text('{"text": "words"}\n')
    with pytest.raises(DartspecError, match="line 1 is no prompt: nothing comes before an answer"):
        list(read_asks([str(source)]))


@pytest.mark.parametrize("gives_ids", [True, False])
def test_a_server_answers_instead_of_the_target(tmp_path: Path, gives_ids: bool) -> None:
    """A server over the same target, with its own ids or as text alone."""
    one, words = target(), text()
    seen: list[dict[str, Any]] = []
    asked: list[int] = []

    def post(body: Mapping[str, Any]) -> Mapping[str, Any]:
        if not gives_ids and "return_token_ids" in body:
            asked.append(1)
            raise RefusedError("HTTP 400: 'return_token_ids' is not a field")
        seen.append(dict(body))
        number = len(seen)
        said = f"the answer {body['prompt'][-3]}"
        ids = words.encode(said)
        choice: dict[str, Any] = {"text": said, "finish_reason": "length" if number == 1 else "stop"}
        if gives_ids:
            choice["token_ids"] = ids[:-1] if number == 2 else [one.vocab_size] if number == 3 else ids
        return {"choices": [choice]}

    rows = run(tmp_path / "a.jsonl", answers=from_server(post, words, 1), temperatures=[0.5])
    assert [b["prompt"] for b in seen] == [words.encode_chat(ask.messages) for ask in PROMPTS]
    assert {b["temperature"] for b in seen} == {0.5}
    info = FileInfo.read(tmp_path / "a.jsonl")
    assert info is not None
    if gives_ids:  # ids that say something else, and ids that we do not have, are left out
        assert len(rows) == 7
        assert info.dropped == {"an answer that our tokenizer does not write": 2}
    else:
        assert len(rows) == 9
        assert len(asked) == 1
        assert rows["p1"]["response"][-1] == words.tokenizer.eos_token_id
        assert rows["p0"]["response"][-1] != words.tokenizer.eos_token_id  # it ended by its length


def cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["data", *arguments])


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ('{"id": "x"}', [], "line 1 is no prompt"),
        ("not json", [], "line 1 is no prompt"),
        (None, [], "no such file"),
        ('{"id": "x", "turns": ["hi"]}', ["--served-model", "x"], "give --endpoint as well"),
        ('{"id": "x", "turns": ["hi"]}', ["--endpoint", "http://localhost:1", "--drafter", "dart"], "drop one"),
        ('{"id": "x", "turns": ["hi"]}', ["--nodes", "many"], "--drafter is none"),
        ("", [], "no prompt in"),
        ('{"id": "x", "turns": ["hi"]}', ["--temperatures", "warm"], "numbers such as 0,0.7"),
        ('{"id": "x", "turns": ["hi"]}', ["--template", "warm"], "not KEY=VALUE"),
    ],
)
def test_bad_input_is_one_sentence_before_a_model_is_loaded(
    tmp_path: Path, line: str | None, options: list[str], said: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    if line is not None:
        prompts.write_text(line + "\n")
    missing = str(tmp_path / "no-model-is-here")
    result = cli("regenerate", str(prompts), "--out", str(tmp_path / "out.jsonl"), "--model", missing, *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_another_kind_of_file_is_not_written_to_and_a_run_can_be_looked_at(tmp_path: Path) -> None:
    folder = tiny_cli.save(tmp_path / "model")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "notes.txt"
    prompts.write_text('{"id": "x", "turns": ["hi"]}\n')
    out.write_text("my notes\nwithout an end")
    common = ["regenerate", str(prompts), "--model", str(folder), "--dtype", "float32", "--max-tokens", "6"]
    result = cli(*common, "--out", str(out))
    assert result.exit_code == 2
    assert "other than answers" in result.stderr
    assert out.read_text() == "my notes\nwithout an end"
    made = tmp_path / "new" / "answers.jsonl"
    result = cli(*common, "--out", str(made), "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["info"]["counts"]["examples"] == 1
    result = cli("info", str(made), "--json")
    assert json.loads(result.stdout.splitlines()[-1])["files"][0]["has_info"]
