"""Measures committed tokens a round (M) by tree size and writes the record into a drafter's config.json.

    python benchmarks/record_acceptance.py DRAFTER_FOLDER --per-set 6 --write

`dartspec` picks a tree size for the machine from this record and from measured forward times. Greedy, loops cut, on
the last prompts of each set in benchmarks/prompts (the tables use the first ones).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from table import cut, prompts

import dartspec
from dartspec.accounting import Metrics
from dartspec.bench.provenance import provenance, save_result

HERE = Path(__file__).parent
SIZES = (2, 4, 8, 12, 16, 24, 32, 59)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("drafter", type=Path)
    p.add_argument("--model", default=None)
    p.add_argument("--per-set", type=int, default=6)
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--write", action="store_true", help="put the record into DRAFTER/config.json")
    a = p.parse_args()
    torch.set_grad_enabled(False)
    lm = dartspec.load(a.model, drafter=a.drafter, nodes=16, threads=a.threads)
    turns = [t for group in prompts([HERE / "prompts"], None, 10**6).values() for t in group[-a.per_set :]]
    record = {"0": 1.0}
    for size in SIZES:
        sized = lm.with_drafter(lm.drafter, nodes=size)
        answers = [
            sized.generate([{"role": "user", "content": t}], max_tokens=a.max_tokens)
            for t in track(turns, f"{size} nodes", console=Console(stderr=True))
        ]
        record[str(size)] = round(Metrics.merged(cut(r) for r in answers).M, 3)
    if a.write:
        path = a.drafter / "config.json"
        config = json.loads(path.read_text())
        config["acceptance"] = record
        save_result(path, config)
    print(json.dumps({"M": record, "num_prompts": len(turns), "provenance": provenance()}))


if __name__ == "__main__":
    main()
