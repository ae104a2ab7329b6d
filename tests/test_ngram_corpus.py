"""Corpus readers: every kind of file becomes the right documents, and anything else is refused by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from dartspec.errors import DartspecError
from dartspec.ngram import read_documents
from dartspec.ngram.corpus import Reader, list_sources


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
        ("a.jsonl.zst", b"not zst", "cannot read .*a.jsonl.zst"),
        ("a.parquet", b"PAR1 not", "no whole parquet"),
        ("a.npy", b"not npy", "no .npy file"),
        ("a.bin", b"\1\2\3", "has 3 bytes, expected a multiple of 4"),
        ("a.bin", b"\xff\xff\xff\xff", "does not fit 31 bits"),
        ("a.dat", b"", "unknown kind"),
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


def test_packed_text_tables_and_rows_of_ids_are_read(tmp_path: Path) -> None:
    zstandard, pyarrow = pytest.importorskip("zstandard"), pytest.importorskip("pyarrow")
    from pyarrow import parquet

    packed = zstandard.ZstdCompressor()
    (tmp_path / "a.txt.zst").write_bytes(packed.compress("aé".encode()))
    two_frames = packed.compress(b'{"text": "x"}\n') + packed.compress(b'{"text": "y"}\n')
    (tmp_path / "b.jsonl.zst").write_bytes(two_frames)
    parquet.write_table(pyarrow.table({"text": ["p", None, "q"], "n": [1, 2, 3]}), tmp_path / "c.parquet")
    np.save(tmp_path / "d.npy", np.array([7, 8], dtype=np.uint16))
    np.array([9, 70_000], dtype="<u4").tofile(tmp_path / "e.bin")
    assert read(tmp_path) == [[97, 233], [120], [121], [112], [113]]  # ids only where they are named
    assert read(tmp_path / "d.npy", tmp_path / "e.bin") == [[7, 8], [9, 70_000]]
    narrow = Reader(encode, id_bits=16).read(list_sources([tmp_path / "e.bin"]))
    assert next(narrow).ids.tolist() == [9, 0, 70_000 - 65_536, 1]

    for column, message in (("n", "column n holds int64, not text"), ("body", r"columns \['text', 'n'\], not 'body'")):
        with pytest.raises(DartspecError, match=message):
            list(Reader(encode, column=column).read(list_sources([tmp_path / "c.parquet"])))
    (tmp_path / "c.parquet").write_bytes((tmp_path / "c.parquet").read_bytes()[:-9])
    with pytest.raises(DartspecError, match="no whole parquet"):
        read(tmp_path / "c.parquet")
    (tmp_path / "d.npy").write_bytes((tmp_path / "d.npy").read_bytes()[:-1])
    with pytest.raises(DartspecError, match="announces 2 ids and ends after 1"):
        read(tmp_path / "d.npy")
    np.save(tmp_path / "d.npy", np.zeros((2, 2)))
    with pytest.raises(DartspecError, match=r"float64 of shape \(2, 2\)"):
        read(tmp_path / "d.npy")


def test_data_sets_stream_from_a_folder_and_from_what_was_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    rows.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    rows.to_parquet(str(tmp_path / "folder" / "train.parquet"))
    for name in ("saved", "folder"):
        assert read_hub(f"hf:{tmp_path / name}") == [[97], [98]]
    assert list_sources([f"hf:{tmp_path / 'folder'}"])[0].size is None
    with pytest.raises(DartspecError, match=r"columns \['n', 'text'\], not 'body'"):
        read_hub(f"hf:{tmp_path / 'folder'}", column="body")
    with pytest.raises(DartspecError, match="row 0: n holds int, not text"):
        read_hub(f"hf:{tmp_path / 'folder'}", column="n")
    with pytest.raises(DartspecError, match="cannot read the data set hf:"):
        read_hub(f"hf:{tmp_path / 'folder'}@validation")


def read_hub(name: str, column: str = "text") -> list[list[int]]:
    batches = Reader(encode, column=column).read(list_sources([name]))
    return [d.tolist() for ids, ends, _ in batches for d in np.split(ids, ends[:-1])]


def test_skipped_documents_are_not_encoded_and_progress_is_counted_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaaa")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{"response": [5, 5, 6]}\n{"text": "c"}\n')
    seen: list[str] = []

    def watched(texts: list[str]) -> list[list[int]]:
        seen.extend(texts)
        return encode(texts)

    sources = list_sources([tmp_path])
    reader = Reader(watched, skip=2, clip=lambda ids: ids[:2])
    assert [d.ids.tolist() for d in reader.read(sources)] == [[5, 5, 99]]
    assert seen == ["c"]
    assert reader.bytes_read == sum(s.size or 0 for s in sources)
    assert reader.encode_s > 0
