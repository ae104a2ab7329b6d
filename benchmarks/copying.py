"""Prompts whose answers copy: where a mixture of a trained drafter and copies from the text should pay.

    python benchmarks/copying.py --out runs/copying
    dartspec bench run --suite runs/copying --suite rag --method dart@16 --method prompt_lookup@16 --method mix@16 \\
        --no-plain --max-tokens 96 --out docs/results/copying.json

Made from the package's own sets: functions of `humaneval` to be edited, passages of `rag` to be summarised. `bench run`
answers them; figures of M count the text before it loops.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dartspec.bench.suites import load_suites

EDITS = (
    "Add type hints to all arguments and answer with the whole code",
    "Rename the function to `solve` and answer with the whole code",
    "Add a line to the docstring that says who wrote it, and answer with the whole code",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    code = [p.turns[0] for p in load_suites(["humaneval"])["humaneval"]]
    passages = [p.turns[0].rpartition("\n")[0] or p.turns[0] for p in load_suites(["rag"])["rag"]]
    sets = {
        "code_edit": [f"{EDITS[i % len(EDITS)]}:\n\n{text}" for i, text in enumerate(code)],
        "summary": [f"Summarise this text in the words of the text:\n\n{text[:2000]}" for text in passages],
    }
    a.out.mkdir(parents=True, exist_ok=True)
    for name, texts in sets.items():
        lines = [json.dumps({"id": f"{name}/{i}", "turns": [text]}) for i, text in enumerate(texts)]
        (a.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{a.out / name}.jsonl: {len(texts)} prompts")


if __name__ == "__main__":
    main()
