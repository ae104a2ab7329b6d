"""Plain twin of the n-gram index: a dictionary of counts and the rule of the official program, word for word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Gram = tuple[int, ...]


def count_grams(
    documents: Sequence[Sequence[int]],
    order: int,
    *,
    exclude: frozenset[int] = frozenset(),
    weights: Sequence[int] | None = None,
    min_count: int = 1,
) -> dict[Gram, int]:
    counts: Counter[Gram] = Counter()
    for number, document in enumerate(documents):
        weight = 1 if weights is None else weights[number]
        pieces: list[list[int]] = [[]]
        for token in document:
            if token in exclude:
                pieces.append([])
            else:
                pieces[-1].append(token)
        for piece in pieces:
            for start in range(len(piece)):
                for length in range(1, order + 1):
                    if start + length <= len(piece):
                        counts[tuple(piece[start : start + length])] += weight
    return {gram: count for gram, count in counts.items() if count >= min_count}


def probability(counts: dict[Gram, int], order: int, context: Sequence[int], token: int, backoff: float = 1.0) -> float:
    longest = min(order - 1, len(context))
    for length in range(longest, 0, -1):
        prefix = tuple(context[len(context) - length :])
        if (*prefix, token) in counts:
            factor = 1.0
            for _ in range(order - 1 - length):
                factor *= backoff
            return factor * (counts[*prefix, token] / counts[prefix])
    return 0.0


def continuations(counts: dict[Gram, int], order: int, context: Sequence[int], top: int) -> list[tuple[int, float]]:
    tokens = {gram[-1] for gram in counts if len(gram) > 1}
    scored = [(token, probability(counts, order, context, token)) for token in tokens]
    return sorted((s for s in scored if s[1] > 0), key=lambda s: (-s[1], s[0]))[:top]
