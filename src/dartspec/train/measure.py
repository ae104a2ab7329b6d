"""M of a drafter through the real engine, on held-out prompts: what training is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dartspec.accounting import Metrics, loop_start
from dartspec.engine import Chunk, Request, generate
from dartspec.target.target import Target
from dartspec.train.data import Example
from dartspec.types import Drafter, SamplingParams

BATCH = 8


def held_prompts(examples: Sequence[Example], most: int) -> list[tuple[int, ...]]:
    """The first prompts of at most so many examples, spread evenly over them; the first half of a text without one."""
    n = min(most, len(examples))
    chosen = [examples[i * len(examples) // n] for i in range(n)]
    return [e.ids[: e.num_prompt or len(e.ids) // 2] for e in chosen]


def committed_a_round(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    num_nodes: int,
    num_tokens: int,
    give_up: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Greedy answers of at most `num_tokens` tokens, loops cut: `M` over all their rounds, `rounds`, `nodes`, and
    `by_prompt`, [committed, rounds] of each.

    give_up: asked after every round; None is returned when it says so.
    """
    requests = [Request(p, SamplingParams(max_tokens=num_tokens)) for p in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    last: list[Chunk | None] = [None for _ in prompts]
    for chunk in generate(target, drafter, requests, num_nodes=num_nodes, batch=BATCH):
        answers[chunk.index] += chunk.ids
        last[chunk.index] = chunk
        if give_up():
            return None
    parts = []
    for ids, chunk_ in zip(answers, last, strict=True):
        assert chunk_ is not None
        loop = loop_start(ids)
        parts.append(chunk_.metrics if loop is None else chunk_.metrics.before(loop))
    m = Metrics.merged(parts)
    return {
        "M": round(m.M, 4) if m.num_rounds else 1.0,
        "rounds": m.num_rounds,
        "nodes": num_nodes,
        "by_prompt": [[sum(r.num_committed for r in p.rounds), p.num_rounds] for p in parts],
    }
