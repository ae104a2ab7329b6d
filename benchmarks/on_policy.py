"""What the target's own answers are worth: drafters on given answers, on its own, and on mixtures, as many tokens each.

    python benchmarks/on_policy.py conversations.jsonl --given-by NAME --model MODEL_FOLDER --tokens 1000000 \
        --work runs/on-policy --out docs/results/on-policy.json

The same conversations are prepared as they are and asked anew (`dartspec data prepare`, `regenerate`). For each share a
drafter is trained for the same number of tokens on data in which so many of the conversations have the target's own
answer and the others the given one, and `dartspec eval` judges it through the engine on prompts that none saw. Every
step is a command that resumes, so the script may be stopped and started again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dartspec.bench.provenance import provenance, save_result
from dartspec.files import write_json, written_aside
from dartspec.train.conversations import read_records, reread
from dartspec.train.regenerate import read_asks


def dartspec(*arguments: str) -> Any:
    """The JSON object that a command ends with; its words go to stderr."""
    run = subprocess.run(
        [sys.executable, "-m", "dartspec", *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    with written_aside(path) as aside:
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("conversations", nargs="+", help="files with given answers, as `dartspec data prepare` reads them")
    p.add_argument("--given-by", required=True, help="who wrote the given answers, for the result")
    p.add_argument("--model", required=True, help="folder of the target")
    p.add_argument("--work", type=Path, required=True, help="folder for data and runs")
    p.add_argument("--shares", default="0,0.5,1", help="of own answers, separated by commas")
    p.add_argument("--tokens", type=int, default=1_000_000, help="trained tokens of each drafter, prompts included")
    p.add_argument("--max-tokens", type=int, default=384, help="of an example, both kinds alike")
    p.add_argument("--max-answer", type=int, default=208)
    p.add_argument("--per-set", type=int, default=8, help="prompts of each set that all are judged on")
    p.add_argument("--temperatures", default="0,1")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    common = ["--model", a.model]
    asked, own = a.work / "asked.jsonl", a.work / "own.jsonl"
    begun = {"conversations": [Path(c).name for c in a.conversations], "model": a.model}
    begun |= {"max_tokens": a.max_tokens, "max_answer": a.max_answer}
    if (a.work / "begun.json").exists() and json.loads((a.work / "begun.json").read_text()) != begun:
        raise SystemExit(f"{a.work} was begun with other conversations, model or lengths: give another --work")
    write_json(a.work / "begun.json", begun)
    if not asked.exists():
        names = (ask.id for ask in read_asks(a.conversations))
        records = (record for source in a.conversations for _, record in read_records(source))
        write_lines(asked, [{**record, "id": name} for name, record in zip(names, records, strict=True)])
    dartspec("data", "regenerate", str(asked), *common, "--max-tokens", str(a.max_answer), "--out", str(own))
    answers = {row["id"]: row for row in map(json.loads, own.read_text(encoding="utf-8").splitlines())}
    # what could not be asked anew (too long) is in neither kind
    both = [r for r in map(json.loads, asked.read_text(encoding="utf-8").splitlines()) if r["id"] in answers]
    both.sort(key=lambda r: hashlib.sha256(r["id"].encode()).digest())
    rows = []
    for share in map(float, a.shares.split(",")):
        folder, count = a.work / f"{share:g}", round(share * len(both))
        folder.mkdir(exist_ok=True)
        data = []
        if count:
            data.append(folder / "own.jsonl")
            write_lines(data[-1], [answers[r["id"]] for r in both[:count]])
        if count < len(both):
            write_lines(folder / "given-text.jsonl", both[count:])
            data.append(folder / "given.jsonl")
            if not data[-1].exists():
                limit = ["--max-tokens", str(a.max_tokens), "--out", str(data[-1])]
                dartspec("data", "prepare", str(folder / "given-text.jsonl"), *common, *limit)
        counts = reread(data)
        config = {
            "target": a.model,
            "data": list(map(str, data)),
            "out": str(folder / "run"),
            "steps": max(1, round(a.tokens / (counts["tokens"] / counts["examples"]))),
            "sequences_per_step": 1,
            "max_tokens": a.max_tokens,
            "threads": a.threads,
            "eval_every": 10**9,
            "m_every": 0,  # the best by its own held-out kind would treat the shares unlike
        }
        write_json(folder / "train.json", config)
        drafter = dartspec("train", "--config", str(folder / "train.json"))["drafter"]
        judged = ["--per-set", str(a.per_set), "--temperatures", a.temperatures, "--threads", str(a.threads)]
        found = dartspec("eval", drafter, *common, *judged)
        rows.append({"share": share, "data": dict(counts), "steps": config["steps"], "eval": found})
        print(share, counts, found["sets"][-1]["M"], file=sys.stderr, flush=True)
    facts = {"given_by": a.given_by, "prompts": len(both), "tokens": a.tokens}
    save_result(a.out, facts | {"rows": rows, "provenance": provenance(model=Path(a.model).name)})


if __name__ == "__main__":
    main()
