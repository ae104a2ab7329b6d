"""The tree search: bit-equal to its plain twin, closed whatever the ties, equal to the official program's answers."""

from __future__ import annotations

import lzma
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dartspec import _core
from dartspec import tree as T
from dartspec.errors import DartspecError
from dartspec.interop.official import import_trie
from dartspec.lattice import SearchConfig, build_tree, build_trees
from dartspec.ngram import NgramIndex
from dartspec.types import TokenTree
from reference import search as twin
from reference.ngram import count_grams

VECTORS = Path(__file__).parent / "data" / "official_vectors"
NONE: frozenset[int] = frozenset()


def toy_index(exact: bool, order: int = 3, documents: object = None) -> NgramIndex:
    generator = np.random.default_rng(5)
    return NgramIndex.build(
        documents or [generator.integers(0, 6, 200).tolist()],  # type: ignore[arg-type]
        order=order, vocab_size=8, fingerprint="f", name="toy", description="toy", exact=exact,
    )  # fmt: skip


INDEXES = [None, *(toy_index(exact, order) for exact in (True, False) for order in (2, 3, 4))]

# Few values, so that ties, saturated rows, duplicates and unusable cells are common.
cell = st.sampled_from([0.0, 0.0, -0.5, -0.5, -1.0, -3.0, -40.0, -200.0, float("nan"), float("-inf"), float("inf")])


@settings(max_examples=400, deadline=None)
@given(
    d=st.integers(0, 4),
    k=st.integers(0, 5),
    beam=st.integers(1, 4),
    budget=st.integers(0, 25),
    index=st.sampled_from(INDEXES),
    eos_ids=st.frozensets(st.integers(0, 7), max_size=2),
    base=st.sampled_from([SearchConfig.paper(), SearchConfig.official()]),
    eps=st.sampled_from([1e-10, 0.5]),  # with 0.5 a step can raise the score, so children can outscore parents
    top_k=st.sampled_from([25, 2]),
    backoff=st.sampled_from([1.0, 1.0, 0.4]),
    data=st.data(),
)
def test_tree_is_bit_equal_to_the_plain_twin(
    d: int,
    k: int,
    beam: int,
    budget: int,
    index: NgramIndex | None,
    eos_ids: frozenset[int],
    base: SearchConfig,
    eps: float,
    top_k: int,
    backoff: float,
    data: st.DataObject,
) -> None:
    config = replace(base, beam=beam, eps=eps, top_k=top_k, backoff=backoff)
    log_probs = torch.tensor([[data.draw(cell) for _ in range(k)] for _ in range(d)]).reshape(d, k).float()
    tokens = torch.tensor([[data.draw(st.integers(-1, 7)) for _ in range(k)] for _ in range(d)]).reshape(d, k).int()
    context = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))

    tree = build_tree(context[-1], log_probs, tokens, context, budget, index, config, eos_ids)

    T.check(tree)
    g = None if index is None else lambda path, token: float(index.probabilities(path, [token], backoff=backoff)[0])
    expected = twin.search(context[-1], log_probs.tolist(), tokens.tolist(), context, budget, g, config, eos_ids)
    assert tree.tokens.tolist() == expected[0]
    assert tree.parents.tolist() == expected[1]
    assert tree.scores.tolist() == np.float32(expected[2]).tolist()

    assert tree.num_drafts <= budget
    assert (tree.scores.diff() <= 0).all()
    for node, children in enumerate(T.children(tree)):
        assert len({tree.tokens[c].item() for c in children}) == len(children)
        assert not (children and tree.tokens[node].item() in eos_ids)


