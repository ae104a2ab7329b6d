"""Conversations as people keep them, to token ids and which of them the assistant wrote.

Read: JSONL or JSON of chat messages, ShareGPT, Alpaca or prompt and answer; plain text; Hugging Face datasets. The
target's own chat template renders them, so that training sees what serving sees. What is left out is counted.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dartspec.accounting import loop_start
from dartspec.errors import DartspecError
from dartspec.files import written_aside
from dartspec.text import Text
from dartspec.train.data import Example, FileInfo, parse_example

_ROLES = {  # ShareGPT's names, and what chat templates call them
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("query", "response"))
_TABLES = (".parquet", ".arrow", ".csv", ".tsv")
MOST_REASONS = 30  # that are told apart: a broken file has another in every line
_REASONING = ("reasoning_content", "reasoning", "thinking")


class Conversation(NamedTuple):
    """messages: as chat templates take them, or empty for a document, whose text is `text`."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    text: str = ""


# -- from records ------------------------------------------------------------------------------------------------------


def conversation_of(record: Any) -> Conversation:
    """What a record of any known form holds. Raises DartspecError that says what was found."""
    if not isinstance(record, Mapping):
        raise DartspecError(f"a record is a {type(record).__name__}; it must be a JSON object")
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, "tools")
    for key in ("messages", "conversations", "conversation"):
        if isinstance(turns := record.get(key), list):
            messages = [_message(turn) for turn in turns]
            system = record.get("system")
            if isinstance(system, str) and system and not any(m["role"] == "system" for m in messages):
                messages.insert(0, {"role": "system", "content": system})
            return Conversation(messages, tools or None)
    if isinstance(record.get("instruction"), str):
        return Conversation(_alpaca(record), tools or None)
    for asked, answered in _PAIRS:
        if isinstance(record.get(asked), str) and isinstance(record.get(answered), str):
            return Conversation([_said("user", record[asked]), _said("assistant", record[answered])], tools or None)
    if isinstance(turns := record.get("turns"), list) and all(isinstance(t, str) for t in turns):
        return Conversation([_said("user", t) for t in turns], tools or None)
    if isinstance(record.get("text"), str):
        return Conversation([], None, record["text"])
    for asked, _ in _PAIRS:
        if isinstance(record.get(asked), str):  # a prompt that nobody has answered
            return Conversation([_said("user", record[asked])], tools or None)
    keys = ", ".join(sorted(map(str, record))[:8])
    raise DartspecError(
        f"a record has the keys {keys}; known forms have messages, conversations, instruction and output, prompt and "
        "response, turns, text, or a prompt alone"
    )


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise DartspecError(f"a turn is a {type(turn).__name__}; it must be an object with a role and a content")
    if "from" in turn and "role" not in turn:  # ShareGPT
        role = str(turn["from"]).lower()
        if role == "function_call":
            call = _json(turn.get("value"), "function_call")
            return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        if role not in _ROLES:
            raise DartspecError(f"a turn is from {turn['from']!r}; known are {', '.join(sorted(_ROLES))}")
        return _said(_ROLES[role], str(turn.get("value") or ""))
    message = {key: value for key, value in turn.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise DartspecError(f"a turn has the keys {', '.join(sorted(map(str, turn)))}; it must have a role")
    message.setdefault("content", "")
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: Any) -> Any:
    """A tool call whose arguments are an object, as templates want them; OpenAI sends them as a string."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        try:
            return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        except ValueError:
            return call
    return call


def _alpaca(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = record.get("system")
    messages = [_said("system", system)] if isinstance(system, str) and system else []
    for asked, answered in record.get("history") or []:
        messages += [_said("user", str(asked)), _said("assistant", str(answered))]
    extra = record.get("input")
    asked = record["instruction"] + (f"\n\n{extra}" if isinstance(extra, str) and extra.strip() else "")
    messages.append(_said("user", asked))
    answer = next((record[k] for k in ("output", "response") if isinstance(record.get(k), str)), "")
    return [*messages, _said("assistant", answer)] if answer else messages


def _json(value: Any, what: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DartspecError(f"{what} is not JSON ({error})") from None


# -- from files and datasets -------------------------------------------------------------------------------------------


def read_records(source: str, split: str = "train") -> Iterator[tuple[str, Any]]:
    """(where, record) of a file (.jsonl, .json, else plain text: one document), a folder that `datasets` saved or that
    holds data files, or a dataset of the hub by its id. A line that is no JSON comes as a DartspecError."""
    path = Path(source)
    if path.is_file():
        yield from _file_records(path)
        return
    if not path.is_dir() and (source.count("/") != 1 or path.suffix in (".jsonl", ".json", ".txt")):
        raise DartspecError(f"{source}: no such file or folder; a dataset of the hub is named OWNER/NAME")
    try:
        import datasets
    except ImportError:
        raise DartspecError(f"{source}: datasets are read with the package datasets: pip install datasets") from None
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(source)
            if isinstance(found, Mapping):
                if split not in found:
                    raise DartspecError(f"{source} has no split {split!r}; it has {', '.join(found)}")
                found = found[split]
        else:
            found = datasets.load_dataset(source, split=split)
    except DartspecError:
        raise
    except Exception as error:  # the library raises a dozen kinds
        reason = " ".join(str(error).split())[:200]
        raise DartspecError(f"the dataset {source} could not be loaded: {reason}") from error
    for i, record in enumerate(found):
        yield f"{source}, row {i}", record


def _file_records(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{path}, line {number}", _line(line)
        elif path.suffix == ".json":
            whole = _line(path.read_text(encoding="utf-8"))
            if isinstance(whole, DartspecError):
                raise DartspecError(f"{path}: {whole}")
            for i, record in enumerate(whole if isinstance(whole, list) else [whole]):
                yield f"{path}, record {i}", record
        elif path.suffix in _TABLES:
            raise DartspecError(f"{path} is one file of a data set: give its folder, which the package datasets reads")
        else:
            yield str(path), {"text": path.read_text(encoding="utf-8")}
    except UnicodeDecodeError as error:
        raise DartspecError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return DartspecError(f"not JSON ({error})")


# -- to ids and answers ------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the conversations."""

    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    not_rendered: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str) -> None:
        """Counts one that is left out; beyond `MOST_REASONS` different reasons, without its own."""
        known = reason in self.dropped or len(self.dropped) < MOST_REASONS
        self.dropped[reason if known else "other reasons"] += 1


