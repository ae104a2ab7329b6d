"""Sampled text follows the target through the whole engine: chi-square over many seeds, at fixed seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

import tiny
from dartspec.engine import Request, generate
from dartspec.sampling import filter_logits
from dartspec.target.target import Target
from dartspec.tree import from_chain
from dartspec.types import Committed, SamplingParams, TokenTree
from reference.verify_chi_square import p_value

PROMPT = (5, 17, 9, 33)
PARAMS = SamplingParams(temperature=1.2, top_k=3, max_tokens=4, ignore_eos=True)
SEEDS = 700
Row = Callable[[tuple[int, ...]], Tensor]


@cache
def small_target() -> Target:
    return Target(tiny.model("llama", num_hidden_layers=1, seed=4), name="small")


@cache
def probabilities(path: tuple[int, ...]) -> Tensor:
    """(V,) the target's processed distribution after PROMPT + path, from a plain forward."""
    with torch.inference_mode():
        logits = small_target().model(torch.tensor([[*PROMPT, *path]])).logits[0, -1]
    return filter_logits(logits.float(), PARAMS).softmax(0)


class Argmax:
    """Drafts the target's likeliest tokens, as a greedy drafter does while the target samples (case 3)."""

    taps: tuple[int, ...] = ()

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def reset(self, slots: Sequence[int]) -> None:
        pass

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        return [self._one(c, min(b, self._depth)) for c, b in zip(new, budget, strict=True)]

    def _one(self, c: Committed, depth: int) -> TokenTree:
        done = tuple(c.history[len(PROMPT) :].tolist())
        chain = [done[-1]]
        for _ in range(depth):
            chain.append(int(probabilities((*done, *chain[1:])).argmax()))
        return from_chain(chain)


@cache
def texts(depth: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Of each seed: the four tokens, and how many drafts were accepted in the first round."""
    t, out = small_target(), []
    for seed in range(SEEDS):
        request = Request(PROMPT, SamplingParams(**{**vars(PARAMS), "seed": seed}))
        chunks = list(generate(t, Argmax(depth), [request], num_nodes=depth))
        out.append((tuple(i for c in chunks for i in c.ids), chunks[1].num_accepted))
    return tuple(out)


def joint(length: int) -> dict[tuple[int, ...], float]:
    """The target's probability of every possible text of this length."""
    out = {(): 1.0}
    for _ in range(length):
        out = {
            (*path, v): p * float(probabilities(path)[v])
            for path, p in out.items()
            for v in probabilities(path).nonzero().flatten().tolist()
        }
    return out


def p_of(found: Counter[tuple[int, ...]], want: dict[tuple[int, ...], float]) -> float:
    """Rare outcomes are pooled, so that every expected count is 5 or more."""
    assert set(found) <= set(want)
    n = sum(found.values())
    common = [k for k, p in want.items() if n * p >= 5]
    counts = [found[k] for k in common]
    expected = [want[k] for k in common]
    if (rest := 1 - sum(expected)) * n >= 5:
        counts.append(n - sum(counts))
        expected.append(rest)
    else:
        expected = [p / sum(expected) for p in expected]
    assert len(counts) >= 3
    return p_value(torch.tensor(counts), torch.tensor(expected, dtype=torch.float64))


def test_the_joint_of_the_first_three_tokens_is_the_targets() -> None:
    found = Counter(text[:3] for text, _ in texts(2))
    assert p_of(found, joint(3)) > 1e-4


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_the_bonus_follows_the_target_however_much_was_accepted(accepted: int) -> None:
    """Case 1: after a fully accepted path the bonus is the last node's own distribution, no residual. After a miss it
    is that distribution without the drafted token, which is just what a miss means."""
    found: Counter[tuple[int, ...]] = Counter()
    want: Counter[tuple[int, ...]] = Counter()
    num_rows = 0
    for text, num in texts(2):
        if num != accepted:
            continue
        path, bonus = text[: 1 + num], text[1 + num]
        row = probabilities(path).clone()
        if accepted < 2:
            row[row.argmax()] = 0
            row /= row.sum()
        order = row.argsort(descending=True)  # ranks, so that different rows can be summed
        found[(int((order == bonus).nonzero()),)] += 1
        for rank, p in enumerate(row[order][:3].tolist()):
            want[(rank,)] += p
        num_rows += 1
    assert num_rows > 50
    counts = torch.tensor([found[k] for k in sorted(want) if want[k] > 0])
    expected = torch.tensor([want[k] for k in sorted(want) if want[k] > 0]) / num_rows
    assert int(counts.sum()) == num_rows
    # rows differ in their probabilities, so this statistic is at most a chi-square one: the threshold holds
    assert p_value(counts, expected) > 1e-4


def test_the_test_can_fail() -> None:
    """Negative control: texts in which every accepted draft had been forced do not pass."""
    forced = Counter((text[0], int(probabilities(text[:1]).argmax()), text[2]) for text, _ in texts(2))
    allowed = joint(3)
    assert p_of(Counter({k: n for k, n in forced.items() if k in allowed}), allowed) < 1e-4