@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(st.integers(0, 7), max_size=30),
    index=st.sampled_from(INDEXES),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    backoff=st.sampled_from([1.0, 0.4]),
    seed=st.integers(0, 100),
)
def test_a_texts_own_counts_are_mixed_in_as_the_plain_twin_says(
    text: list[int], index: NgramIndex | None, weight: float, backoff: float, seed: int
) -> None:
    order = 3
    config = replace(SearchConfig.paper(), text_weight=weight, backoff=backoff, beam=4)
    live = _core.LiveCounts(order, 0, np.empty(0, dtype=np.int32))
    live.add(np.array(text, dtype=np.int32), 0)
    counts = count_grams([text], order)

    def g(path: Sequence[int], token: int) -> float:
        own = 0.0
        for length in range(min(order - 1, len(path)), 0, -1):
            prefix = tuple(path[len(path) - length :])
            if (*prefix, token) in counts:
                followers = sum(counts.get((*prefix, t), 0) for t in range(8))
                own = backoff ** (order - 1 - length) * (counts[*prefix, token] / followers)
                break
        if index is None:
            return own
        return (1.0 - weight) * float(index.probabilities(path, [token], backoff=backoff)[0]) + weight * own

    log_probs, tokens = lattice(seed, d=3, k=6)
    context = [*text, 5]
    tree = build_tree(5, log_probs, tokens, context, 40, index, config, frozenset({4}), live)
    expected = twin.search(5, log_probs.tolist(), tokens.tolist(), context, 40, g, config, frozenset({4}))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == expected[:2]
    assert tree.scores.tolist() == np.float32(expected[2]).tolist()
    (batched,) = build_trees(
        log_probs[None], tokens[None], [context], [40], index, config, frozenset({4}), texts=[live]
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(tree, batched, strict=True))


@pytest.mark.parametrize("vocab", [5000, 70_000])  # tokens of 2 and of 4 bytes
@pytest.mark.parametrize("exact", [True, False])
def test_contexts_with_thousands_of_followers_equal_the_plain_twin(vocab: int, exact: bool) -> None:
    generator = np.random.default_rng(3)
    # 0 is followed by most tokens, (0, 0) by some; 25 columns are no multiple of the searches made at once
    documents = (
        [[0, 0, t] for t in range(1, 5000, 3)] + [[0, t] for t in range(1, 5000, 2)] + [[t, 0] for t in range(50)]
    )
    index = NgramIndex.build(documents, vocab_size=vocab, fingerprint="", name="", description="", exact=exact)
    assert index.info()["num_nodes_by_level"][1] > 3000
    for k in (1, 3, 25):
        ids = [[0, *generator.integers(0, 5000, k - 1).tolist()] for _ in range(3)]
        tokens = torch.tensor(ids, dtype=torch.int32)
        log_probs = torch.randn(3, k, generator=torch.Generator().manual_seed(k)).log_softmax(-1)
        config = SearchConfig.paper()
        tree = build_tree(0, log_probs, tokens, [0, 0], 50, index, config, NONE)
        expected = twin.search(
            0,
            log_probs.tolist(),
            tokens.tolist(),
            [0, 0],
            50,
            lambda path, token: float(index.probabilities(path, [token])[0]),
            config,
            NONE,
        )
        assert (tree.tokens.tolist(), tree.parents.tolist()) == expected[:2]
        assert tree.scores.tolist() == np.float32(expected[2]).tolist()


