"""A soak of the real server: thousands of requests at once, many of them broken off, every text compared.

    python benchmarks/soak.py [--requests 10000] [--clients 24] [--out docs/results/soak.json] [--faults]

`dartspec serve` runs as a program of its own on a tiny float32 model (made here, nothing is downloaded). Requests come
from --clients connections at once: chats and completions, streamed and whole, greedy and sampled, one answer or three,
with stops, penalties and other drafters. One in eight is broken off by its client, somewhere; one in thirty is no valid
request. Every text that arrives must be the one that plain decoding writes, every piece of a broken one its beginning,
every stream must end as it should, and the memory of the server must stay flat.

A run of so many requests is done in parts of --part, each with a check of the server's own counts. What is done is
written to --out after each part: the same command goes on from there, with a fresh server. --faults runs the tests of
single faults as well and writes down how they went.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from dartspec.api import LM, load
from dartspec.bench.provenance import provenance, read_result, save_result
from dartspec.types import SamplingParams

NUM_CASES = 240  # different requests
BROKEN, INVALID = 1 / 8, 1 / 30
DRAFTERS = ("prompt_lookup", "prompt_lookup", "prompt_lookup", "prompt_lookup", "plain", "suffix")
CONTEXT = 160
PATIENCE_S = 300.0
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path) -> None:
    """A random model over bytes whose distributions are far from flat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        ),
        dtype=torch.float32,
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Case:
    """A request, and the texts and token counts of plain decoding."""

    path: str
    body: dict[str, Any]
    texts: list[str]
    num_tokens: int


def cases(lm: LM) -> list[Case]:
    """The same ones in every run."""
    chance = random.Random(5)
    words = ["the", "tide", "é", "漢字", "12", "😀", "\n", "harbour", "of", "light", "a", "is"]
    made = []
    for i in range(NUM_CASES):
        text = " ".join(chance.choice(words) for _ in range(chance.randint(1, 6)))[:40]
        params: dict[str, Any] = {"max_tokens": chance.choice((1, 2, 6, 12, 20, 40)), "temperature": 0}
        if i % 3:
            params |= {"temperature": chance.choice((0.6, 1.0, 1.4)), "seed": chance.randrange(2**40)}
        if i % 5 == 1:
            params |= {"top_p": 0.9, "min_p": 0.02}
        if i % 7 == 2:
            params |= {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2}
        if i % 11 == 3:
            params["stop"] = ["a", "é", "x1"]
        if i % 13 == 4:
            params["speculate"] = chance.choice(("off", 2))
        n = 3 if i % 17 == 5 else 1
        chat = i % 2 == 0
        prompt: Any = [{"role": "user", "content": text}] if chat else text
        engine = {**params, "stop": tuple(params.get("stop", ()))}
        results = lm.generate_batch([prompt], n=n, params=SamplingParams(**engine))
        body = {"messages" if chat else "prompt": prompt, "n": n, **params}
        made.append(
            Case(
                "/v1/chat/completions" if chat else "/v1/completions",
                body,
                [r.text for r in results],
                sum(len(r.ids) for r in results),
            )
        )
    return made


INVALID_BODIES: list[bytes] = [
    b"",
    b"{",
    b"[]",
    json.dumps({"messages": []}).encode(),
    json.dumps({"messages": [{"role": "user", "content": "x"}], "temperature": -1}).encode(),
    json.dumps({"messages": [{"role": "user", "content": "x" * 5000}]}).encode(),
    json.dumps({"messages": [{"role": "user", "content": "x"}], "what": 1}).encode(),
    json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}).encode(),
]


@dataclass
class Tally:
    """What has happened. wrong: what must never be."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Answer:
    """A request on a connection of its own, read piece by piece."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.status = 0
        self.headers: dict[str, str] = {}

    async def open(self, path: str, body: bytes) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def head(self) -> None:
        raw = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(raw[0].split()[1])
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in raw[1:] if line)}

    async def chunk(self) -> bytes:
        """The next chunk, or nothing at the end."""
        size = int((await self._reader.readline()).strip(), 16)
        data = await self._reader.readexactly(size + 2)
        return data[:-2]

    async def whole(self) -> bytes:
        if "content-length" in self.headers:
            return await self._reader.readexactly(int(self.headers["content-length"]))
        parts = []
        while piece := await self.chunk():
            parts.append(piece)
        return b"".join(parts)

    def close(self) -> None:
        self._writer.transport.abort()


