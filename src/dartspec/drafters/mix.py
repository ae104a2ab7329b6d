"""Two drafters (or more) under one node budget: their trees united, ranked by one measure.

For text that one of them cannot draft: DART knows only its draft vocabulary and the top candidates of each position, a
copy from the prompt has any token. Scores of different methods are not comparable, so each is turned into a chance: how
often nodes with about that score turned out right lately. Every proposed path is compared with what was committed,
taken into the tree or not, so a method that is right in this text rises and one that is wrong falls. Where both propose
the same node, either being right suffices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dartspec.drafters._paths import as_tree
from dartspec.errors import DartspecError
from dartspec.tree import truncate
from dartspec.types import Committed, Drafter, Forks, TargetView, TokenTree

BINS_A_NAT = 2  # resolution of scores
NUM_BINS = 32


@dataclass(frozen=True)
class Config:
    """parts:  the methods, by name or folder. memory: rounds after which an observation weighs a third.
    prior:  observations that a score's face value, exp(score), is worth at the start."""

    parts: tuple[str, ...] = ("dart", "prompt_lookup")
    memory: float = 100.0
    prior: float = 3.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if len(self.parts) < 2 or "mix" in self.parts:
            raise DartspecError(f"mix unites two methods or more, found {' and '.join(self.parts) or 'none'}")
        if self.memory < 1 or self.prior <= 0:
            raise DartspecError(
                f"mix needs memory of at least 1 and prior above 0, found {self.memory} and {self.prior}"
            )


@dataclass
class _Record:
    """Of one part: how often nodes were right, by score."""

    right: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    seen: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)

    @staticmethod
    def bin(score: float) -> int:
        return min(NUM_BINS - 1, max(0, int(-score * BINS_A_NAT)))

    def chance(self, score: float, prior: float) -> float:
        """Falls with the score where nothing was seen; in (0, 1)."""
        b = self.bin(score)
        face = min(0.95, math.exp(max(min(score, 0.0), -30.0)))
        return (self.right[b] + prior * face) / (self.seen[b] + prior)

    def add(self, score: float, right: bool) -> None:
        b = self.bin(score)
        self.seen[b] += 1
        self.right[b] += right

    def fade(self, factor: float) -> None:
        self.right = [factor * x for x in self.right]
        self.seen = [factor * x for x in self.seen]


class Mix:
    """parts: the drafters. Each gets the whole budget; `search_ms` sums theirs and the uniting."""

    def __init__(self, config: Config, parts: Sequence[Drafter]) -> None:
        self.config, self.parts = config, list(parts)
        self.taps = tuple(sorted({tap for part in parts for tap in part.taps}))
        self.needs_picks = any(getattr(part, "needs_picks", False) for part in parts)
        self._records = [_Record() for _ in parts]
        self._last: dict[int, tuple[int, list[TokenTree]]] = {}  # per slot: length of the text, what was proposed
        self._own_ms = 0.0
        if all(isinstance(part, Forks) or not part.taps for part in parts):
            self.fork = self._fork  # offered where every part can, or reads nothing but the text

    @property
    def search_ms(self) -> float:
        return self._own_ms + sum(float(getattr(part, "search_ms", 0.0)) for part in self.parts)

    def reset(self, slots: Sequence[int]) -> None:
        for part in self.parts:
            part.reset(slots)
        for slot in slots:
            self._last.pop(slot, None)

    def _fork(self, source: int, target: int, length: int) -> None:
        """See `types.Forks`."""
        for part in self.parts:
            if isinstance(part, Forks):
                part.fork(source, target, length)

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        proposals = [part.propose([self._for(part, one) for one in new], budget) for part in self.parts]
        began = time.perf_counter()
        made = []
        for i, (one, size) in enumerate(zip(new, budget, strict=True)):
            self._learn(one)
            trees = [trees[i] for trees in proposals]
            self._last[one.slot] = len(one.history), trees
            made.append(self._unite(trees, size))
        self._own_ms += 1e3 * (time.perf_counter() - began)
        return made

    def _for(self, part: Drafter, one: Committed) -> Committed:
        """What a part asked for: its own taps of the features."""
        if one.features is None or part.taps == self.taps:
            return one
        columns = [self.taps.index(tap) for tap in part.taps]
        return one._replace(features=one.features[:, columns] if columns else None)

    def _learn(self, one: Committed) -> None:
        """Each node of the last proposals was right, wrong, or too deep to tell."""
        before, trees = self._last.pop(one.slot, (0, []))
        followed = one.history[before:].tolist()
        if not trees or not followed:
            return
        for record, tree in zip(self._records, trees, strict=True):
            record.fade(math.exp(-1 / self.config.memory))
            depth, right = [0], [True]  # right: so far the node's path is the text
            tokens, parents, scores = (part.tolist() for part in tree)
            for token, parent, score in zip(tokens[1:], parents[1:], scores[1:], strict=True):
                at = depth[parent]
                depth.append(at + 1)
                right.append(right[parent] and at < len(followed) and followed[at] == token)
                if at < len(followed) or not right[parent]:
                    record.add(score, right[-1])

    def _unite(self, trees: Sequence[TokenTree], budget: int) -> TokenTree:
        tokens, parents, wrong = [int(trees[0].tokens[0])], [-1], [0.0]
        node_of: dict[tuple[int, int], int] = {}
        for record, tree in zip(self._records, trees, strict=True):
            place = [0]
            for token, parent, score in zip(*(part.tolist()[1:] for part in tree), strict=True):
                key = place[parent], token
                node = node_of.get(key)
                if node is None:
                    node = node_of[key] = len(tokens)
                    tokens.append(token)
                    parents.append(key[0])
                    wrong.append(1.0)
                wrong[node] *= 1 - record.chance(score, self.config.prior)
                place.append(node)
        scores = [0.0]
        for parent, w in zip(parents[1:], wrong[1:], strict=True):  # no node is likelier than its parent
            scores.append(min(scores[parent], math.log(max(1 - w, 1e-30))))
        return truncate(as_tree(tokens, parents, scores), budget)


def load(config: Config, view: TargetView, parts: Sequence[Drafter] = ()) -> Mix:
    """parts: the drafters that `config.parts` names, loaded for this target, in that order."""
    if len(parts) != len(config.parts):
        raise DartspecError(f"mix names {len(config.parts)} parts ({', '.join(config.parts)}), {len(parts)} were given")
    if any(getattr(part, "typical", None) is not None for part in parts):
        raise DartspecError("typical acceptance is Medusa's own rule for its own tree: give it alone, without +")
    return Mix(config, parts)
