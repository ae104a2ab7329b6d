"""The target answers prompts itself: training answers (and index text) in the target's own words.

One line an answer comes out, as soon as it ends: {"id", "temperature", "prompt": ids, "response": ids}, cut where it
begins to loop; `dartspec data regenerate` is the command. Started again with the same output, it goes on where it was.
An answer is a function of the prompt and its id: not of the batch, the drafter or an interruption.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from dartspec.accounting import loop_start
from dartspec.drafters import none
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.text import Text
from dartspec.train.conversations import conversation_of, read_records, reread
from dartspec.train.data import FileInfo
from dartspec.types import Controller, Drafter, SamplingParams

Answers = Callable[[Sequence[Request]], Iterator[tuple[int, list[int] | None]]]
"""Requests -> (index, ids) as they end, in any order; None for an answer that cannot be used."""


class Ask(NamedTuple):
    """What the assistant is to answer: the conversation up to there, tool calls and results as they were given."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    tools: Any = None

    @classmethod
    def turn(cls, name: str, content: str) -> Ask:
        return cls(name, ({"role": "user", "content": content},))


def read_asks(sources: Sequence[str], split: str = "train", last: bool = False) -> Iterator[Ask]:
    """A prompt of every record of the sources (`conversations.read_records`): what comes before the assistant's first
    answer, or before its last. A record of `turns` is asked its first. An id is the record's own, or made from its
    content. A record that asks nothing is named and refused."""
    for source in sources:
        for where, record in read_records(source, split):
            try:
                if isinstance(record, DartspecError):
                    raise record
                messages = _asked(conversation_of(record), last)
            except DartspecError as error:
                raise DartspecError(f"{where} is no prompt: {error}") from error
            tools = record.get("tools")
            name = record.get("id")
            if name is None:
                name = hashlib.sha256(json.dumps([messages, tools], sort_keys=True).encode()).hexdigest()[:16]
            yield Ask(str(name), tuple(messages), json.loads(tools) if isinstance(tools, str) else tools or None)


def _asked(conversation: Any, last: bool) -> list[dict[str, Any]]:
    messages = conversation.messages
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if answers:
        end = answers[-1 if last else 0]
    else:  # user turns alone: the first, behind a system turn
        end = next((i + 1 for i, m in enumerate(messages) if m["role"] == "user"), 0)
    if not end:
        raise DartspecError("nothing comes before an answer; a prompt needs a user's turn")
    return list(messages[:end])


def done_ids(path: Path) -> set[str]:
    """Ids answered already. A last line cut off by a kill is dropped from the file."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    try:
        ids = {str(json.loads(line)["id"]) for line in data[:whole].splitlines()}
    except (ValueError, KeyError, TypeError) as error:
        raise DartspecError(f"{path} holds something other than answers ({error}); give another --out") from error
    if whole < len(data):
        with open(path, "r+b") as file:
            file.truncate(whole)
    return ids


def from_target(target: Target, batch: int, drafter: Drafter | None = None, num_nodes: int | Controller = 0) -> Answers:
    """The target itself, plain or with a drafter's help: the answers are the same."""

    def answers(requests: Sequence[Request]) -> Iterator[tuple[int, list[int] | None]]:
        ids: dict[int, list[int]] = {}
        helper = none.Plain() if drafter is None else drafter
        for chunk in generate(target, helper, requests, batch=batch, num_nodes=num_nodes):
            ids.setdefault(chunk.index, []).extend(chunk.ids)
            if chunk.finish:
                yield chunk.index, ids.pop(chunk.index)

    return answers


Post = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""The body of one request to /v1/completions -> the server's answer."""


class RefusedError(DartspecError):
    """A server that did not understand the request (HTTP 400 or 422)."""


def from_server(post: Post, text: Text, num_at_once: int) -> Answers:
    """Any OpenAI-compatible server, asked by token ids. Its ids are taken where it gives them (`return_token_ids`) and
    say the same text; else the text is tokenized here. An answer that our tokenizer cannot write is none."""
    end = text.tokenizer.eos_token_id
    more = {"return_token_ids": True}  # vLLM's; a strict server refuses what it does not know, and is not asked again

    def one(request: Request) -> list[int] | None:
        p = request.params
        body = {
            "prompt": list(request.prompt),
            "max_tokens": p.max_tokens,
            "temperature": p.temperature,
            "seed": int(p.seed or 0) & 0x7FFFFFFF,
        }
        try:
            answer = post({**body, **more})
        except RefusedError:
            more.clear()
            answer = post(body)
        try:
            choice = answer["choices"][0]
            said, finish = str(choice["text"]), choice.get("finish_reason")
        except (KeyError, IndexError, TypeError):
            raise DartspecError(f"the server's answer has no choices: {str(answer)[:120]}") from None
        ids = choice.get("token_ids")
        if ids is not None and not all(type(i) is int and 0 <= i < text.num_tokens for i in ids):
            return None
        if ids is None:
            ids = text.encode(said)
            if finish == "stop" and isinstance(end, int):
                ids.append(end)
        same = text.decode(ids) == said or text.decode(ids, skip_special=False) == said
        return list(ids) if same and ids else None

    def answers(requests: Sequence[Request]) -> Iterator[tuple[int, list[int] | None]]:
        waiting = iter(enumerate(requests))
        with ThreadPoolExecutor(num_at_once) as pool:
            running = {pool.submit(one, r): i for i, r in _some(waiting, num_at_once)}
            try:
                while running:
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
                        running.update({pool.submit(one, r): i for i, r in _some(waiting, 1)})
            finally:
                for future in running:
                    future.cancel()

    return answers


