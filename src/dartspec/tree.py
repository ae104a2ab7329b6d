"""What follows from a tree's parents: depths, ancestor mask, children, paths; and ways to make small trees.

Knows `TokenTree` and nothing of models, drafters or text. All functions are pure; tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dartspec import _core
from dartspec.errors import DartspecError
from dartspec.types import TokenTree


def depths(tree: TokenTree) -> Tensor:
    """(N,) int64 distance of each node from the root; position of node i = position of the root + depths[i]."""
    out = np.empty(len(tree.parents), dtype=np.int64)
    _core.tree_depths(tree.parents.numpy(), out)
    return torch.from_numpy(out)


def ancestor_mask(tree: TokenTree) -> Tensor:
    """(N, N) bool: row i is true at i and at i's ancestors, the root included."""
    n = len(tree.parents)
    out = np.empty((n, n), dtype=np.bool_)
    _core.tree_ancestor_mask(tree.parents.numpy(), out)
    return torch.from_numpy(out)


def children(tree: TokenTree) -> list[list[int]]:
    """The children of each node, in node order."""
    out: list[list[int]] = [[] for _ in range(len(tree.parents))]
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            out[parent].append(node)
    return out


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Node indices from the root to `node`, both included."""
    if not 0 <= node < len(tree.parents):
        raise DartspecError(f"node {node} is not in a tree of {len(tree.parents)} nodes")
    parents = tree.parents.tolist()
    path = [node]
    while path[-1] != 0:
        path.append(parents[path[-1]])
    return path[::-1]


def check(tree: TokenTree) -> None:
    """Raises DartspecError when `tree` breaks the contract of `TokenTree`."""
    for name, tensor, dtype in (
        ("tokens", tree.tokens, torch.int32),
        ("parents", tree.parents, torch.int32),
        ("scores", tree.scores, torch.float32),
    ):
        if tensor.dtype != dtype or tensor.device.type != "cpu" or tensor.dim() != 1:
            raise DartspecError(
                f"tree.{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
                f"expected {dtype} (N,) on the CPU"
            )
    if not len(tree.tokens) == len(tree.parents) == len(tree.scores):
        raise DartspecError(
            f"tree has {len(tree.tokens)} tokens, {len(tree.parents)} parents and {len(tree.scores)} scores, "
            "expected equally many"
        )
    _core.check_parents(tree.parents.contiguous().numpy())
    lowest = int(tree.tokens.numpy().min())
    if lowest < 0:
        raise DartspecError(f"tree holds token {lowest}, expected ids from 0 on")
    if bool(np.isnan(tree.scores.numpy()).any()):
        raise DartspecError("tree holds a NaN score, expected numbers that can be ranked")


def _tree(tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float]) -> TokenTree:
    return TokenTree(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(parents, dtype=torch.int32),
        torch.tensor(scores, dtype=torch.float32),
    )


def root_only(token: int) -> TokenTree:
    """No draft at all: plain decoding."""
    return _tree([token], [-1], [0.0])


def from_chain(tokens: Sequence[int]) -> TokenTree:
    """A tree without branches; `tokens[0]` is the root. Scores fall with depth."""
    if len(tokens) == 0:
        raise DartspecError("a chain needs at least its root")
    n = len(tokens)
    return _tree(tokens, range(-1, n - 1), [-float(i) for i in range(n)])


def merge_paths(root: int, paths: Iterable[Sequence[int]], budget: int) -> TokenTree:
    """Joins continuations of `root` into one tree of at most `budget` draft tokens; common prefixes share nodes.

    Earlier paths come first: nodes enter path by path until the budget is spent, and score in that order.
    """
    _check_budget(budget)
    tokens, parents = [root], [-1]
    node_of: dict[tuple[int, int], int] = {}
    for path in paths:
        at = 0
        for token in path:
            found = node_of.get((at, token))
            if found is None:
                if len(tokens) > budget:
                    return _tree(tokens, parents, [-float(i) for i in range(len(tokens))])
                found = node_of[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = found
    return _tree(tokens, parents, [-float(i) for i in range(len(tokens))])


def truncate(tree: TokenTree, budget: int) -> TokenTree:
    """The best `budget` draft tokens, in the tree's own order; closed under ancestors whatever the scores.

    A node ranks by the lowest score on its path, then by index: a child never before its parent. So a tree whose
    scores fall with the index, as those of `lattice.build_tree`, is cut to its first nodes.
    """
    _check_budget(budget)
    n = len(tree.parents)
    if n - 1 <= budget:
        return tree
    scores = tree.scores.numpy()
    if bool((scores[2:] <= scores[1:-1]).all()):
        return TokenTree(*(part[: budget + 1] for part in tree))
    parents = tree.parents.tolist()
    rank = [float("inf"), *scores[1:].tolist()]
    for i in range(1, n):
        rank[i] = min(rank[i], rank[parents[i]])
    return subtree(tree, sorted(sorted(range(n), key=lambda i: (-rank[i], i))[: budget + 1]))


def subtree(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """Some nodes of a tree, ascending, the root first, or none. They must be closed: a node's parent is among them."""
    place = {old: new for new, old in enumerate(nodes)} | {-1: -1}
    parents = tree.parents.tolist()
    at = torch.tensor(nodes, dtype=torch.int64)
    renumbered = torch.tensor([place[parents[i]] for i in nodes], dtype=torch.int32)
    return TokenTree(tree.tokens[at], renumbered, tree.scores[at])


def _check_budget(budget: int) -> None:
    if budget < 0:
        raise DartspecError(f"budget is {budget}, expected 0 or more draft tokens")
