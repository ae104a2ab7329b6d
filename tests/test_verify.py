"""`verify` on arbitrary trees, against its plain twin: the longest beginning of the plain text that the tree holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dartspec.device import TapeRecorder
from dartspec.errors import DartspecError
from dartspec.sampling import Sampler, _filtered_together, filter_logits
from dartspec.tree import from_chain, root_only
from dartspec.types import SamplingParams, Scores, TokenTree
from dartspec.verify import Together, verify

V = 6
HISTORY = [3, 1, 4]


@st.composite
def token_trees(draw: st.DrawFn, max_nodes: int = 12, vocab: int = V) -> TokenTree:
    """Any tree at all: equal siblings, deep chains, only a root; its root is HISTORY's last token."""
    n = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]
    tokens = [HISTORY[-1], *draw(st.lists(st.integers(0, vocab - 1), min_size=n - 1, max_size=n - 1))]
    return TokenTree(torch.tensor(tokens, dtype=torch.int32), torch.tensor(parents, dtype=torch.int32), torch.zeros(n))


def row_of(path: list[int]) -> torch.Tensor:
    """A made-up target: (V,) logits that depend on every token of the path and on their order."""
    generator = torch.Generator().manual_seed(hash(tuple(path)) % 2**31)
    return 2 * torch.randn(V, generator=generator)


def scores_of(tree: TokenTree, history: list[int]) -> tuple[Scores, list[list[int]]]:
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*paths[parent], token] if parent >= 0 else [])
    return Scores(torch.stack([row_of(history + p) for p in paths]), None), paths


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1, seed=1),
    SamplingParams(temperature=0.7, top_k=4, top_p=0.95, min_p=0.02, seed=2),
    SamplingParams(temperature=1.3, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, seed=3),
    SamplingParams(logit_bias={2: 1.5}, frequency_penalty=1.0),
]


@settings(max_examples=150, deadline=None)
@given(tree=token_trees(), params=st.sampled_from(PARAMS), seed=st.integers(0, 2**64 - 1))
def test_the_committed_tokens_are_the_plain_text(tree: TokenTree, params: SamplingParams, seed: int) -> None:
    sampler = Sampler(SamplingParams(**{**vars(params), "seed": seed}), V, 2)
    scores, paths = scores_of(tree, HISTORY)
    verdict = verify(scores, tree, sampler, HISTORY)
    plain: list[int] = []
    for _ in verdict.path:
        plain.append(sampler.pick(row_of(HISTORY + plain), HISTORY + plain))
    assert [*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus] == plain
    assert verdict.path[0] == 0
    assert all(tree.parents[b] == a for a, b in zip(verdict.path, verdict.path[1:], strict=False))
    assert verdict.num_accepted == len(plain) - 1
    # the walk goes as far as the tree allows: past its last node no child holds the bonus token
    children = [int(tree.tokens[i]) for i in range(1, len(paths)) if int(tree.parents[i]) == verdict.path[-1]]
    assert verdict.bonus not in children
    if len({tuple(p) for p in paths}) == len(paths):  # no equal siblings: nothing longer was drafted
        assert plain not in paths
    # picks: those asked for and no others
    asked = {node: pick for node, pick in zip(verdict.path, plain, strict=True)}
    assert verdict.picks.dtype == torch.int32
    assert verdict.picks.tolist() == [asked.get(i, -1) for i in range(len(paths))]


TOGETHER = [
    *PARAMS,
    SamplingParams(temperature=1, top_k=3),
    SamplingParams(temperature=1, top_p=0.7),
    SamplingParams(temperature=2, min_p=0.2, logit_bias={0: -1.0, 4: 0.5}),
]


@settings(max_examples=100, deadline=None)
@given(
    trees=st.lists(token_trees(), min_size=1, max_size=5),
    params=st.lists(st.sampled_from(TOGETHER), min_size=5, max_size=5),
    seed=st.integers(0, 2**64 - 1),
    most_rows=st.sampled_from([1, 9, 10**6]),
)
def test_all_at_once_is_one_by_one(
    trees: list[TokenTree], params: list[SamplingParams], seed: int, most_rows: int
) -> None:
    """What an accelerator does is what the CPU does: paths, bonus tokens, and the pick at every node."""
    samplers = [Sampler(SamplingParams(**{**vars(p), "seed": seed}), V - 1, 2, i) for i, p in enumerate(params)]
    samplers = samplers[: len(trees)]
    scored = [scores_of(tree, HISTORY) for tree in trees]
    for recorder in (None, TapeRecorder()):
        together = Together(V - 1, torch.device("cpu"), recorder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dartspec.verify.MOST_ROW_BYTES", 4 * (V - 1) * most_rows)
            verdicts = together.verify([s for s, _ in scored], trees, samplers, [len(HISTORY)] * len(trees))
        for tree, (scores, paths), sampler, verdict in zip(trees, scored, samplers, verdicts, strict=True):
            if sampler.params.uses_history:
                assert verdict is None
                continue
            want = verify(scores, tree, sampler, HISTORY)
            assert verdict is not None
            assert (verdict.path, verdict.bonus) == (want.path, want.bonus)
            assert verdict.picks.dtype == torch.int32
            rows = zip(scores.logits, paths, strict=True)
            assert verdict.picks.tolist() == [sampler.pick(row, HISTORY, path) for row, path in rows]


def test_filters_in_float64_are_those_in_float32() -> None:
    """What a GPU does: the same survivors, but for sums that meet the edge to the last bit."""
    torch.manual_seed(4)
    rows = 3 * torch.randn(40, 300)
    rows[:, 7] = rows[:, 11]
    params = [
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.7, min_p=0.01),
        SamplingParams(),
        SamplingParams(temperature=1.0, min_p=0.05),
    ]
    counts = [10, 12, 8, 10]
    here, there = (_filtered_together(rows, params, counts, wide) for wide in (torch.float32, torch.float64))
    assert torch.equal(here, there)
    own = [
        filter_logits(row, p)
        for row, p in zip(rows, [p for p, n in zip(params, counts, strict=True) for _ in range(n)], strict=True)
    ]
    assert torch.equal(here, torch.stack(own))
    assert 3 < float((here > -torch.inf).sum(1).float().median()) < 20  # they did cut


