"""The n-gram index: equal to its plain twin, the same after save and open, and refusing whatever is not whole."""

from __future__ import annotations

import multiprocessing
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dartspec import _core
from dartspec.errors import DartspecError
from dartspec.ngram import NgramIndex
from reference import ngram as twin

VOCAB = 6
documents_of_ids = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=12), max_size=5)


def build(documents: list[list[int]], **options: object) -> NgramIndex:
    settings: dict[str, object] = {
        "vocab_size": VOCAB, "fingerprint": "f00d", "name": "toy", "description": "a toy", **options
    }  # fmt: skip
    return NgramIndex.build(documents, **settings)  # type: ignore[arg-type]


def all_contexts(order: int) -> list[tuple[int, ...]]:
    contexts: list[tuple[int, ...]] = [()]
    for _ in range(order):
        contexts += [(*c, t) for c in contexts for t in range(VOCAB) if (*c, t) not in contexts]
    return contexts[:300]


@settings(max_examples=60, deadline=None)
@given(
    documents=documents_of_ids,
    order=st.integers(2, 5),
    exclude=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    min_count=st.integers(1, 3),
    exact=st.booleans(),
    wide=st.booleans(),
    data=st.data(),
)
def test_counts_and_back_off_equal_the_plain_twin(
    documents: list[list[int]],
    order: int,
    exclude: frozenset[int],
    min_count: int,
    exact: bool,
    wide: bool,
    data: st.DataObject,
) -> None:
    weights = [data.draw(st.integers(1, 3)) for _ in documents]
    counts = twin.count_grams(documents, order, exclude=exclude, weights=weights, min_count=min_count)
    vocab = 70_000 if wide else VOCAB  # a wide vocabulary stores tokens in 4 bytes, and 5-gram keys in 128 bits
    index = build(
        documents,
        order=order,
        exact=exact,
        min_count=min_count,
        exclude=exclude,
        weights=weights,
        vocab_size=vocab,
    )
    index.verify()
    assert index.info()["num_nodes_by_level"] == [
        sum(len(gram) == level for gram in counts) for level in range(1, order + 1)
    ]
    context = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=order + 1))
    for at in (context, *all_contexts(2)):
        expected = [twin.probability(counts, order, at, token) for token in range(VOCAB)]
        found = index.probabilities(at, range(VOCAB))
        # so few distinct values that the 8-bit form holds each as float32
        np.testing.assert_allclose(found, expected, rtol=1e-12 if exact else 1e-6, atol=0)
        weaker = [twin.probability(counts, order, at, token, 0.4) for token in range(VOCAB)]
        np.testing.assert_allclose(
            index.probabilities(at, range(VOCAB), backoff=0.4), weaker, rtol=1e-12 if exact else 1e-6, atol=0
        )
        if exact:
            assert index.continuations(at, 4) == twin.continuations(counts, order, at, 4)


def test_no_gram_crosses_a_document_or_an_excluded_token() -> None:
    index = build([[0, 1], [2, 3, 5, 4]], exact=True, exclude=frozenset({5}))
    assert index.continuations([1], 9) == []
    assert index.continuations([3], 9) == []
    assert index.continuations([0], 9) == [(1, 1.0)]
    assert index.continuations([2], 9) == [(3, 1.0)]
    assert 5 not in {t for c in range(VOCAB) for t, _ in index.continuations([c], 9)}


def test_unseen_unknown_and_empty_contexts_say_nothing() -> None:
    index = build([[0, 1, 2]])
    assert index.continuations([], 5) == []
    assert index.continuations([5, 5], 5) == []
    assert index.continuations([1 << 30], 5) == []
    assert index.probabilities([0, 1], [2, 5, -1, 1 << 30]).tolist() == [1.0, 0.0, 0.0, 0.0]
    empty = build([])
    assert empty.num_nodes == 0
    assert empty.continuations([1, 2], 5) == []


def test_many_contexts_a_call_are_answered_as_one_by_one() -> None:
    generator = np.random.default_rng(4)
    documents = [(generator.zipf(1.4, 4000) % 300).tolist() for _ in range(10)]
    for order in (2, 3, 5):
        for exact in (True, False):
            index = build(documents, order=order, vocab_size=300, exact=exact)
            contexts = (generator.zipf(1.4, (70, 4)) % 300).astype(np.int32)
            contexts[generator.random((70, 4)).cumsum(axis=1) < 0.8] = -1  # shorter ones
            shared = generator.integers(-1, 300, (1, 25)).astype(np.int32)
            own = generator.integers(-1, 300, (70, 25)).astype(np.int32)
            for tokens in (shared, own):
                found = index.score(contexts, tokens)
                for i, context in enumerate(contexts):
                    state = [t for t in context.tolist() if t >= 0]
                    seen = dict(index.continuations(state, 300))
                    row = tokens[0] if len(tokens) == 1 else tokens[i]
                    assert found[i].tolist() == [seen.get(t, 0.0) for t in row.tolist()]


