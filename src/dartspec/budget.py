"""How many nodes are worth verifying on this machine: a one-off measurement of forward time against rows.

Knows times and expected tokens a round; knows no tree. The choice is fixed for a run; per-round choice comes later.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dartspec.tree import from_chain
from dartspec.types import RoundTimes, SamplingParams, TokenTree, Verdict

if TYPE_CHECKING:
    from dartspec.target.target import Target

ROWS = (1, 3, 5, 9, 13, 17, 25, 33, 45, 60)
CONTEXT = 256  # committed tokens behind the rows that are timed
REPEATS = 7


@dataclass(frozen=True)
class Fixed:
    """A controller (`types.Controller`) that always asks for the same number of nodes and verifies them all."""

    num_nodes: int

    @property
    def most_nodes(self) -> int:
        return self.num_nodes

    def join(self, slot: int, params: SamplingParams, length: int) -> None:
        """Nothing is remembered."""

    def leave(self, slot: int) -> None:
        """Nothing is remembered."""

    def ask(self, slots: Sequence[int], room: Sequence[int]) -> list[int]:
        return [min(self.num_nodes, r) for r in room]

    def cut(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> list[TokenTree]:
        return list(trees)

    def observe(
        self, slots: Sequence[int], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: RoundTimes
    ) -> None:
        """Nothing is learned."""


def measure_rows(target: Target, rows: Sequence[int] = ROWS) -> dict[int, float]:
    """Milliseconds of one sequence's forward over each number of rows, root included: medians of interleaved runs.

    Numbers of rows that the model's context cannot hold are left out.
    """
    rows = [n for n in rows if n <= target.max_positions - 2]
    context = min(CONTEXT, target.max_positions - max(rows) - 1)
    session = target.session(1, context + max(rows), ())
    session.prefill(0, [i % target.num_tokens for i in range(3, 3 + context)])
    trees = {n: from_chain([i % target.num_tokens for i in range(5, 5 + n)]) for n in rows}
    times: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(REPEATS + 1):
        for n in rows:
            began = time.perf_counter()
            session.score([0], [trees[n]])
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            if repeat:  # the first pass warms up
                times[n].append(1e3 * (time.perf_counter() - began))
    return {n: statistics.median(t) for n, t in times.items()}


def cached_rows(target: Target, folder: Path, key: str) -> dict[int, float]:
    """`measure_rows`, kept in `folder` under `key` (what the times depend on: model, dtype, device, threads).

    Where the folder cannot be written, a warning, and they are measured again next time.
    """
    path = folder / f"rows-{key}.json"
    try:
        found = {int(n): float(ms) for n, ms in json.loads(path.read_text()).items()}
        if found:
            return found
    except (OSError, ValueError, TypeError, AttributeError):
        pass  # no file, half a file, or another version's: measure
    times = measure_rows(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as aside:
            json.dump(times, aside)
        os.replace(aside.name, path)
    except OSError as error:
        warnings.warn(
            f"the tree size was measured but cannot be remembered in {folder} ({error.strerror}): set DARTSPEC_CACHE "
            "to a folder that can be written",
            stacklevel=2,
        )
    return times


def choose_nodes(times: Mapping[int, float], expected: Mapping[int, float], round_ms: float) -> int:
    """The number of nodes n with the most committed tokens a millisecond, M(n) / (T(n + 1) + round_ms).

    times:    milliseconds of a forward by rows. expected: committed tokens a round (M) by nodes; between the known
              sizes both are interpolated. round_ms: everything in a round but the forward.
    Zero is an answer: nothing drafted beats a plain step, 1 / T(1).
    """

    def rate(n: int) -> float:
        return interpolate(expected, n) / (interpolate(times, n + 1) + round_ms)

    largest = min(max(expected), max(times) - 1)
    best = max(range(1, largest + 1), key=rate, default=0)
    return best if best and rate(best) > 1 / interpolate(times, 1) else 0


def interpolate(points: Mapping[int, float], x: int) -> float:
    """Piecewise linear through `points`, flat outside."""
    known = sorted(points)
    if x <= known[0]:
        return points[known[0]]
    for a, b in pairwise(known):
        if x <= b:
            return points[a] + (points[b] - points[a]) * (x - a) / (b - a)
    return points[known[-1]]
