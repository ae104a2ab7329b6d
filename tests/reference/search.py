"""Plain twin of the tree search: DART Algorithm 1 and equation (10) with lists, sorts and the documented tie rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reference import exact_math


@dataclass
class Node:
    token: int
    parent: Node | None
    total: float  # equation (10), summed
    rank: float  # lowest total on the path, 0 at the root
    depth: int
    number: int  # position among the extensions of its depth
    path: tuple[int, ...]


def candidates(log_probs: Sequence[float], tokens: Sequence[int], config: Any) -> list[tuple[int, float]]:
    """(token, log(p + eps)) of a row's candidates in column order."""
    columns = list(zip(log_probs, tokens, strict=True))[: config.top_k]
    usable = [j for j, (lp, t) in enumerate(columns) if math.isfinite(lp) and t >= 0]
    kept = [
        j
        for j in usable
        if not any(
            columns[o][1] == columns[j][1] and (-columns[o][0], o) < (-columns[j][0], j) for o in usable if o != j
        )
    ]
    if not kept:
        return []
    if config.softmax_over_kept:
        highest = max(columns[j][0] for j in kept)
        weights = [exact_math.exp(columns[j][0] - highest) for j in kept]
        total = 0.0
        for w in weights:
            total += w
        probabilities = [w / total for w in weights]
    else:
        probabilities = [exact_math.exp(min(columns[j][0], 0.0)) for j in kept]
    return [(columns[j][1], exact_math.log(p + config.eps)) for j, p in zip(kept, probabilities, strict=True)]


def search(
    root: int,
    log_probs: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    context: Sequence[int],
    budget: int,
    continuity: Callable[[Sequence[int], int], float] | None,
    config: Any,
    eos_ids: frozenset[int],
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents, scores. `continuity(context, token)` is g; None leaves the term out."""
    beam = [] if root in eos_ids else [Node(root, None, 0.0, 0.0, 0, 0, tuple(context))]
    top = beam[:1]
    scored: list[Node] = []
    decay = 1.0
    for level in range(len(log_probs)):
        weight = exact_math.power(level + 1.0, -config.level_exponent)
        decay = decay * config.logit_decay if level else 1.0
        extensions = []
        row = candidates(log_probs[level], tokens[level], config)
        for path in beam:
            for token, log_p in row:
                increment = decay * log_p
                if continuity is not None and (level > 0 or config.ngram_at_level0):
                    g = continuity(path.path, token)
                    increment += config.ngram_weight * exact_math.log(g + config.eps)
                total = path.total + increment * weight
                extensions.append(
                    Node(token, path, total, min(path.rank, total), level + 1, len(extensions), (*path.path, token))
                )
        scored += extensions
        live = [n for n in extensions if n.token not in eos_ids]
        beam = sorted(live, key=lambda n: (-n.total, n.number))[: config.beam]
    chosen = sorted(scored, key=lambda n: (-n.rank, n.depth, n.number))[:budget]
    nodes = [*top, *chosen]
    index = {id(n): i for i, n in enumerate(nodes)}
    return (
        [root, *(n.token for n in chosen)],
        [-1, *(index[id(n.parent)] for n in chosen)],
        [0.0, *(n.rank for n in chosen)],
    )
