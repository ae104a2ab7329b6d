"""The README's table: DART beside plain decoding, set by set, paired and in one run.

    python benchmarks/table.py --per-set 20 --nodes 16 --temperature 0 --out docs/results/table.json

Each prompt is answered by plain decoding and by the drafter in turn (A B A B ...), same engine, cache and sampler.
Loops are cut (all figures count the text before a 16-gram occurs a third time); the uncut figures stand beside them.
Prints a table; the last line is one JSON object with provenance.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dartspec
from dartspec.accounting import Metrics, SpeedUp, loop_start
from dartspec.bench.provenance import provenance, save_result

HERE = Path(__file__).parent


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=None, help="target: folder, hub id or GGUF file (default: the embedded one)")
    p.add_argument("--drafter", default="auto", help="method or folder of trained weights")
    p.add_argument("--index", default="auto", help="'auto', 'none' or an index file")
    p.add_argument("--prompts", type=Path, action="append", help="folders of prompt sets (default: benchmarks/prompts)")
    p.add_argument("--sets", default=None, help="comma-separated names; default: all in the folders")
    p.add_argument("--per-set", type=int, default=20)
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--nodes", default="16", help="draft tokens a tree, or 'auto'")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", default=None)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--no-plain", action="store_true", help="only A and M: no plain runs, no speed")
    p.add_argument("--out", type=Path, default=None)
    return p.parse_args()


def prompts(folders: list[Path], names: str | None, per_set: int) -> dict[str, list[str]]:
    """First user turns by set."""
    files = {f.stem: f for folder in folders for f in sorted(folder.glob("*.jsonl"))}
    wanted = names.split(",") if names else list(files)
    if missing := [n for n in wanted if n not in files]:
        sys.exit(f"no prompt set {missing[0]!r} in {', '.join(map(str, folders))}; there are: {', '.join(files)}")
    return {
        name: [json.loads(line)["turns"][0] for line in open(files[name], encoding="utf-8")][:per_set]
        for name in wanted
    }


def cut(result: dartspec.Result) -> Metrics:
    loop = loop_start(result.ids)
    return result.metrics if loop is None else result.metrics.before(loop)


def figures(spec: list[dartspec.Result], plain: list[dartspec.Result]) -> dict:
    """Sums over a set, loops cut and uncut."""
    out: dict = {"num_prompts": len(spec)}
    for name, count in (("", cut), ("uncut_", lambda r: r.metrics)):
        s = Metrics.merged(count(r) for r in spec)
        out |= {f"{name}A": round(s.A, 3), f"{name}M": round(s.M, 3), f"{name}rounds": s.num_rounds}
        if plain:
            p = Metrics.merged(count(r) for r in plain)
            up = SpeedUp.of(p, s)
            out |= {
                f"{name}speed_up": round(up.speed_up, 3),
                f"{name}bound": round(up.bound, 3),
                f"{name}plain_ms": round(p.ms_per_token, 3),
                f"{name}ms_per_round": s.to_dict()["ms_per_round"],
                f"{name}tokens_per_s": [round(p.tokens_per_s, 1), round(s.tokens_per_s, 1)],
            }
    if plain:
        out["num_equal"] = sum(a.ids == b.ids for a, b in zip(spec, plain, strict=True))
    return out


def main() -> None:
    a = arguments()
    index = None if a.index == "none" else a.index
    nodes = a.nodes if a.nodes == "auto" else int(a.nodes)
    lm = dartspec.load(a.model, drafter=a.drafter, index=index, nodes=nodes, dtype=a.dtype, threads=a.threads)
    base = lm.with_drafter("none", nodes=0)
    console = Console(stderr=True)
    console.print(f"{lm.target.name}, {lm.target.dtype}, {lm.drafter_note}, {lm.nodes} nodes, {lm.fast_note}")
    sets = prompts(a.prompts or [HERE / "prompts"], a.sets, a.per_set)
    params = dartspec.SamplingParams(temperature=a.temperature, seed=a.seed, max_tokens=a.max_tokens)
    for warm in (base, lm):
        warm.generate("Warm up.", max_tokens=16)
    spec: dict[str, list] = {n: [] for n in sets}
    plain: dict[str, list] = {n: [] for n in sets}
    work = [(name, turn) for name, turns in sets.items() for turn in turns]
    for name, turn in track(work, "answering", console=console):
        messages = [{"role": "user", "content": turn}]
        if not a.no_plain:
            plain[name].append(base.generate(messages, params=params))
        spec[name].append(lm.generate(messages, params=params))
    rows = {name: figures(spec[name], plain[name]) for name in sets}
    rows["all"] = figures(list(chain(*spec.values())), list(chain(*plain.values())))
    rows["all"]["mean_of_sets_M"] = round(sum(rows[n]["M"] for n in sets) / len(sets), 3)
    table = Table("set", "A", "M", "speed-up", "bound", "plain ms", "round ms", "M uncut", "equal")
    for name, r in rows.items():
        stages = r.get("ms_per_round")
        table.add_row(
            name,
            f"{r['A']:.2f}",
            f"{r['M']:.2f}",
            f"{r['speed_up']:.2f}x" if stages else "",
            f"{r['bound']:.2f}x" if stages else "",
            f"{r['plain_ms']:.1f}" if stages else "",
            f"{sum(stages.values()):.1f}" if stages else "",
            f"{r['uncut_M']:.2f}",
            f"{r['num_equal']}/{r['num_prompts']}" if stages else "",
        )
    Console().print(table)
    result = {
        "sets": rows,
        "config": {
            "drafter": lm.drafter_name,
            "nodes": lm.nodes,
            "temperature": a.temperature,
            "max_tokens": a.max_tokens,
            "kernels": lm.fast_note,
        },
        "provenance": provenance(seed=a.seed, dtype=str(lm.target.dtype)),
    }
    if a.out:
        save_result(a.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
