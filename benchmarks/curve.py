"""M against trained tokens: drafters of the stages of one training, on the same recorded texts, and where it points.

    python benchmarks/curve.py runs/one/latest runs/two/latest ... --index INDEX --out docs/results/curve.json

The run's log is looked for above the folder, or given as FOLDER=LOG.
Each drafter's guesses are recorded over the target's answers (`bench capture`) and replayed through one index and one
tree search, so that nothing but the weights differs. Trained tokens are those of a drafter and of all that it was
started from. The line is `M = a + b log10(tokens)`, fitted to all points; its interval comes from resampling prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dartspec
from dartspec.bench.lattices import recorded, replay
from dartspec.bench.provenance import provenance, save_result
from dartspec.bench.suites import load_suites
from dartspec.drafters._checkpoint import read_json
from dartspec.errors import DartspecError
from dartspec.lattice import SearchConfig
from dartspec.ngram import NgramIndex
from dartspec.train.watch import read_log
from dartspec.types import SamplingParams

SIZES = (16, 59)
POINTS = 7  # of a stage's evaluations on held-out answers
AHEAD = (20e6, 50e6, 100e6)  # trained tokens that the line is read at


def trained_tokens(folder: Path) -> int:
    """Of the drafter and of those that it was started from."""
    found, at = 0, read_json(folder / "config.json")["provenance"]
    while at:
        if "trained_tokens" not in at:
            raise DartspecError(f"{folder}: how many tokens it was trained on is not known; give drafters trained here")
        found, at = found + int(at["trained_tokens"]), at.get("init")
    return found


def held_out(log: Path) -> list[dict[str, Any]]:
    """At most `POINTS` of a run's evaluations, the first and the last among them."""
    found = [record for kind, record in read_log(log) if kind == "eval"] if log.exists() else []
    kept = sorted({round(i * (len(found) - 1) / (POINTS - 1)) for i in range(POINTS)}) if found else []
    keys = ("step", "tokens", "hit1", "hit10", "loss", "chain")
    return [{key: found[i][key] for key in keys} for i in kept]


def ratios(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """(..., prompts, 2) committed and rounds -> (...,) M."""
    both = sums.sum(-2)
    return np.asarray(both[..., 0] / both[..., 1])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("drafters", nargs="+")
    p.add_argument("--model")
    p.add_argument("--index", type=Path, required=True)
    p.add_argument("--suite", action="append", help="prompt sets.  [default: all]")
    p.add_argument("--per-set", type=int, default=4)
    p.add_argument("--max-tokens", type=int, default=96)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    lm = dartspec.load(a.model, drafter="none", threads=a.threads)
    prompts = [one for own in load_suites(a.suite or ["all"], a.per_set).values() for one in own]
    index, search = NgramIndex.open(a.index), {"default": SearchConfig()}
    rows: list[dict[str, Any]] = []
    sums: list[NDArray[np.float64]] = []  # (sizes, prompts, 2) of each drafter
    for name in a.drafters:
        folder, _, log = name.partition("=")
        data = recorded(lm.with_drafter(folder, nodes=16), prompts, SamplingParams(max_tokens=a.max_tokens))
        found = list(replay(data, {"index": index}, search, SIZES))
        sums.append(np.array([list(zip(r["committed"], r["rounds"], strict=True)) for r in found], dtype=np.float64))
        rows.append({"tokens": trained_tokens(Path(folder)), "M": {str(r["nodes"]): r["M"] for r in found}})
        print(rows[-1], flush=True)
        rows[-1]["held_out"] = held_out(Path(log) if log else Path(folder).parent / "log.jsonl")
    x = np.log10([r["tokens"] for r in rows])
    rng, drawn = np.random.default_rng(0), []
    for _ in range(1000):
        taken = rng.integers(0, len(prompts), len(prompts))
        drawn.append([ratios(s[:, taken]) for s in sums])  # (drafters, sizes)
    ahead = []
    for k, nodes in enumerate(SIZES):
        of = [np.polyfit(x, [m[k] for m in d], 1) for d in [[ratios(s) for s in sums], *drawn]]
        for tokens in AHEAD:
            values = [float(np.polyval(line, np.log10(tokens))) for line in of]
            low, high = np.quantile(values[1:], (0.025, 0.975))
            ahead.append({"nodes": nodes, "tokens": tokens, "M": [round(float(v), 3) for v in (values[0], low, high)]})
    result = {"prompts": len(prompts), "rows": rows, "ahead": ahead, "provenance": provenance()}
    save_result(a.out, result)


if __name__ == "__main__":
    main()
