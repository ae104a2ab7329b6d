"""DART's forward in fixed shapes, recorded once and replayed (`dartspec.device`): all sequences at once on a GPU.

The same layer as in `dart.py`, for a padded batch: each sequence's few new rows, then the masks. Keys and values of all
sequences lie in one allocation, so that where to read and to write is a tensor.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dartspec.device import Recorder, Recording, Staged, fetch, first_line, send
from dartspec.drafters._nn import Prefix, rope_table, rotate
from dartspec.target.attention import WAYS

if TYPE_CHECKING:
    from dartspec.drafters.dart import DartDrafter

LEAST_KEYS = 256  # positions, doubled as often as needed
MOST_RECORDINGS = 12  # the one used longest ago goes
_log = logging.getLogger(__name__)


class Room:
    """Keys and values of many sequences' clean rows, (rows, kv, positions, dim) each; grown by doubling, in both. The
    last position is nobody's: padding is written there."""

    def __init__(self, num_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        # zeros: what padding looks at must be finite
        self.keys = torch.zeros(4, num_heads, LEAST_KEYS, dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.on_growth: Callable[[], None] = lambda: None
        self._free = list(range(4))[::-1]

    @property
    def spare(self) -> int:
        return self.keys.shape[2] - 1

    def take(self) -> int:
        """A row for a new sequence."""
        if not self._free:
            have = len(self.keys)
            self._grow(2 * have, self.keys.shape[2])
            self._free = list(range(have, 2 * have))[::-1]
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def reserve(self, length: int) -> None:
        have = size = self.keys.shape[2]
        while size - 1 < length:
            size *= 2
        if size > have:
            self._grow(len(self.keys), size)

    def _grow(self, rows: int, positions: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(rows, old.shape[1], positions, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)
        self.on_growth()


class RoomPrefix(Prefix):
    """One sequence's row of a room."""

    def __init__(self, room: Room) -> None:
        self.length, self.room, self.row = 0, room, room.take()

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        return self.room.keys[self.row]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self.room.values[self.row]

    def reserve(self, length: int) -> None:
        self.room.reserve(length)

    @torch.inference_mode()
    def beginning(self, length: int) -> RoomPrefix:
        made = RoomPrefix(self.room)
        made.keys[:, :length], made.values[:, :length] = self.keys[:, :length], self.values[:, :length]
        made.length = length
        return made

    def give_back(self) -> None:
        self.room.give_back(self.row)


class Bucket(NamedTuple):
    """The shape of one recording: sequences, new rows of each, keys that exist."""

    batch: int
    rows: int
    keys: int


class RecordedDraft:
    """Replaces `DartDrafter`'s last step, from each sequence's few new rows to its lattice."""

    def __init__(self, drafter: DartDrafter, recorder: Recorder, k: int) -> None:
        c = drafter.config
        self._drafter, self._recorder, self._k = drafter, recorder, k
        self._failed = False
        self._device = drafter.view.device
        self.room = Room(c.num_key_value_heads, c.head_dim, drafter.view.dtype, self._device)
        self.room.on_growth = self._anew
        self._recorded: OrderedDict[Bucket, tuple[Staged, Tensor, Recording]] = OrderedDict()
        self._anew()

    def _anew(self) -> None:
        """Nothing recorded holds when the memory under it has moved."""
        c = self._drafter.config
        self._recorded.clear()
        positions = torch.arange(self.room.keys.shape[2], device=self._device)
        self._cos, self._sin = rope_table(positions, c.head_dim, c.rope_theta)

    @property
    def buckets(self) -> list[Bucket]:
        return list(self._recorded)

    def lattice(self, taken: Sequence[tuple[Prefix, Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
        """Per sequence its prefix, the features (n, n_taps * H) of its new rows and the tokens (n,) at one position
        further on -> log-probabilities and draft indices (B * d, k) on the CPU, in one transfer. The prefixes grow.
        None, and nothing has changed, where recording failed."""
        if self._failed:
            return None
        counts = [len(ids) for _, _, ids in taken]
        end = max(p.length + n for (p, _, _), n in zip(taken, counts, strict=True)) + self._drafter.config.num_masks
        keys = LEAST_KEYS
        while keys < end:
            keys *= 2
        bucket = Bucket(1 << (len(taken) - 1).bit_length(), 1 << (max(counts) - 1).bit_length(), keys)
        found = self._recorded.get(bucket)
        if found is None:
            inputs, features = self._inputs(bucket)
            self._fill(bucket, inputs, features, taken)
            try:
                recording = self._recorder.record(lambda: self._run(bucket, inputs.device, features))
            except Exception as error:
                self._failed = True
                _log.warning("the drafter is run without recordings, for one failed: %s", first_line(error))
                return None
            self._recorded[bucket] = inputs, features, recording
            while len(self._recorded) > MOST_RECORDINGS:
                self._recorded.popitem(last=False)
        else:
            inputs, features, recording = found
            self._recorded.move_to_end(bucket)
            self._fill(bucket, inputs, features, taken)
            recording.replay()
        for (prefix, _, _), n in zip(taken, counts, strict=True):
            prefix.length += n
        log_probs, index = fetch(*recording.outputs)
        num = len(taken) * self._drafter.config.d
        return log_probs[:num], index[:num]

    def _inputs(self, bucket: Bucket) -> tuple[Staged, Tensor]:
        c, view = self._drafter.config, self._drafter.view
        B, R = bucket.batch, bucket.rows
        one = ((B,), torch.int64)
        staged = Staged(self._device, {"ids": ((B, R), torch.int64), "start": one, "count": one, "row": one})
        width = len(c.taps) * c.target_hidden_size
        return staged, torch.zeros(B * R, width, dtype=view.dtype, device=self._device)

    def _fill(
        self, bucket: Bucket, inputs: Staged, features: Tensor, taken: Sequence[tuple[Prefix, Tensor, Tensor]]
    ) -> None:
        inputs.wait()
        host = {name: view.numpy() for name, view in inputs.host.items()}
        host["count"].fill(0)
        where = []
        for b, (prefix, _, ids) in enumerate(taken):
            assert isinstance(prefix, RoomPrefix)
            n = len(ids)
            host["ids"][b, :n], host["count"][b] = ids.numpy(), n
            host["start"][b], host["row"][b] = prefix.length, prefix.row
            where.append(np.arange(b * bucket.rows, b * bucket.rows + n))
        inputs.send()
        rows = torch.cat([f for _, f, _ in taken]) if len(taken) > 1 else taken[0][1]
        features.index_copy_(0, send({"where": np.concatenate(where)}, self._device)["where"], rows)

    def _run(self, bucket: Bucket, given: dict[str, Tensor], features: Tensor) -> tuple[Tensor, ...]:
        """What is recorded. Clean rows, then masks, at each sequence's own positions; the last d rows are attended."""
        drafter, room = self._drafter, self.room
        c = drafter.config
        (B, R, K), m = bucket, c.num_masks
        heads, kv = c.num_attention_heads, c.num_key_value_heads
        start, count = given["start"][:, None], given["count"][:, None]  # (B, 1)
        node, sequence = torch.arange(R, device=self._device), torch.arange(B, device=self._device)
        valid = node < count  # (B, R)
        residual, x = drafter._inputs(features, given["ids"].masked_fill(~valid, 0).flatten())
        qkv = drafter._qkv(x).view(B, R, heads + 2 * kv, c.head_dim)
        masks = drafter._mask_qkv.view(1, m, heads + 2 * kv, c.head_dim).expand(B, -1, -1, -1)
        qkv = torch.cat((qkv, masks), dim=1)  # (B, R + m, ...)
        at = torch.cat((start + node, start + count + torch.arange(m, device=self._device)), dim=1)
        at = at.masked_fill(~torch.cat((valid, (count > 0).expand(B, m)), dim=1), room.spare)
        turned = rotate(qkv[:, :, : heads + kv], self._cos[at][:, :, None], self._sin[at][:, :, None])
        room.keys[given["row"][:, None], :, at] = turned[:, :, heads:]
        room.values[given["row"][:, None], :, at] = qkv[:, :, heads + kv :]

        last = (count[:, 0] - 1).clamp(min=0)
        query = torch.cat((turned[sequence, last, :heads][:, None], turned[:, R:, :heads]), dim=1).transpose(1, 2)
        key = torch.arange(K, device=self._device)
        reach = start + count - 1 + torch.arange(c.d, device=self._device)  # (B, d): each row's own position
        seen = (key <= reach[:, :, None]) | (key == 0)
        keys, values = (t[:, :, :K].index_select(0, given["row"]) for t in (room.keys, room.values))
        out = WAYS["folded"](query, keys, values, seen[:, None], c.head_dim**-0.5, False)  # (B, d, heads, dim)
        own = residual.view(B, R, -1)[sequence, last][:, None]
        residual = torch.cat((own, drafter._mask_residual.expand(B, -1, -1)), dim=1).flatten(0, 1)
        return drafter._head.likeliest_there(drafter._finish(residual, out.flatten(2).flatten(0, 1)), self._k)
