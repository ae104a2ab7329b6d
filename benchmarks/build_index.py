"""How fast an index is built from token ids, and in how much memory.

    python benchmarks/build_index.py IDS.npz --tokens 49152 --out docs/results/ngram-build.json

Each case is a process of its own: it reads ids (int32) piece by piece, sorts, spills, merges, writes, verifies and
syncs the file; the clock runs from the first id to the finished file. Peak memory is the process's own maximum, the
interpreter and its libraries (`base`) included. All files of one form must be equal. `twin` is the plain way: a hash
map in memory (the counts only, no file); the official program inserts 2.4 M tokens/s on this kind of machine, and
where the twin is more than 15 % slower than that, ratios are against the official figure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

OFFICIAL = 2.4e6  # tokens/s, insertion alone, one thread
CASES = [
    # name, threads, memory in MiB beside the program, order, exact, least count
    ("1 thread, 64 MiB", 1, 64, 3, False, 1),
    ("1 thread, 256 MiB", 1, 256, 3, False, 1),
    ("2 threads, 64 MiB", 2, 64, 3, False, 1),
    ("2 threads, 256 MiB", 2, 256, 3, False, 1),
    ("1 thread, 64 MiB, exact", 1, 64, 3, True, 1),
    ("1 thread, 64 MiB, at least 2", 1, 64, 3, False, 2),
    ("1 thread, 64 MiB, order 5", 1, 64, 5, False, 1),
]


def one(ids: Path, ends: Path, vocab: int, case: int, out: Path) -> dict[str, object]:
    from dartspec import _core
    from dartspec.ngram.build import peak_memory_bytes, resident_bytes

    _, threads, memory, order, exact, min_count = CASES[case]
    base = resident_bytes()
    work = Path(f"{out}.building")
    builder = _core.NgramBuilder(
        order, vocab, np.empty(0, np.int32), memory_bytes=memory << 20, threads=threads, folder=str(work)
    )
    stops = np.load(ends)
    began = time.perf_counter()
    with open(ids, "rb") as file:
        at = document = 0
        while document < len(stops):
            upto = max(document + 1, int(np.searchsorted(stops, at + (1 << 20))))
            block = np.fromfile(file, np.int32, int(stops[upto - 1]) - at)
            builder.add_documents(block, stops[document:upto] - at)
            at, document = int(stops[upto - 1]), upto
    builder.spill()
    counted = time.perf_counter()
    index = builder.finish(exact, min_count, "", "", "", path=str(out))
    seconds = time.perf_counter() - began
    facts = index.info()
    spilled = builder.spilled_bytes()
    shutil.rmtree(work)
    return {
        "s": round(seconds, 3),
        "count_s": round(counted - began, 3),
        "peak_mib": peak_memory_bytes() >> 20,
        "base_mib": base >> 20,
        "spilled_mib": spilled >> 20,
        "nodes": facts["num_nodes"],
        "bytes_per_node": round(facts["bytes_per_node"], 3),
        "digest": hashlib.sha256(out.read_bytes()).hexdigest()[:16],
    }


def twin(ids: Path, ends: Path) -> float:
    """Tokens/s of a dictionary of counts over the first million tokens."""
    from collections import Counter

    values = np.fromfile(ids, np.int32, 1_000_000).tolist()
    stops = [s for s in np.load(ends).tolist() if s <= len(values)]
    began = time.perf_counter()
    counts: Counter[tuple[int, ...]] = Counter()
    at = 0
    for stop in stops:
        document = values[at:stop]
        for n in (1, 2, 3):
            counts.update(zip(*(document[i:] for i in range(n)), strict=False))
        at = stop
    return at / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", type=Path, help="npz with ids and ends")
    parser.add_argument("--tokens", type=int, required=True, help="vocabulary size")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)  # case, raw ids, file to write
    args = parser.parse_args()
    if args.case:
        case, raw, file = args.case
        print(json.dumps(one(Path(raw), Path(raw).with_suffix(".ends.npy"), args.tokens, int(case), Path(file))))
        return

    from dartspec.bench.provenance import provenance, save_result

    with tempfile.TemporaryDirectory(dir=args.out.parent) as name:
        folder = Path(name)
        raw = folder / "ids.bin"
        stored = np.load(args.ids)
        stored["ids"].astype(np.int32).tofile(raw)
        np.save(raw.with_suffix(".ends.npy"), stored["ends"].astype(np.int64))
        num_tokens = len(stored["ids"])
        rows, digests = [], {}
        for case, (label, threads, memory, order, exact, min_count) in enumerate(CASES):
            command = [sys.executable, __file__, str(args.ids), "--tokens", str(args.tokens), "--out", str(args.out)]
            command += ["--case", str(case), str(raw), str(folder / "out.ngram")]
            runs = [json.loads(subprocess.run(command, check=True, stdout=-1).stdout) for _ in range(args.runs)]
            same = digests.setdefault((order, exact, min_count), runs[0]["digest"])
            if any(run["digest"] != same for run in runs):
                raise SystemExit(f"{label}: the file depends on threads or memory")
            rates = [num_tokens / run["s"] / 1e6 for run in runs]
            rows.append(
                {
                    "case": label,
                    "threads": threads,
                    "memory_mib": memory,
                    "m_tokens_per_s": round(statistics.median(rates), 1),
                    "slowest": round(min(rates), 1),
                    "fastest": round(max(rates), 1),
                    "times_official": round(statistics.median(rates) * 1e6 / OFFICIAL, 1),
                    **{key: value for key, value in runs[0].items() if key != "s"},
                }
            )
            print(rows[-1], flush=True)
        result = {
            "tokens": num_tokens,
            "documents": len(stored["ends"]),
            "vocab_size": args.tokens,
            "official_tokens_per_s": OFFICIAL,
            "twin_tokens_per_s": round(twin(raw, raw.with_suffix(".ends.npy"))),
            "cases": rows,
            "provenance": provenance(),
        }
    save_result(args.out, result)


if __name__ == "__main__":
    main()
