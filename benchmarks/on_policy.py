"""What regenerated answers are worth: two drafters, one on given answers, one on the target's own, as many tokens each.

    python benchmarks/on_policy.py conversations.jsonl --model MODEL_FOLDER --tokens 1000000 --work runs/on-policy \
        --out docs/results/on-policy.json

The same conversations are prepared as they are and asked anew (`dartspec data prepare`, `regenerate`), a drafter is
trained on each for the same number of trained tokens, and `dartspec eval` judges both through the engine on prompts
that neither saw. Every step is a command that resumes, so the script may be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dartspec.bench.provenance import provenance, save_result
from dartspec.train.conversations import reread


def dartspec(*arguments: str) -> Any:
    """The JSON object that a command ends with; its words go to stderr."""
    run = subprocess.run(
        [sys.executable, "-m", "dartspec", *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("conversations", nargs="+", help="files with given answers, as `dartspec data prepare` reads them")
    p.add_argument("--model", required=True, help="folder of the target")
    p.add_argument("--work", type=Path, required=True, help="folder for data and runs")
    p.add_argument("--tokens", type=int, default=1_000_000, help="trained tokens of each drafter")
    p.add_argument("--max-tokens", type=int, default=384, help="of an example, both kinds alike")
    p.add_argument("--max-answer", type=int, default=208)
    p.add_argument("--per-set", type=int, default=8, help="prompts of each set that both are judged on")
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    given, own = a.work / "given.jsonl", a.work / "own.jsonl"
    common = ["--model", a.model]
    if not given.exists():
        dartspec("data", "prepare", *a.conversations, *common, "--max-tokens", str(a.max_tokens), "--out", str(given))
    dartspec("data", "regenerate", *a.conversations, *common, "--max-tokens", str(a.max_answer), "--out", str(own))

    def judge(drafter: str) -> Any:
        return dartspec("eval", drafter, *common, "--per-set", str(a.per_set), "--temperatures", "0,1")

    result: dict[str, Any] = {}
    for name, data in (("given", given), ("own", own)):
        counts = reread([data])
        steps = max(1, round(a.tokens / (2 * counts["tokens"] / counts["examples"])))  # two sequences an update
        run = a.work / name
        config = {
            "target": a.model,
            "data": [str(data)],
            "out": str(run),
            "steps": steps,
            "sequences_per_step": 2,
            "max_tokens": a.max_tokens,
            "cache": str(a.work / f"{name}.states"),
        }
        (a.work / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
        drafter = dartspec("train", "--config", str(a.work / f"{name}.json"))["drafter"]
        result[name] = {"data": counts, "steps": steps, "eval": judge(drafter)}
    result["provenance"] = provenance(model=Path(a.model).name)
    if a.out is not None:
        save_result(a.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