def lattice(seed: int, d: int = 8, k: int = 25, vocab: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    log_probs, _ = torch.randn(d, k, generator=generator).mul(3).log_softmax(-1).sort(descending=True)
    return log_probs, torch.randint(0, vocab, (d, k), generator=generator, dtype=torch.int32)


def test_a_smaller_budget_gives_the_first_nodes_of_the_larger_tree() -> None:
    log_probs, tokens = lattice(1)
    full = build_tree(3, log_probs, tokens, [2, 3], 59, INDEXES[1], SearchConfig(), NONE)
    assert full.num_drafts == 59
    for budget in (0, 1, 7, 58):
        small = build_tree(3, log_probs, tokens, [2, 3], budget, INDEXES[1], SearchConfig(), NONE)
        assert all(torch.equal(a, b[: budget + 1]) for a, b in zip(small, full, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(small, T.truncate(full, budget), strict=True))


@pytest.mark.parametrize("threads", [1, 3])
def test_many_sequences_a_call_give_the_trees_of_one_by_one(threads: int) -> None:
    generator = np.random.default_rng(7)
    for index in (None, INDEXES[2], INDEXES[-1]):
        cases = [lattice(s) for s in range(7)]
        contexts = [generator.integers(0, 8, 1 + s).tolist() for s in range(7)]
        budgets = [0, 5, 59, 30, 1, 2000, 7]
        config, eos = SearchConfig.paper(), frozenset({4})
        log_probs, tokens = (torch.stack([c[i] for c in cases]) for i in (0, 1))
        found = build_trees(log_probs, tokens, contexts, budgets, index, config, eos, threads=threads)
        for case, context, budget, tree in zip(cases, contexts, budgets, found, strict=True):
            alone = build_tree(context[-1], *case, context, budget, index, config, eos)
            assert all(torch.equal(a, b) for a, b in zip(tree, alone, strict=True))
    assert build_trees(torch.empty(0, 8, 25), torch.empty(0, 8, 25, dtype=torch.int32), [], [], None, config, eos) == []


def test_badly_matched_batches_are_refused() -> None:
    log_probs, tokens = (x[None] for x in lattice(0))
    for contexts, budgets, message in (
        ([], [5], "0 contexts for 1 lattices"),
        ([[1]], [5, 5], "2 budgets for 1 lattices"),
        ([[]], [5], "context 0 is empty"),
        ([[1]], [-1], "budget is -1"),
    ):
        with pytest.raises(DartspecError, match=message):
            build_trees(log_probs, tokens, contexts, budgets, None, SearchConfig(), NONE)  # type: ignore[arg-type]


def test_a_search_leaves_nothing_behind_for_the_next_and_threads_do_not_meet() -> None:
    cases = [(lattice(s, d=1 + s % 8, k=1 + s % 25), INDEXES[s % len(INDEXES)]) for s in range(40)]

    def run() -> list[TokenTree]:
        return [build_tree(1, *lat, [0, 1], 30, index, SearchConfig(), frozenset({4})) for lat, index in cases]

    first = run()
    results: list[list[TokenTree]] = []
    threads = [threading.Thread(target=lambda: results.append(run())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for again in (run(), *results):
        assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))


def test_red_apple_blue_berry() -> None:
    """Marginals put half their mass on pairs that never occur; a continuity model ranks the two real pairs first."""
    red, blue, apple, berry = 1, 2, 3, 4
    index = toy_index(True, documents=[[red, apple]] * 5 + [[blue, berry]] * 5)
    half = torch.full((2, 2), 0.5).log()
    tokens = torch.tensor([[red, blue], [apple, berry]], dtype=torch.int32)
    for config in (SearchConfig(), SearchConfig.paper(), SearchConfig.official()):
        tree = build_tree(0, half, tokens, [0], 4, index, config, NONE)
        pairs = {tuple(tree.tokens[p].item() for p in T.path_to(tree, n)[1:]) for n in range(5)}
        assert pairs == {(), (red,), (blue,), (red, apple), (blue, berry)}
        blind = build_tree(0, half, tokens, [0], 4, None, config, NONE)
        pairs = {tuple(blind.tokens[p].item() for p in T.path_to(blind, n)[1:]) for n in range(5)}
        assert pairs == {(), (red,), (blue,), (red, apple), (red, berry)}


def test_presets() -> None:
    paper, official, shipped = SearchConfig.paper(), SearchConfig.official(), SearchConfig()
    assert (paper.budget, paper.ngram_at_level0, paper.softmax_over_kept) == (59, True, False)
    assert (official.budget, official.ngram_at_level0, official.softmax_over_kept) == (60, False, True)
    assert shipped == replace(official, budget=59)
    for config in (paper, official):
        assert (config.top_k, config.beam, config.level_exponent) == (25, 20, 0.7)
        assert (config.logit_decay, config.ngram_weight, config.eps) == (0.9, 0.5, 1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"top_k": 0}, "top_k is 0"), ({"beam": 0}, "beam is 0"), ({"budget": -1}, "budget is -1"),
     ({"beam": 2.0}, "beam is 2.0"),
     ({"eps": 0.0}, "eps is 0"), ({"logit_decay": 0.0}, "logit_decay is 0"), ({"ngram_weight": -1.0}, "not negative"),
     ({"backoff": 0.0}, "backoff is 0"), ({"text_weight": 1.5}, "text_weight is 1.5"),
     ({"level_exponent": float("nan")}, "finite number"), ({"ngram_at_level0": 1}, "true or false")],
)  # fmt: skip
def test_bad_config_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(DartspecError, match=message):
        SearchConfig(**options)  # type: ignore[arg-type]


