"""Conversations of every form become the ids that serving would see, and the mask is on the assistant's words alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny_cli
import tiny_train
from dartspec.cli.main import app
from dartspec.errors import DartspecError
from dartspec.text import Text
from dartspec.train import run
from dartspec.train.conversations import (
    MOST_REASONS,
    Conversation,
    Limits,
    Renderer,
    conversation_of,
    document,
    prepare,
)
from dartspec.train.data import Example, FileInfo, check_infos, loss_mask, read_examples

TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# drops earlier reasoning, as thinking models' templates do; an argument closes the thinking in the generation prompt
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>{{ m.get('reasoning_content', '') }}</think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}call {{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    {"role": "system", "content": "be the thing"},
    {"role": "user", "content": "on?"},
    {"role": "assistant", "content": "the one"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "in"},
]


def text(template: str | None = tiny_cli.TEMPLATE) -> Text:
    tokenizer = tiny_cli.tokenizer.__wrapped__()  # our own: the template is changed
    tokenizer.chat_template = template
    return Text(tokenizer)


def answers(words: Text, example: Example) -> list[str]:
    return [words.decode(example.ids[s:e], skip_special=False) for s, e in example.answers]


def chat(*turns: dict[str, Any], tools: Any = None) -> Conversation:
    return conversation_of({"messages": list(turns), "tools": tools})


@pytest.mark.parametrize("template", [tiny_cli.TEMPLATE, TAGGED])
def test_the_mask_is_on_every_answer_and_its_end_alone(template: str) -> None:
    words = text(template)
    (example,) = Renderer(words).examples(chat(*TURNS))
    assert answers(words, example) == ["the one<|im_end|>", "in<|im_end|>"]
    # what comes before the first answer is the prompt that serving would give, token for token
    prompt = words.encode_chat(TURNS[:2])
    assert list(example.ids[: example.num_prompt]) == prompt
    assert list(example.ids[: example.answers[1][0]]) == words.encode_chat(TURNS[:4])
    # and the row before the boundary is the one that is trained on the answer's first token (case 23)
    mask = loss_mask(example, 1)[:, 0]
    assert bool(mask[len(prompt) - 2])
    assert not bool(mask[len(prompt) - 3])


def test_both_ways_to_the_mask_agree_on_the_same_template() -> None:
    rendered, tagged = (Renderer(text(t)).examples(chat(*TURNS)) for t in (tiny_cli.TEMPLATE, TAGGED))
    assert rendered == tagged


def test_an_answer_that_would_grow_together_with_the_prompt_is_tokenized_as_served() -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}: t{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: t{% endif %}"
    )
    words = text(template)
    renderer = Renderer(words)
    (example,) = renderer.examples(chat({"role": "user", "content": "a"}, {"role": "assistant", "content": "he"}))
    assert words.encode("the") != words.encode("t") + words.encode("he")
    assert list(example.ids[: example.num_prompt]) == renderer.prompt_ids([{"role": "user", "content": "a"}])
    assert answers(words, example) == ["he"]
    assert renderer.tally.counts["answers_rendered_apart"] == 1


@pytest.mark.parametrize("thinking", [True, False])
def test_a_template_that_drops_earlier_reasoning_gives_each_turn_as_it_was_served(thinking: bool) -> None:
    words = text(THINKING)
    renderer = Renderer(words, {"enable_thinking": thinking})
    turns = [
        {"role": "user", "content": "on?"},
        {"role": "assistant", "content": "one", "reasoning_content": "so" if thinking else ""},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "in", "reasoning_content": "hm" if thinking else ""},
    ]
    last, first = renderer.examples(chat(*turns))
    said = ["<think>hm</think>in<|im_end|>", "<think>so</think>one<|im_end|>"] if thinking else None
    assert [*answers(words, last), *answers(words, first)] == (said or ["in<|im_end|>", "one<|im_end|>"])
    assert list(last.ids[: last.num_prompt]) == renderer.prompt_ids(turns[:3])
    assert list(first.ids[: first.num_prompt]) == renderer.prompt_ids(turns[:1])
    assert renderer.tally.not_rendered["reasoning_content"] == (1 if thinking else 0)  # "so" is gone from the whole


def test_tools_calls_and_results_are_what_the_template_makes_of_them() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "user", "content": "sum"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    conversation = chat(*turns, tools=[{"function": {"name": "add"}}, {"function": {"name": "sub"}}])
    words = text(TOOLS)
    renderer = Renderer(words)
    (example,) = renderer.examples(conversation)
    assert answers(words, example) == ['call add {"a": 1}<|im_end|>', "two<|im_end|>"]
    assert '"sub"' in words.decode(example.ids)
    assert not +renderer.tally.not_rendered
    plain = Renderer(text())  # this one knows nothing of tools
    plain.examples(conversation)
    assert dict(+plain.tally.not_rendered) == {"tools": 2, "tool_calls": 1}


FORMS = [
    {"messages": TURNS[1:3]},
    {"conversations": [{"from": "human", "value": "on?"}, {"from": "gpt", "value": "the one"}]},
    {"conversation": [{"role": "user", "content": "on?"}, {"role": "assistant", "content": "the one"}]},
    {"instruction": "on?", "input": "", "output": "the one"},
    {"prompt": "on?", "response": "the one"},
    {"question": "on?", "answer": "the one"},
]


@pytest.mark.parametrize("record", FORMS)
def test_every_form_is_the_same_conversation(record: dict[str, Any]) -> None:
    assert conversation_of(record).messages == TURNS[1:3]


def test_forms_with_more_in_them() -> None:
    share = {
        "system": "be the thing",
        "tools": '[{"name": "add"}]',
        "conversations": [
            {"from": "human", "value": "on?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"},
        ],
    }
    c = conversation_of(share)
    assert [m["role"] for m in c.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert c.tools == [{"name": "add"}]
    assert c.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    alpaca = {"instruction": "on", "input": "the thing", "output": "it", "system": "s", "history": [["a", "b"]]}
    assert [m["content"] for m in conversation_of(alpaca).messages] == ["s", "a", "b", "on\n\nthe thing", "it"]
    assert conversation_of({"text": "words", "question": "of the page"}).text == "words"
    assert conversation_of({"prompt": "on?"}).messages == TURNS[1:2]
    assert len(conversation_of({"prompt": "on?", "turns": ["one", "two"]}).messages) == 2


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([], "a record is a list"),
        ({"a": 1, "b": 2}, "keys a, b"),
        ({"conversations": [{"from": "crowd", "value": "x"}]}, "a turn is from 'crowd'"),
        ({"messages": [{"content": "x"}]}, "must have a role"),
        ({"messages": ["x"]}, "a turn is a str"),
        ({"messages": [], "tools": "{"}, "tools is not JSON"),
    ],
)
def test_an_unknown_form_says_what_it_has(record: Any, said: str) -> None:
    with pytest.raises(DartspecError, match=said):
        conversation_of(record)


def test_documents_end_with_the_end_token_and_are_split() -> None:
    words = text()
    one, two = document(words, "the thing and on", 12)
    assert (len(one.ids), one.answers) == (12, ((0, 12),))
    assert two.ids[-1] == words.tokenizer.eos_token_id
    assert words.decode([*one.ids, *two.ids]) == "the thing and on"


def test_a_file_is_prepared_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    words = text()
    source, plain, out = tmp_path / "in.jsonl", tmp_path / "book.txt", tmp_path / "out" / "data.jsonl"
    lines = [
        *map(json.dumps, [*FORMS[:2], {"messages": TURNS}, {"messages": TURNS[:2]}, {"x": 1}]),
        "{",
        "",
        json.dumps({"prompt": "on?", "response": "the " * 99}),
        json.dumps({"prompt": "on? " * 60, "response": "the one"}),
    ]
    source.write_text("\n".join(lines))
    plain.write_text("the thing and on")
    info = prepare([str(source), str(plain)], words, out, limits=Limits(max_tokens=120))
    examples = read_examples([out], max_tokens=999, vocab_size=words.num_tokens, cut_loops=False)
    assert len(examples) == info.counts["examples"] == 4
    assert info.counts["answer_tokens"] == sum(e.num_response for e in examples)
    assert info.counts["cut_to_length"] == 1
    dropped = {k.split(" (")[0].split(";")[0]: n for k, n in info.dropped.items()}
    assert dropped == {
        "a duplicate": 1,
        "no answer of an assistant": 1,
        "a record has the keys x": 1,
        "not JSON": 1,
        "its answers begin after 120 tokens": 1,
    }
    assert FileInfo.read(out) == info
    assert (info.tokenizer_fingerprint, info.template_hash) == (words.fingerprint, words.template_hash)
    assert not list(tmp_path.glob("**/*.tmp"))
    longer = prepare([str(source)], words, tmp_path / "b.jsonl", limits=Limits(max_tokens=120, long="drop"))
    assert longer.dropped["longer than 120 tokens"] == 2
    with pytest.raises(DartspecError, match="would carry loss"):
        prepare([str(source)], words, tmp_path / "c.jsonl", limits=Limits(min_answer=500))
    assert not (tmp_path / "c.jsonl").exists()


def test_a_broken_file_does_not_fill_the_info_with_reasons(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(FORMS[0]) + "\n" + "\n".join("[" + " " * i + "x" for i in range(90)))
    info = prepare([str(source)], text(), tmp_path / "out.jsonl")
    assert len(info.dropped) == MOST_REASONS + 1
    assert sum(info.dropped.values()) == 90
    assert info.dropped["other reasons"] == 90 - MOST_REASONS


def test_what_cannot_be_prepared_leaves_no_file_and_no_source_is_lost(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    (tmp_path / "x").mkdir()
    for raw, said in ((b"\xff\x00", "not UTF-8"), (b"[" * 100_000, "not JSON")):
        source.write_bytes(raw)
        with pytest.raises(DartspecError, match=said):
            prepare([str(source)], text(), tmp_path / "out.jsonl")
    (tmp_path / "x" / "part.parquet").write_bytes(b"text")
    with pytest.raises(DartspecError, match="is one file of a data set: give its folder"):
        prepare([str(tmp_path / "x" / "part.parquet")], text(), tmp_path / "out.jsonl")
    source.write_text(json.dumps(FORMS[0]) + "\n")
    before = source.read_bytes()
    with pytest.raises(DartspecError, match="is read as well, so it would be lost"):
        prepare([str(source)], text(), tmp_path / "x" / ".." / "in.jsonl")
    with pytest.raises(DartspecError, match="is a folder"):
        prepare([str(source)], text(), tmp_path / "x")
    assert source.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "x"]


def test_datasets_are_read_from_a_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(
        [{"prompt": "on?", "response": "the one"}, {"prompt": "and?", "response": "in it"}]
    )
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "dict"))
    for name in ("one", "dict"):
        info = prepare([str(tmp_path / name)], text(), tmp_path / f"{name}.jsonl")
        assert info.counts["examples"] == 2
    with pytest.raises(DartspecError, match="no split 'test'"):
        prepare([str(tmp_path / "dict")], text(), tmp_path / "x.jsonl", split="test")
    with pytest.raises(DartspecError, match="no such file or folder"):
        prepare([str(tmp_path / "none.jsonl")], text(), tmp_path / "x.jsonl")


def test_training_refuses_what_was_made_for_another_target(tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{n}.jsonl" for n in "abc")
    FileInfo("prepare", "one", "t", {"enable_thinking": False}).write(a)
    FileInfo("prepare", "one", "t", {"enable_thinking": True}).write(b)
    assert check_infos([a, c], "one") == {"template_hash": "t", "template_arguments": {"enable_thinking": False}}
    assert check_infos([c], "one") == {}
    with pytest.raises(DartspecError, match="made for tokenizer one, the target uses two"):
        check_infos([a], "two")
    with pytest.raises(DartspecError, match="train on one of them"):
        check_infos([a, b], "one")
    FileInfo.path_of(c).write_text("{}")
    with pytest.raises(DartspecError, match="format 1 was expected"):
        check_infos([c], "one")


def test_the_command_prepares_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_cli.tokenizer().save_pretrained(folder)
    source, out = tmp_path / "in.jsonl", tmp_path / "data.jsonl"
    source.write_text("\n".join(map(json.dumps, [{"messages": TURNS}, {"x": 1}])))
    result = CliRunner().invoke(app, ["data", "prepare", str(source), "--model", str(folder), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "answer tokens" in result.stdout
    assert "dropped: 1 x a record has the keys x" in result.stdout
    result = CliRunner().invoke(app, ["data", "info", str(out)])
    assert "rendered twice" in result.stdout


def test_a_checkpoint_says_which_template_arguments_its_data_had(tmp_path: Path) -> None:  # case 24
    config, target = tiny_train.config_in(tmp_path), tiny_train.target()
    data = Path(config.data[0])
    assert "template_arguments" not in run.prepare(config, target, "the target's").net.config.provenance
    FileInfo("prepare", target.tokenizer_fingerprint or "", "data's", {"enable_thinking": False}).write(data)
    made = run.prepare(config, target, "the target's").net.config
    assert made.provenance["template_arguments"] == {"enable_thinking": False}
    assert made.template_hash == "data's"
    target.tokenizer_fingerprint = "mine"
    FileInfo("prepare", "another").write(data)
    with pytest.raises(DartspecError, match="made for tokenizer another, the target uses mine"):
        run.prepare(config, target)
