"""Reads index files of the official DART program (fvliang/DART): `.trie`, little-endian, no magic, no version.

u64 order, u64 node count, then each node: i32 token, u64 parent, i32 frequency, u64 number of children, and a child
table of (i32 token, u64 node), which repeats what the parents say. Node 0 is the root. The core reads it in one pass
(`NgramBuilder.add_trie`): 24 bytes a node lie in a nameless temporary file meanwhile, and little of it in memory.

Such a file does not say for which tokenizer it was built: the tokenizer is the caller's word.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from dartspec import _core
from dartspec.errors import DartspecError
from dartspec.ngram import NgramIndex
from dartspec.ngram.build import Built, Progress, Tokens, Watch, finish_index, memory_for_sorting, watched
from dartspec.ngram.index import as_ids


def import_trie(
    path: str | os.PathLike[str],
    *,
    vocab_size: int,
    fingerprint: str,
    name: str,
    description: str,
    exact: bool = True,
    min_count: int = 1,
) -> NgramIndex:
    """The same counts as an index of ours in memory; raises DartspecError when the file is no such trie."""
    builder = _core.NgramBuilder(_order(Path(path)), vocab_size, as_ids([]))
    builder.add_trie(os.fspath(path), tempfile.gettempdir())
    return NgramIndex(builder.finish(exact, min_count, fingerprint, name, description), None)


def convert_trie(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tokens: Tokens,
    description: str,
    exact: bool = True,
    min_count: int = 1,
    memory: int = 2 << 30,
    threads: int | None = None,
    watch: Watch | None = None,
) -> Built:
    """The same counts as an index file of ours, in bounded memory."""
    path, out, threads = Path(source), Path(out), threads or os.cpu_count() or 1
    work = out.with_name(out.name + ".importing")
    shutil.rmtree(work, ignore_errors=True)
    order = _order(path)
    builder = _core.NgramBuilder(
        order,
        tokens.vocab_size,
        as_ids([]),
        memory_bytes=memory_for_sorting(memory),
        threads=threads,
        folder=str(work),
    )
    began, size = time.perf_counter(), path.stat().st_size

    def show() -> None:
        if watch is not None:
            watch(Progress("reading", builder.trie_bytes_read(), size, 0))

    try:
        watched(lambda: builder.add_trie(str(path), str(work)), show)
        read = time.perf_counter()
        index = NgramIndex(finish_index(builder, out, exact, min_count, tokens, description, watch), out)
        return Built(
            index,
            num_documents=0,
            num_tokens=index.info()["num_tokens"],
            count_s=read - began,
            merge_s=time.perf_counter() - read,
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _order(path: Path) -> int:
    """What the file's head says, where it can be; the core refuses a file that is none."""
    try:
        with open(path, "rb") as file:
            order = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise DartspecError(f"cannot open the trie {path}: {error.strerror}") from error
    return order if 2 <= order <= 5 else 3
