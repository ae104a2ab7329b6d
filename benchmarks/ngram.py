"""Measures the n-gram index and the tree search; each part merges its figures into one JSON file.

    python benchmarks/ngram.py sizes --name SmolLM2 --ids IDS.npz --vocab 49152 --folder runs/  bytes a node, both forms
    python benchmarks/ngram.py sizes --name Qwen3 --text FOLDER --tokenizer FOLDER --folder runs/
    python benchmarks/ngram.py synthetic --nodes 100000000 --folder runs/   size and opening of a large one
    python benchmarks/ngram.py times --index FILE --exact FILE              open, query, search, several processes
    python benchmarks/ngram.py forms CAPTURE --index FILE --exact FILE      what 8 bits change: trees and M

IDS.npz holds `ids` and `ends`. `times` wants a quiet machine; with `--busy` a neighbour keeps another core busy. Every
query and search is asked once per pass; lattices follow the index for eight tokens from a random bigram, half of the 25
columns are tokens that it has seen there, the others are random. The ratios are against the official program's figures
as measured on such a machine (OFFICIAL), unchanged C++, one thread; the plain Python twin does not come near them, so
its own times are no basis for a ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from time_search import COLUMNS, DEPTH, NODES, drawn

from dartspec import tree as T
from dartspec.bench.provenance import provenance, save_result
from dartspec.lattice import SearchConfig, build_tree, build_trees
from dartspec.ngram import NgramIndex, read_documents

OFFICIAL = {
    "file_bytes_per_node": 36.0,
    "memory_bytes_per_node": 151.0,
    "load_nodes_per_s": 9.8e6,
    "query_us": 4.8,
    "query_p99_us": 7.5,
    "search_ms": 0.92,
    "search_16_threads_ms": 2.1,
}
EOS = frozenset({2})


def microseconds(times: list[float]) -> dict[str, float]:
    return {
        name: round(float(value) * 1e6, 2)
        for name, value in (
            ("mean_us", np.mean(times)),
            ("median_us", np.median(times)),
            ("p99_us", np.percentile(times, 99)),
        )
    }


def shape(index: NgramIndex) -> dict[str, Any]:
    keys = ("counts", "order", "token_bits", "num_nodes", "num_nodes_by_level", "index_bytes", "log_prob_error")
    info = index.info()
    return {k: info[k] for k in keys} | {"bytes_per_node": round(info["bytes_per_node"], 3)}


def opened(path: Path) -> dict[str, Any]:
    """Opening in milliseconds, after the file's pages were thrown out of memory and when they are there."""
    found = {}
    for name in ("cold", "warm"):
        if name == "cold":
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        NgramIndex.open(path)
        found[f"open_{name}_ms"] = round((time.perf_counter() - began) * 1e3, 3)
    return found


# --- parts ----------------------------------------------------------------------------------------------------------


def sizes(a: argparse.Namespace) -> dict[str, Any]:
    if a.ids is not None:
        stored = np.load(a.ids)
        ids, ends = stored["ids"], stored["ends"]
        vocab = a.vocab
    else:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(a.tokenizer / "tokenizer.json"))
        vocab = tokenizer.get_vocab_size()
        documents = list(
            read_documents([a.text], lambda t: [e.ids for e in tokenizer.encode_batch(t, add_special_tokens=False)])
        )
        ids, ends = np.concatenate(documents), np.cumsum([len(d) for d in documents])
    found: dict[str, Any] = {"num_tokens": len(ids), "vocab_size": vocab}
    for exact in (False, True):
        path = a.folder / f"{a.name}-{'exact' if exact else 'coded'}.ngram"
        build(ids, ends, vocab, exact, a.name, path)
        index = NgramIndex.open(path, verify=True)
        found["exact" if exact else "coded"] = shape(index) | opened(path)
    return {f"sizes_{a.name}": found}


def build(ids: Any, ends: Any, vocab: int, exact: bool, name: str, path: Path) -> None:
    documents = np.split(ids, np.asarray(ends)[:-1])
    NgramIndex.build(
        documents, vocab_size=vocab, fingerprint="", name=name, description="benchmark", exact=exact
    ).save(path)  # fmt: skip


def synthetic(a: argparse.Namespace) -> dict[str, Any]:
    """Documents of words drawn by Zipf's law over 2^17 tokens until the index has about so many nodes."""
    generator = np.random.default_rng(0)
    vocab = 1 << 17
    weights = 1.0 / np.arange(10, vocab + 10)
    cumulative = np.cumsum(weights / weights.sum())
    num = int(a.nodes * 0.62)
    ids = generator.permutation(vocab).astype(np.int32)[np.searchsorted(cumulative, generator.random(num))]
    path = a.folder / "synthetic.ngram"
    began = time.perf_counter()
    build(ids, np.arange(1000, num + 1000, 1000).clip(max=num), vocab, False, "synthetic", path)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    index = NgramIndex.open(path, verify=True)
    verify = time.perf_counter() - began
    facts = {"num_tokens": num, "build_s": round(seconds, 1), "verify_s": round(verify, 1)}
    queries = random_queries(index, 20_000)
    del index
    return {"synthetic": facts | shape(NgramIndex.open(path)) | opened(path) | {"query_random": ask(path, queries)}}


