"""Positions and attention masks of token trees, by layer type. Lengths and parents in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dartspec import _core
from dartspec.errors import DartspecError


class MaskPlan:
    """How one model wants its masks: which layer types it has, their windows, and boolean or additive form.

    A model whose layers differ takes a dict by layer type, all others one tensor.
    """

    def __init__(self, config: Any, additive: torch.dtype | None) -> None:
        """config: the text model's Hugging Face config. additive: dtype of an additive mask, None for a boolean one."""
        types = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
        window = getattr(config, "sliding_window", None)
        chunk = getattr(config, "attention_chunk_size", None)
        if not types:
            types = ["sliding_attention" if window else "full_attention"]
        kinds: dict[str, tuple[str, int]] = {}
        for t in types:
            if t == "full_attention":
                kinds[t] = "full", 0
            elif t == "sliding_attention" and window:
                kinds[t] = "sliding", int(window)
            elif t == "chunked_attention" and chunk:
                kinds[t] = "chunked", int(chunk)
            else:
                raise DartspecError(f"layers of type {t!r} cannot verify a token tree; see `dartspec doctor MODEL`")
        self._kinds = kinds
        self._additive = additive

    def build(
        self, starts: Sequence[int], tree: Tensor, depth: Tensor, device: torch.device, done: Sequence[int] = ()
    ) -> Any:
        """The mask(s) for B sequences of N - max(done) rows each, keys [0, the last row's).

        starts: committed length of each sequence; its tree is written behind it.
        tree:   (B, N, N) bool, row i true at i and at its ancestors. depth: (B, N) int64, 0 for the root.
        done:   first nodes of each tree that are in the cache already and get no row; none when empty.

        Returns one (B, 1, rows, K) mask or a dict of them; boolean (true = visible) or additive.
        """
        B, N = depth.shape
        done = done or [0] * B
        rows = N - max(done)
        end = max(s + k for s, k in zip(starts, done, strict=True)) + rows
        start = torch.tensor(starts)[:, None]  # (B, 1)
        key = torch.arange(end)
        visible = key < start[:, :, None]  # (B, 1, K) the committed prefix
        visible = visible.expand(B, rows, end).clone()
        for b, (s, k) in enumerate(zip(starts, done, strict=True)):
            visible[b, :, s : s + k + rows] = tree[b, k : k + rows, : k + rows]
        masks: dict[str, Tensor] = {}
        query = start + torch.stack([depth[b, k : k + rows] for b, k in enumerate(done)])
        query = query[:, :, None]  # (B, rows, 1) absolute positions
        for name, (kind, size) in self._kinds.items():
            mask = visible
            if kind != "full":
                # a key in the tree region stands at its node's depth, not at the place where it is stored
                where = key.expand(B, end).clone()
                for b, (s, k) in enumerate(zip(starts, done, strict=True)):
                    where[b, s : s + k + rows] = s + depth[b, : k + rows]
                near = query - where[:, None] < size if kind == "sliding" else query // size == (where // size)[:, None]
                mask = visible & near
            masks[name] = self._finish(mask[:, None], device)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def build_tensors(self, start: Tensor, depth: Tensor, tree: Tensor, valid: Tensor, num_keys: int) -> Any:
        """`build` where everything is a tensor on one device: only shapes and `num_keys` are known to Python, so that
        it can be recorded once and replayed for other trees.

        start (B,), depth (B, N) int64; tree (B, N, N) bool as in `build`; valid (B, N) bool, false for padding rows,
        which see key 0 alone. num_keys: keys [0, num_keys) exist, those behind a sequence's tree are hidden.
        """
        B, N = depth.shape
        key = torch.arange(num_keys, device=depth.device)
        start = start[:, None]
        node = key - start  # (B, K) the node at each key, where there is one
        inside = (node >= 0) & (node < N)
        node = node.clamp(0, N - 1)
        visible = tree.gather(2, node[:, None].expand(B, N, num_keys)) & inside[:, None]
        visible |= (key < start)[:, None]
        first = (key == 0).expand(B, N, num_keys)
        where = torch.where(inside, start + depth.gather(1, node), key)[:, None]  # a node stands at its depth
        query = (start + depth)[:, :, None]
        masks: dict[str, Tensor] = {}
        for name, (kind, size) in self._kinds.items():
            mask = visible
            if kind == "sliding":
                mask = visible & (query - where < size)
            elif kind == "chunked":
                mask = visible & (query // size == where // size)
            mask = torch.where(valid[:, :, None], mask, first)
            masks[name] = self._finish(mask[:, None], depth.device)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _finish(self, mask: Tensor, device: torch.device) -> Tensor:
        if self._additive is None:
            return mask.to(device)
        low = torch.finfo(self._additive).min
        return torch.zeros(mask.shape, dtype=self._additive, device=mask.device).masked_fill_(~mask, low).to(device)


def tree_tensors(parents: Sequence[Sequence[int]], size: int = 0) -> tuple[Tensor, Tensor]:
    """Ancestor masks and depths of several trees, padded to the largest, or to `size` where that is more.

    parents: per tree, `parents[0] == -1` and parents before children. A padding row sees itself alone, at depth 0.

    Returns (B, N, N) bool and (B, N) int64.
    """
    n = max(size, *map(len, parents))
    mask = np.zeros((len(parents), n, n), dtype=np.bool_)
    mask[:, range(n), range(n)] = True
    depth = np.zeros((len(parents), n), dtype=np.int64)
    for b, tree in enumerate(parents):
        if (size := len(tree)) > 1:
            own, block = np.asarray(tree, dtype=np.int32), np.empty((size, size), dtype=np.bool_)
            _core.tree_ancestor_mask(own, block)
            _core.tree_depths(own, depth[b, :size])
            mask[b, :size, :size] = block
    return torch.from_numpy(mask), torch.from_numpy(depth)
