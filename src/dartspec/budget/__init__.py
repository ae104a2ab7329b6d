"""How many nodes are worth verifying: what rows cost here, how likely guesses are right, and who weighs the two."""

from dartspec.budget.calibration import Calibration
from dartspec.budget.controller import Adaptive, Fixed, subtree
from dartspec.budget.cost import CostModel, best_threads, cached_rows, interpolate

__all__ = ["Adaptive", "Calibration", "CostModel", "Fixed", "best_threads", "cached_rows", "interpolate", "subtree"]