def test_bad_lattices_are_refused() -> None:
    log_probs, tokens = lattice(0)
    for args, message in (
        ((log_probs.double(), tokens, [1], 5), "torch.float64"),
        ((log_probs, tokens.long(), [1], 5), "torch.int64"),
        ((log_probs[:3], tokens, [1], 5), r"\(3, 25\)"),
        ((log_probs, tokens, [1], -1), "budget is -1"),
        ((log_probs, tokens, [], 5), "expected the root, 1"),
        ((log_probs, tokens, [1, 2], 5), "expected the root, 1"),
    ):
        with pytest.raises(DartspecError, match=message):
            build_tree(1, *args, None, SearchConfig(), NONE)  # type: ignore[arg-type]


# --- the official program's answers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def official_index(tmp_path_factory: pytest.TempPathFactory) -> NgramIndex:
    path = tmp_path_factory.mktemp("official") / "small.trie"
    path.write_bytes(lzma.decompress((VECTORS / "small.trie.xz").read_bytes()))
    return import_trie(path, vocab_size=151_936, fingerprint="", name="Qwen3", description="test vectors")


def paths_of(tree: TokenTree) -> dict[tuple[int, ...], float]:
    tokens = tree.tokens.tolist()
    return {tuple(tokens[i] for i in T.path_to(tree, n)[1:]): float(tree.scores[n]) for n in range(1, len(tokens))}


def test_official_preset_gives_the_official_path_sets(official_index: NgramIndex) -> None:
    cases, trees = np.load(VECTORS / "cases.npz"), np.load(VECTORS / "trees.npz")
    assert official_index.num_nodes == 97_621 - 1  # ours does not count the root
    for i in range(200):
        prompt = cases["prompt"][i].tolist()
        log_probs = torch.from_numpy(np.log(cases["probs"][i]))
        tokens = torch.from_numpy(cases["tokens"][i])
        wide = paths_of(
            build_tree(prompt[-1], log_probs, tokens, prompt, 80, official_index, SearchConfig.official(), NONE)
        )
        ours = list(wide)[:59]
        mask, draft = trees["mask"][i], trees["draft_tokens"][i]
        order = np.argsort(trees["positions"][i], kind="stable")
        theirs = {tuple(int(draft[j]) for j in order if mask[n, j] and j != 0) for n in range(1, 60)}
        cut = wide[ours[-1]]
        for path in theirs ^ set(ours):  # only nodes that tie with the last one may differ (their float32 rounds)
            assert path in wide
            assert abs(wide[path] - cut) < 1e-5 * abs(cut)


def test_official_trie_that_is_cut_off_or_foreign_is_refused(tmp_path: Path) -> None:
    data = lzma.decompress((VECTORS / "small.trie.xz").read_bytes())
    path = tmp_path / "trie"
    for bad, message in (
        (b"", "0 bytes"),
        (data[: len(data) // 2], "cut off"),
        (data[:-1], "cut off"),
        (data + b"\0", "damaged"),
        (b"GGUF" + data[4:], "order"),
        (data[:8] + b"\xff" * 8 + data[16:], "announces"),
    ):
        path.write_bytes(bad)
        with pytest.raises(DartspecError, match=message):
            import_trie(path, vocab_size=151_936, fingerprint="", name="", description="")