class Renderer:
    """A chat template with its arguments, and where the assistant's words lie in what it writes.

    The mask comes from the template's own `{% generation %}` tags; without them from rendering twice, up to an answer
    with the generation prompt and then with the answer. Ids are those that serving gives the target: an answer whose
    first token would have grown together with the prompt's last is tokenized apart from it.
    """

    def __init__(self, text: Text, arguments: Mapping[str, Any] | None = None, tally: Tally | None = None) -> None:
        if text.chat_template is None:
            raise DartspecError("the tokenizer has no chat template, so only plain text can be prepared for it")
        self.text, self.arguments = text, dict(arguments or {})
        self.tally = Tally() if tally is None else tally
        self.has_tags = "{% generation" in text.chat_template or "{%- generation" in text.chat_template
        self._stops = text.eos_token_ids()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, prompt: bool = False) -> str:
        """The template's text. Raises DartspecError with the template's own words."""
        try:
            return str(
                self.text.tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **self.arguments
                )
            )
        except Exception as error:  # jinja errors and whatever a template raises
            reason = " ".join(str(error).split())[:120]
            raise DartspecError(f"the chat template refused it ({reason})") from error

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        return self.text.encode(self.render(messages, tools, prompt=True))

    def examples(self, c: Conversation) -> list[Example]:
        """One example with every answer in it, and one more for each answer that the whole conversation renders
        otherwise than it was served (templates that drop earlier reasoning). None without any answer."""
        whole = self.render(c.messages, c.tools)
        self._note_missing(c, whole)
        if self.has_tags:
            return self._tagged(c)
        ids = self.text.encode(whole)
        spans: list[tuple[int, int]] = []
        apart: list[Example] = []
        for i, message in enumerate(c.messages):
            if message["role"] != "assistant":
                continue
            before = self.render(c.messages[:i], c.tools, prompt=True) if i else ""
            after = self.render(c.messages[: i + 1], c.tools)
            if not after.startswith(before):  # the generation prompt holds more than an answer begins with
                self.tally.counts["answers_that_begin_otherwise_than_the_generation_prompt"] += 1
                before = before[: _alike(before, after)]
            head, both = self.text.encode(before), self.text.encode(after)
            if whole.startswith(after) and ids[: len(head)] == head:
                end = self._end(ids, len(head), len(both) if ids[: len(both)] == both else _alike(ids, both))
                if end > len(head):
                    spans.append((len(head), end))
                continue
            tail = self.text.encode(after[len(before) :])
            joined = head + tail
            if both[: len(head)] == head:
                joined = both
            elif self.text.decode(joined, skip_special=False) != self.text.decode(both, skip_special=False):
                self.tally.counts["answers_that_no_token_begins"] += 1
                continue
            end = self._end(joined, len(head), len(joined))
            if end > len(head):
                self.tally.counts["answers_rendered_apart"] += 1
                apart.append(Example(tuple(joined[:end]), ((len(head), end),)))
        if spans:
            apart.insert(0, Example(tuple(ids[: spans[-1][1]]), tuple(spans)))
        return apart

    def _tagged(self, c: Conversation) -> list[Example]:
        try:
            out = self.text.tokenizer.apply_chat_template(
                list(c.messages),
                tools=c.tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self.arguments,
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:120]
            raise DartspecError(f"the chat template refused it ({reason})") from error
        ids, mask = list(out["input_ids"]), [*out["assistant_masks"], 0]
        edges = [i for i in range(len(mask)) if mask[i] != (mask[i - 1] if i else 0)]
        spans = tuple(zip(edges[::2], edges[1::2], strict=True))
        return [Example(tuple(ids[: spans[-1][1]]), spans)] if spans else []

    def _end(self, ids: Sequence[int], start: int, end: int) -> int:
        """Behind the last end-of-turn token: what the template writes after it the target never does."""
        stops = [i for i in range(start, end) if ids[i] in self._stops]
        return stops[-1] + 1 if stops else end

    def _note_missing(self, c: Conversation, whole: str) -> None:
        """Counts what the conversation has and the template did not write."""
        missing = self.tally.not_rendered
        for tool in c.tools or []:
            name = (tool.get("function") or tool).get("name") if isinstance(tool, Mapping) else None
            missing["tools"] += isinstance(name, str) and name not in whole
        for message in c.messages:
            for key in _REASONING:
                value = message.get(key)
                missing[key] += isinstance(value, str) and bool(value.strip()) and value.strip() not in whole
            for call in message.get("tool_calls") or []:
                name = (call.get("function") or call).get("name") if isinstance(call, Mapping) else None
                missing["tool_calls"] += isinstance(name, str) and name not in whole
            content = message["content"]
            if isinstance(content, str) and content.strip() and content.strip() not in whole:
                missing[f"{message['role']} content"] += 1