def _some(waiting: Iterator[tuple[int, Request]], most: int) -> Iterator[tuple[int, Request]]:
    for _ in range(most):
        pair = next(waiting, None)
        if pair is None:
            return
        yield pair


def regenerate(
    answers: Answers,
    text: Text,
    asks: Sequence[Ask],
    out: Path,
    *,
    temperatures: Sequence[float] = (0.0, 0.7),
    max_tokens: int = 208,
    max_prompt: int = 176,
    arguments: Mapping[str, Any] | None = None,
    target: str = "",
    sources: Sequence[str] = (),
    log: TextIO = sys.stderr,
) -> FileInfo:
    """Answers all prompts not yet in `out` and writes the info file beside it.

    An id's temperature and seed follow from the id, so a resumed run writes what an unbroken one would have written.
    Prompts longer than `max_prompt` tokens are left out and counted. arguments: of the chat template; a file that was
    begun with others, with other temperatures or lengths, or for another tokenizer, is refused.
    """
    given = dict(arguments or {})
    answering = {"temperatures": list(temperatures), "max_tokens": max_tokens}
    before = FileInfo.read(out)
    if before is not None:
        _same(out, before, text, given, answering)
    done = done_ids(out)
    if before is not None and done and not before.answering:
        answering = {}  # older files do not say how they were answered, and a mixture has no one answer
    counts, dropped = Counter(before.counts if before else {}), Counter[str]()
    names, requests = [], []
    too_long = f"a prompt longer than {max_prompt} tokens"
    once: dict[str, Ask] = {}  # one id is one answer, whether or not the run is broken off between them
    for ask in asks:
        once.setdefault(ask.id, ask)
    if len(once) < len(asks):
        dropped["a prompt whose id came before"] = len(asks) - len(once)
    for ask in once.values():
        if ask.id in done:
            continue
        tools = {} if ask.tools is None else {"tools": ask.tools}
        prompt = text.encode_chat(ask.messages, **tools, **given)
        if len(prompt) > max_prompt:
            dropped[too_long] += 1
            continue
        draw = int.from_bytes(hashlib.sha256(ask.id.encode()).digest()[:8], "little")
        temperature = temperatures[draw % len(temperatures)]
        names.append(ask.id)
        requests.append(Request(prompt, SamplingParams(temperature=temperature, seed=draw, max_tokens=max_tokens)))
    num_long = dropped[too_long]
    print(f"{len(requests)} prompts to answer, {len(done)} answered already, {num_long} too long", file=log)

    def info() -> FileInfo:
        return FileInfo(
            made_by="regenerate",
            tokenizer_fingerprint=text.fingerprint,
            template_hash=text.template_hash,
            template_arguments=given,
            answering=answering,
            target=target,
            sources=tuple(Path(s).name for s in sources),
            counts=dict(counts),
            dropped=dict(dropped),
            mask="the answer",
            made_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    out.parent.mkdir(parents=True, exist_ok=True)
    info().write(out)  # before the first answer: a run that is killed has said what it was made with
    num_written = num_answers = 0
    began = shown = time.monotonic()
    with open(out, "a", encoding="utf-8") as file:
        for index, response in answers(requests):
            num_answers += 1
            if response is None:
                dropped["an answer that our tokenizer does not write"] += 1
            else:
                num_written += len(response)
                if (loop := loop_start(response)) is not None:
                    response = response[:loop]
                    counts["loops_cut"] += 1
                request = requests[index]
                row = {
                    "id": names[index],
                    "temperature": request.params.temperature,
                    "prompt": list(request.prompt),
                    "response": response,
                }
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                file.flush()
                counts.update(
                    examples=1, answers=1, answer_tokens=len(response), tokens=len(request.prompt) + len(response)
                )
            now = time.monotonic()
            if now - shown > 10 or num_answers == len(requests):
                shown, rate = now, num_written / (now - began)
                left = (len(requests) - num_answers) * (now - began) / num_answers
                print(
                    f"{num_answers}/{len(requests)} answers, {num_written} tokens, {rate:.0f} tokens/s,"
                    f" {left / 60:.0f} min left",
                    file=log,
                    flush=True,
                )
                info().write(out)
    counts = Counter(reread([out])) + Counter(loops_cut=counts["loops_cut"])  # whatever was written by earlier runs
    made = info()
    made.write(out)
    return made


def _same(out: Path, before: FileInfo, text: Text, arguments: Mapping[str, Any], answering: Mapping[str, Any]) -> None:
    pairs: list[tuple[str, Any, Any]] = [
        ("tokenizer", before.tokenizer_fingerprint, text.fingerprint),
        ("chat template", before.template_hash, text.template_hash),
        ("template arguments", before.template_arguments, dict(arguments)),
    ]
    if before.answering:
        pairs.append(("temperatures and length", before.answering, dict(answering)))
    for name, a, b in pairs:
        if a != b:
            raise DartspecError(f"{out} was begun with {name} {a}, this run has {b}: give another --out")
