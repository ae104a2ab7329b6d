"""The target's forward in fixed shapes, recorded once and replayed: CUDA graphs, and their stand-in on the CPU.

A forward over a few rows is a thousand small kernels; on a GPU starting them takes longer than running them. So trees
are padded to a few sizes (`Bucket`), all that changes from round to round is written into tensors that stay where they
are, and the device replays the operations that it was shown. Python runs while recording and never again.

Knows the target's forward, masks and cache. Knows no sampling, no drafter. Nothing here changes a result: padding rows
write behind all sequences and are seen by nobody.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dartspec.device import Recorder, Recording, Staged, first_line
from dartspec.target.cache import SlotCache
from dartspec.target.masks import MaskPlan
from dartspec.tree import ancestor_mask, depths
from dartspec.types import Scores, TokenTree

ROWS = (1, 5, 9, 17, 33, 61)  # tokens a sequence, root included
LEAST_KEYS = 256  # keys are counted in this, doubled as often as needed
MOST_RECORDINGS = 16  # of one cache; the one that was used longest ago goes
MOST_OUTPUT_BYTES = 2 << 30  # of all recordings of one cache together; a larger forward is not recorded
_log = logging.getLogger(__name__)


class Bucket(NamedTuple):
    """The shape of one recording: cache rows [0, batch), tokens a sequence, keys that exist, whether taps are read."""

    batch: int
    rows: int
    keys: int
    features: bool


class _Recorded(NamedTuple):
    inputs: Staged
    recording: Recording
    num_bytes: int


class RecordedForwards:
    """The forwards over trees of one session's cache. Made anew when the cache is.

    forward:  `(ids (B, N), positions (B, N), mask, features) -> (logits (B, N, V),)`, with (B, N, n_taps, H) behind it
              where features are wanted: the target's own, which reads and writes `cache`.
    has_taps: whether `forward` can return features.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Any, bool], tuple[Tensor, ...]],
        masks: MaskPlan,
        cache: SlotCache,
        device: torch.device,
        has_taps: bool,
        recorder: Recorder,
    ) -> None:
        self._forward, self._masks, self._cache, self._device = forward, masks, cache, device
        self._has_taps, self._recorder = has_taps, recorder
        self._recorded: OrderedDict[Bucket, _Recorded] = OrderedDict()
        self._too_large: set[Bucket] = set()
        self.failure: str | None = None  # why nothing is recorded any more

    @property
    def num_bytes(self) -> int:
        """What the recordings' results hold."""
        return sum(r.num_bytes for r in self._recorded.values())

    @property
    def buckets(self) -> list[Bucket]:
        """The recordings there are, the one used last at the end."""
        return list(self._recorded)

    def score(
        self, rows: Sequence[int], starts: Sequence[int], trees: Sequence[TokenTree], features: bool
    ) -> list[Scores] | None:
        """`Session.score` for trees at cache rows `rows` whose committed lengths are `starts`; None where no recording
        serves: the trees are too large, or recording failed.

        The scores lie in the recording's memory: they hold until the next call.
        """
        bucket = self._bucket(rows, starts, trees, features and self._has_taps)
        if self.failure is not None or bucket is None or bucket in self._too_large:
            return None
        found = self._recorded.get(bucket)
        if found is None:
            found = self._record(bucket, rows, starts, trees)
            if found is None:
                return None
        else:
            self._recorded.move_to_end(bucket)
            self._fill(found.inputs, rows, starts, trees)
            found.recording.replay()
        logits, *taps = found.recording.outputs
        return [
            Scores(logits[row, : len(t.tokens)], taps[0][row, : len(t.tokens)] if taps else None)
            for row, t in zip(rows, trees, strict=True)
        ]

    def _bucket(
        self, rows: Sequence[int], starts: Sequence[int], trees: Sequence[TokenTree], features: bool
    ) -> Bucket | None:
        needed = max(len(t.tokens) for t in trees)
        size = next((n for n in ROWS if n >= needed), None)
        if size is None:
            return None
        batch = 1
        while batch <= max(rows):
            batch *= 2
        end, most = max(s + len(t.tokens) for s, t in zip(starts, trees, strict=True)), self._cache.capacity
        if end > most:
            return None  # the plain path says so in a sentence
        keys = LEAST_KEYS
        while keys < end:
            keys *= 2
        return Bucket(min(batch, self._cache.rows), size, min(keys, most + self._cache.spare), features)

    def _record(
        self, bucket: Bucket, rows: Sequence[int], starts: Sequence[int], trees: Sequence[TokenTree]
    ) -> _Recorded | None:
        B, N = bucket.batch, bucket.rows
        inputs = Staged(
            self._device,
            {
                "ids": ((B, N), torch.int64),
                "depth": ((B, N), torch.int64),
                "start": ((B,), torch.int64),
                "count": ((B,), torch.int64),
                "tree": ((B, N, N), torch.bool),
            },
        )
        self._fill(inputs, rows, starts, trees)
        try:
            recording = self._recorder.record(lambda: self._run(bucket, inputs.device))
        except Exception as error:
            # a model may ask for a value half-way; nothing is lost but time
            self.failure = first_line(error)
            _log.warning("the target's forwards are run one by one, for recording one failed (%s)", self.failure)
            self._recorded.clear()
            return None
        made = _Recorded(inputs, recording, sum(t.numel() * t.itemsize for t in recording.outputs))
        if made.num_bytes > MOST_OUTPUT_BYTES:
            self._too_large.add(bucket)
        else:
            self._recorded[bucket] = made
            while len(self._recorded) > MOST_RECORDINGS or self.num_bytes > MOST_OUTPUT_BYTES:
                self._recorded.popitem(last=False)
        return made

    def _fill(self, inputs: Staged, rows: Sequence[int], starts: Sequence[int], trees: Sequence[TokenTree]) -> None:
        inputs.wait()
        host = {name: view.numpy() for name, view in inputs.host.items()}
        host["count"].fill(0)  # a cache row without a tree is padding
        for row, start, t in zip(rows, starts, trees, strict=True):
            n = len(t.tokens)
            host["start"][row], host["count"][row] = start, n
            host["ids"][row, :n] = t.tokens.numpy()
            host["depth"][row, :n] = depths(t).numpy()
            host["tree"][row].fill(False)
            host["tree"][row, :n, :n] = ancestor_mask(t).numpy()
        inputs.send()

    def _run(self, bucket: Bucket, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """What is recorded: padding told apart, masks, write positions, and the target's forward."""
        B, N = bucket.batch, bucket.rows
        node = torch.arange(N, device=self._device)
        valid = node < given["count"][:, None]  # (B, N)
        padding, start = ~valid, given["start"]
        # masked_fill: `where` may bring its number from the host, which no recording allows
        depth, ids = (given[name].masked_fill(padding, 0) for name in ("depth", "ids"))
        positions = (start[:, None] + depth).masked_fill(padding, 0)
        writes = (start[:, None] + node).masked_fill(padding, self._cache.capacity)
        mask = self._masks.build_tensors(start, depth, given["tree"], valid, bucket.keys)
        cache_rows = torch.arange(B, device=self._device)[:, None]
        self._cache.window.set_tensors(cache_rows, writes, bucket.keys)
        return self._forward(ids, positions, mask, bucket.features)