@pytest.mark.parametrize("options", [{"preload": True}, {"huge_pages": True}, {"interleave": True, "preload": True}])
def test_however_it_is_brought_into_memory_it_says_the_same(tmp_path: Path, options: dict[str, bool]) -> None:
    built = build([[0, 1, 2, 3], [0, 1, 4]])
    built.save(tmp_path / "i")
    opened = NgramIndex.open(tmp_path / "i", verify=True, **options)  # type: ignore[arg-type]
    assert opened.continuations([0, 1], 9) == built.continuations([0, 1], 9)


def test_8_bit_log_probabilities_stay_within_the_stated_error() -> None:
    generator = np.random.default_rng(1)
    documents = [(generator.zipf(1.3, 3000) % 500).astype(np.int32) for _ in range(20)]
    exact, coded = (build(documents, vocab_size=500, exact=e) for e in (True, False))  # type: ignore[arg-type]
    bound = coded.info()["log_prob_error"]
    assert 0 < bound < 0.05
    worst = 0.0
    for a, b in generator.integers(0, 40, (200, 2)):
        p, q = (i.probabilities([a, b], np.arange(500)) for i in (exact, coded))
        assert ((p > 0) == (q > 0)).all()
        worst = max(worst, float(np.abs(np.log(p[p > 0]) - np.log(q[p > 0])).max(initial=0)))
    assert 0 < worst <= bound + 1e-6


def test_saved_and_mapped_is_the_same_index(tmp_path: Path) -> None:
    built = build([[0, 1, 2, 3], [0, 1, 4]])
    with pytest.raises(DartspecError, match="save it first"):
        pickle.dumps(built)
    path = tmp_path / "toy.ngram"
    built.save(path)
    assert list(tmp_path.iterdir()) == [path]  # nothing left aside
    opened = NgramIndex.open(path, verify=True, expect_fingerprint="f00d")
    assert opened.info() == built.info()
    assert opened.info()["path"] == str(path)
    assert opened.continuations([0, 1], 9) == built.continuations([0, 1], 9)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(NgramIndex.continuations, (opened, [0, 1], 9)) == built.continuations([0, 1], 9)


def test_same_documents_same_bytes_whatever_their_order(tmp_path: Path) -> None:
    documents = [[0, 1, 2, 3], [0, 1, 4], [2, 2, 2]]
    for name, docs in (("a", documents), ("b", documents[::-1])):
        build(docs).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_wrong_tokenizer_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    build([[0, 1]]).save(tmp_path / "i")
    with pytest.raises(DartspecError, match=r"fingerprint is f00d .*toy.* has beef.*rebuild"):
        NgramIndex.open(tmp_path / "i", expect_fingerprint="beef")


