"""Lookahead: the target's own guesses, its n-grams, and that a round's tree is the paper's two branches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import tiny
from dartspec.accounting import Metrics
from dartspec.drafters import lookahead, none
from dartspec.drafters.lookahead import Config, Lookahead
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.sampling import Sampler
from dartspec.target.target import Target
from dartspec.tree import check, depths, from_chain
from dartspec.types import Committed, Drafter, SamplingParams, Scores, TokenTree
from dartspec.verify import verify


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    check(tree)
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        out.append((*out[parent], token) if parent >= 0 else ())
    return out[1:]


def position_picks(tree: TokenTree, length: int) -> torch.Tensor:
    """A target whose text is 0, 1, 2, ...: its token is the position, whatever came before."""
    return (length + depths(tree)).int()


def step(drafter: Lookahead, ids: list[int], budget: int, last: TokenTree | None = None, length: int = 0) -> TokenTree:
    picks = None if last is None else position_picks(last, length)
    (tree,) = drafter.propose([Committed(0, torch.tensor(ids), 1, None, last, picks)], [budget])
    return tree


def test_the_window_is_a_chain_with_a_tail_at_each_column() -> None:
    tree = step(Lookahead(Config(window=3, ngram=4, guesses=2, from_text=False), 97), [10, 11, 12, 13], 15)
    # levels begin as the text's own tokens: 10 11 12 | 11 12 13 | 12 13 10
    spine = {(10,), (10, 11), (10, 11, 12)}
    tails = {(10, 11), (10, 11, 12), (10, 11, 12, 13), (10, 11, 12, 13, 10)}  # columns of 10 11 12, 11 12 13, 12 13 10
    assert set(paths(tree)) == spine | tails


def test_after_n_rounds_the_pool_holds_the_truth() -> None:
    """Jacobi iteration finds the text ahead, whatever the first window was; its n-grams are accepted whole."""
    c = Config(window=4, ngram=3, guesses=2, from_text=False)
    drafter = Lookahead(c, 1000)
    ids, last, before = [0, 1, 2, 3], None, 0
    committed = []
    for _ in range(12):
        last, before = step(drafter, ids, 30, last, before), len(ids)
        right = [p for p in [(), *paths(last)] if list(p) == list(range(before, before + len(p)))]
        count = max(map(len, right)) + 1
        ids += range(before, before + count)
        committed.append(count)
    assert committed[0] == 1
    assert max(committed) >= c.ngram + 1  # n-grams of the pool, and the target's own token
    assert sum(committed[6:]) > 2 * 6  # though a long step leaves the window behind
    assert all(len(grams) <= c.guesses for grams in drafter._states[0].pool.values())


def test_the_window_follows_when_several_tokens_were_committed() -> None:
    c = Config(window=4, ngram=3, guesses=1, from_text=False)
    drafter = Lookahead(c, 97)
    tree = step(drafter, [1, 2], 30)
    before = [list(level) for level in drafter._states[0].levels]
    step(drafter, [1, 2, 3, 4, 5], 30, tree, 2)  # three tokens: the window moves on by two more columns
    after = drafter._states[0].levels
    assert after[0] == [before[1][min(col + 2, 3)] for col in range(4)]
    newest = [2 + col + 2 for col in range(4)]  # column col, level 1 is at depth col + 2
    assert after[1] == [newest[min(col + 2, 3)] for col in range(4)]


@pytest.mark.parametrize("budget", [0, 1, 3, 6, 7, 20, 100])
def test_any_budget_is_kept(budget: int) -> None:
    drafter = Lookahead(Config(), 97)
    ids, last = [5, 6, 5, 6, 5], None
    for _ in range(6):
        last = step(drafter, ids, budget, last, len(ids) - 1)
        assert last.num_drafts <= budget
        assert int(last.tokens[0]) == ids[-1]
        ids.append((ids[-1] + 1) % 97)


def test_text_enters_the_pool_only_when_asked_to() -> None:
    ids = [5, 6, 7, 8, 9, 5]
    assert (6, 7, 8) in paths(step(Lookahead(Config(), 97), ids, 100))
    drafter = Lookahead(Config(from_text=False), 97)
    step(drafter, ids, 100)
    assert not drafter._states[0].pool
    assert not any(77 in p for p in paths(step(Lookahead(Config(window=1), 50), [5, 77, 6, 5], 100)))


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.9, seed=3)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_every_node_is_picked_when_asked_and_the_walk_is_the_same(params: SamplingParams, penalty: float) -> None:
    torch.manual_seed(2)
    history = [3, 4, 5]
    params = SamplingParams(**{**vars(params), "repetition_penalty": penalty})
    sampler = Sampler(params, 20, 2)
    logits = 2 * torch.randn(6, 20)
    tree = TokenTree(
        torch.tensor([5, 6, 7, 8, 9, 6], dtype=torch.int32),
        torch.tensor([-1, 0, 0, 1, 3, 2], dtype=torch.int32),
        torch.zeros(6),
    )
    some, every = (verify(Scores(logits, None), tree, sampler, history, e) for e in (False, True))
    assert (some.path, some.bonus) == (every.path, every.bonus)
    for node, path in enumerate([[], *map(list, paths(tree))]):
        assert int(every.picks[node]) == sampler.pick(logits[node], history, path)
    logits[4] = torch.nan  # no token can follow a node that nobody comes to
    assert int(verify(Scores(logits, None), tree, sampler, history, True).picks[4]) == -1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_plain_decodings_and_drafts_are_accepted(temperature: float) -> None:
    t = Target(tiny.model("llama"))
    requests = [
        Request(p, SamplingParams(temperature=temperature, top_k=2, seed=1, max_tokens=60, repetition_penalty=0.7))
        for p in ([5, 6, 7], [9])
    ]

    def run(drafter: Drafter, **options: int) -> tuple[list[list[int]], Metrics]:
        out: list[list[int]] = [[], []]
        metrics: list[Metrics] = [Metrics(), Metrics()]
        for chunk in generate(t, drafter, requests, **options):
            out[chunk.index] += chunk.ids
            metrics[chunk.index] = chunk.metrics
        return out, Metrics.merged(metrics)

    want, _ = run(none.Plain())
    got, metrics = run(lookahead.load(Config(from_text=False), t), batch=2)
    assert got == want
    assert metrics.A > 0


def test_numbers_that_cannot_be_are_refused() -> None:
    wrong: Sequence[dict[str, int]] = ({"window": 0}, {"ngram": 1}, {"guesses": 0})
    for changes in wrong:
        with pytest.raises(DartspecError, match="lookahead needs"):
            Config(**changes)  # type: ignore[arg-type]
    assert from_chain([1]).num_drafts == 0
