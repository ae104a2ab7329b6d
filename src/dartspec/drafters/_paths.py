"""Scored continuations of a text, joined into a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dartspec.tree import truncate
from dartspec.types import TokenTree


def as_tree(tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float]) -> TokenTree:
    return TokenTree(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(parents, dtype=torch.int32),
        torch.tensor(scores, dtype=torch.float32),
    )


def join(root: int, paths: Iterable[tuple[Sequence[int], Sequence[float]]], budget: int) -> TokenTree:
    """The best `budget` nodes of several paths from `root`; each is its tokens and a falling score for each of them.

    Common beginnings share nodes, which take the highest of their scores.
    """
    tokens, parents, scores = [root], [-1], [0.0]
    node_of: dict[tuple[int, int], int] = {}
    for path, values in paths:
        at = 0
        for token, score in zip(path, values, strict=True):
            node = node_of.get((at, token))
            if node is None:
                node = node_of[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
                scores.append(score)
            else:
                scores[node] = max(scores[node], score)
            at = node
    return truncate(as_tree(tokens, parents, scores), budget)
