"""How likely is it that a drafted token is the target's own? Counts of what became of such tokens before.

A node's score rises or falls from its parent's by a step. Verified nodes whose parent was reached are labels: picked or
not. They are counted by depth and step; the share of picked ones, made to rise with the step, is the probability.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dartspec.budget.cost import rising
from dartspec.errors import DartspecError

STEPS = (-8.0, -6.0, -4.5, -3.5, -2.75, -2.25, -1.8, -1.4, -1.1, -0.85, -0.65, -0.5, -0.35, -0.22, -0.12, -0.05)
DEPTHS = 5  # depths 1, 2, 3, 4, and deeper
PRIOR_TRIALS = 4.0  # how many labels the first guess of a cell weighs
MOST_TRIALS = 3000.0  # older labels fade: a cell never weighs more
REFRESH = 256  # labels between two looks at the counts
FILE = "calibration.json"  # beside a drafter's weights
_VERSION = 1


class Calibration:
    """Probability that a node is picked, its parent having been reached, by (depth, step of the score).

    hits, trials: labels so far, DEPTHS rows of len(STEPS) + 1 cells; None: none yet, a rough guess stands in.
    """

    def __init__(
        self, hits: Sequence[Sequence[float]] | None = None, trials: Sequence[Sequence[float]] | None = None
    ) -> None:
        cells = len(STEPS) + 1
        if hits is None or trials is None:
            guess = [min(0.9, math.exp(s)) for s in (-10.0, *STEPS)]
            trials = [[PRIOR_TRIALS] * cells for _ in range(DEPTHS)]
            hits = [[PRIOR_TRIALS * p for p in guess] for _ in range(DEPTHS)]
        self.hits = [list(map(float, row)) for row in hits]
        self.trials = [list(map(float, row)) for row in trials]
        good = len(self.hits) == len(self.trials) == DEPTHS and all(
            len(h) == len(t) == cells and all(0 <= a <= b < math.inf for a, b in zip(h, t, strict=True))
            for h, t in zip(self.hits, self.trials, strict=True)
        )
        if not good:
            raise DartspecError(
                f"a calibration holds {DEPTHS} rows of {cells} cells with 0 <= hits <= trials; this one does not: "
                "make it again with benchmarks/calibrate.py"
            )
        self._cells = cells
        self._stale = 0
        self.log_odds: list[float] = []
        self._refresh()

    def _refresh(self) -> None:
        self._stale = 0
        self.log_odds = []
        for hits, trials in zip(self.hits, self.trials, strict=True):
            share = [(h + 0.25) / (t + 0.5) for h, t in zip(hits, trials, strict=True)]
            self.log_odds += [math.log(p / (1 - p)) for p in rising(share, [t + 0.5 for t in trials])]

    def cell(self, depth: int, step: float) -> int:
        """Which entry of `log_odds` tells how likely a node at this depth (1: a child of the root), whose score lies
        `step` above its parent's, is picked where its parent is."""
        return (min(depth, DEPTHS) - 1) * self._cells + bisect_right(STEPS, step)

    def learn(self, cell: int, hit: bool) -> None:
        """One label. The probabilities follow every few labels."""
        row, at = divmod(cell, self._cells)
        hits, trials = self.hits[row], self.trials[row]
        if trials[at] >= MOST_TRIALS:
            hits[at] *= 0.5
            trials[at] *= 0.5
        trials[at] += 1
        hits[at] += hit
        self._stale += 1
        if self._stale >= REFRESH:
            self._refresh()

    def save(self, folder: Path, **about: Any) -> None:
        """`calibration.json` in a drafter's folder, written aside and renamed. about: where the labels came from."""
        aside = folder / f"{FILE}.tmp"
        rounded = {name: [[round(x, 1) for x in row] for row in getattr(self, name)] for name in ("hits", "trials")}
        aside.write_text(json.dumps({"version": _VERSION, "steps": STEPS, **rounded, **about}, indent=1) + "\n")
        os.replace(aside, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Calibration:
        """Of a drafter's folder; one that has none begins from a guess."""
        path = folder / FILE
        if not path.is_file():
            return cls()
        try:
            values: Mapping[str, Any] = json.loads(path.read_text())
            if values["version"] != _VERSION or tuple(values["steps"]) != STEPS:
                raise DartspecError(f"{path} is of version {values['version']}, this program reads {_VERSION}")
            return cls(list(values["hits"]), list(values["trials"]))
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, DartspecError):
                raise DartspecError(f"{path}: {error}") from None
            raise DartspecError(f"{path} is no calibration ({error!r}); delete it to begin without one") from None
