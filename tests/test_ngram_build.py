"""Index files: the same bytes whatever the memory, the threads or a kill; merged, pruned and imported counts."""

from __future__ import annotations

import json
import lzma
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dartspec import _core
from dartspec.errors import DartspecError
from dartspec.interop.official import convert_trie, import_trie
from dartspec.ngram import NgramIndex, build
from dartspec.ngram.corpus import Reader, list_sources
from reference import ngram as twin

VECTORS = Path(__file__).parent / "data" / "official_vectors"
TOKENS = build.Tokens(300, "f00d", "toy", frozenset({299}))


def encode(texts: list[str]) -> list[list[int]]:
    return [[ord(c) for c in text] for text in texts]


@pytest.fixture
def tiny_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand grams a buffer, so that small tests have many runs."""
    monkeypatch.setattr(build, "memory_for_sorting", lambda memory, texts=False: 1)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(0)
    for i in range(30):
        letters = generator.choice(list("etaoin shrdlu"), size=int(generator.integers(0, 900)))
        (folder / f"{i:02}.txt").write_text("".join(letters))
    return folder


def built(folder: Path, out: Path, **options: object) -> build.Built:
    sources = [(list_sources([folder]), 1)]
    return build.build_index(sources, out, reader=Reader(encode), tokens=TOKENS, **options)  # type: ignore[arg-type]


def in_memory(documents: list[list[int]], **options: object) -> NgramIndex:
    options = {"vocab_size": 300, "fingerprint": "f00d", "name": "toy", "description": "", **options}
    return NgramIndex.build(documents, exclude=TOKENS.exclude, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [False, True])
def test_same_bytes_for_any_memory_and_any_number_of_threads(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    in_memory([encode([p.read_text()])[0] for p in sorted(texts.iterdir())], exact=exact).save(tmp_path / "memory")
    expected = (tmp_path / "memory").read_bytes()
    for threads, memory in ((1, None), (1, 1), (2, 1), (4, 20_000)):
        with monkeypatch.context() as patch:
            if memory is not None:
                patch.setattr(build, "memory_for_sorting", lambda _, texts=False, memory=memory: memory)
            result = built(texts, tmp_path / "out", threads=threads, exact=exact)
        assert (tmp_path / "out").read_bytes() == expected
        assert result.num_documents == 30
        assert (result.spilled_bytes > 0) == (memory is not None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["memory", "out"]


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_ngram_build as t
t.build.memory_for_sorting = lambda memory, texts=False: 1
seen = 0
def encode(texts):
    global seen
    seen += 1
    if seen == {stop}:
        print("ready", flush=True)
        time.sleep(60)
    return t.encode(texts)
import dartspec.ngram.corpus as corpus
corpus._BATCH_CHARS = 1000
sources = [(t.list_sources([{folder!r}]), 1)]
t.build.build_index(sources, {out!r}, reader=t.Reader(encode), tokens=t.TOKENS, threads={threads})
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_killed_build_goes_on_where_it_was(texts: Path, tmp_path: Path, tiny_buffers: None, threads: int) -> None:
    built(texts, tmp_path / "whole")
    out = tmp_path / "out"
    for stop in (4, 7):
        script = KILLED.format(
            tests=str(Path(__file__).parent), folder=str(texts), out=str(out), stop=stop, threads=threads
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            os.kill(process.pid, signal.SIGKILL)
    assert not out.exists()
    assert list((tmp_path / "out.building").glob("*.run"))
    with pytest.raises(DartspecError, match=r"order 3 .*expected 4"):
        built(texts, out, order=4)
    with pytest.raises(DartspecError, match="other text, options or tokenizer"):
        build.build_index([], out, reader=Reader(encode), tokens=TOKENS)
    result = built(texts, out, threads=threads)
    assert result.taken_up >= 2 * 1024
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    assert result.num_documents == 30
    assert not (tmp_path / "out.building").exists()


def test_answers_count_by_their_weight_and_ids_are_cut_at_excluded_tokens(tmp_path: Path, tiny_buffers: None) -> None:
    generator = np.random.default_rng(1)
    ids = generator.integers(0, 300, 5000)
    np.save(tmp_path / "a.npy", ids.astype(np.uint16))
    ids.astype("<u4").tofile(tmp_path / "b.bin")
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": [9], "response": [1, 2, 3, 1, 2, 3]}))
    reader = Reader(encode, overlap=2, clip=lambda answer: answer[:4])
    sources = [
        ([s], w)
        for s, w in zip(list_sources(tmp_path / n for n in ("c.jsonl", "a.npy", "b.bin")), (7, 1, 1), strict=True)
    ]
    result = build.build_index(sources, tmp_path / "out", reader=reader, tokens=TOKENS, exact=True)
    in_memory([[1, 2, 3, 1], ids.tolist(), ids.tolist()], weights=[7, 1, 1], exact=True).save(tmp_path / "twin")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "twin").read_bytes()
    assert result.num_tokens == 10_004


def test_long_rows_of_ids_are_counted_across_their_pieces(
    tmp_path: Path, tiny_buffers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dartspec.ngram.corpus._PIECE_IDS", 100)
    ids = np.random.default_rng(2).integers(0, 40, 1003)
    np.save(tmp_path / "a.npy", ids)
    for order in (2, 3, 5):
        reader = Reader(encode, overlap=order - 1)
        build.build_index(
            [(list_sources([tmp_path / "a.npy"]), 1)], tmp_path / "out", reader=reader, tokens=TOKENS, order=order
        )
        in_memory([ids.tolist()], order=order).save(tmp_path / "twin")
        assert (tmp_path / "out").read_bytes() == (tmp_path / "twin").read_bytes()


def test_too_little_memory_is_refused_with_what_is_needed(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DartspecError, match=r"--memory is 20M, the program itself takes \d+M: give at least \d+M"):
        built(texts, tmp_path / "out", memory=20 << 20)
    for text, expected in (("2G", 2 << 30), ("1.5M", 3 << 19), ("64 KiB", 1 << 16), ("99", 99)):
        assert build.parse_bytes(text) == expected
    with pytest.raises(DartspecError, match="'lots' is no amount of memory"):
        build.parse_bytes("lots")


DOCUMENTS = [np.random.default_rng(3).integers(0, 12, 200).tolist() for _ in range(4)]


def test_merged_indexes_and_shards_equal_one_build_of_all(tmp_path: Path, tiny_buffers: None) -> None:
    for i in range(2):
        in_memory(DOCUMENTS[i : i + 1], exact=True).save(tmp_path / f"{i}.ngram")
        count = build.count_shard(DOCUMENTS[2 + i : 3 + i], tmp_path / f"{i}.grams", tokens=TOKENS, order=3, memory=1)
        assert count == 200
    parts = [(tmp_path / "0.ngram", 1), (tmp_path / "1.ngram", 5), (tmp_path / "0.grams", 2), (tmp_path / "1.grams", 1)]
    result = build.join(parts, tmp_path / "out", exact=True, min_count=2, description="", threads=2)
    in_memory(DOCUMENTS, weights=[1, 5, 2, 1], exact=True, min_count=2).save(tmp_path / "twin")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "twin").read_bytes()
    assert result.index.info()["num_tokens"] == 9 * 200
    only = build.join([(tmp_path, 1)], tmp_path / "out", tokens=TOKENS, exact=True, description="")
    in_memory(DOCUMENTS[2:], exact=True).save(tmp_path / "twin")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "twin").read_bytes()
    assert only.index.info()["description"] == ""
    assert not list(tmp_path.glob("*.merging"))
    assert not list(tmp_path.glob("*.counting"))


def test_what_cannot_be_merged_is_refused(tmp_path: Path, tiny_buffers: None) -> None:
    in_memory(DOCUMENTS).save(tmp_path / "a.ngram")
    in_memory(DOCUMENTS, fingerprint="beef").save(tmp_path / "b.ngram")
    in_memory(DOCUMENTS, order=4).save(tmp_path / "c.ngram")
    build.count_shard(DOCUMENTS, tmp_path / "d.grams", tokens=replace(TOKENS, fingerprint="beef"), order=3, memory=1)
    (tmp_path / "e").mkdir()
    out = tmp_path / "out"
    for names, message in (
        (("a.ngram", "b.ngram"), "fingerprint beef.*has f00d"),
        (("a.ngram", "c.ngram"), "order 4.*has 3"),
        (("a.ngram", "d.grams"), "counted from other text, options or tokenizer"),
        (("d.grams",), "shards do not name their tokenizer"),
        (("e",), "holds no .grams file"),
    ):
        with pytest.raises(DartspecError, match=message):
            build.join([(tmp_path / n, 1) for n in names], out)
    assert not out.exists()
    assert not list(tmp_path.glob("*.merging"))


def test_pruning_equals_building_with_the_cut_off(tmp_path: Path) -> None:
    in_memory(DOCUMENTS, exact=True).save(tmp_path / "all")
    for exact in (True, False):
        in_memory(DOCUMENTS, exact=exact, min_count=4).save(tmp_path / "twin")
        build.prune(tmp_path / "all", tmp_path / "out", min_count=4, exact=exact)
        assert (tmp_path / "out").read_bytes() == (tmp_path / "twin").read_bytes()
    with pytest.raises(DartspecError, match="exact counts cannot be had from it again"):
        build.prune(tmp_path / "out", tmp_path / "again", exact=True)


def test_each_continuation_says_how_much_context_it_rests_on() -> None:
    index = in_memory([[1, 2, 3], [4, 2, 5]], exact=True)
    context = build.as_ids([1, 2])
    assert index.continuations([1, 2], 9) == [(3, 1.0), (5, 0.5)]
    assert _core.context_lengths(index.core, context, build.as_ids([3, 5, 4, -1])) == [2, 1, 0, 0]
    assert _core.context_lengths(index.core, build.as_ids([]), context) == [0, 0]


def test_estimated_counts_of_a_quantised_index_merge_close_to_the_exact_ones(tmp_path: Path) -> None:
    in_memory(DOCUMENTS).save(tmp_path / "coded")
    index = build.join([(tmp_path / "coded", 1)], tmp_path / "out", exact=True).index
    counts = twin.count_grams(DOCUMENTS, 3)
    for context in ([1], [2, 3], [5, 7]):
        for token, p in index.continuations(context, 12):
            assert p == pytest.approx(twin.probability(counts, 3, context, token), rel=0.1, abs=0.02)


def test_an_official_trie_is_converted_in_bounded_memory(tmp_path: Path, tiny_buffers: None) -> None:
    trie = tmp_path / "small.trie"
    trie.write_bytes(lzma.decompress((VECTORS / "small.trie.xz").read_bytes()))
    qwen = build.Tokens(151_936, "f00d", "Qwen3")
    stages = set()
    result = convert_trie(
        trie, tmp_path / "out", tokens=qwen, description="", threads=2, watch=lambda step: stages.add(step.stage)
    )
    import_trie(trie, vocab_size=151_936, fingerprint="f00d", name="Qwen3", description="").save(tmp_path / "twin")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "twin").read_bytes()
    assert result.index.num_nodes == 97_620
    assert stages <= {"reading", "merging", "writing"}
    with pytest.raises(DartspecError, match="outside the vocabulary of 300"):
        convert_trie(trie, tmp_path / "out", tokens=TOKENS, description="")
    with pytest.raises(DartspecError, match="cannot open the trie"):
        convert_trie(tmp_path / "none", tmp_path / "out", tokens=TOKENS, description="")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "small.trie", "twin"]
