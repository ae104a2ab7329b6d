"""M against the length of the context: does a drafter that saw short answers in training still help behind long ones?

    python benchmarks/long_context.py --out docs/results/long-context.json

Passages of the set `rag`, one behind the other, up to each length, and a request to go on with them. The same texts at
every length end alike: the last passage and the request are the same, so that only what lies before differs. Lengths
go up to the target's limit and 8 times `--trained`, the length that the drafter was trained on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import dartspec
from dartspec.bench.measure import measure
from dartspec.bench.provenance import provenance, save_result
from dartspec.bench.stats import ratio_of_sums
from dartspec.bench.suites import load_suites
from dartspec.engine import Request
from dartspec.types import SamplingParams

REQUEST = "\n\nSum up the last passage above in your own words."


def prompts(lm: dartspec.LM, length: int, count: int) -> list[list[int]]:
    """Prompts of about `length` tokens (a passage's end is dropped to fit) that end in `count` different passages."""
    passages = [p.turns[0].rpartition("\n")[0] or p.turns[0] for p in load_suites(["rag"])["rag"]]
    frame = len(lm.encode([{"role": "user", "content": REQUEST}]))
    made = []
    for i in range(count):
        ids = lm.text.encode(passages[i])[-(length - frame) :]
        at = i
        while len(ids) < length - frame:
            at = (at + 1) % len(passages)
            ids = (lm.text.encode(passages[at] + "\n\n") + ids)[-(length - frame) :]
        made.append(lm.encode([{"role": "user", "content": lm.text.decode(ids) + REQUEST}]))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--drafter", default="dart", help="a method or a folder (default: the shipped one)")
    parser.add_argument("--index", default="auto", help="auto or none")
    parser.add_argument("--trained", type=int, default=384, help="tokens of a sequence in training (default: 384)")
    parser.add_argument(
        "--lengths", default="", help="comma-separated; default: trained/2, 1, 2, 4, 8 times, the limit"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    index = None if a.index == "none" else a.index
    lm = dartspec.load(a.model, drafter=a.drafter, index=index, nodes=a.nodes, threads=a.threads)
    limit = lm.target.max_positions - a.max_tokens - a.nodes - 1
    wanted = [int(n) for n in a.lengths.split(",")] if a.lengths else [a.trained * m // 2 for m in (1, 2, 4, 8, 16)]
    lengths = sorted({min(n, limit) for n in (wanted if a.lengths else [*wanted, limit])})
    rows: list[dict[str, Any]] = []
    for length in lengths:
        counted = []
        for ids in prompts(lm, length, a.prompts):
            _, (record,) = measure(lm, [Request(ids[:limit], SamplingParams(max_tokens=a.max_tokens))])
            counted.append((record["cut"]["committed"], record["cut"]["rounds"], record["num_prompt_tokens"]))
        committed, rounds, tokens = zip(*counted, strict=True)
        m = ratio_of_sums(committed, rounds)
        rows.append(
            {
                "length": length,
                "mean_prompt_tokens": round(sum(tokens) / len(tokens)),
                "M": m.rounded(3),
                "rounds": sum(rounds),
            }
        )
        print(f"{length:>6} tokens: M {m}", flush=True)
    settings = {k: getattr(a, k) for k in ("index", "trained", "prompts", "max_tokens", "nodes")}
    facts = {"kind": "long context", "target": lm.target.name, "drafter": Path(a.drafter).name, **settings}
    save_result(a.out, {**facts, "rows": rows, "provenance": provenance(dtype=str(lm.target.dtype))})


if __name__ == "__main__":
    main()
