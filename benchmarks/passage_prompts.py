"""Prompts about passages for stage 4 of the shipped drafter's training: summaries, questions on a text, German.

    python benchmarks/passage_prompts.py --prose FOLDER --german FOLDER --tasks p3.jsonl --out passages.jsonl

--prose holds .txt files (the Brown corpus, addresses), which are asked to be summarised in pieces; --german text files
of sentences (Debian's fortunes-de, an HTML handbook), which are asked to be translated; --tasks prompts that hold a
passage already, as {"id", "turns"}, of which the long ones are kept. Same input, same prompts. None of these texts is
among the prompts of the evaluation.
"""

from __future__ import annotations

import argparse
import html
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from dartspec.files import written_aside

GERMAN = re.compile(r"\b(der|die|das|und|ist|nicht|ein|eine|zu|den|wir|ich|es)\b")


def pieces(text: str, rng: random.Random) -> Iterator[str]:
    """Runs of whole sentences of 1,200 to 3,400 characters."""
    piece, wanted = "", rng.randint(1200, 3400)
    for sentence in re.split(r'(?<=[.?!"]) +', " ".join(text.split())):
        piece = f"{piece} {sentence}".strip()
        if len(piece) >= wanted:
            yield piece[:3600]
            piece, wanted = "", rng.randint(1200, 3400)
    if len(piece) > 900:
        yield piece[:3600]


def german_sentences(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8", errors="ignore")
    if path.suffix == ".html":
        blocks = [
            html.unescape(re.sub(r"<[^>]+>", "", p)) for p in re.findall(r'<div class="para">(.*?)</div>', text, re.S)
        ]
    else:
        blocks = [b.split("--")[0] for b in text.split("\n%\n")]
    for block in blocks:
        for sentence in re.split(r"(?<=[.?!]) +", " ".join(block.split())):
            if 40 <= len(sentence) <= 240 and GERMAN.search(sentence):
                yield sentence


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prose", type=Path, nargs="*", default=[])
    p.add_argument("--german", type=Path, nargs="*", default=[])
    p.add_argument("--tasks", type=Path, nargs="*", default=[])
    p.add_argument("--most", type=int, default=1250, help="summaries; of German sentences 2,100 in proportion")
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    rng = random.Random(a.seed)
    prose = [x for f in a.prose for path in sorted(f.rglob("*.txt")) for x in pieces(path.read_text("utf-8"), rng)]
    files = [path for f in a.german for path in sorted(f.rglob("*")) if path.is_file() and path.suffix in ("", ".html")]
    german = sorted({s for path in files for s in german_sentences(path)})
    tasks = [json.loads(line) for f in a.tasks for line in f.read_text("utf-8").splitlines()]
    rng.shuffle(prose)
    rng.shuffle(german)
    rows = [(f"summary/{i}", f"Summarize: {x}") for i, x in enumerate(prose[: a.most])]
    rows += [(f"german/{i}", f"Translate German to English: {x}") for i, x in enumerate(german[: a.most * 42 // 25])]
    rows += [(r["id"], r["turns"][0][:3600]) for r in tasks if len(r["turns"][0]) > 520]
    if not rows:
        raise SystemExit("no prompt: give --prose, --german or --tasks")
    with written_aside(a.out) as aside, aside.open("w", encoding="utf-8") as file:
        for name, prompt in rows:
            file.write(json.dumps({"id": name, "turns": [prompt]}, ensure_ascii=False) + "\n")
    print(
        f"{len(rows)} prompts: {min(len(prose), a.most)} summaries, "
        f"{len(german)} German sentences, {len(tasks)} tasks read"
    )


if __name__ == "__main__":
    main()
