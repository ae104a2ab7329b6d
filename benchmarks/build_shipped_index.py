"""Builds the n-gram index that is shipped: the target's own answers, weighted, with gaps filled from general text.

    python benchmarks/build_shipped_index.py --answers ANSWERS.jsonl --corpus FOLDER --tokenizer FOLDER --out FILE

Answers are jsonl records with `response` token ids; looping ones are cut before their first loop. A gram of the
corpus must occur `--min-count` times; an answer's gram counts `--answer-weight` times and always enters (the weight
is at least `--min-count`). Prints one JSON object at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dartspec.accounting import loop_start
from dartspec.ngram import NgramIndex, read_documents
from dartspec.text import Text, load_tokenizer

Ids = NDArray[np.int32]


def read_answers(paths: list[Path]) -> Iterator[Ids]:
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for line in file:
                response = json.loads(line)["response"]
                yield np.array(response[: loop_start(response)], dtype=np.int32)


def read_corpus(folders: list[Path], text: Text, cache: Path | None) -> Iterator[Ids]:
    """Tokenising takes minutes, counting seconds: `cache` keeps the ids of the folders between runs."""
    if cache is not None and cache.exists():
        stored = np.load(cache)
        yield from np.split(stored["ids"], stored["ends"][:-1])
        return

    def encode(texts: list[str]) -> list[list[int]]:
        backend = text.tokenizer.backend_tokenizer
        return [e.ids for e in backend.encode_batch(texts, add_special_tokens=False)]

    documents = []
    for document in read_documents(folders, encode):
        documents.append(document)
        yield document
    if cache is not None:
        aside = cache.with_name(cache.name + ".part.npz")
        np.savez(aside, ids=np.concatenate(documents), ends=np.cumsum([len(d) for d in documents]))
        aside.rename(cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, nargs="+", required=True)
    parser.add_argument("--corpus", type=Path, nargs="*", default=[])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--name", default="SmolLM2", help="the tokenizer's name, for people")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--answer-weight", type=int, default=512)
    parser.add_argument("--min-count", type=int, default=4)
    parser.add_argument("--max-bytes", type=int, default=12_000_000, help="a larger result is refused")
    parser.add_argument("--ids-cache", type=Path, help="file for the corpus's token ids (npz)")
    args = parser.parse_args()
    if args.answer_weight < args.min_count:
        parser.error("--answer-weight must be at least --min-count, or rare grams of the answers are lost")

    text = Text(load_tokenizer(args.tokenizer))
    answers = list(read_answers(args.answers))
    corpus = list(read_corpus(args.corpus, text, args.ids_cache)) if args.corpus else []
    started = time.perf_counter()
    index = NgramIndex.build(
        [*answers, *corpus],
        weights=[args.answer_weight] * len(answers) + [1] * len(corpus),
        order=args.order,
        vocab_size=text.num_tokens,
        fingerprint=text.fingerprint,
        name=args.name,
        description=(
            f"{sum(map(len, answers))} tokens of the target's own answers, weight {args.answer_weight}; "
            f"general text: {', '.join(sorted({p.name for f in args.corpus for p in f.glob('*/*')}))}"
        ),
        min_count=args.min_count,
        exclude=text.special_ids,
    )
    build_s = time.perf_counter() - started
    info = index.info()
    if info["index_bytes"] > args.max_bytes:
        raise SystemExit(f"the index has {info['index_bytes']} bytes, more than {args.max_bytes}: raise --min-count")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    index.save(args.out)
    report = {**index.info(), "build_s": round(build_s, 2), "answer_weight": args.answer_weight}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
