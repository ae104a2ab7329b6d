"""From a lattice (per future position, likely tokens) and an n-gram index to a token tree.

The beam search of DART (arXiv 2601.19278, Algorithm 1 and Appendix D, equation (10)), done by the C++ core.
Knows log-probabilities and ids; knows no model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dartspec import _core
from dartspec.errors import DartspecError
from dartspec.ngram.index import NgramIndex, as_ids
from dartspec.types import TokenTree


@dataclass(frozen=True)
class SearchConfig:
    """The numbers of the search. The defaults are what is shipped: the official program's rules, the paper's size.

    The increment of a path at level l (from 0) that takes token v after context c is, equation (10),

        [logit_decay^l * log(p_l(v) + eps) + ngram_weight * log(g(v | c) + eps)] / (l + 1)^level_exponent

    with natural logarithms in double precision. Without an index the second term is left out.
    """

    top_k: int = 25
    """Candidates a position: the first `top_k` columns of each row are considered."""
    beam: int = 20
    """Paths that are extended at each level."""
    budget: int = 59
    """Draft tokens of a full tree (theta), for drafters that choose no size; `build_tree` takes its own."""
    level_exponent: float = 0.7
    logit_decay: float = 0.9
    ngram_weight: float = 0.5
    eps: float = 1e-10
    backoff: float = 1.0
    """Factor of g for each token of the context that is not used: 1 as the official program, less: stupid back-off."""
    text_weight: float = 0.5
    """Share of the text's own counts in g, where there are any."""
    running_text: bool = False
    """Whether a drafter counts the n-grams of each sequence's own prompt and output (`ngram.live.LiveText`)."""
    learned_weight: float = 0.5
    """Share of the learned continuity in g, where a drafter has one; without index and text it is all of g."""
    ngram_at_level0: bool = False
    """Whether the n-gram term counts at level 0 too (the paper: yes, the official program: no)."""
    softmax_over_kept: bool = True
    """Whether p is renormalised over the kept candidates (the official program) or is the given p (the paper)."""

    def __post_init__(self) -> None:
        for name, low in (("top_k", 1), ("beam", 1), ("budget", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 1_000_000:
                raise DartspecError(f"{name} is {value!r}, expected a whole number from {low} to 1000000")
        for name in (
            "level_exponent",
            "logit_decay",
            "ngram_weight",
            "eps",
            "backoff",
            "text_weight",
            "learned_weight",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise DartspecError(f"{name} is {value!r}, expected a finite number")
        for name in ("running_text", "ngram_at_level0", "softmax_over_kept"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise DartspecError(f"{name} is {value!r}, expected true or false")
        self._new_search()  # the core checks the ranges

    @classmethod
    def paper(cls) -> SearchConfig:
        """As printed: full-vocabulary probabilities, the n-gram term at every level, 59 nodes."""
        return cls(budget=59, ngram_at_level0=True, softmax_over_kept=False)

    @classmethod
    def official(cls) -> SearchConfig:
        """As the official program does it: softmax over the kept, no n-gram term at level 0, 60 nodes."""
        return cls(budget=60, ngram_at_level0=False, softmax_over_kept=True)

    def changes(self) -> dict[str, Any]:
        """The numbers that are not the default: what a drafter's configuration says."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def _new_search(self) -> _core.TreeSearch:
        return _core.TreeSearch(
            top_k=self.top_k,
            beam=self.beam,
            level_exponent=self.level_exponent,
            logit_decay=self.logit_decay,
            ngram_weight=self.ngram_weight,
            eps=self.eps,
            backoff=self.backoff,
            text_weight=self.text_weight,
            learned_weight=self.learned_weight,
            ngram_at_level0=self.ngram_at_level0,
            softmax_over_kept=self.softmax_over_kept,
        )


class _Searches(threading.local):
    """The core's search holds scratch, so each thread has its own for each configuration."""

    def __init__(self) -> None:
        self.by_config: dict[SearchConfig, _core.TreeSearch] = {}
        self.last: tuple[SearchConfig, _core.TreeSearch] | None = None

    def get(self, config: SearchConfig) -> _core.TreeSearch:
        last = self.last
        if last is not None and last[0] is config:  # hashing ten fields costs more than the whole call
            return last[1]
        search = self.by_config.get(config)
        if search is None:
            search = self.by_config[config] = config._new_search()
        self.last = (config, search)
        return search


_searches = _Searches()
MOST_CONTEXT = 4  # tokens that an index of the highest order, 5, reads


@lru_cache(maxsize=64)
def _eos_array(eos_ids: frozenset[int]) -> NDArray[np.int32]:
    return as_ids(sorted(eos_ids))


def build_tree(
    root: int,
    log_probs: Tensor,
    tokens: Tensor,
    context: Sequence[int],
    budget: int,
    continuity: NgramIndex | None,
    config: SearchConfig,
    eos_ids: frozenset[int],
    text: _core.TextCounts | None = None,
    learned: Tensor | None = None,
) -> TokenTree:
    """The best `budget` nodes of the lattice; at most, for a lattice can be smaller.

    root:       the last committed token.
    log_probs:  (d, k) float32, natural logarithms of the drafter's probabilities at d future positions.
    tokens:     (d, k) int32, their token ids. A negative id, or a NaN or infinite log-probability, is no candidate;
                of equal ids in a row the likeliest counts.
    context:    the committed tokens before the tree, the root included and last; the index reads as many as its
                order uses (two for trigrams).
    continuity: the n-gram index, or None for probabilities alone.
    eos_ids:    nothing is drafted after one of these.
    text:       the running text's own counts, mixed with the index (`config.text_weight`); alone where there is none.
    learned:    (d, k, k) float32, a drafter's own g: [l, i, j] of column j of row l after column i of the row before,
                at level 0 after the root, i = 0. Mixed with the others (`config.learned_weight`), or alone.

    Returns nodes by falling score, parents before children: any prefix of the tree is a tree, and the best of its
    size. Same input, same tree, on every machine. `scores` are the lowest of a path's cumulative sums of equation
    (10), the root's being 0.
    """
    if budget < 0:
        raise DartspecError(f"budget is {budget}, expected 0 or more draft tokens")
    if len(context) == 0 or context[-1] != root:
        raise DartspecError(f"context ends in {list(context)[-1:]}, expected the root, {root}")
    _check_lattice(log_probs, tokens, 2)
    n = 1 + min(budget, _most_nodes(log_probs.shape[0], log_probs.shape[1], config))
    out_tokens = np.empty(n, dtype=np.int32)
    out_parents = np.empty(n, dtype=np.int32)
    out_scores = np.empty(n, dtype=np.float32)
    found = _searches.get(config).run(
        _array(log_probs),
        _array(tokens),
        np.array(context[-MOST_CONTEXT:], dtype=np.int32),
        _eos_array(eos_ids),
        None if continuity is None else continuity.core,
        text,
        None if learned is None else _array(learned),
        out_tokens,
        out_parents,
        out_scores,
    )
    if found < n:
        out_tokens, out_parents, out_scores = out_tokens[:found], out_parents[:found], out_scores[:found]
    return TokenTree(torch.from_numpy(out_tokens), torch.from_numpy(out_parents), torch.from_numpy(out_scores))


def build_trees(
    log_probs: Tensor,
    tokens: Tensor,
    contexts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    continuity: NgramIndex | None,
    config: SearchConfig,
    eos_ids: frozenset[int],
    texts: Sequence[_core.TextCounts | None] = (),
    threads: int = 1,
    learned: Tensor | None = None,
) -> list[TokenTree]:
    """`build_tree` for B sequences in one call: lattices (B, d, k), `learned` (B, d, k, k) or None, the rest one a
    sequence; `texts` may be empty.

    The last token of each context is its root. The trees do not depend on `threads`.
    """
    _check_lattice(log_probs, tokens, 3)
    num, d, k = log_probs.shape
    for name, given in (("contexts", contexts), ("budgets", budgets), *((("texts", texts),) if texts else ())):
        if len(given) != num:
            raise DartspecError(f"there are {len(given)} {name} for {num} lattices, expected one each")
    if num == 0:
        return []
    if min(budgets) < 0:
        raise DartspecError(f"budget is {min(budgets)}, expected 0 or more draft tokens")
    most = _most_nodes(d, k, config)
    ends = np.full((num, MOST_CONTEXT), -1, dtype=np.int32)
    for i, context in enumerate(contexts):
        if len(context) == 0:
            raise DartspecError(f"context {i} is empty, expected at least the root")
        kept = context[-MOST_CONTEXT:]
        ends[i, MOST_CONTEXT - len(kept) :] = kept
    room = 1 + min(max(budgets), most)
    out_tokens = np.empty((num, room), dtype=np.int32)
    out_parents = np.empty((num, room), dtype=np.int32)
    out_scores = np.empty((num, room), dtype=np.float32)
    found = np.empty(num, dtype=np.int32)
    _searches.get(config).run_batch(
        _array(log_probs),
        _array(tokens),
        ends,
        np.minimum(np.array(budgets, dtype=np.int64), most).astype(np.int32),
        _eos_array(eos_ids),
        None if continuity is None else continuity.core,
        list(texts),
        None if learned is None else _array(learned),
        out_tokens,
        out_parents,
        out_scores,
        found,
        threads,
    )
    parts = (torch.from_numpy(out_tokens), torch.from_numpy(out_parents), torch.from_numpy(out_scores))
    return [TokenTree(*(part[i, :n] for part in parts)) for i, n in enumerate(found.tolist())]


def _check_lattice(log_probs: Tensor, tokens: Tensor, num_axes: int) -> None:
    if log_probs.dtype != torch.float32 or tokens.dtype != torch.int32:
        raise DartspecError(
            f"lattice is {log_probs.dtype} and {tokens.dtype}, expected torch.float32 log-probabilities "
            "and torch.int32 tokens"
        )
    if log_probs.dim() != num_axes or log_probs.shape != tokens.shape:
        raise DartspecError(
            f"lattice has log-probabilities {tuple(log_probs.shape)} and tokens {tuple(tokens.shape)}, "
            f"expected {'(d, k)' if num_axes == 2 else '(B, d, k)'} both"
        )


def _array(x: Tensor) -> NDArray[Any]:
    """The tensor as the core takes it, without a copy where it lies on the CPU already."""
    return x.detach().cpu().contiguous().numpy()


def _most_nodes(d: int, k: int, config: SearchConfig) -> int:
    """Extensions that a (d, k) lattice can have at all, so that a huge budget allocates nothing huge."""
    k = min(k, config.top_k)
    return k + max(0, d - 1) * config.beam * k if d > 0 else 0
