"""Drafts from the n-gram index alone: no network, the likeliest continuations of the last tokens in ordinary text.

Best-first: the node of the highest path probability is expanded next, so the tree is the best of its size under the
index (order - 1 tokens of context, the index's own back-off). The lower bound of what an index is worth: DART adds what
the target's hidden states know.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dartspec.drafters._paths import as_tree
from dartspec.errors import DartspecError
from dartspec.types import Committed, TargetView, TokenTree

if TYPE_CHECKING:
    from dartspec.ngram import NgramIndex


@dataclass(frozen=True)
class Config:
    """top_k: continuations of a node at most. length: depth at most. least: path probability below which nothing is
    drafted."""

    top_k: int = 8
    length: int = 8
    least: float = 0.001

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.length < 1 or not 0 <= self.least < 1:
            raise DartspecError(
                "index needs top_k and length of at least 1 and least in [0, 1), "
                f"found {self.top_k}, {self.length} and {self.least}"
            )


class IndexDrafter:
    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, index: NgramIndex, view: TargetView) -> None:
        self.config, self.index = config, index
        self._num_tokens, self._eos = view.num_tokens, view.eos_token_ids

    def reset(self, slots: Sequence[int]) -> None:
        """Nothing is remembered."""

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        width = self.index.order - 1
        return [self._one(c.history[-width:].tolist(), b) for c, b in zip(new, budget, strict=True)]

    def _one(self, context: list[int], budget: int) -> TokenTree:
        c, width = self.config, self.index.order - 1
        tokens, parents, scores = [context[-1]], [-1], [0.0]
        contexts, depths = [context], [0]
        # (-score, parent, rank, token): a total order, so the same text has the same tree
        heap: list[tuple[float, int, int, int]] = []

        def push(node: int) -> None:
            if depths[node] == c.length or tokens[node] in self._eos:
                return
            for rank, (token, probability) in enumerate(self.index.continuations(contexts[node], c.top_k)):
                score = scores[node] + math.log(probability) if probability > 0 else -math.inf
                if token < self._num_tokens and score >= math.log(c.least or 1e-300):
                    heapq.heappush(heap, (-score, node, rank, token))

        if budget > 0:
            push(0)
        while heap and len(tokens) <= budget:
            negative, parent, _, token = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            scores.append(-negative)
            contexts.append([*contexts[parent], token][-width:])
            depths.append(depths[parent] + 1)
            if len(tokens) <= budget:
                push(len(tokens) - 1)
        return as_tree(tokens, parents, scores)


def load(source: Config | Path | str, view: TargetView, index: NgramIndex | Path | str | None = None) -> IndexDrafter:
    """source: a config, or an index file, which then is `index`."""
    from dartspec.ngram import NgramIndex

    config = source if isinstance(source, Config) else Config()
    index = source if not isinstance(source, Config) and index is None else index
    if index is None:
        raise DartspecError("the drafter index was given no n-gram index: name one (`dartspec ngram build` makes it)")
    if not isinstance(index, NgramIndex):
        assert isinstance(index, Path | str)
        index = NgramIndex.open(index, expect_fingerprint=getattr(view, "tokenizer_fingerprint", None))
    return IndexDrafter(config, index, view)
