"""The test drafter: knows the answer and is right at a chosen rate, so that what is accepted is certain.

Not a method to use: it needs the text that it is to speed up. Tests drive every path of the engine with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from dartspec.errors import DartspecError
from dartspec.tree import merge_paths
from dartspec.types import Committed, TargetView, TokenTree


@dataclass(frozen=True)
class Config:
    """texts: whole sequences of ids, prompt and answer; the one that a history begins is followed.
    rate: chance that a token of the main path is right. length: its depth. branches: wrong siblings of each node."""

    texts: tuple[tuple[int, ...], ...] = ()
    rate: float = 1.0
    length: int = 4
    branches: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise DartspecError(f"the oracle's rate is {self.rate}; it must be in [0, 1]")


class Oracle:
    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, num_tokens: int) -> None:
        self._config = config
        self._num_tokens = num_tokens
        self._random = random.Random(config.seed)

    def reset(self, slots: Sequence[int]) -> None:
        """Nothing is remembered."""

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        return [self._one(c, b) for c, b in zip(new, budget, strict=True)]

    def _one(self, new: Committed, budget: int) -> TokenTree:
        c, history = self._config, tuple(new.history.tolist())
        text = next((t for t in c.texts if t[: len(history)] == history), ())
        main: list[int] = []
        paths: list[list[int]] = []
        for token in text[len(history) : len(history) + c.length]:
            right = self._random.random() < c.rate
            wrong = [[*main, (token + 1 + k) % self._num_tokens] for k in range(c.branches)]
            # wrong siblings come first: a walk must choose by token, not by place
            paths += wrong
            if not right:
                break
            main = [*main, token]
            paths.append(main)
        return merge_paths(history[-1], paths, budget)


def load(config: Config, view: TargetView) -> Oracle:
    return Oracle(config, view.num_tokens)
