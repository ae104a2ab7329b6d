"""Fits a drafter's calibration: how likely a drafted token is the target's own, by depth and step of the score.

    python benchmarks/calibrate.py --last 8 --out src/dartspec/assets/smollm2-135m-instruct

The last prompts of each set (tables use the first ones) are answered greedily and at temperature 0.8, every drafted
node is verified, and `calibration-METHOD.json` is written into the drafter's folder. Prints the shares it found.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.progress import track

import dartspec
from dartspec.bench.provenance import provenance
from dartspec.bench.suites import FOLDER
from dartspec.budget import Adaptive
from dartspec.budget.calibration import DEPTHS, STEPS, Calibration
from dartspec.budget.cost import CostModel, Times
from dartspec.engine import Request, generate
from dartspec.types import SamplingParams


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=None)
    p.add_argument("--drafter", default="auto")
    p.add_argument("--prompts", type=Path, default=FOLDER, help="folder of prompt sets")
    p.add_argument("--last", type=int, default=8, help="prompts of each set, from its end")
    p.add_argument("--nodes", type=int, default=16)
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, required=True, help="the drafter's folder")
    a = p.parse_args()

    lm = dartspec.load(a.model, drafter=a.drafter, nodes=a.nodes, threads=a.threads)
    free = CostModel(Times({1: 1.0, 4096: 1.0}))  # where rows cost nothing, every drafted node is verified
    teacher = Adaptive(free, Calibration(), most_nodes=a.nodes)
    teacher._next_look = lambda: 1  # type: ignore[method-assign]  # every round is a lesson
    sets = sorted(a.prompts.glob("*.jsonl"))
    jobs = [
        (json.loads(line)["turns"][0], t)
        for path in sets
        for line in path.read_text(encoding="utf-8").splitlines()[-a.last :]
        for t in a.temperatures
    ]
    for prompt, t in track(jobs, description="answers"):
        ids = lm.encode([{"role": "user", "content": prompt}])
        request = Request(ids, SamplingParams(temperature=t, seed=0, max_tokens=a.max_tokens))
        for _ in generate(lm.target, lm.drafter, [request], num_nodes=teacher):
            pass
    made = teacher.calibration
    made.save(
        a.out,
        lm.drafter_name,
        provenance=provenance(sets=[s.stem for s in sets], last=a.last, temperatures=a.temperatures),
    )
    print("steps up to", *STEPS, "above")
    for depth in range(DEPTHS):
        cells = zip(made.hits[depth], made.trials[depth], strict=True)
        print(f"depth {depth + 1}:", *(f"{h / n:.2f}({n:.0f})" for h, n in cells))


if __name__ == "__main__":
    main()
