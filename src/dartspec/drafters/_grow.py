"""A tree that grows level by level, its best leaves expanded, the best of all kept. Knows no network.

The dynamic tree of EAGLE-2 (arXiv 2406.16858, section 4), which EAGLE-3 keeps: a node's value is the product of the
probabilities on its path; each level expands the `beam` best of its new nodes (expand), and of everything that was
ever scored the best are the tree (rerank).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from dartspec.lattice import SearchConfig, build_tree
from dartspec.types import TokenTree

LEAST_BEAM = 64


def best_first(
    root: int, log_probs: Tensor, tokens: Tensor, budget: int, ends: frozenset[int], top_k: int
) -> TokenTree:
    """The `budget` likeliest paths of independent positions, (d, k) each: a node's value is the product of its path's
    probabilities. With a beam as wide as the tree the search loses none of them."""
    config = SearchConfig(
        top_k=top_k,
        beam=max(LEAST_BEAM, budget),
        level_exponent=0.0,
        logit_decay=1.0,
        ngram_weight=0.0,
        softmax_over_kept=False,
    )
    return build_tree(root, log_probs, tokens, [root], budget, None, config, ends)


class Growth:
    """Trees of one batch while they grow.

    roots: the last committed token of each sequence. budget: draft tokens each may have. beam: nodes expanded a level.
    ends: end-of-text ids; nothing is drafted after them.
    """

    def __init__(self, roots: Sequence[int], budget: Sequence[int], beam: int, ends: Collection[int]) -> None:
        self.roots, self.budget, self.beam = list(roots), list(budget), beam
        self._ends = list(ends)
        n = len(self.roots)
        self._each = np.arange(n)[:, None]
        # candidate 0 is the root; children come behind their parents, level by level
        self._tokens = [np.array(self.roots, dtype=np.int32)[:, None]]
        self._scores = [np.zeros((n, 1), dtype=np.float32)]
        self._parents = [np.full((n, 1), -1, dtype=np.int32)]
        self._frontier = np.zeros((n, 1), dtype=np.int32)  # candidates expanded last
        self._values = np.zeros((n, 1), dtype=np.float32)  # their scores; -inf where nothing follows
        self._count = 1
        self._best = [
            np.full(budget, -np.inf, dtype=np.float32) for budget in self.budget
        ]  # scores of each tree so far

    def add(self, log_probs: Tensor, tokens: Tensor) -> None:
        """Children of the frontier: (B, w, k) float32 and int32 on the CPU, w nodes each. A child whose log-probability
        is not finite is none."""
        step = log_probs.numpy()
        n = len(self.roots)
        values = self._values[:, :, None] + np.where(np.isfinite(step), np.minimum(step, 0), np.float32(-np.inf))
        scores = values.reshape(n, -1)
        self._parents.append(self._frontier.repeat(step.shape[2], axis=1))
        self._scores.append(scores)
        self._tokens.append(tokens.numpy().reshape(n, -1))
        for i, budget in enumerate(self.budget):
            if budget:
                joined = np.concatenate((self._best[i], scores[i]))
                joined.partition(len(joined) - budget)
                self._best[i] = joined[len(joined) - budget :]

    def choose(self) -> tuple[Tensor, Tensor] | None:
        """The next frontier, the best of the newest candidates: (B, w) their tokens, int64, and (B, w) which nodes of
        the frontier before they hang at. None where no child could still enter a tree."""
        scores, tokens = self._scores[-1], self._tokens[-1]
        order = (-scores).argsort(axis=1, kind="stable")[:, : self.beam]
        values, chosen = scores[self._each, order], tokens[self._each, order]
        for end in self._ends:
            values[chosen == end] = -np.inf
        # a child is never better than its parent, and loses ties to what came before it
        if not any(
            budget and value > best[0]
            for budget, value, best in zip(self.budget, values.max(1), self._best, strict=True)
        ):
            return None
        children = scores.shape[1] // self._frontier.shape[1]
        self._frontier = (self._count + order).astype(np.int32)
        self._count += scores.shape[1]
        self._values = values
        return torch.from_numpy(chosen.astype(np.int64)), torch.from_numpy(order // children)

    def trees(self) -> list[TokenTree]:
        """The best `budget` candidates of each sequence, by falling score, parents before children."""
        all_scores = np.concatenate(self._scores, axis=1)
        all_tokens = np.concatenate(self._tokens, axis=1)
        all_parents = np.concatenate(self._parents, axis=1)
        out = []
        for i, budget in enumerate(self.budget):
            scores = all_scores[i]
            # stable: of equals the one found first, so never a child before its parent
            kept = 1 + np.argsort(-scores[1:], kind="stable")[:budget]
            kept = np.concatenate(([0], kept[np.isfinite(scores[kept])]))
            place = np.full(len(scores), -1, dtype=np.int32)
            place[kept] = np.arange(len(kept))
            parents = place[all_parents[i][kept]]
            parents[0] = -1
            out.append(
                TokenTree(
                    torch.from_numpy(all_tokens[i][kept].astype(np.int32)),
                    torch.from_numpy(parents),
                    torch.from_numpy(scores[kept]),
                )
            )
        return out