def _alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- a prepared file ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What is kept. long: "cut" keeps the first `max_tokens`, "drop" leaves the conversation out; a document is always
    split into pieces of `max_tokens`. min_answer: answer tokens that an example must have."""

    max_tokens: int = 2048
    min_answer: int = 2
    long: str = "cut"

    def __post_init__(self) -> None:
        if self.max_tokens < 4 or self.min_answer < 1 or self.long not in ("cut", "drop"):
            raise DartspecError(
                f"max_tokens is {self.max_tokens}, min_answer {self.min_answer}, long {self.long!r}; they must be 4 or "
                "more, 1 or more, and cut or drop"
            )


def refuse_own_source(out: Path, sources: Sequence[str]) -> None:
    """Raises DartspecError where the file to write is one of those that are read, which would be lost."""
    if out.is_dir():
        raise DartspecError(f"{out} is a folder: give the name of a file to write")
    if any(Path(s).exists() and out.exists() and os.path.samefile(s, out) for s in sources):
        raise DartspecError(f"{out} is to be written and is read as well, so it would be lost: give another --out")


def prepare(
    sources: Sequence[str],
    text: Text,
    out: Path,
    *,
    arguments: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    split: str = "train",
    target: str = "",
) -> FileInfo:
    """Writes all usable conversations of the sources as token ids, and the info file beside them.

    arguments: of the chat template. Both files are written aside and renamed. Raises DartspecError where nothing usable
    is left.
    """
    limits, tally, seen = limits or Limits(), Tally(), set[bytes]()
    renderer: Renderer | None = None
    refuse_own_source(out, sources)
    out.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(out) as aside, aside.open("w", encoding="utf-8") as file:
        for source in sources:
            for where, record in read_records(source, split):
                tally.counts["records"] += 1
                try:
                    if isinstance(record, DartspecError):
                        raise record
                    conversation = conversation_of(record)
                    if conversation.messages and renderer is None:
                        renderer = Renderer(text, arguments, tally)
                    if conversation.messages:
                        assert renderer is not None
                        examples = renderer.examples(conversation)
                        if not examples:
                            raise DartspecError("no answer of an assistant")
                    else:
                        examples = document(text, conversation.text, limits.max_tokens)
                except DartspecError as error:
                    tally.drop(str(error))
                    continue
                for example in examples:
                    if (kept := _fit(example, limits, tally, seen)) is not None:
                        line = {"ids": list(kept.ids), "answers": [list(s) for s in kept.answers], "source": where}
                        file.write(json.dumps(line, separators=(",", ":")) + "\n")
                        tally.counts["examples"] += 1
                        tally.counts["tokens"] += len(kept.ids)
                        tally.counts["answers"] += len(kept.answers)
                        tally.counts["answer_tokens"] += kept.num_response
        if not tally.counts["examples"]:
            why = "; ".join(f"{n} x {reason}" for reason, n in tally.dropped.most_common(3)) or "they are empty"
            raise DartspecError(f"no token of {', '.join(sources)} would carry loss: {why}")
    info = FileInfo(
        made_by="prepare",
        tokenizer_fingerprint=text.fingerprint,
        template_hash=text.template_hash if renderer else None,
        template_arguments=dict(arguments or {}) if renderer else {},
        target=target,
        sources=tuple(Path(s).name if Path(s).exists() else s for s in sources),
        counts=dict(tally.counts),
        dropped=dict(tally.dropped),
        not_rendered={k: n for k, n in tally.not_rendered.items() if n},
        mask=("generation tags" if renderer.has_tags else "rendered twice") if renderer else "",
        made_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    info.write(out)
    return info


def document(text: Text, content: str, max_tokens: int) -> list[Example]:
    """Plain text in pieces of at most `max_tokens`; the end of the document is an end-of-text token, where the
    tokenizer has one. Every token carries loss but those that no row can predict."""
    ids = text.encode_prompt(content)
    if not content.strip() or not ids:
        raise DartspecError("an empty document")
    end = getattr(text.tokenizer, "eos_token_id", None)
    if isinstance(end, int):
        ids.append(end)
    pieces = [ids[at : at + max_tokens] for at in range(0, len(ids), max_tokens)]
    return [Example(tuple(p), ((0, len(p)),)) for p in pieces]


def _fit(example: Example, limits: Limits, tally: Tally, seen: set[bytes]) -> Example | None:
    """The example within its limits, or None where it is dropped; counted either way."""
    key = hashlib.sha256(repr(example).encode()).digest()
    if key in seen:
        tally.drop("a duplicate")
        return None
    seen.add(key)
    if len(example.ids) > limits.max_tokens and limits.long == "drop":
        tally.drop(f"longer than {limits.max_tokens} tokens")
        return None
    kept = example.cut(limits.max_tokens)
    if kept is None:
        short = example.cut(len(example.ids)) is None
        tally.drop("too short an answer" if short else f"its answers begin after {limits.max_tokens} tokens")
        return None
    if kept.num_response < limits.min_answer:
        tally.drop("too short an answer")
        return None
    tally.counts["cut_to_length"] += len(kept.ids) < len(example.ids)
    tally.counts["loops"] += any(loop_start(kept.ids[s:e]) is not None for s, e in kept.answers)
    return kept


def reread(paths: Iterable[Path]) -> dict[str, int]:
    """Counts of files of token ids as training would find them, for `dartspec data info`."""
    counts: Counter[str] = Counter()
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                counts["lines"] += 1
                example = parse_example(line, f"{path}, line {number}", 1 << 31)
                if example is None:
                    counts["empty_answers"] += 1
                    continue
                counts["examples"] += 1
                counts["tokens"] += len(example.ids)
                counts["answers"] += len(example.answers)
                counts["answer_tokens"] += example.num_response
                counts["loops"] += example.first_loop() is not None
                counts["longest"] = max(counts["longest"], len(example.ids))
    return dict(counts)
