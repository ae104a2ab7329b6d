"""What an index is built from: files and folders of text or token ids, read as documents.

Knows file kinds; knows no tokenizer: the caller brings the function that turns texts into ids.

- `.txt`, `.md`, `.py` (also `.gz`): one document a file, UTF-8.
- `.jsonl` (also `.gz`): one record a line, with exactly one of `text` (a string), `messages` (chat turns with
  `content`; each turn is a document) and `response` (token ids, taken as they are, or a string).
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dartspec.errors import DartspecError
from dartspec.ngram.index import as_ids

Encode = Callable[[list[str]], Sequence[Sequence[int]]]
"""Texts to token ids, a batch at a time, without special tokens."""

TEXT_SUFFIXES = (".txt", ".md", ".py")
RECORD_SUFFIX = ".jsonl"
_RECORD_KEYS = ("text", "messages", "response")
_BATCH_CHARS = 4_000_000  # texts are encoded together up to this much: enough to fill a tokenizer's threads


def list_files(sources: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The readable files: named ones as they come, those in folders (and below) in name order.

    Raises DartspecError for a source that does not exist, a named file of another kind, or a folder with none.
    """
    files: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            found = sorted(p for p in source.rglob("*") if p.is_file() and _kind(p) is not None)
            if not found:
                raise DartspecError(f"folder {source} holds no {_kinds()} file")
            files += found
        elif not source.exists():
            raise DartspecError(f"{source} does not exist: give a text or jsonl file, or a folder of them")
        elif _kind(source) is None:
            raise DartspecError(f"{source} is of an unknown kind, expected {_kinds()}, or .gz of these")
        else:
            files.append(source)
    return files


def read_documents(sources: Iterable[str | os.PathLike[str]], encode: Encode) -> Iterator[NDArray[np.int32]]:
    """Every document of the sources as token ids, in order; see the module's docstring for what is read."""
    waiting: list[str] = []
    num_chars = 0
    for path in list_files(sources):
        for record in _records(path):
            if isinstance(record, str):
                waiting.append(record)
                num_chars += len(record)
                if num_chars < _BATCH_CHARS:
                    continue
            yield from _encoded(waiting, encode)
            waiting, num_chars = [], 0
            if not isinstance(record, str):
                yield record
    yield from _encoded(waiting, encode)


def _encoded(texts: list[str], encode: Encode) -> Iterator[NDArray[np.int32]]:
    if texts:
        for ids in encode(texts):
            yield as_ids(ids)


def _kind(path: Path) -> str | None:
    name = path.name.removesuffix(".gz")
    return next((s for s in (*TEXT_SUFFIXES, RECORD_SUFFIX) if name.endswith(s)), None)


def _kinds() -> str:
    return ", ".join((*TEXT_SUFFIXES, RECORD_SUFFIX))


def _records(path: Path) -> Iterator[str | NDArray[np.int32]]:
    opener: Any = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            if _kind(path) != RECORD_SUFFIX:
                yield file.read()
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield from _parsed(line, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise DartspecError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (OSError, EOFError) as error:
        raise DartspecError(f"cannot read {path}: {error}") from error


def _parsed(line: str, where: str) -> list[str | NDArray[np.int32]]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DartspecError(f"{where} is not JSON: {error.msg}") from error
    if not isinstance(record, dict):
        raise DartspecError(f"{where} holds {type(record).__name__}, expected an object")
    keys = [key for key in _RECORD_KEYS if key in record]
    if len(keys) != 1:
        raise DartspecError(f"{where} has the keys {sorted(record)}, expected exactly one of {', '.join(_RECORD_KEYS)}")
    value = record[keys[0]]
    if keys[0] == "messages" and isinstance(value, list):
        turns = [turn.get("content") for turn in value if isinstance(turn, dict)]
        texts = [turn for turn in turns if isinstance(turn, str)]
        if len(texts) == len(value):
            return [_valid(text, where) for text in texts]
    if keys[0] == "response" and isinstance(value, list):
        try:
            return [as_ids(value)]
        except DartspecError as error:
            raise DartspecError(f"{where}: {error}") from error
    if keys[0] != "messages" and isinstance(value, str):
        return [_valid(value, where)]
    raise DartspecError(f"{where}: {keys[0]} is not of the kind that `{keys[0]}` has (see dartspec.ngram.corpus)")


def _valid(text: str, where: str) -> str:
    """The text, unless JSON escapes have put half a surrogate pair into it, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DartspecError(f"{where}: half a surrogate pair, U+{ord(text[error.start]):04X}, is no text") from None
    return text
