"""Plain decoding: a root-only tree every round. The baseline, and the reference for losslessness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dartspec.tree import root_only
from dartspec.types import Committed, TargetView, TokenTree


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""


class Plain:
    taps: tuple[int, ...] = ()

    def reset(self, slots: Sequence[int]) -> None:
        """Nothing is remembered."""

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        return [root_only(int(c.history[-1])) for c in new]


def load(config: Config, view: TargetView) -> Plain:
    return Plain()
