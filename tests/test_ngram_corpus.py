"""Corpus readers: every kind of file becomes the right documents, and anything else is refused by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dartspec.errors import DartspecError
from dartspec.ngram import read_documents


def encode(texts: list[str]) -> list[list[int]]:
    return [[ord(c) for c in text] for text in texts]


def read(*sources: Path) -> list[list[int]]:
    return [document.tolist() for document in read_documents(sources, encode)]


def test_a_folder_is_read_in_name_order_with_ids_and_texts_in_place(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("aé")
    (tmp_path / "b" / "c.md.gz").write_bytes(gzip.compress(b"c"))
    (tmp_path / "d.py").write_text("d")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    records = [
        {"text": "x", "source": "s"},
        {"response": [7, 8, 9]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]},
        {"response": "y"},
    ]
    (tmp_path / "e.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    assert read(tmp_path) == [[97, 233], [99], [100], [120], [7, 8, 9], [113], [114], [121]]
    assert read(tmp_path / "d.py", tmp_path / "a.txt") == [[100], [97, 233]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{oops\n', "line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 holds list"),
        ("a.jsonl", b'{"question": "x"}\n', r"line 1 has the keys \['question'\]"),
        ("a.jsonl", b'{"text": "x", "response": [1]}\n', "exactly one of"),
        ("a.jsonl", b'{"text": 3}\n', "text is not of the kind"),
        ("a.jsonl", b'{"response": [0.5]}\n', "line 1: token ids come as float64"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "messages is not of the kind"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.txt.gz", b"not gzip", "cannot read"),
        ("a.bin", b"", "unknown kind"),
    ],
)
def test_bad_files_are_refused_by_name_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DartspecError, match=message):
        read(tmp_path / name)


def test_missing_and_empty_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DartspecError, match="does not exist"):
        read(tmp_path / "none")
    with pytest.raises(DartspecError, match=r"holds no \.txt"):
        read(tmp_path)
