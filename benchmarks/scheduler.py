"""What serving many requests costs each of them, on the default model; one JSON object at the end, or in --out.

    python benchmarks/scheduler.py [--model FOLDER] [--threads 1] [--out docs/results/scheduler.json]

chunks:  four requests are decoded when one with a prompt of 1,024 tokens arrives: the time of a step for the four while
         it is read, and the time to its first token, by the rows of prompts that a step may read.
reuse:   time to the first token of a prompt of 560 tokens of which 512 were there already, and of one that shares none.
load:    random arrivals, a third of them sampled, one in eight cancelled: are all texts, in bfloat16, those of plain
         decoding alone? And tokens a second, beside the same requests one after the other; decoded plainly, with trees
         of a fixed size, and with the controller that chooses the size.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dartspec.api import LM, load
from dartspec.bench.provenance import layout, provenance, save_result
from dartspec.budget import Fixed
from dartspec.engine import Request, generate
from dartspec.scheduler import Handle, Limits, Scheduler
from dartspec.types import Controller, SamplingParams

TEXT = (
    "The harbour of the old town lies behind two walls, and every ship that enters has to pass the light between them. "
    "Write down what the keeper sees in the course of a day, hour by hour, and what he thinks of it. "
)
LONG, SHARED, OWN = 1024, 512, 48  # prompt tokens
ROWS = (16, 32, 64, 128, 256, 512)


def prompts(lm: LM, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of ordinary words in random order: no two begin alike."""
    chance, words = random.Random(seed), TEXT.split()
    made = []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < length:
            ids += lm.text.encode_prompt(" ".join(chance.sample(words, 20)))
        made.append(ids[:length])
    return made


def scheduler(lm: LM, nodes: Controller, **limits: Any) -> Scheduler:
    return Scheduler(lm.target, lm.drafter, text=lm.text, num_nodes=nodes, limits=Limits(max_length=2048, **limits))


def chunks(lm: LM, nodes: Controller, rows: int) -> dict[str, Any]:
    short = prompts(lm, 4, OWN, 1)
    (long,) = prompts(lm, 1, LONG, 2)
    s = scheduler(lm, nodes, num_slots=5, num_prefixes=0, prefill_rows=rows)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    others = [s.submit(Request(p, params)) for p in short]
    while s.num_waiting or s.counts.num_rounds < 4:
        s.step()

    def steps(until: Any, most: int = 10**6) -> list[float]:
        times: list[float] = []
        while not until() and len(times) < most:
            began = time.perf_counter()
            s.step()
            times.append(1e3 * (time.perf_counter() - began))
        return times

    alone = steps(lambda: False, 12)
    began = time.perf_counter()
    arrived = s.submit(Request(long, SamplingParams(max_tokens=2, ignore_eos=True)))
    while_read = steps(lambda: arrived.finish is not None or arrived._chunks)
    first_ms = 1e3 * (time.perf_counter() - began)
    assert all(h.finish is None for h in others)
    s.close()
    return {
        "prefill_rows": rows,
        "step_alone_ms": round(statistics.median(alone), 1),
        "step_while_read_ms": round(statistics.median(while_read), 1),
        "longest_step_ms": round(max(while_read), 1),
        "steps": len(while_read),
        "first_token_ms": round(first_ms),
    }


def first_token_ms(s: Scheduler, request: Request) -> tuple[float, Handle]:
    began = time.perf_counter()
    handle = s.submit(request)
    while not handle._chunks:
        s.step()
    ms = 1e3 * (time.perf_counter() - began)
    while s.step():
        pass
    return ms, handle


