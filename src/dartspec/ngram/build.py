"""Index files from text, token ids, other indexes and counted shards: bounded memory, resumable.

The core counts by external sort (`csrc/core/ngram_sort.hpp`): grams go to sorted runs in a folder beside the result,
and are merged to the file when all is read. The bytes of the file depend on the text and the options alone, not on
memory, threads or interruptions. An interrupted build goes on from its last run when it is asked for again.

Knows sources and options; knows no tokenizer beyond its fingerprint (`Reader` brings its function).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dartspec import _core
from dartspec.errors import DartspecError
from dartspec.ngram.corpus import ID_SUFFIXES, Reader, Source
from dartspec.ngram.index import NgramIndex, _whole, as_ids

SHARD_SUFFIX = ".grams"
LEAST_MEMORY = 32 << 20  # for sorting; with less there would be a run for every few megabytes of text
_RESERVE = 96 << 20  # for ids and read buffers on their way, and for writing
_RESERVE_TEXTS = 320 << 20  # for texts that are being encoded too


@dataclass(frozen=True)
class Tokens:
    """Whose token ids an index counts.

    vocab_size: ids are below it. fingerprint: of the tokenizer; name: for people.
    exclude: tokens that never enter (special tokens); a document is cut at each.
    """

    vocab_size: int
    fingerprint: str
    name: str
    exclude: frozenset[int] = frozenset()


class Progress(NamedTuple):
    """Where a build is: `done` of `total` (bytes of the sources, then entries to merge; None: not known)."""

    stage: str
    done: int
    total: int | None
    num_tokens: int


Watch = Callable[[Progress], None]


@dataclass
class Built:
    """An index and what its making took. `num_tokens` were read; `taken_up` of them by an earlier, interrupted run.

    encode_s, count_s, merge_s: seconds in the tokenizer, in sorting (and reading), in merging and writing.
    """

    index: NgramIndex
    num_documents: int
    num_tokens: int
    taken_up: int = 0
    spilled_bytes: int = 0
    encode_s: float = 0.0
    count_s: float = 0.0
    merge_s: float = 0.0
    peak_memory: int = field(default_factory=lambda: peak_memory_bytes())


def build_index(
    inputs: Sequence[tuple[Sequence[Source], int]],
    out: str | os.PathLike[str],
    *,
    reader: Reader,
    tokens: Tokens,
    order: int = 3,
    description: str = "",
    exact: bool = False,
    min_count: int = 1,
    memory: int = 2 << 30,
    threads: int | None = None,
    watch: Watch | None = None,
) -> Built:
    """Counts sources, each group as often as its weight says, and writes the index.

    inputs:  groups of sources with a whole weight each.
    memory:  resident bytes of this process that are not exceeded, what it holds already included.
    threads: for sorting and merging; None: all cores.

    Runs lie in `<out>.building` until the index is written. Raises DartspecError for sources that cannot be read,
    and when that folder holds the runs of another build.
    """
    out, threads = Path(out), threads or os.cpu_count() or 1
    work = out.with_name(out.name + ".building")
    identity = json.dumps(
        {
            "tokens": _about(tokens, order),
            "inputs": [[[_seen(s) for s in sources], weight] for sources, weight in inputs],
            "reader": [reader.column, reader.id_bits, reader.overlap, reader.clip is not None],
        }
    )
    builder = _core.NgramBuilder(
        order,
        tokens.vocab_size,
        as_ids(sorted(tokens.exclude)),
        memory_bytes=memory_for_sorting(
            memory, texts=any(s.kind not in ID_SUFFIXES for group, _ in inputs for s in group)
        ),
        threads=threads,
        folder=str(work),
        identity=identity,
    )
    reader.skip, first, taken_up = builder.progress()
    began = time.perf_counter()
    sizes = [s.size for sources, _ in inputs for s in sources]
    total = None if None in sizes else sum(s or 0 for s in sizes)
    try:
        for sources, weight in inputs:
            for batch in reader.read(sources):
                builder.add_documents(batch.ids, batch.ends, first, batch.tail, _whole(weight, "weight"))
                first = 0
                if watch is not None:
                    watch(Progress("counting", reader.bytes_read, total, builder.progress()[2]))
    except BaseException:
        with suppress(OSError):  # runs stay for the next try; without any there is nothing to keep
            work.rmdir()
        raise
    num_documents, _, num_tokens = builder.progress()
    counted = time.perf_counter()
    core = finish_index(builder, out, exact, min_count, tokens, description, watch)
    result = Built(
        NgramIndex(core, out),
        num_documents,
        num_tokens,
        taken_up,
        builder.spilled_bytes(),
        reader.encode_s,
        counted - began - reader.encode_s,
        time.perf_counter() - counted,
    )
    builder.remove_files()
    shutil.rmtree(work)
    return result


def join(
    parts: Sequence[tuple[str | os.PathLike[str], int]],
    out: str | os.PathLike[str],
    *,
    tokens: Tokens | None = None,
    order: int | None = None,
    description: str | None = None,
    exact: bool = False,
    min_count: int = 1,
    memory: int = 2 << 30,
    threads: int | None = None,
    watch: Watch | None = None,
) -> Built:
    """One index of several: index files and shards (`.grams`, or folders of them), each counted `weight` times.

    tokens: needed where all parts are shards, which do not name their tokenizer; otherwise the first index's.
    Counts of a quantised index are estimates. Raises DartspecError where parts differ in tokenizer, order or size.
    """
    out, threads = Path(out), threads or os.cpu_count() or 1
    indexes: list[tuple[NgramIndex, int]] = []
    shards: list[tuple[Path, int]] = []
    for name, weight in parts:
        path = Path(name)
        if path.is_dir():
            inside = sorted(path.glob(f"*{SHARD_SUFFIX}"))
            if not inside:
                raise DartspecError(f"folder {path} holds no {SHARD_SUFFIX} file: give the folder that a count wrote")
            shards += [(p, _whole(weight, "weight")) for p in inside]
        elif path.suffix == SHARD_SUFFIX:
            shards.append((path, _whole(weight, "weight")))
        else:
            indexes.append((NgramIndex.open(path), _whole(weight, "weight")))
    if indexes:
        facts = indexes[0][0].info()
        for index, _ in indexes[1:]:
            for key in ("fingerprint", "order", "vocab_size"):
                if index.info()[key] != facts[key]:
                    raise DartspecError(
                        f"{index.path} has {key} {index.info()[key]}, {indexes[0][0].path} has {facts[key]}: only "
                        "indexes of one tokenizer and order can be merged"
                    )
        exclude = frozenset() if tokens is None else tokens.exclude
        tokens = Tokens(facts["vocab_size"], facts["fingerprint"], facts["name"], exclude)
        order = int(facts["order"])
    if tokens is None:
        raise DartspecError("shards do not name their tokenizer: say which by --tokenizer")
    order = 3 if order is None else order
    work = out.with_name(out.name + ".merging")
    shutil.rmtree(work, ignore_errors=True)
    builder = _core.NgramBuilder(
        order,
        tokens.vocab_size,
        as_ids([]),
        memory_bytes=memory_for_sorting(memory),
        threads=threads,
        folder=str(work),
    )
    began = time.perf_counter()
    try:
        for number, (index, weight) in enumerate(indexes):
            if watch is not None:
                watch(Progress("reading", number, len(indexes), 0))
            builder.add_index(index.core, weight)
        for path, weight in shards:
            builder.add_run(str(path), shard_identity(tokens, order), weight)
        read = time.perf_counter()
        text = description
        if text is None:
            text = " + ".join(f"{weight} x {Path(name).name}" for name, weight in parts)
        core = finish_index(builder, out, exact, min_count, tokens, text, watch)
        index = NgramIndex(core, out)
        merge_s = time.perf_counter() - read
        return Built(index, 0, index.info()["num_tokens"], count_s=read - began, merge_s=merge_s)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def prune(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    min_count: int = 1,
    exact: bool = False,
    description: str | None = None,
) -> NgramIndex:
    """The index without grams counted fewer than `min_count` times, in one pass. `exact` keeps exact counts."""
    index = NgramIndex.open(source)
    if exact and index.info()["counts"] != "exact":
        raise DartspecError(f"{source} holds 8-bit log-probabilities: exact counts cannot be had from it again")
    text = str(index.info()["description"]) if description is None else description
    core = _core.prune_index(index.core, os.fspath(out), exact, _whole(min_count, "min_count"), text)
    return NgramIndex(core, Path(out))


def count_shard(
    documents: Iterable[Sequence[int]], out: str | os.PathLike[str], *, tokens: Tokens, order: int, memory: int
) -> int:
    """Counts documents of ids into one shard for `join`; returns how many tokens. Written aside and renamed.

    What a killed run left beside `out` is thrown away: shards are small enough to be counted again.
    """
    work = Path(f"{os.fspath(out)}.counting")
    shutil.rmtree(work, ignore_errors=True)
    builder = _core.NgramBuilder(
        order, tokens.vocab_size, as_ids(sorted(tokens.exclude)), memory_bytes=memory, folder=str(work)
    )
    try:
        for document in documents:
            builder.add_document(as_ids(document))
        builder.write_run(os.fspath(out), shard_identity(tokens, order))
        return builder.progress()[2]
    finally:
        shutil.rmtree(work, ignore_errors=True)


def shard_identity(tokens: Tokens, order: int) -> str:
    """What shards must have in common to be joined."""
    return json.dumps({"tokens": [order, tokens.vocab_size, tokens.fingerprint]})


def parse_bytes(text: str) -> int:
    """`2G`, `500M`, `64k` or a plain number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(?:i?[bB])?\s*", text)
    if found is None:
        raise DartspecError(f"{text!r} is no amount of memory, expected a number with K, M or G: 2G")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def resident_bytes() -> int:
    """Memory that this process holds now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc: what it held at most says it well enough
        return peak_memory_bytes()


def peak_memory_bytes() -> int:
    """Memory that this process has held at most."""
    try:  # the system's other account, getrusage, begins with what the parent held
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def memory_for_sorting(memory: int, texts: bool = False) -> int:
    """What is left of `memory` for buffers beside the program itself and what it reads; `texts` take more than ids."""
    held = resident_bytes() + (_RESERVE_TEXTS if texts else _RESERVE)
    if memory - held < LEAST_MEMORY:
        raise DartspecError(
            f"--memory is {memory >> 20}M, the program itself takes {held >> 20}M: give at least "
            f"{(held + LEAST_MEMORY >> 20) + 1}M"
        )
    return memory - held


def _about(tokens: Tokens, order: int) -> list[object]:
    return [order, tokens.vocab_size, tokens.fingerprint, sorted(tokens.exclude)]


def _seen(source: Source) -> list[object]:
    """What tells that a source is still the same."""
    if source.size is None:
        return [str(source.path)]
    return [str(source.path), source.size, Path(source.path).stat().st_mtime_ns]


def finish_index(
    builder: _core.NgramBuilder,
    out: Path,
    exact: bool,
    min_count: int,
    tokens: Tokens,
    description: str,
    watch: Watch | None,
) -> _core.NgramIndex:
    """The counted grams as a file, with progress."""
    results: list[_core.NgramIndex] = []

    def finish() -> None:
        results.append(
            builder.finish(
                exact, _whole(min_count, "min_count"), tokens.fingerprint, tokens.name, description, path=str(out)
            )
        )

    def show() -> None:
        if watch is not None:
            done, total, _ = builder.merged()
            watch(Progress("writing" if done >= total else "merging", done, total, builder.progress()[2]))

    watched(finish, show)
    return results[0]


def watched(work: Callable[[], object], show: Callable[[], None]) -> None:
    """Runs `work` on a thread and calls `show` meanwhile, so that progress is seen and Ctrl-C is heard."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        show()
    if failure:
        raise failure[0]
