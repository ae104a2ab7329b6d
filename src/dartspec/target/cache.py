"""Our cache layer: preallocated keys and values, ragged rows, written in place, able to keep chosen positions.

Knows lengths and tensors, not tokens. Every layer of one shape shares one allocation, so that `keep` moves the accepted
path of all layers in two copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dartspec.device import send

ALIGNMENT = 64  # bytes: torch's own


class LayerShape(NamedTuple):
    """What one attention layer stores."""

    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device


class ShapeRecorder(Cache):  # type: ignore[misc]
    """Stands in for a cache in the first probe forward and notes what each layer stores."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        k = key_states
        self.shapes[layer_idx] = LayerShape(k.shape[1], k.shape[3], value_states.shape[3], k.dtype, k.device)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        raise NotImplementedError("the mask is always given")


class Window:
    """Which rows of the cache a forward touches and where it writes: set before each forward, read by every layer."""

    def __init__(self) -> None:
        self.first = 0  # cache rows [first, first + len(starts))
        self.starts: list[int] = [0]  # write position of each of them
        self.num_rows = 0  # tokens a sequence (padded)
        self.end = 0  # keys [0, end) are visible
        self.by_tensor = False  # where to write is known to the device alone
        self._index: tuple[Tensor, Tensor] | None = None

    def set(self, first: int, starts: Sequence[int], num_rows: int) -> None:
        self.first, self.starts, self.num_rows = first, list(starts), num_rows
        self.end = max(starts) + num_rows
        self._index = None
        self.by_tensor = False

    def set_tensors(self, rows: Tensor, positions: Tensor, end: int) -> None:
        """In place of `set`, where a forward is recorded: `rows` (B, 1) are the first B cache rows, `positions`
        (B, num_rows) where each token is written, and only their shapes and `end` are part of the recording."""
        self.first, self.starts, self.num_rows = 0, [0] * len(positions), positions.shape[1]
        self.end = end
        self._index = rows, positions
        self.by_tensor = True

    def scatter_index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(B, 1) cache rows and (B, num_rows) positions, for sequences of unequal lengths."""
        if self._index is None or self._index[0].device != device:
            start = torch.tensor(self.starts, device=device)[:, None]
            rows = torch.arange(self.first, self.first + len(self.starts), device=device)[:, None]
            self._index = rows, start + torch.arange(self.num_rows, device=device)
        return self._index


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys (rows, heads, capacity, D) and values, views into its group's allocation."""

    def __init__(self, keys: Tensor, values: Tensor, window: Window) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._window = window

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the tensors exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes (B, heads, n, D) at each row's position; returns views (B, heads, end, D): nothing is concatenated."""
        w = self._window
        stop = w.first + len(w.starts)
        if not w.by_tensor and min(w.starts) == max(w.starts):
            at = w.starts[0]
            self.keys[w.first : stop, :, at : at + w.num_rows] = key_states
            self.values[w.first : stop, :, at : at + w.num_rows] = value_states
        else:
            rows, positions = w.scatter_index(self.keys.device)
            self.keys[rows, :, positions] = key_states.transpose(1, 2)
            self.values[rows, :, positions] = value_states.transpose(1, 2)
        return self.keys[w.first : stop, :, : w.end], self.values[w.first : stop, :, : w.end]

    def get_seq_length(self) -> int:
        return self._window.end - self._window.num_rows

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self._window.end, 0


class Raw(NamedTuple):
    """Where the next forward's keys and values go, for kernels that write them themselves.

    keys, values: one address a layer, of the first sequence's position 0. stride: elements by sequence, head, position.
    starts: each sequence's first new position. end: keys that are visible.
    """

    keys: list[int]
    values: list[int]
    stride: tuple[int, int, int]
    starts: list[int]
    end: int


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU the system's own zero pages, which take no time and no memory until they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    first = -pages.ctypes.data % ALIGNMENT
    return torch.from_numpy(pages[first : first + num_bytes]).view(dtype).view(shape)