def reuse(lm: LM, nodes: Controller) -> dict[str, Any]:
    (system,) = prompts(lm, 1, SHARED, 3)
    ends = prompts(lm, 6, OWN, 4)
    params = SamplingParams(max_tokens=8)
    s = scheduler(lm, nodes, num_slots=2, num_prefixes=2)
    first_token_ms(s, Request([*system, *ends[0]], params))
    shared = [first_token_ms(s, Request([*system, *end], params)) for end in ends[1:]]
    fresh = [first_token_ms(s, Request(p, params)) for p in prompts(lm, 5, SHARED + OWN, 5)]
    assert {h.num_reused for _, h in shared} == {SHARED - 1}, [h.num_reused for _, h in shared]
    return {
        "prompt_tokens": SHARED + OWN,
        "reused_tokens": SHARED - 1,
        "first_token_shared_ms": round(statistics.median(ms for ms, _ in shared), 1),
        "first_token_fresh_ms": round(statistics.median(ms for ms, _ in fresh), 1),
    }


def requests_of(lm: LM, count: int) -> list[Request]:
    chance = random.Random(6)
    (system,) = prompts(lm, 1, 64, 7)
    requests = []
    for i, own in enumerate(prompts(lm, count, OWN, 8)):
        params = SamplingParams(
            max_tokens=chance.randrange(16, 80), temperature=0.8 if i % 3 == 0 else 0.0, seed=i, ignore_eos=True
        )
        requests.append(Request([*system, *own] if i % 2 else own, params))
    return requests


def under_load(
    lm: LM, name: str, nodes: Controller, requests: Sequence[Request], plain: list[list[int]], slots: int
) -> dict[str, Any]:
    chance, count = random.Random(9), len(requests)
    began = time.perf_counter()
    alone = [answer(lm, nodes, r) for r in requests]
    alone_s = time.perf_counter() - began
    s = scheduler(lm, nodes, num_slots=slots)
    handles: list[Handle] = []
    cancelled = {i for i in range(count) if i % 8 == 5}
    began = time.perf_counter()
    while s.step() or len(handles) < count:
        while len(handles) < count and chance.random() < 0.5:
            handles.append(s.submit(requests[len(handles)]))
        for i in cancelled:
            if i < len(handles) and len(ids(handles[i])) > 8:
                handles[i].cancel()
    many_s = time.perf_counter() - began
    assert all((h.finish == "cancelled") == (i in cancelled) for i, h in enumerate(handles))
    return {
        "nodes": name,
        "requests": count,
        "cancelled": len(cancelled),
        "slots": slots,
        "texts_equal_alone": sum(a == p for a, p in zip(alone, plain, strict=True)),
        "texts_equal": sum(ids(h) == p[: len(ids(h))] for h, p in zip(handles, plain, strict=True)),
        "reused_tokens": s.counts.num_reused_tokens,
        "tokens_per_s_alone": round(sum(map(len, alone)) / alone_s, 1),
        "tokens_per_s": round(s.counts.num_new_tokens / many_s, 1),
    }


def ids(handle: Handle) -> list[int]:
    return [i for chunk in handle._chunks for i in chunk.ids]


def answer(lm: LM, nodes: Controller, request: Request) -> list[int]:
    chunks = generate(lm.target, lm.drafter, [request], text=lm.text, num_nodes=nodes, batch=1)
    return [i for chunk in chunks for i in chunk.ids]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a folder or hub id; the embedded default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=8, help="draft tokens a tree")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--out", type=Path, help="a JSON file; printed otherwise")
    args = parser.parse_args(arguments)
    lm = load(args.model, threads=args.threads)
    fixed = Fixed(args.nodes)
    answer(lm, fixed, Request(prompts(lm, 1, OWN, 0)[0], SamplingParams(max_tokens=8)))  # warms up
    requests = requests_of(lm, args.requests)
    plain = [answer(lm, Fixed(0), r) for r in requests]
    ways: list[tuple[str, Controller]] = [("0", Fixed(0)), (str(args.nodes), fixed), ("auto", lm.controller)]
    result = {
        "provenance": provenance(dtype=str(lm.target.dtype).removeprefix("torch."), drafter=lm.drafter_note),
        "chunks": [chunks(lm, fixed, rows) for rows in ROWS],
        "reuse": reuse(lm, fixed),
        "load": [under_load(lm, name, nodes, requests, plain, args.slots) for name, nodes in ways],
    }
    if args.out:
        save_result(args.out, result)
    else:
        print(layout(result))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
