"""A trained drafter for a target that was fine-tuned since: train until M is flat, and say whether it was worth it.

A run adapts when it starts from a drafter (`init`) whose target had other weights, and M is measured (`m_every`). M of
the drafter as it is comes first. The run ends where M rises no more, or at its last update.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dartspec.drafters._checkpoint import DraftNet
from dartspec.errors import DartspecError
from dartspec.files import write_json
from dartspec.train.watch import Record

PATIENCE = 2  # measurements in a row without a gain above noise: M is flat
RESAMPLES, LEVEL = 2000, 0.95
FILE = "adapt.json"


class Gain(NamedTuple):
    """M after less M before, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        return self.low <= 0

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def gain(before: Record, after: Record) -> Gain:
    """Two measurements of M on the same prompts: prompts are drawn with replacement, both runs' rounds together.

    `by_prompt`: [committed, rounds] of each prompt. The same measurements, the same interval.
    """
    a, b = (np.asarray(record["by_prompt"], dtype=np.float64) for record in (before, after))
    if a.shape != b.shape:
        raise DartspecError(f"M was measured on {len(a)} prompts before and on {len(b)} after: they must be the same")
    counts = np.random.default_rng(0).multinomial(len(a), np.full(len(a), 1 / len(a)), size=RESAMPLES)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = _ratio(counts @ b) - _ratio(counts @ a)
        value = _ratio(b.sum(0)) - _ratio(a.sum(0))
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return Gain(0.0, 0.0, 0.0)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Gain(float(value), float(low), float(high))


def _ratio(sums: Any) -> Any:
    return sums[..., 0] / sums[..., 1]


class Adaptation:
    """Told of every measurement of M; says when it is enough, and what came of it.

    out: folder of the run, whose `adapt.json` it keeps: a resumed run goes on with what was measured. drafter: the
    folder that is adapted. measure: M of it as it is.
    """

    def __init__(
        self, out: Path, drafter: Path, measure: Callable[[], Record | None], report: Callable[[str], None] = print
    ) -> None:
        self.out, self.drafter, self.report = out, drafter, report
        self.path = out / FILE
        self.measured: list[Record] = []
        self.minutes, self._since = 0.0, time.monotonic()
        if self.path.exists():
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            self.before, self.measured, self.minutes = kept["before"], kept["measured"], kept["minutes"]
        else:
            found = measure()
            assert found is not None, "nothing tells this measurement to stop"
            self.before = found
            self._since = time.monotonic()  # measuring is no training
        report(
            f"M of the drafter as it is: {self.before['M']:.2f} over {self.before['rounds']} rounds, "
            f"{self.before['nodes']} nodes"
        )

    def __call__(self, record: Record) -> bool:
        """Whether it is enough: M is flat."""
        self.measured = [*(r for r in self.measured if r["step"] < record["step"]), record]
        now = time.monotonic()
        self.minutes, self._since = self.minutes + (now - self._since) / 60, now
        self._write()
        self.report(f"M {record['M']:.2f}, {gain(self.before, record)} against the drafter as it is")
        return self.is_flat

    @property
    def is_flat(self) -> bool:
        """The last measurements, each, brought nothing above noise to the best before them."""
        history = [self.before, *self.measured]  # so a drafter that training does not help is told at the second
        if len(history) <= PATIENCE:
            return False
        best = max(history[:-PATIENCE], key=_m)
        return all(gain(best, record).is_noise for record in history[-PATIENCE:])

    @property
    def best(self) -> Record:
        return max(self.measured, key=_m)

    def end(self, adapted: Path) -> Path:
        """The folder to use: the adapted drafter's, or the old one's where the difference is within noise."""
        if not self.measured:
            return adapted
        found, best = gain(self.before, self.best), self.best
        keep = found.is_noise
        self._write(gain=list(found), kept="old" if keep else "adapted", after=best)
        self.report(
            f"M {self.before['M']:.2f} before, {best['M']:.2f} after {best['step']} updates: {found}, "
            f"{self.minutes:.1f} minutes"
        )
        if keep:
            self.report(f"the old drafter is within noise: use it as it is, {self.drafter}")
        return self.drafter if keep else adapted

    def _write(self, **more: Any) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        kept = {"drafter": self.drafter.name, "minutes": round(self.minutes, 2), **more}
        write_json(self.path, {**kept, "before": self.before, "measured": self.measured})


def _m(record: Record) -> float:
    return float(record["M"])


# -- low rank --------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A matrix W as W + B A; only A (r, in) and B (out, r) are trained. B begins at zero, so W is what it was."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.A = nn.Parameter(torch.randn(rank, columns, generator=generator) * columns**-0.5)
        self.B = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.B @ self.A).to(weight.dtype)


def make_low_rank(net: DraftNet, rank: int, seed: int) -> None:
    """From here on only a change of this rank to every matrix is trained, and norms and masks whole."""
    generator = torch.Generator().manual_seed(seed)
    for module in list(net.modules()):
        if isinstance(module, nn.Linear):
            change = LowRank(module.weight, min(rank, *module.weight.shape), generator)
            parametrize.register_parametrization(module, "weight", change)
            original: Tensor = module.parametrizations.weight.original  # type: ignore[union-attr,assignment]
            original.requires_grad_(False)


def is_low_rank(net: nn.Module) -> bool:
    return any(isinstance(module, LowRank) for module in net.modules())


@torch.no_grad()
def plain_state(net: nn.Module) -> dict[str, Tensor]:
    """`state_dict` with every change added to its matrix: that of a network without them."""
    state = {name: t for name, t in net.state_dict().items() if ".parametrizations." not in name}
    for name, module in net.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            state[f"{name}.weight"] = module.weight.detach()
    return state