def test_rows_without_a_token_are_left_to_the_one_that_says_so() -> None:
    """A row that is never walked may hold anything; one that is walked leaves the verdict to `verify`, which raises."""
    tree = from_chain([HISTORY[-1], 2, 0])
    logits = torch.zeros(3, V)
    logits[0, 2] = logits[1, 4] = 5.0
    logits[2] = torch.nan
    sampler = Sampler(SamplingParams(), V, 2)
    together = Together(V, torch.device("cpu"))
    (verdict,) = together.verify([Scores(logits, None)], [tree], [sampler], [3])
    assert verdict is not None
    assert (verdict.path, verdict.bonus, verdict.picks.tolist()) == ([0, 1], 4, [2, 4, -1])
    logits[1] = -torch.inf
    assert together.verify([Scores(logits, None)], [tree], [sampler], [3]) == [None]
    with pytest.raises(DartspecError, match="no token can follow"):
        verify(Scores(logits, None), tree, sampler, HISTORY)


def test_ties_go_to_the_lowest_id_in_every_precision() -> None:
    logits = torch.zeros(4, V)
    logits[:, 3] = logits[:, 1] = 7.0
    tree = from_chain([HISTORY[-1], 1, 1, 3])
    for dtype in (torch.float32, torch.bfloat16):
        (verdict,) = Together(V, torch.device("cpu")).verify(
            [Scores(logits.to(dtype), None)], [tree], [Sampler(SamplingParams(), V, 2)], [3]
        )
        assert verdict is not None
        assert (verdict.path, verdict.bonus) == ([0, 1, 2], 1)


def test_only_the_walk_is_asked_on_the_cpu() -> None:
    """As many picks as plain decoding makes: a penalty or a user's processor is not called for rejected nodes."""
    calls: list[list[int]] = []

    def note(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        calls.append(ids[0].tolist())
        return logits

    tree = from_chain([HISTORY[-1], 0, 1, 2, 3])
    scores, _ = scores_of(tree, HISTORY)
    verdict = verify(scores, tree, Sampler(SamplingParams(processors=(note,)), V, 2), HISTORY)
    assert len(calls) == len(verdict.path)
    assert calls[0] == HISTORY


def test_a_processor_sees_each_nodes_own_path() -> None:
    seen: list[list[int]] = []

    def force(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        out = torch.full_like(logits, -torch.inf)
        out[0, (int(ids[0, -1]) + 1) % V] = 0.0
        return out

    tree = TokenTree(
        torch.tensor([4, 0, 5, 0, 1], dtype=torch.int32),
        torch.tensor([-1, 0, 0, 2, 1], dtype=torch.int32),
        torch.zeros(5),
    )
    scores, _ = scores_of(tree, HISTORY)
    verdict = verify(scores, tree, Sampler(SamplingParams(processors=(force,)), V, 2), HISTORY)
    assert (verdict.path, verdict.bonus) == ([0, 2, 3], 1)
    assert seen == [[3, 1, 4], [3, 1, 4, 5], [3, 1, 4, 5, 0]]


def test_scores_of_a_tree_never_enter_the_rule() -> None:
    """Ranking scores are no probabilities (method, section 4): NaN, infinite or reversed, the verdict is the same."""
    tree = from_chain([4, 0, 1, 2])
    scores, _ = scores_of(tree, HISTORY)
    sampler = Sampler(SamplingParams(temperature=1, seed=5), V, 2)
    plain = verify(scores, tree, sampler, HISTORY)
    for value in (torch.nan, torch.inf, -torch.inf):
        other = verify(scores, tree._replace(scores=torch.full((4,), value)), sampler, HISTORY)
        assert (other.path, other.bonus) == (plain.path, plain.bonus)


def test_verify_changes_neither_logits_nor_history() -> None:
    tree = from_chain([4, 0, 1])
    scores, _ = scores_of(tree, HISTORY)
    before, history = scores.logits.clone(), list(HISTORY)

    def spoil(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.mul_(0.5)

    params = SamplingParams(
        temperature=0.8, repetition_penalty=1.5, frequency_penalty=1, logit_bias={1: 3.0}, processors=(spoil,), seed=1
    )
    verify(scores, tree, Sampler(params, V, 2), history)
    assert torch.equal(scores.logits, before)
    assert history == HISTORY


def test_the_first_of_equal_siblings_is_walked() -> None:
    tree = TokenTree(
        torch.tensor([4, 2, 2, 0], dtype=torch.int32), torch.tensor([-1, 0, 0, 2], dtype=torch.int32), torch.zeros(4)
    )
    logits = torch.full((4, V), -5.0)
    logits[0, 2] = 5.0
    logits[1:, 0] = 5.0
    verdict = verify(Scores(logits, None), tree, Sampler(SamplingParams(), V, 2), HISTORY)
    assert (verdict.path, verdict.bonus) == ([0, 1], 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_ids_are_never_picked_even_when_the_head_prefers_them(temperature: float) -> None:
    logits = torch.zeros(1, V)
    logits[0, V - 1] = 100.0
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1), V - 1, 2)
    picked = {verify(Scores(logits, None), root_only(4), sampler, [*HISTORY, *[0] * k]).bonus for k in range(40)}
    assert V - 1 not in picked
