"""Time of one forward by rows and cached positions: stock transformers against the same model with our kernels.

    python benchmarks/kernels.py MODEL_FOLDER --threads 2 --out docs/results/kernels.json

Three systems in one process, in turn at every repeat, so that whatever else the machine does falls on all of them:
`dynamic` and `static` (transformers' caches, sdpa attention, the static one padded to its capacity) and `ours` (packed
products, our attention, our cache). bf16. The rows are a tree: a root and its children. Prints a table of medians in
milliseconds; the bound is the bytes of the weights over the rate at which this machine reads them in our own product.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from dartspec import _core
from dartspec.bench.provenance import provenance, save_result
from dartspec.target import attention, fast
from dartspec.target.cache import ShapeRecorder, SlotCache

ROOM = 64  # positions beyond the cached ones in the preallocated caches
Forward = Callable[[int], Any]


def star(rows: int, cached: int, keys: int) -> tuple[Tensor, Tensor]:
    """Mask (1, 1, rows, keys) and position ids (1, rows) of a root with rows - 1 children after `cached` tokens."""
    mask = torch.zeros(1, 1, rows, keys, dtype=torch.bool)
    mask[..., : cached + 1] = True
    mask[0, 0, torch.arange(rows), cached + torch.arange(rows)] = True
    positions = torch.full((1, rows), cached + 1)
    positions[0, 0] = cached
    return mask, positions


def forward(model: nn.Module, rows: int, cached: int, keys: int, cache: Any) -> Tensor:
    mask, positions = star(rows, cached, keys)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.full((1, rows), 7)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache}).logits


def dynamic(model: nn.Module, cached: int, shapes: dict[int, Any]) -> Forward:
    cache = DynamicCache()
    kept = []
    for i, s in shapes.items():
        kv = [torch.randn(1, s.num_heads, cached, w).to(s.dtype) for w in (s.key_width, s.value_width)]
        cache.update(*kv, i)
        kept.append(kv)

    def run(rows: int) -> None:
        forward(model, rows, cached, cached + rows, cache)
        for layer, (k, v) in zip(cache.layers, kept, strict=True):  # back to the cached positions, nothing copied
            layer.keys, layer.values = k, v

    return run


def static(model: nn.Module, cached: int, shapes: dict[int, Any]) -> Forward:
    cache = StaticCache(config=model.config, max_cache_len=cached + ROOM)
    for i, s in shapes.items():
        cache.update(*(torch.randn(1, s.num_heads, cached, w).to(s.dtype) for w in (s.key_width, s.value_width)), i)

    def run(rows: int) -> None:
        forward(model, rows, cached, cached + ROOM, cache)
        cache.crop(-rows)

    return run


def ours(model: nn.Module, cached: int, shapes: dict[int, Any]) -> Forward:
    cache = SlotCache(shapes, rows=1, capacity=cached + ROOM)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()

    def run(rows: int) -> None:
        cache.window.set(0, [cached], rows)
        forward(model, rows, cached, cached + rows, cache)

    return run


def read_rate(num_threads: int) -> float:
    """GB/s at which a one-row product reads weights that are in no cache."""
    weight = torch.zeros(65_536, 1024, dtype=torch.bfloat16)  # 128 MiB
    packed = _core.PackedLinear([(weight.data_ptr(), 65_536, 1024, 0)], 1024)
    x, y = torch.zeros(1024, dtype=torch.bfloat16), torch.empty(65_536, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(9):
        start = time.perf_counter()
        packed.apply(x.data_ptr(), 1, 1024, y.data_ptr(), 65_536, False, num_threads)
        best = min(best, time.perf_counter() - start)
    return packed.num_bytes / best / 1e9


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a Hugging Face model folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 9, 17, 33, 60])
    parser.add_argument("--cached", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)

    def load(implementation: str) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(
            a.folder, dtype=torch.bfloat16, attn_implementation=implementation
        ).eval()

    stock, fused = load("sdpa"), load(attention.register())
    recorder = ShapeRecorder()
    forward(stock, 2, 0, 2, recorder)
    report = fast.accelerate(fused, torch.arange(2, 14)[None], a.threads)
    rate = read_rate(a.threads) if report.used else None
    bound = report.packed_bytes / rate / 1e6 if rate else None

    cells: list[dict[str, Any]] = []
    table = Table("cached", "rows", "dynamic", "static", "ours", "ours/1 row", "speed-up", title="ms a forward, median")
    for cached in a.cached:
        systems = {
            "dynamic": dynamic(stock, cached, recorder.shapes),
            "static": static(stock, cached, recorder.shapes),
            "ours": ours(fused, cached, recorder.shapes),
        }
        times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in a.rows} for name in systems}
        for repeat in range(a.repeats + 1):
            for rows in a.rows:
                for name, run in systems.items():
                    start = time.perf_counter()
                    run(rows)
                    if repeat:  # the first one warms up
                        times[name][rows].append((time.perf_counter() - start) * 1e3)
        for rows in a.rows:
            cell = {"cached": cached, "rows": rows}
            for name in systems:
                values = times[name][rows]
                cell[name] = round(statistics.median(values), 2)
                cell[f"{name}_min"] = round(min(values), 2)
            cells.append(cell)
            one = statistics.median(times["ours"][a.rows[0]])
            speedup = min(cell["dynamic"], cell["static"]) / cell["ours"]
            table.add_row(
                *(str(v) for v in (cached, rows)),
                *(f"{cell[name]:.1f}" for name in systems),
                f"{cell['ours'] / one:.2f}",
                f"{speedup:.2f}x",
            )
    console = Console()
    console.print(table)
    console.print(report.reason)
    if bound is not None:
        console.print(f"bound of one row: {report.packed_bytes / 1e6:.0f} MB at {rate:.1f} GB/s = {bound:.2f} ms")
    result = {
        "cells": cells,
        "bound_ms": bound,
        "read_gb_per_s": rate,
        "report": vars(report),
        "provenance": provenance(dtype="bfloat16", repeats=a.repeats),
    }
    if a.out is not None:
        save_result(a.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
