"""Times the n-gram index and the tree search, called from Python; prints one JSON object at the end.

    python benchmarks/time_search.py                      the official vectors' 200 inputs and their small trie
    python benchmarks/time_search.py --index FILE         an index of yours, with lattices drawn from it

A drawn lattice follows the index for eight tokens from a random bigram; at each position half of the 25 columns are
tokens that the index has seen there, the others are random. One thread; every input is different.
"""

from __future__ import annotations

import argparse
import json
import lzma
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dartspec.interop.official import import_trie
from dartspec.lattice import SearchConfig, build_tree
from dartspec.ngram import NgramIndex

VECTORS = Path(__file__).parent.parent / "tests" / "data" / "official_vectors"
DEPTH, COLUMNS, NODES = 8, 25, 59
Case = tuple[int, torch.Tensor, torch.Tensor, list[int]]


def official() -> tuple[NgramIndex, list[Case]]:
    with tempfile.TemporaryDirectory() as folder:
        trie = Path(folder) / "small.trie"
        trie.write_bytes(lzma.decompress((VECTORS / "small.trie.xz").read_bytes()))
        index = import_trie(trie, vocab_size=151_936, fingerprint="", name="Qwen3", description="official vectors")
    cases = np.load(VECTORS / "cases.npz")
    prompts, log_probs, tokens = cases["prompt"], np.log(cases["probs"]), cases["tokens"]
    return index, [
        (int(p[-1]), torch.from_numpy(lp), torch.from_numpy(t), p.tolist())
        for p, lp, t in zip(prompts, log_probs, tokens, strict=True)
    ]


def drawn(index: NgramIndex, num_cases: int, seed: int = 0) -> list[Case]:
    generator = np.random.default_rng(seed)
    vocab = index.info()["vocab_size"]
    cases: list[Case] = []
    while len(cases) < num_cases:
        context = [int(generator.integers(vocab))]
        tokens = np.empty((DEPTH, COLUMNS), dtype=np.int32)
        for _ in range(2):
            followers = index.continuations(context, 20)
            if followers:
                context.append(followers[int(generator.integers(len(followers)))][0])
        path = list(context)
        for row in tokens:
            seen = [t for t, _ in index.continuations(path[-2:], COLUMNS // 2)]
            row[:] = generator.choice(vocab, COLUMNS, replace=False)
            row[: len(seen)] = seen
            path.append(int(row[int(generator.integers(max(1, len(seen))))]))
        log_probs = np.sort(np.log(generator.dirichlet(np.full(COLUMNS, 0.2), DEPTH) + 1e-6), axis=1)[:, ::-1]
        cases.append(
            (
                context[-1],
                torch.from_numpy(log_probs.astype(np.float32)),
                torch.from_numpy(tokens),
                context,
            )
        )
    return cases


def microseconds(call: Any, inputs: list[Any], passes: int = 6) -> dict[str, float]:
    """Median and 99th percentile over all inputs; the first pass warms up and is not counted."""
    times = []
    for number in range(passes):
        for item in inputs:
            began = time.perf_counter()
            call(item)
            if number:
                times.append(time.perf_counter() - began)
    return {
        "median_us": round(float(np.median(times)) * 1e6, 2),
        "p99_us": round(float(np.percentile(times, 99)) * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path)
    parser.add_argument("--cases", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config, eos = SearchConfig(), frozenset({2})
    report: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "depth": DEPTH, "columns": COLUMNS}
    if args.index is None:
        index, cases = official()
    else:
        began = time.perf_counter()
        index = NgramIndex.open(args.index)
        report["open_ms"] = round((time.perf_counter() - began) * 1e3, 3)
        began = time.perf_counter()
        index.verify()
        report["verify_ms"] = round((time.perf_counter() - began) * 1e3, 1)
        cases = drawn(index, args.cases)
    report |= {key: index.info()[key] for key in ("num_nodes", "index_bytes", "bytes_per_node", "counts")}
    report["cases"] = len(cases)
    for name, continuity in (("search", index), ("search_without_index", None)):

        def search(case: Case, continuity: NgramIndex | None = continuity) -> None:
            root, log_probs, tokens, context = case
            build_tree(root, log_probs, tokens, context, NODES, continuity, config, eos)

        report[name] = microseconds(search, cases)
    report["query_25"] = microseconds(lambda c: index.probabilities(c[3], c[2][0].numpy()), cases)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
