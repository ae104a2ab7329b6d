"""Is plain decoding a straw man? Ours against transformers' generate, in its default and its static compiled form.

    python benchmarks/plain.py --prompts 6 --compiled --out docs/results/plain.json

All forms answer the same prompts in turn (A B C D, A B C D ...), greedy, exactly `--max-tokens` new tokens
(end-of-text is ignored), bf16. The ratio is taken prompt by prompt on decoding time; the prefill is timed apart and
left out. Prints a table; the last line is one JSON object with provenance.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.generation.streamers import BaseStreamer

import dartspec
from dartspec.bench.provenance import provenance, save_result
from dartspec.bench.suites import load_suites
from dartspec.target.load import load_model


class FirstToken(BaseStreamer):
    """Notes when the first new token came, so that the prefill can be left out."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call hands over the prompt
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def of_transformers(model: Any, **options: Any) -> Callable[[list[int], int], tuple[float, list[int]]]:
    def run(ids: list[int], n: int) -> tuple[float, list[int]]:
        clock = FirstToken()
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            streamer=clock,
            **options,
        )
        return 1e3 * (time.perf_counter() - clock.at) / (n - 1), out[0, len(ids) :].tolist()

    return run


def of_ours(lm: dartspec.LM) -> Callable[[list[int], int], tuple[float, list[int]]]:
    def run(ids: list[int], n: int) -> tuple[float, list[int]]:
        result = lm.generate(ids, max_tokens=n, ignore_eos=True)
        return result.metrics.ms_per_token, result.ids

    return run


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=None, help="folder or hub id (default: the embedded model)")
    p.add_argument("--prompts", type=int, default=6, help="how many, spread over the sets")
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--nodes", default="auto")
    p.add_argument("--compiled", action="store_true", help="also the static-cache compiled form (compiles for minutes)")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    torch.set_num_threads(a.threads)

    def stock() -> Any:
        """The model as transformers has it by default."""
        return load_model(a.model, dtype="bfloat16", attention="sdpa").model

    dart = dartspec.load(a.model, dtype="bfloat16", nodes=a.nodes if a.nodes == "auto" else int(a.nodes))
    forms = {
        "transformers": of_transformers(stock()),
        "ours": of_ours(dart.with_drafter("none", nodes=0)),
        "ours, dart": of_ours(dart),
    }
    compile_s = 0.0
    if a.compiled:
        static = stock()
        static.forward = torch.compile(static.forward, dynamic=False)
        forms["transformers, static compiled"] = of_transformers(static, cache_implementation="static")
        began = time.perf_counter()
        forms["transformers, static compiled"]([5] * 64, 4)
        compile_s = time.perf_counter() - began
    sets = load_suites(["mt_bench", "humaneval", "gsm8k", "qa", "mbpp", "translation"], -(-a.prompts // 6))
    turns = [p.turns[0] for group in zip(*sets.values(), strict=True) for p in group][: a.prompts]
    times: dict[str, list[float]] = {name: [] for name in forms}
    equal = 0
    for k, turn in enumerate([turns[0], *turns]):
        chat = [{"role": "user", "content": turn}]
        ids = dart.encode(chat)
        outs = {name: run(ids, a.max_tokens) for name, run in forms.items()}
        if k:  # the first prompt warms up
            for name, (ms, _) in outs.items():
                times[name].append(ms)
            equal += outs["ours"][1] == outs["ours, dart"][1]
    table = Table("form", "ms a token (median)", "speed against transformers (median of pairs)", "least", "most")
    rows = {}
    for name, ms in times.items():
        ratio = sorted(t / o for t, o in zip(times["transformers"], ms, strict=True))
        rows[name] = {
            "ms_per_token": round(statistics.median(ms), 2),
            "ratio": round(statistics.median(ratio), 3),
            "ratio_range": [round(ratio[0], 3), round(ratio[-1], 3)],
        }
        table.add_row(
            name,
            f"{statistics.median(ms):.2f}",
            f"{statistics.median(ratio):.2f}x",
            *(f"{r:.2f}x" for r in (ratio[0], ratio[-1])),
        )
    Console().print(table)
    result = {
        "forms": rows,
        "compile_s": round(compile_s, 1),
        "nodes": dart.nodes,
        "num_prompts": len(turns),
        "max_tokens": a.max_tokens,
        "dart_equals_plain": f"{equal}/{len(turns)}",
        "kernels": dart.fast_note,
        "provenance": provenance(dtype="bfloat16"),
    }
    if a.out:
        save_result(a.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
