"""The text at hand as an n-gram index of its own: rare names and phrases that no corpus knows.

Two forms. *Running*: each sequence's own prompt and output, updated as tokens are committed. *Live*: one table of all
that this process has written, and of the prompts of the sequences in work, taken off again when these end: a model
that gets faster as it is used. The live form remembers what it wrote for one user while it serves another, and though
it can never change a text, only how fast it comes, it is off unless it is asked for.

Knows token ids. What it says is mixed with the index by the tree search (`SearchConfig.text_weight`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dartspec import _core
from dartspec.errors import DartspecError
from dartspec.ngram.build import Tokens
from dartspec.ngram.index import NgramIndex, as_ids

MOST_LIVE_GRAMS = 2_000_000  # about 0.2 GB: a million tokens of text, the older ones fading


class LiveText:
    """Counts for the sequences of one drafter; not for several threads at once.

    live:      one table for all sequences, kept when they end; else one a sequence, forgotten with it.
    order:     tokens in the longest gram.
    exclude:   tokens that never enter (special tokens).
    max_grams: grams that the live table holds at most; beyond, older counts fade.
    """

    def __init__(
        self,
        live: bool = False,
        *,
        order: int = 3,
        exclude: frozenset[int] = frozenset(),
        max_grams: int = MOST_LIVE_GRAMS,
    ) -> None:
        self.live, self.order = live, order
        self._exclude = as_ids(sorted(exclude))
        self._max_grams = max_grams
        self._all = self._table(max_grams)
        self._slots: dict[int, tuple[_core.LiveCounts, int, NDArray[np.int32]]] = {}

    def counts(self, slot: int, history: Sequence[int] | NDArray[np.int64], num_prompt: int) -> _core.LiveCounts:
        """What is known for the next tree of a sequence; the tokens that are new in `history` are counted first.

        num_prompt: how many of the first tokens are the prompt; used when the slot is new.
        """
        length = len(history)
        known = self._slots.get(slot)
        if known is None or known[1] > length:
            self.forget([slot])
            prompt = as_ids(history[:num_prompt])
            table = self._all if self.live else self._table(0)
            table.add(prompt)
            known = table, num_prompt, prompt
        table, counted, prompt = known
        if counted < length:
            begin = max(0, counted - self.order + 1)
            table.add(as_ids(history[begin:]), counted - begin)
        self._slots[slot] = table, length, prompt
        return table

    def forget(self, slots: Sequence[int]) -> None:
        """The sequences have ended: their prompts are taken off the live table, what was written stays."""
        for slot in slots:
            known = self._slots.pop(slot, None)
            if known is not None and self.live:
                self._all.remove(known[2])

    def learn(self, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        """Adds a text that was written elsewhere to the live table."""
        self._all.add(as_ids(tokens))

    @property
    def num_grams(self) -> int:
        """Of the live table."""
        return self._all.num_grams()

    def save(self, path: str | os.PathLike[str], tokens: Tokens, *, description: str = "live counts") -> NgramIndex:
        """The live table as an index file with exact counts; joined to the file that is there, if one is.

        Raises DartspecError for a file of another tokenizer or order, and when sequences are in work: their prompts
        are not for a file.
        """
        if self._slots and self.live:
            raise DartspecError(f"{len(self._slots)} sequences are in work: save the live counts when they have ended")
        builder = _core.NgramBuilder(self.order, tokens.vocab_size, self._exclude)
        grams, counts = self._all.passes()
        builder.add_grams(np.array(grams, dtype=np.int32).reshape(-1, self.order), np.array(counts, dtype=np.int64))
        if Path(path).exists():
            builder.add_index(NgramIndex.open(path, expect_fingerprint=tokens.fingerprint).core)
        core = builder.finish(True, 1, tokens.fingerprint, tokens.name, description, path=os.fspath(path))
        return NgramIndex(core, Path(path))

    def _table(self, max_grams: int) -> _core.LiveCounts:
        return _core.LiveCounts(self.order, max_grams, self._exclude)
