"""How likely is it that a drafted token is the target's own? Counts of what became of such tokens before.

A node's score rises or falls from its parent's by a step. Verified nodes whose parent was reached are labels: picked or
not. They are counted by depth and step; the share of picked ones, made to rise with the step, is the probability.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dartspec.budget.cost import rising
from dartspec.errors import DartspecError
from dartspec.files import write_json

STEPS = (-8.0, -6.0, -4.5, -3.5, -2.75, -2.25, -1.8, -1.4, -1.1, -0.85, -0.65, -0.5, -0.35, -0.22, -0.12, -0.05)
DEPTHS = 5  # depths 1, 2, 3, 4, and deeper
PRIOR_TRIALS = 4.0  # how many labels the first guess of a cell weighs
MOST_TRIALS = 3000.0  # older labels fade: a cell never weighs more
REFRESH = 32  # trees between two looks at the counts
_VERSION = 1


class Calibration:
    """Probability that a node is picked, its parent having been reached, by (depth, step of the score).

    hits, trials: labels so far, DEPTHS rows of len(STEPS) + 1 cells; None: none yet, a rough guess stands in.
    log_odds: (DEPTHS * (len(STEPS) + 1),) float32, what the counts say, rising with the step.
    """

    steps = np.array(STEPS, dtype=np.float32)

    def __init__(
        self, hits: Sequence[Sequence[float]] | None = None, trials: Sequence[Sequence[float]] | None = None
    ) -> None:
        shape = (DEPTHS, len(STEPS) + 1)
        if hits is None or trials is None:
            guess = [min(0.9, math.exp(s)) for s in (-10.0, *STEPS)]
            trials = [[PRIOR_TRIALS] * shape[1]] * DEPTHS
            hits = [[PRIOR_TRIALS * p for p in guess]] * DEPTHS
        made = np.array(hits, dtype=np.float64), np.array(trials, dtype=np.float64)
        if not all(m.shape == shape and np.isfinite(m).all() for m in made) or not (made[0] >= 0).all():
            raise _misfit()
        if not (made[0] <= made[1]).all():
            raise _misfit()
        self.hits, self.trials = made
        self.log_odds = np.zeros(self.hits.size, dtype=np.float32)
        self._rounds = 0
        self.refresh()

    def refresh(self) -> None:
        """Makes `log_odds` of the counts, after old ones have faded."""
        fade = np.where(self.trials > MOST_TRIALS, 0.5, 1.0)
        self.hits *= fade
        self.trials *= fade
        share = (self.hits + 0.25) / (self.trials + 0.5)
        fit = np.array([rising(s, w) for s, w in zip(share.tolist(), (self.trials + 0.5).tolist(), strict=True)])
        self.log_odds[:] = np.log(fit / (1 - fit)).ravel()

    def counted(self) -> None:
        """One more tree's labels were counted; the probabilities follow now and then."""
        self._rounds += 1
        if self._rounds % REFRESH == 0:
            self.refresh()

    def save(self, folder: Path, method: str, **about: Any) -> None:
        """`calibration-METHOD.json` in a drafter's folder, written aside and renamed. about: where labels came from."""
        rounded = {name: getattr(self, name).round(1).tolist() for name in ("hits", "trials")}
        write_json(folder / f"calibration-{method}.json", {"version": _VERSION, "steps": STEPS, **rounded, **about})

    @classmethod
    def load(cls, folder: Path, method: str) -> Calibration:
        """Of a drafter's folder and a method that uses it; one that has none begins from a guess."""
        path = folder / f"calibration-{method}.json"
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


def _misfit() -> DartspecError:
    return DartspecError(
        f"a calibration holds {DEPTHS} rows of {len(STEPS) + 1} cells with 0 <= hits <= trials; this one does not: "
        "make it again with benchmarks/calibrate.py"
    )
