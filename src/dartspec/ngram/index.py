"""The n-gram index: which token follows which, counted in ordinary text. A thin face over the C++ core.

Knows token ids, counts and the fingerprint of the tokenizer that made the ids; reads no text (see `corpus`).
The file format is described in docs/index-format.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dartspec import _core
from dartspec.errors import DartspecError


def as_ids(tokens: Sequence[int] | NDArray[Any]) -> NDArray[np.int32]:
    """Token ids as contiguous int32; a document of anything but whole numbers below 2^31 is refused."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DartspecError(
            f"token ids come as {array.dtype} of shape {array.shape}, expected one row of whole numbers"
        )
    if array.dtype.itemsize > 2 and (int(array.max()) > 0x7FFFFFFF or int(array.min()) < -0x80000000):
        raise DartspecError(f"token id {int(array.max())} does not fit 31 bits: these are no token ids")
    return np.ascontiguousarray(array, dtype=np.int32)


class NgramIndex:
    """A read-only n-gram index: mapped from a file, or built in memory and then saved.

    Probabilities follow the paper's implementation: freq(context + token) / freq(context) at the longest context
    in which the token was seen, down to a context of one token; 0 when it was seen in none. No discount.
    Instances are pickled by path; they may be queried from several threads.
    """

    def __init__(self, core: _core.NgramIndex, path: Path | None) -> None:
        """For the constructors below."""
        self.core = core
        self.path = path
        self._info: dict[str, Any] = core.info()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        verify: bool = False,
        expect_fingerprint: str | None = None,
        preload: bool = False,
        huge_pages: bool = False,
        interleave: bool = False,
    ) -> NgramIndex:
        """Maps the file and checks its header; `verify` also reads and checks every section.

        Pages come from the file as they are first read and are shared by all processes that map it. `preload` reads
        the whole file now. `huge_pages` makes a private copy in huge pages where the system gives them: fewer misses
        of the address cache, memory of its own. `interleave` spreads the pages that this opening brings into memory
        over all NUMA nodes.

        Raises DartspecError when the file is no index, damaged, or built for another tokenizer than
        `expect_fingerprint`.
        """
        core = _core.NgramIndex.open(os.fspath(path), preload=preload, huge_pages=huge_pages, interleave=interleave)
        index = cls(core, Path(path))
        found = index.fingerprint
        if expect_fingerprint is not None and found != expect_fingerprint:
            raise DartspecError(
                f"index {path}: fingerprint is {found} (tokenizer {index._info['name']}), the target's tokenizer has "
                f"{expect_fingerprint}: rebuild with `dartspec ngram build`"
            )
        if verify:
            index.verify()
        return index

    @classmethod
    def build(
        cls,
        documents: Iterable[Sequence[int] | NDArray[Any]],
        *,
        order: int = 3,
        vocab_size: int,
        fingerprint: str,
        name: str,
        description: str,
        exact: bool = False,
        min_count: int = 1,
        exclude: frozenset[int] = frozenset(),
        weights: Iterable[int] | None = None,
    ) -> NgramIndex:
        """Counts all grams of 1 to `order` tokens, in memory.

        documents:   token ids, one sequence a document; no gram crosses from one to the next.
        vocab_size:  ids are below it; decides the width of a stored token.
        fingerprint: of the tokenizer; `name` is its name for people, `description` says what the text was.
        exact:       32-bit counts instead of 8-bit log-probabilities.
        min_count:   grams counted less often are left out.
        exclude:     tokens that never enter (special tokens); a document is cut at each.
        weights:     how many times each document counts, one whole number a document (default 1 each).
        """
        builder = _core.NgramBuilder(order, vocab_size, as_ids(sorted(exclude)))
        if weights is None:
            for document in documents:
                builder.add_document(as_ids(document))
        else:
            pairs = zip(documents, weights, strict=True)
            try:
                for document, weight in pairs:
                    builder.add_document(as_ids(document), _whole(weight, "weight"))
            except ValueError as error:
                if isinstance(error, DartspecError):
                    raise
                raise DartspecError("there are not as many weights as documents: give one a document") from error
        return cls(builder.finish(exact, _whole(min_count, "min_count"), fingerprint, name, description), None)

    @classmethod
    def from_counts(
        cls,
        grams: NDArray[np.int32],
        counts: NDArray[np.int64],
        *,
        vocab_size: int,
        fingerprint: str,
        name: str,
        description: str,
        exact: bool = True,
        min_count: int = 1,
    ) -> NgramIndex:
        """From grams that were counted elsewhere: `grams` (n, order) int32, shorter ones padded with -1 behind.

        Each row adds its count (n,) int64 to its gram and to that gram's prefixes.
        """
        builder = _core.NgramBuilder(int(grams.shape[1]), vocab_size, as_ids([]))
        builder.add_grams(np.ascontiguousarray(grams, dtype=np.int32), np.ascontiguousarray(counts, dtype=np.int64))
        return cls(builder.finish(exact, _whole(min_count, "min_count"), fingerprint, name, description), None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file aside, syncs and renames it; `path` becomes this index's path."""
        self.core.save(os.fspath(path))
        self.path = Path(path)

    def verify(self) -> None:
        """Reads the whole index; raises DartspecError at the first fault."""
        self.core.verify()

    def info(self) -> dict[str, Any]:
        """What the header says: order, vocab_size, counts, num_nodes, index_bytes, fingerprint, ..., and the path."""
        return {**self._info, "path": None if self.path is None else str(self.path)}

    @property
    def order(self) -> int:
        return int(self._info["order"])

    @property
    def num_nodes(self) -> int:
        return int(self._info["num_nodes"])

    @property
    def fingerprint(self) -> str:
        return str(self._info["fingerprint"])

    def continuations(self, context: Sequence[int], top: int) -> list[tuple[int, float]]:
        """The `top` likeliest tokens after the context (its last order - 1 tokens) with their probabilities, best
        first, lowest id first among equals. They need not sum to 1: each token backs off on its own."""
        if top < 0:
            raise DartspecError(f"top is {top}, expected 0 or more")
        return self.core.continuations(as_ids(context), top)

    def probabilities(
        self, context: Sequence[int], tokens: Sequence[int] | NDArray[Any], *, backoff: float = 1.0
    ) -> NDArray[np.float64]:
        """(n,) float64: the probability of each token after the context; `backoff` as in `score`."""
        row: NDArray[np.float64] = self.score(as_ids(context)[None], as_ids(tokens)[None], backoff=backoff)[0]
        return row

    def score(
        self, contexts: NDArray[np.int32], tokens: NDArray[np.int32], *, backoff: float = 1.0
    ) -> NDArray[np.float64]:
        """(B, k) float64: the probability of each token after each context, as the tree search asks for it.

        contexts: (B, c) int32, the newest token last; -1 in front of shorter ones.
        tokens:   (B, k) int32, or (1, k) for all contexts; negative ones have probability 0.
        backoff:  factor for each token of the longest context (order - 1) that is not used: below 1, "stupid back-off".
        """
        out = np.empty((contexts.shape[0], tokens.shape[1]), dtype=np.float64)
        self.core.score(np.ascontiguousarray(contexts), np.ascontiguousarray(tokens), backoff, out)
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            raise DartspecError("an index that was not saved cannot be sent to another process: save it first")
        return _reopen, (str(self.path),)

    def __repr__(self) -> str:
        return f"NgramIndex(order={self.order}, num_nodes={self.num_nodes}, path={str(self.path)!r})"


def _reopen(path: str) -> NgramIndex:
    return NgramIndex.open(path)


def _whole(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value < 2**32:
        raise DartspecError(f"{what} is {value!r}, expected a whole number from 1 to 2^32 - 1")
    return int(value)