class SlotCache(Cache):  # type: ignore[misc]
    """The keys and values of up to `rows` sequences of at most `capacity` positions each.

    `row` arguments are physical rows; which sequence lives in which is the caller's knowledge.
    spare: positions behind `capacity` that no sequence uses; recorded forwards let padding rows write there.
    """

    def __init__(self, shapes: dict[int, LayerShape], rows: int, capacity: int, spare: int = 0) -> None:
        self.window = Window()
        self.rows, self.capacity, self.spare = rows, capacity, spare
        self._groups: list[tuple[Tensor, Tensor]] = []
        members: dict[LayerShape, list[int]] = {}
        for layer, shape in shapes.items():
            members.setdefault(shape, []).append(layer)
        layers: dict[int, SlotLayer] = {}
        for (heads, dk, dv, dtype, device), indices in members.items():
            n = len(indices)
            # zeros, not empty: positions that padding rows look at must hold finite numbers
            keys = _zeros((n, rows, heads, capacity + spare, dk), dtype, device)
            values = _zeros((n, rows, heads, capacity + spare, dv), dtype, device)
            self._groups.append((keys, values))
            for i, layer in enumerate(indices):
                layers[layer] = SlotLayer(keys[i], values[i], self.window)
        self._raw_base = self._bases(layers) if len(self._groups) == 1 else None
        # a layer that stores nothing (it shares another's keys) still has a place in the list
        first = layers[min(layers)]
        super().__init__(layers=[layers.get(i, first) for i in range(max(layers) + 1)])

    @staticmethod
    def _bases(layers: dict[int, SlotLayer]) -> tuple[list[int], list[int], tuple[int, int, int], int] | None:
        one = layers[min(layers)]
        whole = sorted(layers) == list(range(len(layers)))
        if not whole or one.keys.device.type != "cpu" or one.keys.shape != one.values.shape:
            return None
        by_row, by_head, by_position, _ = one.keys.stride()
        addresses = [[getattr(layers[i], name).data_ptr() for i in range(len(layers))] for name in ("keys", "values")]
        return addresses[0], addresses[1], (by_row, by_head, by_position), by_row * one.keys.element_size()

    def raw(self) -> Raw | None:
        """None where layers differ in shape, share keys, lie on another device, or positions are held in tensors."""
        w = self.window
        if w.by_tensor or self._raw_base is None:
            return None
        keys, values, stride, step = self._raw_base
        first = w.first * step
        return Raw([k + first for k in keys], [v + first for v in values], stride, w.starts, w.end)

    def keep(self, row: int, start: int, path: Sequence[int]) -> None:
        """Moves the keys and values at positions start + path[k] to start + k, for every layer.

        path: node indices of the accepted path, root first, ascending. What lies behind is free to be overwritten.
        """
        skip = next((k for k, node in enumerate(path) if node != k), len(path))
        if skip == len(path):
            return  # a chain of first nodes already lies where it belongs
        for group in self._groups:
            for tensor in group:
                source = torch.tensor([start + node for node in path[skip:]], device=tensor.device)
                moved = tensor[:, row].index_select(2, source)  # a copy, so overlap is safe
                tensor[:, row, :, start + skip : start + len(path)] = moved

    def keep_all(self, rows: Sequence[int], starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """`keep` for several sequences at once, for accelerators: one transfer of places, two copies a group."""
        moves = [
            (row, start + node, start + k)
            for row, start, path in zip(rows, starts, paths, strict=True)
            for k, node in enumerate(path)
            if node != k
        ]
        if not moves:
            return
        places = send({"moves": np.array(moves).T}, self._groups[0][0].device)["moves"]
        for group in self._groups:
            for tensor in group:
                row, source, target = places.to(tensor.device)
                tensor[:, row, :, target] = tensor[:, row, :, source]  # the right side is a copy, so overlap is safe

    def copy_from(self, other: SlotCache) -> None:
        """Takes over all rows of a cache of the same model that is no larger than this one."""
        for ours, theirs in zip(self._groups, other._groups, strict=True):
            for new, old in zip(ours, theirs, strict=True):
                new[:, : other.rows, :, : other.capacity] = old[:, :, :, : other.capacity]

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copies one sequence's first `length` positions to another physical row."""
        for group in self._groups:
            for tensor in group:
                tensor[:, target, :, :length] = tensor[:, source, :, :length]
