"""Prompt lookup: what followed the last tokens when they occurred before, in the prompt or in the answer so far.

Needs no weights. The longest suffix that occurred before is tried first; several continuations, newest first, form a
tree. After Saxena's prompt lookup decoding (2023), with the text's own repeats indexed instead of searched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dartspec.errors import DartspecError
from dartspec.tree import merge_paths
from dartspec.types import Committed, TargetView, TokenTree


@dataclass(frozen=True)
class Config:
    """max_ngram, min_ngram: suffix lengths tried, longest first. num_continuations: earlier places used at most.
    length: tokens copied from each."""

    max_ngram: int = 4
    min_ngram: int = 2
    num_continuations: int = 3
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
        paths: list[list[int]] = []
        for n in range(c.max_ngram, c.min_ngram - 1, -1):
            for place in reversed(places.get(tuple(ids[-n:]), ()) if len(ids) >= n else ()):
                path = self._copy(ids, place)
                if path and path not in paths:
                    paths.append(path)
                if len(paths) == c.num_continuations:
                    return merge_paths(ids[-1], paths, budget)
        return merge_paths(ids[-1], paths, budget)

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
