"""Where a round's time goes, against what this machine allows: bandwidth, arithmetic, and all that is neither.

    python benchmarks/stages.py --prompts 6 --out docs/results/stages.json

Measures the memory bandwidth and the arithmetic rate with our own products; then answers prompts by plain decoding and
by DART, in turn, with every call into the core's products, norms and attention timed. What a round takes beyond them is
overhead: Python, transformers, masks, picks, search. The same prompts with the automatic tree size tell how well the
controller predicts forward times. Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import dartspec
from dartspec import _core
from dartspec.accounting import Metrics
from dartspec.bench.provenance import provenance, save_result
from dartspec.bench.suites import load_suites
from dartspec.budget import Adaptive
from dartspec.target.fast import PackedLinear, Product

FUNCTIONS = ("run_layers", "attention", "gated_mlp", "rms_norm", "prepare_heads", "top_log_probs")
METHODS = (
    (_core.PackedLinear, "apply"),
    (_core.Int8Linear, "apply"),
    (_core.DecoderLayer, "begin"),
    (_core.DecoderLayer, "finish"),
    (_core.DraftLayer, "run"),
)


class Kernels:
    """Milliseconds spent in the core's kernels since the last look; `run_layers` is one call for all layers."""

    def __init__(self) -> None:
        self.ms = 0.0
        for name in FUNCTIONS:
            setattr(_core, name, self._timed(getattr(_core, name)))
        for owner, name in METHODS:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.ms += 1e3 * (time.perf_counter() - began)

        return timed

    def take(self) -> float:
        ms, self.ms = self.ms, 0.0
        return ms


def linear(out: int, size: int, threads: int) -> Product:
    layer = torch.nn.Linear(size, out, bias=False).to(torch.bfloat16)
    return Product([layer], threads)


def rate(products: list[Product], rows: int, repeats: int) -> float:
    """Seconds of one pass over all products, the median."""
    x = torch.randn(rows, products[0].packed.in_features).bfloat16()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        for p in products:
            p(x)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def machine(threads: int) -> dict[str, float]:
    """GB/s of reading weights from memory, GFLOP/s of products whose weights stay in the nearest caches."""
    large = [linear(49_152, 576, threads) for _ in range(5)]  # 280 MB: far beyond the caches
    num_bytes = sum(p.packed.num_bytes for p in large)
    bandwidth = num_bytes / rate(large, 1, 9) / 1e9
    small = [linear(256, 576, threads)]
    flops = 2 * 12 * 256 * 576 * 1.0
    return {"GB_per_s": round(bandwidth, 1), "GFLOP_per_s": round(flops / rate(small, 12, 400) / 1e9, 0)}


def weight_bytes(lm: dartspec.LM) -> int:
    """Bytes of weights that one step reads: all products once, the embedding's rows not."""
    seen: dict[int, int] = {}
    for module in lm.target.model.modules():
        product = getattr(getattr(module, "_shared", None), "product", None)
        parts = (product, getattr(module, "qkv", None), getattr(module, "out", None))
        packed = [getattr(p, "packed", None) for p in parts] + [getattr(module, n, None) for n in ("gate_up", "down")]
        seen |= {id(p): p.num_bytes for p in packed if isinstance(p, _core.PackedLinear)}
        if isinstance(module, PackedLinear):
            seen[id(module._shared.product.packed)] = module._shared.product.packed.num_bytes
    return sum(seen.values())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", type=int, default=6)
    p.add_argument("--max-tokens", type=int, default=96)
    p.add_argument("--nodes", type=int, default=8)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()

    roof = machine(a.threads)
    lm = dartspec.load(threads=a.threads, drafter="dart", nodes=a.nodes)
    plain = lm.with_drafter("none", nodes=0)
    kernels = Kernels()
    sets = load_suites(["all"], a.prompts)
    texts = [s[k].turns[0] for k in range(a.prompts) for s in sets.values() if k < len(s)][: a.prompts]
    times: dict[str, list[Metrics]] = {"plain": [], "dart": []}
    inside: dict[str, float] = {"plain": 0.0, "dart": 0.0}
    for i, text in enumerate([texts[0], *texts]):
        for name, one in (("plain", plain), ("dart", lm)):
            kernels.take()
            stream = one.stream([{"role": "user", "content": text}], max_tokens=a.max_tokens)
            for k, _ in enumerate(stream):
                if k == 0:
                    kernels.take()  # the prefill belongs to no round
            ms = kernels.take()
            if i:  # the first pass warms up
                inside[name] += ms
                times[name].append(stream.result.metrics)
    auto = lm.with_drafter("auto", nodes="auto")
    for text in texts:
        auto.generate([{"role": "user", "content": text}], max_tokens=a.max_tokens)
    assert isinstance(auto.controller, Adaptive)
    off = sorted(abs(math.expm1(e)) for e in auto.controller.costs.errors[20:])
    num_bytes = weight_bytes(lm)
    bound = num_bytes / roof["GB_per_s"] / 1e6
    rows = {}
    for name, metrics in times.items():
        m = Metrics.merged(metrics)
        n = m.num_rounds
        stage = {s: sum(getattr(r, f"{s}_ms") for r in m.rounds) / n for s in ("draft", "search", "verify", "other")}
        rows[name] = {
            "M": round(m.M, 3),
            "round_ms": round(m.ms_per_round, 3),
            **{s: round(v, 3) for s, v in stage.items()},
            "kernels_ms": round(inside[name] / n, 3),
            "overhead_share": round(1 - inside[name] / n / m.ms_per_round, 4),
        }
    d, q = rows["dart"], rows["plain"]
    result = {
        "machine": roof,
        "weight_bytes": num_bytes,
        "read_bound_ms": round(bound, 3),
        "rows": rows,
        "speed_up": round(d["M"] * q["round_ms"] / d["round_ms"], 3),
        "bound_M_T_AR_over_T_V": round(d["M"] * q["round_ms"] / d["verify"], 3),
        "predicted_forwards": len(off),
        "prediction_error": {"median": round(statistics.median(off), 4), "p90": round(off[int(0.9 * len(off))], 4)},
        "provenance": provenance(threads=a.threads, prompts=a.prompts, max_tokens=a.max_tokens, nodes=a.nodes),
    }
    table = Table("", "M", "round", "draft", "search", "verify", "other", "in kernels", "overhead")
    for name, r in rows.items():
        stages = (f"{r[s]:.2f}" for s in ("round_ms", "draft", "search", "verify", "other", "kernels_ms"))
        table.add_row(name, f"{r['M']:.2f}", *stages, f"{r['overhead_share']:.1%}")
    console = Console(stderr=True)
    console.print(table)
    console.print(
        f"{roof['GB_per_s']} GB/s, {roof['GFLOP_per_s']:.0f} GFLOP/s; {num_bytes / 1e6:.0f} MB of weights take "
        f"{bound:.2f} ms to read; speed-up {result['speed_up']}x of at most {result['bound_M_T_AR_over_T_V']}x"
    )
    if a.out:
        save_result(a.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