@pytest.mark.parametrize(
    ("options", "documents", "message"),
    [
        ({"order": 1}, [], "order is 1, expected 2 to 5"),
        ({"order": 6}, [], "order is 6, expected 2 to 5"),
        ({"vocab_size": (1 << 24) + 1}, [], "vocab_size is 16777217, expected 1 to 16777216"),
        ({}, [[0, 6]], r"token 6 \(document 0\) is outside the vocabulary of 6"),
        ({}, [[0], [-1]], r"token -1 \(document 1\)"),
        ({}, [[0.5]], "float64"),
        ({}, [[1 << 40]], "does not fit 31 bits"),
        ({"min_count": 0}, [], "min_count is 0"),
        ({"exclude": frozenset({9})}, [], "token 9"),
        ({"weights": [1]}, [[0], [1]], "as many weights as documents"),
        ({"weights": [0]}, [[0]], "weight is 0"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    options: dict[str, object], documents: list[list[int]], message: str
) -> None:
    with pytest.raises(DartspecError, match=message):
        build(documents, **options)


def test_counts_made_elsewhere_give_the_same_index() -> None:
    documents = [[0, 1, 2], [0, 1], [0, 3, 3, 3]]
    passes = [
        [0, 1, 2],
        [1, 2, -1],
        [2, -1, -1],
        [0, 1, -1],
        [1, -1, -1],
        [0, 3, 3],
        [3, 3, 3],
        [3, 3, -1],
        [3, -1, -1],
    ]
    index = NgramIndex.from_counts(
        np.array(passes), np.ones(len(passes)), vocab_size=VOCAB, fingerprint="f00d", name="toy", description="a toy"
    )  # fmt: skip
    assert index.core.info() == build(documents, exact=True).core.info()
    for context in all_contexts(2):
        assert index.continuations(context, 9) == build(documents, exact=True).continuations(context, 9)
    for grams, message in (([[-1, 0, 0]], "gap or no token"), ([[0, -1, 0]], "gap"), ([[0, 9, 0]], "token 9")):
        with pytest.raises(DartspecError, match=message):
            NgramIndex.from_counts(
                np.array(grams), np.ones(1), vocab_size=VOCAB, fingerprint="", name="", description=""
            )


# --- files that are not whole ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["quantised", "exact", "wide"])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    generator = np.random.default_rng(0)
    vocab = 70_000 if request.param == "wide" else 40
    documents = [generator.integers(0, 30, 60).tolist() for _ in range(6)]
    path = tmp_path_factory.mktemp("index") / "i"
    build(documents, vocab_size=vocab, exact=request.param == "exact").save(path)
    return path.read_bytes()


def sections(image: bytes) -> list[tuple[int, int]]:
    """(offset, bytes) of each section, read as docs/index-format.md says."""
    (count,) = struct.unpack_from("<I", image, 124)
    return [struct.unpack_from("<QQ", image, 152 + 32 * i + 8) for i in range(count)]  # type: ignore[misc]


def query_everything(index: NgramIndex) -> None:
    for a in range(31):
        found = index.probabilities([a, (a * 7) % 31], range(-1, 42))
        assert ((found >= 0) & (found <= 1)).all()
        index.continuations([(a * 3) % 31, a], 50)


def test_truncation_anywhere_is_refused_at_open(image: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    boundaries = {offset + part for offset, size in sections(image) for part in (0, 1, size - 1, size)}
    for length in sorted({0, 1, 7, 8, 151, 152, 200, len(image) - 1, *boundaries} - {len(image)}):
        path.write_bytes(image[:length])
        with pytest.raises(DartspecError, match=r"bytes"):
            NgramIndex.open(path)
    path.write_bytes(image + b"\0")
    with pytest.raises(DartspecError, match="file_bytes"):
        NgramIndex.open(path)
    path.write_bytes(image)
    NgramIndex.open(path, verify=True)


def test_every_flipped_bit_of_the_header_is_refused_at_open(image: bytes) -> None:
    (header_bytes,) = struct.unpack_from("<I", image, 16)
    for bit in range(header_bytes * 8):
        damaged = bytearray(image)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(DartspecError):
            _core.NgramIndex.from_bytes(bytes(damaged))


def test_a_flipped_bit_in_any_section_or_gap_is_found_by_verify_and_never_crashes(image: bytes) -> None:
    generator = np.random.default_rng(2)
    (header_bytes,) = struct.unpack_from("<I", image, 16)
    offsets = [offset + at for offset, size in sections(image) for at in generator.integers(0, size, 30)]
    offsets += generator.integers(header_bytes, len(image), 100).tolist()
    for at in offsets:
        damaged = bytearray(image)
        damaged[at] ^= 1 << int(generator.integers(0, 8))
        index = NgramIndex(_core.NgramIndex.from_bytes(bytes(damaged)), None)
        query_everything(index)
        with pytest.raises(DartspecError, match="damaged"):
            index.verify()


def test_offsets_that_point_anywhere_are_read_within_bounds(image: bytes) -> None:
    generator = np.random.default_rng(3)
    for offset, size in sections(image):
        damaged = bytearray(image)
        damaged[offset : offset + size] = generator.bytes(size)
        index = NgramIndex(_core.NgramIndex.from_bytes(bytes(damaged)), None)
        for a in range(31):
            found = index.probabilities([a, (a * 7) % 31], range(-1, 42))
            assert ((found >= 0) & (found <= 1)).all()
            assert all(0 <= p <= 1 for _, p in index.continuations([(a * 3) % 31, a], 50))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGUF", 'magic is "GGUFNGRM", expected "DARTNGRM"'),
        (12, bytes([1, 2, 3, 4]), "byte_order is 0x04030201, expected 0x01020304"),
        (8, struct.pack("<I", 9), "version is 9, this program reads 2"),
        (16, struct.pack("<I", 1 << 30), "header_bytes is 1073741824"),
    ],
)
def test_foreign_files_are_refused_with_the_field_and_both_values(
    image: bytes, at: int, value: bytes, message: str
) -> None:
    damaged = bytearray(image)
    damaged[at : at + len(value)] = value
    with pytest.raises(DartspecError, match=message):
        _core.NgramIndex.from_bytes(bytes(damaged))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DartspecError, match="No such file"):
        NgramIndex.open(tmp_path / "none")
    with pytest.raises(DartspecError, match="regular file"):
        NgramIndex.open(tmp_path)
    (tmp_path / "text").write_text("plain text, longer than a header would be " * 10)
    with pytest.raises(DartspecError, match="magic is"):
        NgramIndex.open(tmp_path / "text")
    with pytest.raises(DartspecError, match="cannot write the index"):
        build([[0]]).save(tmp_path / "no" / "folder")
