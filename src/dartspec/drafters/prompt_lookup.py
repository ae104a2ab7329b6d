"""Prompt lookup: what followed the last tokens when they occurred before, in the prompt or in the answer so far.

Needs no weights. The longest suffix that occurred before comes first; several continuations, newest first, form a tree.
After Saxena's prompt lookup decoding (2023), with the text's own repeats indexed instead of searched.

A node's score is the logarithm of a rough chance that it is right: a copy whose last n tokens agreed goes on agreeing
with n / (n + 1) a token, and of several places each older one counts half.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dartspec.drafters._paths import join
from dartspec.errors import DartspecError
from dartspec.types import Committed, TargetView, TokenTree

MOST_PLACES = 64  # earlier places of one n-gram that are compared, the newest
MOST_MATCHED = 32  # tokens that a match is followed back


@dataclass(frozen=True)
class Config:
    """max_ngram, min_ngram: suffix lengths that are indexed; a match of the longest is followed further back.
    num_continuations: earlier places used at most. length: tokens copied from each."""

    max_ngram: int = 4
    min_ngram: int = 1
    num_continuations: int = 5
    length: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise DartspecError(
                f"prompt_lookup needs 1 <= min_ngram <= max_ngram, found {self.min_ngram} and {self.max_ngram}"
            )
        if self.num_continuations < 1 or self.length < 1:
            raise DartspecError("prompt_lookup needs num_continuations and length of at least 1")


class PromptLookup:
    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, num_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self._config = config
        self._num_tokens = num_tokens
        self._eos = eos_token_ids
        self._ids: dict[int, list[int]] = {}
        # per slot: n-gram -> positions right behind its occurrences, oldest first
        self._places: dict[int, dict[tuple[int, ...], list[int]]] = {}

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._ids.pop(slot, None)
            self._places.pop(slot, None)

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        return [self._one(c, b) for c, b in zip(new, budget, strict=True)]

    def _one(self, new: Committed, budget: int) -> TokenTree:
        c = self._config
        ids = self._ids.setdefault(new.slot, [])
        places = self._places.setdefault(new.slot, defaultdict(list))
        for token in new.history[len(ids) :].tolist():
            # a gram is entered when its continuation is known, so a lookup never finds the end of the text itself
            for n in range(c.min_ngram, min(c.max_ngram, len(ids)) + 1):
                places[tuple(ids[-n:])].append(len(ids))
            ids.append(token)
        paths: list[tuple[list[int], list[float]]] = []
        seen: set[int] = set()
        for n in range(min(c.max_ngram, len(ids)), c.min_ngram - 1, -1):
            found = [place for place in places.get(tuple(ids[-n:]), ())[-MOST_PLACES:] if place not in seen]
            seen.update(found)
            agreed = {place: self._agreed(ids, place, n) if n == c.max_ngram else n for place in found}
            for place in sorted(found, key=lambda place: (-agreed[place], -place)):
                path = self._copy(ids, place)
                if not path or any(path == known for known, _ in paths):
                    continue
                step, first = math.log(agreed[place] / (agreed[place] + 1)), -len(paths) * math.log(2)
                paths.append((path, [first + step * (k + 1) for k in range(len(path))]))
                if len(paths) == c.num_continuations:
                    return join(ids[-1], paths, budget)
        return join(ids[-1], paths, budget)

    def _agreed(self, ids: list[int], place: int, n: int) -> int:
        """How many tokens before `place` are the last ones of the text; at least n are."""
        while n < min(place, MOST_MATCHED) and ids[place - n - 1] == ids[-n - 1]:
            n += 1
        return n

    def _copy(self, ids: list[int], place: int) -> list[int]:
        """The tokens from `place` on, up to an end-of-text token or one that the tokenizer does not know."""
        path: list[int] = []
        for token in ids[place : place + self._config.length]:
            if token >= self._num_tokens:
                break
            path.append(token)
            if token in self._eos:
                break
        return path


def load(config: Config, view: TargetView) -> PromptLookup:
    return PromptLookup(config, view.num_tokens, view.eos_token_ids)
