"""What an index is built from: files, folders and data sets of text or token ids, read as documents.

Knows file kinds; knows no tokenizer: the caller brings the function that turns texts into ids.

- `.txt`, `.md`, `.py`: one document a file, UTF-8.
- `.jsonl`: one record a line, with exactly one of `text` (a string), `messages` (chat turns with `content`; each turn
  is a document) and `response` (token ids, taken as they are, or a string).
- the same with `.gz` or `.zst` behind (the latter with the package `zstandard`).
- `.parquet`: a column of texts (the extra `dartspec[corpus]`).
- `.npy`, `.bin`: token ids, one after the other; an excluded token (end of text) parts documents. A `.bin` holds
  little-endian 16-bit ids where the vocabulary fits, else 32-bit ones.
- `hf:NAME`: a data set of the Hugging Face hub, or a folder of one (`hf:NAME/CONFIG@SPLIT`; the extra
  `dartspec[corpus]`), read as it streams.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dartspec.errors import DartspecError
from dartspec.ngram.index import as_ids

Encode = Callable[[list[str]], Sequence[Sequence[int]]]
"""Texts to token ids, a batch at a time, without special tokens."""

TEXT_SUFFIXES = (".txt", ".md", ".py")
RECORD_SUFFIX = ".jsonl"
TABLE_SUFFIX = ".parquet"
ID_SUFFIXES = (".npy", ".bin")
_PACKED = (".gz", ".zst")
_RECORD_KEYS = ("text", "messages", "response")
_BATCH_CHARS = 1_000_000  # texts are encoded together up to this much: enough to fill a tokenizer's threads
_PIECE_IDS = 1 << 20  # long rows of ids are read in pieces
_BATCH_DOCUMENTS = 4096
HUB = "hf:"


class Documents(NamedTuple):
    """Documents that are counted together.

    ids:  (n,) int32, one document behind the other.
    ends: (d,) int64, where each ends.
    tail: the last so many ids of the only document are also the first ones of the next piece: grams that start there
          are counted with that one.
    """

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    tail: int = 0


@dataclass
class Source:
    """A file, or a data set; `size` in bytes where it is known, for a progress bar and to notice a change."""

    path: Path | str
    kind: str
    size: int | None

    def __str__(self) -> str:
        return str(self.path)


@dataclass
class Reader:
    """Reads sources in order. `bytes_read` grows with the files that were begun; `encode_s` is the tokenizer's time.

    encode:  texts to ids.
    column:  of the tables and data sets.
    id_bits: of an id in a `.bin`, 16 or 32.
    overlap: ids that the pieces of a long row share: the order of the index less one.
    clip:    cuts a `response` of ids (answers that run into a loop), or None.
    skip:    so many documents that come next are read and not encoded.
    """

    encode: Encode
    column: str = "text"
    id_bits: int = 32
    overlap: int = 4
    clip: Callable[[Sequence[int]], Sequence[int]] | None = None
    skip: int = 0
    bytes_read: int = 0
    encode_s: float = 0.0

    def read(self, sources: Iterable[Source]) -> Iterator[Documents]:
        """Every document of the sources, in order."""
        waiting: list[str | NDArray[np.int32]] = []
        num_chars = 0
        for source in sources:
            at_begin = self.bytes_read
            for item in self._items(source, at_begin):
                if self.skip > 0:
                    self.skip -= 1
                    continue
                if isinstance(item, Documents):
                    yield from self._batch(waiting)
                    waiting, num_chars = [], 0
                    yield item
                    continue
                waiting.append(item)
                num_chars += len(item)
                if num_chars >= _BATCH_CHARS or len(waiting) >= _BATCH_DOCUMENTS:
                    yield from self._batch(waiting)
                    waiting, num_chars = [], 0
            self.bytes_read = at_begin + (source.size or 0)
        yield from self._batch(waiting)

    def _batch(self, items: list[str | NDArray[np.int32]]) -> Iterator[Documents]:
        if not items:
            return
        began = time.perf_counter()
        encoded = iter(self.encode([item for item in items if isinstance(item, str)]))
        self.encode_s += time.perf_counter() - began
        rows = [as_ids(next(encoded)) if isinstance(item, str) else item for item in items]
        yield Documents(np.concatenate(rows), np.cumsum([len(row) for row in rows], dtype=np.int64))

    def _items(self, source: Source, at_begin: int) -> Iterator[str | NDArray[np.int32] | Documents]:
        if source.kind == HUB:
            yield from self._of_data_set(str(source.path))
            return
        path = Path(source.path)
        try:
            if source.kind == TABLE_SUFFIX:
                yield from self._of_table(path)
            elif source.kind in ID_SUFFIXES:
                yield from self._of_ids(path, at_begin)
            else:
                yield from self._of_text(path, source.kind, at_begin)
        except UnicodeDecodeError as error:
            raise DartspecError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
        except (OSError, EOFError) as error:
            raise DartspecError(f"cannot read {path}: {error}") from error

    def _of_text(self, path: Path, kind: str, at_begin: int) -> Iterator[str | NDArray[np.int32]]:
        with open(path, "rb") as raw:
            packed: Any = raw
            if path.name.endswith(".gz"):
                packed = gzip.GzipFile(fileobj=raw)
            elif path.name.endswith(".zst"):
                packed = _zstd(raw, path)
            with io.TextIOWrapper(packed, encoding="utf-8") as file:
                if kind != RECORD_SUFFIX:
                    yield file.read()
                    return
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self.bytes_read = at_begin + raw.tell()
                        yield from self._of_record(line, f"{path}, line {number}")

    def _of_record(self, line: str, where: str) -> list[str | NDArray[np.int32]]:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DartspecError(f"{where} is not JSON: {error.msg}") from error
        if not isinstance(record, dict):
            raise DartspecError(f"{where} holds {type(record).__name__}, expected an object")
        keys = [key for key in _RECORD_KEYS if key in record]
        if len(keys) != 1:
            raise DartspecError(
                f"{where} has the keys {sorted(record)}, expected exactly one of {', '.join(_RECORD_KEYS)}"
            )
        value = record[keys[0]]
        if keys[0] == "messages" and isinstance(value, list):
            turns = [turn.get("content") for turn in value if isinstance(turn, dict)]
            texts = [turn for turn in turns if isinstance(turn, str)]
            if len(texts) == len(value):
                return [_valid(text, where) for text in texts]
        if keys[0] == "response" and isinstance(value, list):
            try:
                return [as_ids(value if self.clip is None else self.clip(value))]
            except DartspecError as error:
                raise DartspecError(f"{where}: {error}") from error
        if keys[0] != "messages" and isinstance(value, str):
            return [_valid(value, where)]
        raise DartspecError(f"{where}: {keys[0]} is not of the kind that `{keys[0]}` has (see dartspec.ngram.corpus)")

    def _of_table(self, path: Path) -> Iterator[str]:
        try:
            from pyarrow import ArrowException, parquet, types
        except ImportError as error:
            raise DartspecError(f"{path}: parquet needs pyarrow: pip install 'dartspec[corpus]'") from error
        try:
            with parquet.ParquetFile(path) as table:
                fields = table.schema_arrow
                if self.column not in fields.names:
                    raise DartspecError(
                        f"{path} has the columns {fields.names}, not {self.column!r}: name one by --column"
                    )
                if not (
                    types.is_string(fields.field(self.column).type)
                    or types.is_large_string(fields.field(self.column).type)
                ):
                    raise DartspecError(
                        f"{path}: column {self.column} holds {fields.field(self.column).type}, not text"
                    )
                for batch in table.iter_batches(batch_size=1024, columns=[self.column]):
                    yield from (text for text in batch.column(0).to_pylist() if text)
        except ArrowException as error:
            raise DartspecError(f"{path} is no whole parquet file: {error}") from error

    def _of_data_set(self, name: str) -> Iterator[str]:
        try:
            import datasets
        except ImportError as error:
            raise DartspecError(f"{name}: data sets need a library: pip install 'dartspec[corpus]'") from error
        path, split = name.removeprefix(HUB), "train"
        if "@" in path:
            path, split = path.rsplit("@", 1)
        config = None
        if not Path(path).exists() and path.count("/") == 2:
            path, config = path.rsplit("/", 1)
        try:
            if (Path(path) / "dataset_info.json").exists() or (Path(path) / "dataset_dict.json").exists():
                rows = datasets.load_from_disk(path)
                rows = rows[split] if isinstance(rows, dict) else rows
            else:
                rows = datasets.load_dataset(path, config, split=split, streaming=True)
            for number, row in enumerate(rows):
                if self.column not in row:
                    raise DartspecError(
                        f"{name} has the columns {sorted(row)}, not {self.column!r}: name one by --column"
                    )
                if isinstance(row[self.column], str):
                    yield row[self.column]
                elif row[self.column] is not None:
                    raise DartspecError(
                        f"{name}, row {number}: {self.column} holds {type(row[self.column]).__name__}, not text"
                    )
        except DartspecError:
            raise
        except Exception as error:  # the library raises whatever its readers and the network raise
            raise DartspecError(f"cannot read the data set {name}: {str(error).splitlines()[0]}") from error

    def _of_ids(self, path: Path, at_begin: int) -> Iterator[Documents]:
        with open(path, "rb") as file:
            if path.suffix == ".npy":
                try:
                    version = np.lib.format.read_magic(file)
                    read_header = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = read_header(file)
                except ValueError as error:
                    raise DartspecError(f"{path} is no .npy file: {error}") from error
                if len(shape) != 1 or dtype.kind not in "iu":
                    raise DartspecError(f"{path} holds {dtype} of shape {shape}, expected one row of whole numbers")
                count = shape[0]
            else:
                dtype = np.dtype("<u2" if self.id_bits == 16 else "<u4")
                size = path.stat().st_size
                if size % dtype.itemsize:
                    raise DartspecError(
                        f"{path} has {size} bytes, expected a multiple of {dtype.itemsize} ({dtype} ids)"
                    )
                count = size // dtype.itemsize
            held = np.empty(0, dtype=np.int32)
            for begin in range(0, count, _PIECE_IDS):
                want = min(_PIECE_IDS, count - begin)
                data = file.read(want * dtype.itemsize)
                if len(data) != want * dtype.itemsize:
                    raise DartspecError(
                        f"{path} announces {count} ids and ends after {begin + len(data) // dtype.itemsize}: cut off"
                    )
                self.bytes_read = at_begin + file.tell()
                try:
                    held = np.concatenate((held, as_ids(np.frombuffer(data, dtype=dtype))))
                except DartspecError as error:
                    raise DartspecError(f"{path}: {error}") from error
                last = begin + want == count
                tail = 0 if last else min(self.overlap, len(held))
                yield Documents(held, np.array([len(held)], dtype=np.int64), tail)
                held = held[len(held) - tail :].copy() if tail else held[:0]


def list_sources(names: Iterable[str | os.PathLike[str]]) -> list[Source]:
    """What is read: named files and data sets as they come, files in folders (and below) in name order.

    Raises DartspecError for a source that does not exist, a named file of another kind, or a folder with none.
    """
    found: list[Source] = []
    for name in names:
        if str(name).startswith(HUB):
            found.append(Source(str(name), HUB, None))
            continue
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) not in (None, *ID_SUFFIXES))
            if not inside:
                raise DartspecError(f"folder {path} holds no {_kinds()} file")
        elif not path.exists():
            raise DartspecError(
                f"{path} does not exist: give a text or jsonl file, a folder of them, or hf:NAME for a data set"
            )
        elif _kind(path) is None:
            raise DartspecError(f"{path} is of an unknown kind, expected {_kinds()}, {', '.join(ID_SUFFIXES)}")
        else:
            inside = [path]
        found += [Source(p, str(_kind(p)), p.stat().st_size) for p in inside]
    return found


def read_documents(sources: Iterable[str | os.PathLike[str]], encode: Encode) -> Iterator[NDArray[np.int32]]:
    """Every document of the sources as token ids, in order; long rows of ids come in pieces that do not overlap."""
    for batch in Reader(encode, overlap=0).read(list_sources(sources)):
        yield from np.split(batch.ids, batch.ends[:-1])


def _kind(path: Path) -> str | None:
    name = path.name
    for suffix in (TABLE_SUFFIX, *ID_SUFFIXES):
        if name.endswith(suffix):
            return suffix
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return next((s for s in (*TEXT_SUFFIXES, RECORD_SUFFIX) if name.endswith(s)), None)


def _kinds() -> str:
    return f"{', '.join((*TEXT_SUFFIXES, RECORD_SUFFIX))} (also .gz and .zst) or {TABLE_SUFFIX}"


def _zstd(raw: IO[bytes], path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DartspecError(f"{path}: .zst needs zstandard: pip install 'dartspec[corpus]'") from error

    class Whole(io.RawIOBase):
        """zstandard's reader with its errors told as this package tells them."""

        def __init__(self) -> None:
            self.inner = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            try:
                return int(self.inner.readinto(buffer))
            except zstandard.ZstdError as error:
                raise DartspecError(f"cannot read {path}: {error}") from error

    return io.BufferedReader(Whole(), 1 << 16)


def _valid(text: str, where: str) -> str:
    """The text, unless JSON escapes have put half a surrogate pair into it, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DartspecError(f"{where}: half a surrogate pair, U+{ord(text[error.start]):04X}, is no text") from None
    return text
