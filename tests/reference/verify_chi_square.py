"""Pearson's chi-square test, from torch's incomplete gamma function."""

from __future__ import annotations

import torch
from torch import Tensor


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """(k,) counts and (k,) expected probabilities, none of them 0, summing to 1 -> P(a statistic at least as large)."""
    expected = probabilities.double() * counts.sum()
    statistic = ((counts.double() - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))
