"""Counting by a datatrove pipeline with two workers gives the index that one build of all texts gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_cli
from dartspec.ngram import build
from dartspec.ngram.corpus import Reader, list_sources
from dartspec.text import Text, load_tokenizer

pytest.importorskip("datatrove")
EXAMPLE = Path(__file__).parent.parent / "examples" / "count_corpus.py"


def test_shards_of_two_workers_join_to_the_index_of_one_build(tmp_path: Path) -> None:
    texts, folder = tmp_path / "texts", tmp_path / "tokenizer"
    texts.mkdir()
    tiny_cli.tokenizer().save_pretrained(folder)
    words = ["the", "thing", "in", "end", "and", "or"]
    for i in range(3):
        lines = [{"text": " ".join(words[(n * j + i) % 6] for n in range(40 + j)), "id": f"{i}/{j}"} for j in range(30)]
        (texts / f"{i}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    out = tmp_path / "corpus.ngram"
    command = [sys.executable, str(EXAMPLE), str(texts), "--tokenizer", str(folder), "--out", str(out), "--tasks", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"HOME": str(tmp_path)}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in Path(f"{out}.shards").glob("*.grams")) == [f"0000{i}.grams" for i in range(3)]

    text = Text(load_tokenizer(str(folder)))
    tokens = build.Tokens(text.num_tokens, text.fingerprint, str(folder), text.special_ids)
    whole = tmp_path / "whole.ngram"
    sources = [(list_sources([texts]), 1)]
    build.build_index(sources, whole, reader=Reader(text.encode_all), tokens=tokens, description=str(texts))
    assert out.read_bytes() == whole.read_bytes()
    assert json.loads(done.stdout.splitlines()[-1])["num_nodes"] > 20