async def one(port: int, number: int, known: list[Case], tally: Tally) -> None:
    """Request `number` of the run: what it is depends on the number alone."""
    chance = random.Random(number)
    if chance.random() < INVALID:
        answer = Answer(port)
        await answer.open("/v1/chat/completions", chance.choice(INVALID_BODIES))
        await answer.head()
        error = json.loads(await answer.whole())
        answer.close()
        tally.counts["refused as invalid"] += 1
        if answer.status != 400 or not error["error"]["message"]:
            tally.wrong.append(f"request {number}: an invalid one got {answer.status}")
        return
    case = chance.choice(known)
    streamed = chance.random() < 0.6
    options = {"include_usage": True} if streamed else None
    extra = {"drafter": chance.choice(DRAFTERS), "rounds": streamed and chance.random() < 0.2}
    body = json.dumps({**case.body, "stream": streamed, "stream_options": options, "dartspec": extra}).encode()
    breaks = chance.random() < BROKEN
    while True:
        answer = Answer(port)
        await answer.open(case.path, body)
        try:
            if breaks and (not streamed or chance.random() < 0.3):
                await asyncio.sleep(chance.random() * 0.05)
                tally.counts["broken off before the answer"] += 1
                return
            await answer.head()
            if answer.status == 429:
                tally.counts["told to come again (429)"] += 1
                await answer.whole()
                await asyncio.sleep(0.05)
                continue
            if answer.status != 200:
                tally.wrong.append(f"request {number}: HTTP {answer.status}: {(await answer.whole())[:200]!r}")
                return
            if not streamed:
                _check_whole(number, case, await answer.whole(), tally)
            elif breaks:
                await _check_part(number, case, answer, chance.randint(1, 8), tally)
            else:
                _check_stream(number, case, await answer.whole(), tally)
            return
        finally:
            answer.close()


def _check_whole(number: int, case: Case, data: bytes, tally: Tally) -> None:
    made = json.loads(data)
    texts = [c["message"]["content"] if "message" in c else c["text"] for c in made["choices"]]
    _compare(number, case, texts, made["usage"], tally)
    tally.counts["whole answers"] += 1


def _check_stream(number: int, case: Case, data: bytes, tally: Tally) -> None:
    events = data.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        tally.wrong.append(f"request {number}: the stream ends with {events[-2:]}")
        return
    pieces = [json.loads(e.removeprefix("data: ")) for e in events[:-2]]
    if len({p["id"] for p in pieces}) != 1:
        tally.wrong.append(f"request {number}: pieces of several answers in one stream")
    _compare(number, case, _texts(case, pieces), pieces[-1]["usage"], tally)
    tally.counts["whole streams"] += 1


def _texts(case: Case, pieces: list[dict[str, Any]]) -> list[str]:
    texts = [""] * len(case.texts)
    for piece in pieces:
        for c in piece["choices"]:
            texts[c["index"]] += c["delta"].get("content", "") if "delta" in c else c["text"]
    return texts


def _compare(number: int, case: Case, texts: list[str], usage: dict[str, Any], tally: Tally) -> None:
    if texts != case.texts:
        tally.wrong.append(f"request {number}: {texts!r} is not {case.texts!r}")
    if usage["completion_tokens"] != case.num_tokens:
        tally.wrong.append(f"request {number}: {usage['completion_tokens']} tokens, not {case.num_tokens}")
    tally.counts["texts compared"] += len(texts)
    tally.counts["tokens"] += usage["completion_tokens"]
    tally.counts["accepted drafts"] += usage["dartspec"]["accepted"]


async def _check_part(number: int, case: Case, answer: Answer, most: int, tally: Tally) -> None:
    """Reads some pieces and goes away."""
    pieces = []
    for _ in range(most):
        data = await answer.chunk()
        if not data:
            break
        pieces += [json.loads(e.removeprefix("data: ")) for e in data.decode().split("\n\n") if "{" in e]
    texts = _texts(case, pieces)
    if not all(right.startswith(text) for text, right in zip(texts, case.texts, strict=True)):
        tally.wrong.append(f"request {number}: {texts!r} is no beginning of {case.texts!r}")
    tally.counts["broken off in the stream"] += 1


async def part(port: int, numbers: range, clients: int, known: list[Case], tally: Tally) -> None:
    waiting = iter(numbers)

    async def client() -> None:
        for number in waiting:
            try:
                await asyncio.wait_for(one(port, number, known, tally), PATIENCE_S)
            except Exception as error:
                tally.wrong.append(f"request {number}: {type(error).__name__}: {error}")

    await asyncio.gather(*(client() for _ in range(clients)))


