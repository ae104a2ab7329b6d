"""How many nodes are worth verifying: what rows cost here, how likely guesses are right, and who weighs the two."""

from dartspec.budget.calibration import Calibration
from dartspec.budget.controller import Adaptive, Fixed
from dartspec.budget.cost import CostModel, Times, best_threads, cached_times, interpolate

__all__ = [
    "Adaptive",
    "Calibration",
    "CostModel",
    "Fixed",
    "Times",
    "best_threads",
    "cached_times",
    "interpolate",
]
