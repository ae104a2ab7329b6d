"""What the continuity model should be made of: M by recorded guesses, without running the model.

    dartspec bench capture -s all --per-set 10 --out guesses.safetensors
    python benchmarks/continuity.py guesses.safetensors --answers ANSWERS.jsonl --corpus-ids IDS.npz --out RESULT.json

Indexes of equal size (as many tokens as the answers have): general corpus, the target's own answers, and half of each
with several weights; each with and without the running text's own n-grams. And a live table after it has seen more and
more answers of the same target to other prompts: M when so many tokens have been served. Trigrams; loops are cut.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dartspec.accounting import loop_start
from dartspec.bench.lattices import Capture
from dartspec.bench.provenance import provenance, save_result
from dartspec.lattice import MOST_CONTEXT, SearchConfig, build_tree
from dartspec.ngram import NgramIndex
from dartspec.ngram.live import LiveText

SIZES = (8, 16, 59)
SERVED = (0, 10_000, 30_000, 100_000, 1_000_000)


def mean_committed(
    capture: Capture, index: NgramIndex | None, nodes: int, text: LiveText | None, config: SearchConfig
) -> float:
    """Committed tokens a round over all recorded texts, up to where each begins to loop."""
    committed = rounds = 0
    for number, one in enumerate(capture.texts):
        ids, at = one.ids, 0
        end = loop_start(ids) or len(ids)
        while at + 1 < end and at < len(one.tokens):
            history = one.prompt + ids[: at + 1]
            counts = None if text is None else text.counts(number, history, len(one.prompt))
            args = (one.log_probs[at], one.tokens[at], history[-MOST_CONTEXT:], nodes, index, config, capture.eos_ids)
            tree = build_tree(ids[at], *args, counts)
            edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
            children = {edge: i for i, edge in enumerate(edges)}
            node, n = 0, 1
            while at + n < len(ids) and (node := children.get((node, ids[at + n]), -1)) > 0:
                n += 1
            n = min(n, len(ids) - at - 1)
            committed, rounds, at = committed + n, rounds + 1, at + n
        if text is not None:
            text.forget([number])
    return round(committed / rounds, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capture", type=Path)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--corpus-ids", type=Path, required=True, help="npz with ids and ends")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    capture = Capture.load(args.capture)

    answers: list[list[int]] = []
    for line in args.answers.read_text(encoding="utf-8").splitlines():
        response = json.loads(line)["response"]
        answers.append(response[: loop_start(response)])
    np.random.default_rng(0).shuffle(answers)  # type: ignore[arg-type]
    stored = np.load(args.corpus_ids)
    corpus = np.split(stored["ids"], stored["ends"][:-1])
    np.random.default_rng(0).shuffle(corpus)  # type: ignore[arg-type]
    size = sum(map(len, answers))

    def first(documents: list, num_tokens: int) -> list:
        """Documents from the front until there are so many tokens; the last one is cut."""
        taken, left = [], num_tokens
        for document in documents:
            if left <= 0:
                break
            taken.append(document[:left])
            left -= len(taken[-1])
        return taken

    def build(parts: list[tuple[list, int]]) -> NgramIndex:
        documents = [d for part, _ in parts for d in part]
        weights = [w for part, w in parts for _ in part]
        vocab = max(int(stored["ids"].max()), max(max(a, default=0) for a in answers)) + 1
        return NgramIndex.build(
            documents,
            weights=weights,
            vocab_size=vocab,
            fingerprint="",
            name="",
            description="",
            exclude=capture.eos_ids,
        )

    half = size // 2
    indexes: dict[str, Callable[[], NgramIndex | None]] = {
        "none": lambda: None,
        "corpus": lambda: build([(first(corpus, size), 1)]),
        "own answers": lambda: build([(answers, 1)]),
        **{
            f"half of each, answers x {w}": lambda w=w: build([(first(answers, half), w), (first(corpus, half), 1)])
            for w in (1, 8, 64, 512)
        },
        "all corpus": lambda: build([(corpus, 1)]),
        "all corpus and answers x 64": lambda: build([(answers, 64), (corpus, 1)]),
    }
    rows, served = [], []
    config = SearchConfig()
    held: dict[str, NgramIndex | None] = {}
    for name, make in indexes.items():
        index = held[name] = make()
        for form in ("", "running text"):
            row = {"index": name, "text": form or "none", "nodes_in_index": 0 if index is None else index.num_nodes}
            for nodes in SIZES:
                row[f"M at {nodes}"] = mean_committed(capture, index, nodes, LiveText() if form else None, config)
            rows.append(row)
            print(row, flush=True)
    for name in ("none", "all corpus"):
        for num_tokens in SERVED:
            row: dict[str, object] = {"index": name, "served": min(num_tokens, size)}
            for nodes in SIZES:
                text = LiveText(live=True, exclude=capture.eos_ids)  # a fresh one: it would know the texts by now
                for answer in first(answers, num_tokens):
                    text.learn(answer)
                row["live_grams"] = text.num_grams
                row[f"M at {nodes}"] = mean_committed(capture, held[name], nodes, text, config)
            served.append(row)
            print(row, flush=True)
    result = {
        "tokens": size,
        "corpus_tokens": len(stored["ids"]),
        "texts": len(capture.texts),
        "text_weight": config.text_weight,
        "indexes": rows,
        "live": served,
        "capture": capture.facts,
        "provenance": provenance(),
    }
    save_result(args.out, result)


if __name__ == "__main__":
    main()