class Server:
    """The program, its memory, its counts, its end."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "dartspec", "serve", str(folder), "--port", "0", "--threads", "1"]
        command += ["--drafter", "prompt_lookup", "--nodes", "6", "--dtype", "float32", "--slots", "8", "--queue", "64"]
        with log.open("ab") as to:
            to.truncate(0)
            self.process = subprocess.Popen(command, stderr=to, stdin=subprocess.DEVNULL)
        end = time.monotonic() + PATIENCE_S
        while "ready: " not in (text := log.read_text()):
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start:\n{text}")
            time.sleep(0.1)
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", text)
        assert found is not None
        self.port = int(found[1])

    @property
    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return round(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024, 1)  # type: ignore[index]

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def metrics(self) -> dict[str, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
        lines = (line.rsplit(" ", 1) for line in page.splitlines() if re.match(r"(vllm|dartspec):", line))
        return {re.sub(r'model_name="[^"]*",engine="0",?', "", k).replace("{}", ""): float(v) for k, v in lines}

    async def at_rest(self, tally: Tally) -> dict[str, float]:
        """Its counts, once nothing runs: soon after the last client has gone."""
        for _ in range(600):
            found = await self.metrics()
            if found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0:
                return found
            await asyncio.sleep(0.05)
        tally.wrong.append("slots are in use though every client has gone")
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


def faults(root: Path) -> list[dict[str, Any]]:
    """How the tests of single faults went."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
        command += [str(root / "tests" / name) for name in ("test_serve_faults.py", "test_serve_schema.py")]
        subprocess.run(command, check=False, cwd=root)
        made = []
        for case in ElementTree.parse(report).iter("testcase"):
            bad = any(case.find(tag) is not None for tag in ("failure", "error"))
            result = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
            made.append({"test": f"{case.get('classname')}::{case.get('name')}", "result": result})
        return made


async def soak(args: argparse.Namespace, state: dict[str, Any], known: list[Case], server: Server) -> None:
    tally = Tally(Counter(state["counts"]), list(state["wrong"]))
    while state["done"] < args.requests:
        numbers = range(state["done"], min(args.requests, state["done"] + args.part))
        began = time.perf_counter()
        await part(server.port, numbers, args.clients, known, tally)
        took = time.perf_counter() - began
        found = await server.at_rest(tally)
        if bad := {k: v for k, v in found.items() if 'status="500"' in k or "downgraded" in k if v}:
            tally.wrong.append(f"the server counts {bad}")
        state["done"] = numbers.stop
        state["seconds"] = round(state["seconds"] + took, 1)
        state["counts"], state["wrong"] = dict(sorted(tally.counts.items())), tally.wrong
        state["memory"].append({"requests": state["done"], "mib": server.memory_mib, "open_files": server.num_files})
        save(args, state)
        print(f"{state['done']:6d}  {took:6.1f} s  {server.memory_mib} MiB  wrong: {len(tally.wrong)}", flush=True)


def save(args: argparse.Namespace, state: dict[str, Any]) -> None:
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        save_result(args.out, {**state, "provenance": provenance(dtype="float32", threads=1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--part", type=int, default=500)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--faults", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    state: dict[str, Any] = {"done": 0, "seconds": 0.0, "counts": {}, "wrong": [], "memory": [], "starts": 0}
    if args.out and args.out.exists():
        before = read_result(args.out)
        if before["done"] < args.requests:
            state = {k: before.get(k, v) for k, v in state.items()}
            print(f"going on at request {state['done']}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "tiny")
        lm = load(Path(folder) / "tiny", drafter="none", dtype="float32", fast=False, threads=1)
        known = cases(lm)
        server = Server(Path(folder) / "tiny", Path(folder) / "log")
        state |= {"starts": state["starts"] + 1, "requests": args.requests, "clients": args.clients}
        try:
            asyncio.run(soak(args, state, known, server))
            state["exit_code"] = server.stop()
        finally:
            server.process.kill()
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        state["errors_logged"] = sum(line["level"] in ("error", "critical") for line in lines)
    state["clean"] = not state["wrong"] and state["exit_code"] == 0 and not state["errors_logged"]
    if args.faults:
        state["faults"] = faults(Path(__file__).parent.parent)
        state["clean"] = state["clean"] and all(f["result"] != "failed" for f in state["faults"])
    save(args, state)
    print(json.dumps({k: v for k, v in state.items() if k not in ("memory", "faults")}))
    if not state["clean"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
