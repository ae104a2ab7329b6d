"""The statistics of every table: sums first, then one division; intervals by the bootstrap over prompts.

A *unit* is what is drawn with replacement: one prompt with all its repeats and seeds, or one pair of runs. Units are
independent of each other; the rounds of one prompt are not, so rounds are never drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dartspec.accounting import with_interval

Floats = NDArray[np.float64]
RESAMPLES = 4000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A figure and its interval: percentiles of the bootstrap. With one unit the interval is the figure itself."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return with_interval(self)

    def rounded(self, digits: int = 4) -> list[float]:
        """For JSON."""
        return [round(x, digits) for x in self]


def bootstrap(
    units: ArrayLike,
    statistic: Callable[[Floats], Floats],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """A figure that follows from the sums over units.

    units: (n, k), k sums for each unit. statistic: (..., k) sums -> (...) figures. The same seed, the same interval.
    """
    u = np.asarray(units, dtype=np.float64)
    n = len(u)
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)  # how often each is drawn
    drawn = statistic(counts.astype(np.float64) @ u)
    low, high = np.quantile(drawn[np.isfinite(drawn)], [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(statistic(u.sum(0))), float(low), float(high))


def ratio_of_sums(a: ArrayLike, b: ArrayLike, *, level: float = LEVEL, seed: int = 0) -> Estimate:
    """sum(a) / sum(b), the units paired."""
    return bootstrap(np.column_stack([a, b]), lambda s: s[..., 0] / s[..., 1], level=level, seed=seed)


def rate_ratio(a: ArrayLike, b: ArrayLike, *, level: float = LEVEL, seed: int = 0) -> Estimate:
    """How much faster a is than b: (tokens of a / ms of a) / (tokens of b / ms of b), the units paired.

    a, b: (n, 2), tokens and milliseconds of each unit. This is S = M * T_AR / T_round, for M = tokens / rounds.
    """

    def statistic(s: Floats) -> Floats:
        return (s[..., 0] / s[..., 1]) / (s[..., 2] / s[..., 3])

    return bootstrap(np.column_stack([a, b]), statistic, level=level, seed=seed)


def median(values: Sequence[float], *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The median of pair-by-pair ratios. Beside the ratio of sums, never in its place."""
    v = np.asarray(values, dtype=np.float64)
    drawn = np.median(v[np.random.default_rng(seed).integers(len(v), size=(resamples, len(v)))], axis=1)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(np.median(v)), float(low), float(high))


def quantiles_in_order(
    columns: ArrayLike,
    q: float,
    figure: Callable[[Floats], Floats],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """A figure that follows from quantiles over requests in order of arrival.

    columns: (n, k), k values for each request. figure: (..., k) quantiles -> (...) figures. Requests that follow each
    other share a queue, so blocks of about sqrt(n) neighbours are drawn and not single ones (moving-block bootstrap).
    """
    u = np.asarray(columns, dtype=np.float64)
    n = len(u)
    length = max(1, round(n**0.5))
    starts = np.random.default_rng(seed).integers(n - length + 1, size=(resamples, -(-n // length)))
    index = (starts[..., None] + np.arange(length)).reshape(resamples, -1)[:, :n]
    drawn = figure(np.quantile(u[index], q, axis=1))
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(figure(np.quantile(u, q, axis=0))), float(low), float(high))
