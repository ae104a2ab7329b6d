"""Drafters trained alike, side by side: what each run learned, and what it then commits a round.

    dartspec train --config configs/smollm2-rivals.yaml --method eagle3 --out runs/rivals/eagle3 ...  # one a method
    dartspec bench run --suite all --per-set 3 --no-plain --method runs/rivals/eagle3/latest@16 --out bench/eagle3.json
    python benchmarks/rivals.py runs/rivals bench --out docs/results/rivals.json

RUNS has a folder a method, BENCH a result a method; names are the methods'. Refused where two runs saw other data,
other numbers of tokens, or other prompts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dartspec.bench.provenance import provenance, save_result
from dartspec.errors import DartspecError
from dartspec.train.config import TrainConfig

OWN = ("method", "options", "d", "gamma", "num_first", "num_anchors", "eval_every", "out", "cache", "cache_taps")


def run_of(folder: Path) -> dict[str, Any]:
    """Settings, curve and size of one training run."""
    defaults = TrainConfig(target="x", data=("x",), out="x").to_dict()  # a run may be older than a setting
    settings = defaults | json.loads((folder / "train.json").read_text())
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    curve = [r["eval"] for r in records if "eval" in r]
    config = json.loads((folder / "latest" / "config.json").read_text())
    return {
        "shared": {k: v for k, v in settings.items() if k not in (*OWN, "target", "data")},
        "data_digest": config["provenance"]["data_digest"],
        "tokens": curve[-1]["tokens"],
        "settings": {k: settings[k] for k in ("d", "gamma", "num_first", "num_anchors", "options") if settings[k]},
        "megabytes": round((folder / "latest" / "model.safetensors").stat().st_size / 1e6, 1),
        "curve": [{k: e[k] for k in ("step", "tokens", "hit1", "chain")} for e in curve],
    }


def bench_of(path: Path) -> dict[str, Any]:
    """M of one result: over all rounds, and set by set."""
    result = json.loads(path.read_text())
    by_set = {r["suite"]: r for r in result["rows"]}
    return {
        "M": by_set["all"]["M"],
        "by_set": {name: r["M"] for name, r in by_set.items() if name != "all"},
        "nodes": int(
            by_set["all"]["method"].partition("@")[2].partition(",")[0]
        ),  # as asked for; a few trees are smaller
        "num_prompts": by_set["all"]["num_runs"],
        "commit": result["provenance"]["commit"],
        "bench": {k: v for k, v in result["config"].items() if k != "methods"},
    }


def same(what: str, found: dict[str, Any]) -> Any:
    """The one value that all have."""
    values = {json.dumps(v, sort_keys=True) for v in found.values()}
    if len(values) > 1:
        raise DartspecError(f"{what} differs between the runs: {', '.join(f'{k} {v}' for k, v in found.items())}")
    return next(iter(found.values()))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", type=Path)
    p.add_argument("bench", type=Path)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    measured = {path.stem: bench_of(path) for path in sorted(a.bench.glob("*.json"))}
    runs = {name: run_of(a.runs / name) for name in measured}
    shared = same("a setting", {n: r.pop("shared") for n, r in runs.items()})
    result = {
        "shared": shared,
        "data_digest": same("the data", {n: r.pop("data_digest") for n, r in runs.items()}),
        "tokens": same("the number of trained tokens", {n: r.pop("tokens") for n, r in runs.items()}),
        "nodes": same("the tree size", {n: m.pop("nodes") for n, m in measured.items()}),
        "num_prompts": same("the number of prompts", {n: m.pop("num_prompts") for n, m in measured.items()}),
        "bench": same("a setting of the measurement", {n: m.pop("bench") for n, m in measured.items()}),
        "methods": [{"method": name, **runs[name], **measured[name]} for name in measured],
        "provenance": provenance(),
    }
    save_result(a.out, result)
    print(json.dumps({m["method"]: m["M"] for m in result["methods"]}))


if __name__ == "__main__":
    main()
