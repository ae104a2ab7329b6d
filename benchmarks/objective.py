"""What the training objective costs: forms of the mask, memory of the loss, time of the learned continuity.

    python benchmarks/objective.py --out docs/results/objective.json
    python benchmarks/objective.py --device cuda --parts forms memory --out docs/results/gpu/objective.json

`forms`: one forward and backward of the prefix-shared pass at SmolLM2's shapes in float32, block and dense on the CPU,
FlexAttention too on CUDA (where its backward is; both are compared there), with loss and gradients side by side.
`memory`: peak memory of the loss over many rows and a large vocabulary, each way in a process of its own. `continuity`:
microseconds of a tree search with the n-gram index, with the learned continuity, and with both. --dry: tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dartspec.bench.provenance import provenance, save_result
from dartspec.drafters._bigram import Bigram, Continuity
from dartspec.drafters.dart import Config, DartNet, SharedRows
from dartspec.lattice import SearchConfig, build_tree
from dartspec.ngram import NgramIndex
from dartspec.train.loss import Teacher, draft_loss

WAYS = ("naive", "rows", "vocabulary")


def shape(dry: bool) -> dict[str, Any]:
    size = 32 if dry else 576
    return {
        "hidden_size": size,
        "target_hidden_size": size,
        "intermediate_size": size * 8 // 3,
        "head_dim": 4 if dry else 64,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "d": 8,
        "taps": (2, 15, 27),
        "num_target_layers": 30,
        "draft_vocab_size": 1024,
        "vocab_size": 1024,
    }


def timed(work: Callable[[], Any], device: torch.device, least_s: float = 2.0) -> float:
    """Milliseconds, the least of as many runs as fit: others may share the machine."""
    work()
    best, began = float("inf"), time.monotonic()
    while time.monotonic() - began < least_s or best == float("inf"):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def forms(device: torch.device, dry: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    net = DartNet(Config(**shape(dry))).to(device)
    for p in net.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.03)
        elif bool((p == 0).all()):
            torch.nn.init.normal_(p, std=0.3)
    c, rows = net.config, []
    for length in (64,) if dry else (1024,) if device.type == "cpu" else (1024, 4096):
        features = torch.randn(length, 3 * c.hidden_size, device=device)
        embeddings = torch.randn(length, c.hidden_size, device=device)
        final = torch.randn(length + c.d + 1, c.hidden_size, device=device)
        head = torch.randn(c.draft_vocab_size, c.hidden_size, device=device) * 0.1
        teacher = Teacher(final, head, torch.logsumexp(final @ head.T, -1))
        for anchors in (16, 64, length):
            every = torch.arange(length, device=device)
            some = every[:: max(1, length // anchors)][:anchors]
            first = every[:: max(1, length // max(96, anchors))]
            given = SharedRows(features, embeddings, [length], [first], [some])
            position = torch.cat((first + 1, (some[:, None] + torch.arange(2, c.d + 1, device=device)).flatten()))
            weight = torch.full((len(position),), 1.0 / len(position), device=device)
            parameters = list(net.parameters())

            def loss(form: str) -> Tensor:
                net.form = form
                one, many = net.shared_forward(given)  # noqa: B023
                hidden = torch.cat((one, many.flatten(0, 1)))
                return draft_loss(hidden, net.lm_head.weight, teacher, position, weight, chunk=2048)[0]  # noqa: B023

            def run_pass(form: str) -> None:
                net.form = form
                one, many = net.shared_forward(given)  # noqa: B023
                torch.autograd.backward(one.sum() + many.sum())
                net.zero_grad(set_to_none=True)

            names = ("dense", "block") if device.type == "cpu" else ("dense", "block", "flex")
            values = {form: loss(form) for form in names}
            grads = {f: torch.autograd.grad(v, parameters) for f, v in values.items()}
            row: dict[str, Any] = {"tokens": length, "anchors": anchors, "first": len(first)}
            for form in names:
                row[form] = {"ms": round(timed(lambda form=form: run_pass(form), device), 1)}
                if form == "dense":
                    continue
                off = [
                    float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads[form], grads["dense"], strict=True)
                ]
                row[form] |= {
                    "loss_off": float((values[form] - values["dense"]).detach().abs() / values["dense"].detach().abs()),
                    "gradient_off": max(off),
                    "times_faster": round(row["dense"]["ms"] / row[form]["ms"], 2),
                }
            print(row, flush=True)
            rows.append(row)
    return rows


def resident(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most (Linux)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return 1024 * int(line.split()[1])


def one_loss(way: str, device: torch.device, dry: bool) -> dict[str, Any]:
    """In a process of its own: what the loss of many rows adds to the peak."""
    n, size, vocabulary = (64, 32, 512) if dry else (2048, 576, 49152)
    torch.manual_seed(0)
    hidden = torch.randn(n, size, device=device, requires_grad=True)
    head = (torch.randn(vocabulary, size, device=device) * 0.05).requires_grad_()
    final, target = torch.randn(n, size, device=device), torch.randn(vocabulary, size, device=device) * 0.05
    log_norm = torch.cat([torch.logsumexp(some @ target.T, -1) for some in final.split(32)])
    position, weight = torch.arange(n, device=device), torch.full((n,), 1.0 / n, device=device)
    teacher = Teacher(final, target, log_norm)

    def run() -> Tensor:
        if way == "naive":
            q = (final @ target.T - log_norm[:, None]).exp()
            return -(q * (hidden @ head.T).log_softmax(-1)).sum() / n
        return draft_loss(
            hidden, head, teacher, position, weight, chunk=256, vocabulary_chunk=8192 if way == "vocabulary" else 0
        )[0]

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far: a child begins with its parent's
        before = resident("VmRSS")
    began = time.perf_counter()
    loss = run()
    torch.autograd.backward(loss)
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")
    assert head.grad is not None
    return {
        "way": way, "rows": n, "vocabulary": vocabulary, "hidden_size": size, "loss": float(loss),
        "gradient_norm": float(head.grad.norm()), "peak_mb": round((peak - before) / 1e6), "seconds": round(seconds, 2),
    }  # fmt: skip


def memory(device: torch.device, dry: bool) -> list[dict[str, Any]]:
    rows = []
    for way in WAYS:
        command = [sys.executable, __file__, "--device", str(device), "--loss", way, *(["--dry"] if dry else [])]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(rows[-1], flush=True)
    return rows


def continuity(dry: bool) -> list[dict[str, Any]]:
    from dartspec.api import ASSETS

    generator = np.random.default_rng(0)
    index = NgramIndex.open(ASSETS / "smollm2-135m-instruct" / "index.ngram")
    rows, vocabulary, size = [], 15360, 576
    scores = (
        torch.from_numpy(generator.normal(size=(200, 8, 25)).astype(np.float32)).log_softmax(-1).sort(descending=True)
    )
    # likely tokens are frequent ones: as uneven as words are
    ranks = np.minimum(generator.zipf(1.2, (200, 8, 200)), vocabulary) - 1
    tokens = torch.tensor([[list(dict.fromkeys([*row, *range(25)]))[:25] for row in one] for one in ranks.tolist()])
    tokens = tokens.int()
    config = SearchConfig()
    for rank in (64, 128, 256):
        bigram = Bigram(size, rank, vocabulary)
        bigram.start(torch.Generator().manual_seed(0))
        ids = torch.arange(vocabulary)
        began = time.perf_counter()
        learned = Continuity(bigram, torch.randn(vocabulary, size).bfloat16(), ids, 49152)
        load_ms = 1e3 * (time.perf_counter() - began)
        for name in ("none", "index", "learned", "learned and index"):
            times: list[float] = []
            for number in range(20 if dry else 200):
                context = tokens[number, 0, :4].tolist()
                began = time.perf_counter()
                table = learned.table(tokens[number : number + 1])[0] if "learned" in name else None
                used = index if "index" in name else None
                build_tree(
                    context[-1],
                    scores.values[number],
                    tokens[number],
                    context,
                    59,
                    used,
                    config,
                    frozenset(),
                    None,
                    table,
                )
                times.append(1e6 * (time.perf_counter() - began))
            if rank == 64 or "learned" in name:
                rows.append(
                    {
                        "continuity": name,
                        "rank": rank if "learned" in name else None,
                        "us_median": round(float(np.median(times[len(times) // 4 :]))),
                        "us_p99": round(float(np.quantile(times[len(times) // 4 :], 0.99))),
                        "us_first": round(times[0]),
                        "load_ms": round(load_ms, 1),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--parts", nargs="+", default=["forms", "memory", "continuity"])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--loss", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.loss:
        print(json.dumps(one_loss(args.loss, args.device, args.dry)))
        return
    # parts that are not asked for stay as they are
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    if "forms" in args.parts:
        result["forms"] = forms(args.device, args.dry)
    if "memory" in args.parts:
        result["memory"] = memory(args.device, args.dry)
    if "continuity" in args.parts:
        result["continuity"] = continuity(args.dry)
    if args.out:
        save_result(args.out, result | {"provenance": provenance()})


if __name__ == "__main__":
    main()