def random_queries(index: NgramIndex, num: int, seed: int = 1) -> tuple[Any, Any]:
    """Contexts (num, 2) that occur, drawn evenly over first words; 25 tokens each, half of them seen there."""
    generator = np.random.default_rng(seed)
    vocab = index.info()["vocab_size"]
    contexts = np.full((num, 2), -1, dtype=np.int32)
    tokens = generator.integers(0, vocab, (num, COLUMNS)).astype(np.int32)
    for i in range(num):
        followers: list[tuple[int, float]] = []
        while not followers:
            first = int(generator.integers(vocab))
            followers = index.continuations([first], 50)
        contexts[i] = first, followers[int(generator.integers(len(followers)))][0]
        seen = [t for t, _ in index.continuations(contexts[i].tolist(), COLUMNS // 2)]
        tokens[i, : len(seen)] = seen
    return contexts, tokens


def ask(path: Path, queries: tuple[Any, Any]) -> dict[str, Any]:
    """Each context once, by a fresh reader: one call a context (Python's share included), then all in one call."""
    contexts, tokens = queries
    core = NgramIndex.open(path).core
    out = np.empty((1, COLUMNS), dtype=np.float64)
    half, times = len(contexts) // 2, []
    for i in range(half):
        c, t = contexts[i : i + 1], tokens[i : i + 1]
        began = time.perf_counter()
        core.score(c, t, 1.0, out)
        times.append(time.perf_counter() - began)
    out = np.empty((len(contexts) - half, COLUMNS), dtype=np.float64)
    began = time.perf_counter()
    core.score(contexts[half:], tokens[half:], 1.0, out)
    return microseconds(times) | {"one_call_us": round((time.perf_counter() - began) / len(out) * 1e6, 3)}


def reader(path: Path, queries: tuple[Any, Any], start: Any, done: Any, results: Any) -> None:
    index = NgramIndex.open(path)
    index.verify()  # every page is mapped
    start.wait()
    found = ask(path, queries)
    done.wait()
    text = Path("/proc/self/smaps").read_text()
    block = re.search(rf"^\S+ r--s .*{re.escape(path.name)}\n(?:.*\n)*?VmFlags", text, re.M)
    kilobytes = {k: int(v) for k, v in re.findall(r"^(Rss|Pss):\s+(\d+) kB", block.group(0) if block else "", re.M)}
    results.put(found | {"rss_mb": kilobytes["Rss"] / 1e3, "pss_mb": kilobytes["Pss"] / 1e3})
    done.wait()


def several(path: Path, queries: tuple[Any, Any], num: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    start, done, results = context.Barrier(num), context.Barrier(num), context.Queue()
    readers = [context.Process(target=reader, args=(path, queries, start, done, results)) for _ in range(num)]
    for r in readers:
        r.start()
    found = [results.get() for _ in readers]
    for r in readers:
        r.join()
    return {k: round(float(np.mean([f[k] for f in found])), 2) for k in found[0]}


def spin() -> None:
    while True:
        sum(range(10_000))


def times(a: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    config, path = SearchConfig(), a.index
    index = NgramIndex.open(path)
    cases = drawn(index, 500)
    neighbour = multiprocessing.get_context("spawn").Process(target=spin, daemon=True) if a.busy else None
    if neighbour is not None:
        neighbour.start()
        time.sleep(1)
    for name, continuity in (("search", index), ("search_exact", NgramIndex.open(a.exact)), ("search_no_index", None)):
        spent: list[float] = []
        for number in range(6):
            for root, log_probs, tokens, context in cases:
                began = time.perf_counter()
                build_tree(root, log_probs, tokens, context, NODES, continuity, config, EOS)
                if number:
                    spent.append(time.perf_counter() - began)
        report[name] = microseconds(spent)
    if neighbour is not None:
        neighbour.kill()
        return {"times_busy_neighbour": report}
    # the search asks 1 + 7 * 20 contexts at most; its own work without an index is the rest
    report["query_in_search_order_us"] = round(
        (report["search"]["mean_us"] - report["search_no_index"]["mean_us"]) / (1 + (DEPTH - 1) * config.beam), 3
    )
    lattices = tuple(torch.stack([c[i] for c in cases]) for i in (1, 2))
    contexts = [c[3] for c in cases]
    for threads in (1, 2):
        spent = []
        for _ in range(5):
            began = time.perf_counter()
            build_trees(*lattices, contexts, [NODES] * len(cases), index, config, EOS, threads=threads)
            spent.append((time.perf_counter() - began) / len(cases))
        report[f"search_batch_{threads}_threads_us"] = round(float(np.median(spent)) * 1e6, 2)
    queries = random_queries(index, 20_000)
    report["query_random"] = ask(path, queries)
    for num in (1, 2, 4):
        report[f"processes_{num}"] = several(path, queries, num)
    twin = plain_twin(index, cases[:10], config)
    report |= {"index": shape(index), "exact": shape(NgramIndex.open(a.exact))} | opened(path)
    report["plain_python_twin_search_ms"] = twin
    report["official"] = OFFICIAL
    report["official_over_ours"] = {
        "file_bytes": round(OFFICIAL["file_bytes_per_node"] / index.info()["bytes_per_node"], 1),
        "memory_bytes": round(OFFICIAL["memory_bytes_per_node"] / index.info()["bytes_per_node"], 1),
        "search_1_thread": round(OFFICIAL["search_ms"] * 1e3 / report["search"]["mean_us"], 1),
        "search_as_shipped_16_threads": round(OFFICIAL["search_16_threads_ms"] * 1e3 / report["search"]["mean_us"], 1),
        "query_in_search_order": round(OFFICIAL["query_us"] / report["query_in_search_order_us"], 1),
        "query_random": round(OFFICIAL["query_us"] / report["query_random"]["one_call_us"], 1),
    }
    return {"times": report}


def plain_twin(index: NgramIndex, cases: list[Any], config: SearchConfig) -> float:
    """Milliseconds a search of the plain twin of the tests, on the same cases; its trees are equal, or this fails."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from reference import search as twin

    spent = []
    for root, log_probs, tokens, context in cases:
        began = time.perf_counter()
        found = twin.search(
            root,
            log_probs.tolist(),
            tokens.tolist(),
            context,
            NODES,
            lambda c, t: float(index.probabilities(list(c)[-2:], [t])[0]),
            config,
            EOS,
        )
        spent.append(time.perf_counter() - began)
        ours = build_tree(root, log_probs, tokens, context, NODES, index, config, EOS)
        if ours.tokens.tolist() != found[0] or ours.parents.tolist() != found[1]:
            raise SystemExit("the search and its plain twin differ")
    return round(float(np.mean(spent)) * 1e3, 1)


def forms(a: argparse.Namespace) -> dict[str, Any]:
    from dartspec.bench.lattices import Capture, replay

    data = Capture.load(a.capture)
    exact, coded = NgramIndex.open(a.exact), NgramIndex.open(a.index)
    config = SearchConfig()

    def nodes(text: Any, at: int, index: NgramIndex) -> set[tuple[int, ...]]:
        context = [*text.prompt[-2:], *text.ids[: at + 1]][-2:]
        tree = build_tree(
            text.ids[at], text.log_probs[at], text.tokens[at], context, NODES, index, config, data.eos_ids
        )  # fmt: skip
        tokens = tree.tokens.tolist()
        return {tuple(tokens[i] for i in T.path_to(tree, n)[1:]) for n in range(1, len(tokens))}

    shares = [
        len(nodes(text, at, exact) & nodes(text, at, coded)) / NODES
        for text in data.texts
        for at in range(0, len(text.tokens), 3)
    ]
    searches = {"backoff 1": config} | {f"backoff {b}": replace(config, backoff=b) for b in (0.7, 0.4, 0.2)}
    rows = list(replay(data, {"exact": exact, "coded": coded}, searches, [16, NODES]))
    return {
        "forms": {
            "lattices": len(shares),
            "node_overlap_mean": round(float(np.mean(shares)), 4),
            "log_prob_error": coded.info()["log_prob_error"],
            "M": [{k: r[k] for k in ("index", "search", "nodes", "M")} for r in rows],
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/ngram.json"))
    verbs = parser.add_subparsers(required=True)
    s = verbs.add_parser("sizes")
    s.add_argument("--name", required=True)
    s.add_argument("--ids", type=Path)
    s.add_argument("--vocab", type=int)
    s.add_argument("--text", type=Path)
    s.add_argument("--tokenizer", type=Path)
    s.add_argument("--folder", type=Path, required=True)
    s.set_defaults(run=sizes)
    y = verbs.add_parser("synthetic")
    y.add_argument("--nodes", type=int, default=100_000_000)
    y.add_argument("--folder", type=Path, required=True)
    y.set_defaults(run=synthetic)
    t = verbs.add_parser("times")
    t.add_argument("--index", type=Path, required=True)
    t.add_argument("--exact", type=Path, required=True)
    t.add_argument("--busy", action="store_true")
    t.set_defaults(run=times)
    f = verbs.add_parser("forms")
    f.add_argument("capture", type=Path)
    f.add_argument("--index", type=Path, required=True)
    f.add_argument("--exact", type=Path, required=True)
    f.set_defaults(run=forms)
    a = parser.parse_args()
    found = a.run(a)
    for part in found.values():
        part["provenance"] = provenance(peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    before = json.loads(a.out.read_text()) if a.out.exists() else {}
    save_result(a.out, before | found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
