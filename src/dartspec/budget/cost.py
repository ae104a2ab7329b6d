"""What a round costs on this machine: milliseconds of a forward by rows, measured once and corrected as rounds go by.

Knows times and numbers of rows; knows no tree and no probability.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dartspec.tree import from_chain

if TYPE_CHECKING:
    from dartspec.target.target import Target
    from dartspec.types import RoundTimes

ROWS = (1, 2, 3, 5, 7, 9, 10, 11, 12, 13, 14, 17, 21, 25, 29, 33, 41, 49, 65, 97, 129)
CONTEXT = 256  # committed tokens behind the rows that are timed
ROWS_TO_TIME = 600  # the fewer rows, the more often they are timed: about so many rows in all, within REPEATS
REPEATS = (3, 15)
LONG_CONTEXT, LONG_ROWS = 2048, 9  # where attention shows
THREAD_ROWS, THREAD_REPEATS = (1, 9), 3  # what numbers of threads are tried on
NEARLY = 1.04  # of the least time: fewer threads are taken
FIRST_SHARE = 0.08  # what draft and search take of a plain step, until they have been seen
QUICK, SLOW = 0.1, 0.02  # weights of a new round: in what the whole machine does, in what one number of rows does
MOST_STEP = 1.0  # of one round, as a logarithm


class Times(NamedTuple):
    """Milliseconds of a forward on this machine. rows: by rows, root included, CONTEXT committed tokens behind them.
    row_key: what each row adds for each committed token beyond that (attention)."""

    rows: dict[int, float]
    row_key: float = 0.0


def measure_rows(target: Target, rows: Sequence[int] = ROWS, context: int = CONTEXT) -> dict[int, float]:
    """Milliseconds of one sequence's forward over each number of rows, root included.

    Medians of interleaved runs; then the nearest curve that never falls, since more rows never take less time and a
    busy neighbour must not say so. Numbers of rows that the model's context cannot hold are left out.
    """
    rows = [n for n in rows if n <= target.max_positions - 2]
    context = min(context, target.max_positions - max(rows) - 1)
    session = target.session(1, context + max(rows), ())
    session.prefill(0, [i % target.num_tokens for i in range(3, 3 + context)])
    trees = {n: from_chain([i % target.num_tokens for i in range(5, 5 + n)]) for n in rows}
    repeats = {n: max(REPEATS[0], min(REPEATS[1], ROWS_TO_TIME // n)) for n in rows}
    times: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(max(repeats.values()) + 1):
        for n in rows:
            if repeat > repeats[n]:
                continue
            began = time.perf_counter()
            session.score([0], [trees[n]])
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            if repeat:  # the first pass warms up
                times[n].append(1e3 * (time.perf_counter() - began))
    return dict(zip(rows, rising([statistics.median(times[n]) for n in rows]), strict=True))


def measure(target: Target) -> Times:
    """Both, measured now."""
    rows = measure_rows(target)
    far = min(LONG_CONTEXT, target.max_positions - LONG_ROWS - 2)
    if far < 2 * CONTEXT:
        return Times(rows)
    near_ms, far_ms = (measure_rows(target, (LONG_ROWS,), c)[LONG_ROWS] for c in (CONTEXT, far))
    return Times(rows, max(0.0, far_ms - near_ms) / LONG_ROWS / (far - CONTEXT))


def rising(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The nearest values, in weighted squares, that never fall (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, v, n), (b, w, m) = blocks[-2:]
            blocks[-2:] = [((a * v + b * w) / (v + w), v + w, n + m)]
    return [mean for mean, _, n in blocks for _ in range(n)]


def cached_times(target: Target, folder: Path, key: str, *, again: bool = False) -> Times:
    """`measure`, kept in `folder` under `key` (what the times depend on: model, dtype, device, threads).

    again: measure even where they are known. Where the folder cannot be written, a warning, and they are measured again
    next time.
    """
    path = folder / f"cost-{key}.json"
    if not again and len(found := _remembered(path)) > 1:
        row_key = found.pop(0, 0.0)  # a row alone costs nothing: its place holds the other number
        return Times(found, row_key)
    times = measure(target)
    _remember(path, {0: times.row_key, **times.rows})
    return times


def best_threads(
    target: Target, use: Callable[[int], None], most: int, folder: Path, key: str, *, again: bool = False
) -> int:
    """The number of CPU threads with which a plain step and a small tree take least time; `use` was called with it.

    Powers of two up to `most` are tried, and `most`; the fewest within NEARLY of the best, since threads that bring
    nothing only disturb others. Kept in `folder` as `cached_times` are.
    """
    path = folder / f"threads-{key}.json"
    counts = sorted({2**k for k in range(most.bit_length()) if 2**k <= most} | {most})
    times = {} if again else _remembered(path)
    if sorted(times) != counts:
        seen: dict[int, list[float]] = {n: [] for n in counts}
        for _ in range(THREAD_REPEATS):
            for n in counts:
                use(n)
                seen[n].append(sum(measure_rows(target, THREAD_ROWS).values()))
        times = {n: statistics.median(t) for n, t in seen.items()}
        _remember(path, times)
    least = min(times.values())
    chosen = min(n for n in counts if times[n] <= least * NEARLY)
    use(chosen)
    return chosen


def _remembered(path: Path) -> dict[int, float]:
    """Nothing where there is no file, half a file, or another version's."""
    try:
        return {int(n): float(ms) for n, ms in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(path: Path, times: Mapping[int, float]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as aside:
            json.dump(times, aside)
        os.replace(aside.name, path)
    except OSError as error:
        warnings.warn(
            f"this machine's times were measured but cannot be remembered in {path.parent} ({error.strerror}): set "
            "DARTSPEC_CACHE to a folder that can be written",
            stacklevel=3,
        )


def interpolate(points: Mapping[int, float], x: int) -> float:
    """Piecewise linear through `points`, flat outside."""
    known = sorted(points)
    if x <= known[0]:
        return points[known[0]]
    for a, b in pairwise(known):
        if x <= b:
            return points[a] + (points[b] - points[a]) * (x - a) / (b - a)
    return points[known[-1]]


class CostModel:
    """Milliseconds of a round's stages, predicted from numbers of rows and kept true by what rounds report.

    times: Beyond the largest number of rows the last slope goes on.

    Two corrections, both factors: one for the machine as it is now (a busy neighbour slows all alike), quick; and one
    for each number of sequences and rows (longer contexts, batches), slow. Draft and search are seen, never measured
    ahead.
    """

    def __init__(self, times: Times) -> None:
        self._times, self._row_key = dict(sorted(times.rows.items())), times.row_key
        self._curves: dict[int, NDArray[np.float64]] = {}  # by sequences: ms of 1, 2, ... rows each, corrected but for
        self._now = 0.0  # the logarithm of the machine's slowness now
        self._draft: dict[int, float] = {}  # ms of drafting for a class of sequences, nothing to catch up
        self._reading = 0.0  # ms for each row that it catches up on
        self._other: dict[tuple[bool, int], float] = {}  # ms of all else, by (drafted?, class of sequences)
        self.errors: list[float] = []  # logarithm of seen over predicted, the last rounds'

    def base_ms(self, rows: int) -> float:
        """A forward over so many rows, as measured ahead."""
        known = list(self._times)
        if rows <= known[-1] or len(known) < 2:
            return interpolate(self._times, rows)
        a, b = known[-2:]
        slope = max(0.0, (self._times[b] - self._times[a]) / (b - a))
        return self._times[b] + slope * (rows - b)

    def verify_ms(self, sequences: int, most_rows: int, context: float = CONTEXT) -> NDArray[np.float64]:
        """(most_rows,) the target's forward over so many sequences of 1, 2, ... rows each, their mean committed length
        being `context`."""
        curve = self._curve(sequences, most_rows)[:most_rows]
        if context > CONTEXT and self._row_key:
            curve = curve + self._attention_ms(sequences, context) * np.arange(1, most_rows + 1)
        return curve * math.exp(self._now)

    def _attention_ms(self, sequences: int, context: float) -> float:
        """Of one row each, beyond what the curve holds."""
        return self._row_key * sequences * max(0.0, context - CONTEXT)

    def _curve(self, sequences: int, most_rows: int) -> NDArray[np.float64]:
        curve = self._curves.get(sequences)
        if curve is None or len(curve) < most_rows:
            curve = np.array([self.base_ms(sequences * n) for n in range(1, most_rows + 1)])
            self._curves[sequences] = curve  # what was learned is learned anew
        return curve

    def draft_ms(self, sequences: int, behind: float = 0) -> float:
        """Draft and search for so many sequences, which together have `behind` more rows to read than they committed in
        one round."""
        if not sequences:
            return 0.0
        size = _size(sequences)
        known = self._draft.get(size)
        if known is None:
            if self._draft:
                near = min(self._draft, key=lambda s: abs(s - size))
                known = self._draft[near] * 2.0 ** (size - near)
            else:
                known = FIRST_SHARE * self.base_ms(1) * sequences
        return known + self._reading * behind

    def other_ms(self, drafted: bool, sequences: int) -> float:
        """All else in a round, the controller included."""
        key = drafted, _size(sequences)
        return self._other.get(key, self._other.get((not drafted, key[1]), 0.0))

    def observe(self, times: RoundTimes, sequences: int, drafted: int, context: float = CONTEXT) -> None:
        """One round of `sequences`, of which `drafted` were drafted for; context: their mean length before it."""
        rows = times.num_padded_rows // sequences
        curve = self._curve(sequences, rows)
        predicted = curve[rows - 1] + self._attention_ms(sequences, context) * rows
        off = math.log(max(times.verify_ms, 1e-3) / predicted) - self._now
        self.errors.append(off)
        if len(self.errors) > 4096:
            del self.errors[:2048]
        off = max(-MOST_STEP, min(MOST_STEP, off))  # one stall is not a new machine
        self._now += QUICK * off
        curve[rows - 1] *= 1 + SLOW * off
        if drafted:
            size, ms = _size(drafted), times.draft_ms + times.search_ms
            behind = times.num_read - 4 * drafted
            old = self._draft.get(size)
            if behind <= 4 * drafted:
                self._draft[size] = ms if old is None else old + QUICK * (min(ms, 3 * old) - old)
            elif old is not None:
                each = max(0.0, ms - old) / behind
                self._reading += QUICK * (each - self._reading) if self._reading else each
        key = drafted > 0, _size(sequences)
        before = self._other.get(key, times.other_ms)
        self._other[key] = before + QUICK * (min(times.other_ms, 3 * before) - before)


def _size(count: int) -> int:
    """Classes of numbers: 1, 2, 3-4, 5-8, 9-16 ..."""
    return (count - 1).bit_length()
