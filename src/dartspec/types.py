"""The nouns that the whole package passes around. Tensors and numbers only: no model, no text, no policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class TokenTree(NamedTuple):
    """Guesses of one sequence: node 0 is the last committed token, every other node a draft token.

    tokens:  (N,) int32 on the CPU; `tokens[0]` is the root.
    parents: (N,) int32 on the CPU; `parents[0] == -1` and `0 <= parents[i] < i`, so the tree is closed under
             ancestors by construction.
    scores:  (N,) float32; for ranking only, never a probability, never in an acceptance rule.

    Counting (design, section 3): a tree of theta draft tokens has theta + 1 rows.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor

    @property
    def num_drafts(self) -> int:
        """Draft tokens in the tree; the root is none."""
        return len(self.tokens) - 1


class Scores(NamedTuple):
    """What the target says about one sequence's rows: the nodes of a tree, or the prompt's last position.

    logits:   (N, V) float32 or the model's dtype, unprocessed; row i scores the token that follows node i.
    features: (N, n_taps, H) hidden states at the taps in the model's dtype, or None when no tap was asked for.
    """

    logits: Tensor
    features: Tensor | None


class Verdict(NamedTuple):
    """What verification decided for one tree.

    path:  accepted node indices from the root on, root included: `path[0] == 0`.
    bonus: the target's own token after the last accepted node.
    picks: (N,) int32, the target's token at each node that had to be asked; -1 where it was not needed.
    log_probs: log-probability (natural) of each committed token under the processed distribution, or None.
    """

    path: list[int]
    bonus: int
    picks: Tensor
    log_probs: list[float] | None = None

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1


class Committed(NamedTuple):
    """What one sequence learned in the last round; all that a drafter ever sees of it.

    The pairing, defined once: the hidden state at position p predicted the token at p + 1. So row i of `features`
    is the state that predicted `history[L - n_new + i]`.

    slot:     stable number of the sequence while it lives.
    history:  (L,) int64, every committed token; the last one is the root of the next tree and has not been through
              the target yet.
    n_new:    how many of them are new since the last `propose` (after prefill: all but the first token).
    features: (n_new, n_taps, H) or None when the drafter asked for no taps.
    tree:     the tree that was scored, or None after prefill.
    picks:    (N,) int32 as in `Verdict`, or None after prefill.
    """

    slot: int
    history: Tensor
    n_new: int
    features: Tensor | None
    tree: TokenTree | None = None
    picks: Tensor | None = None


@runtime_checkable
class TargetView(Protocol):
    """The part of a target that a drafter may see: sizes and the two shared matrices."""

    vocab_size: int  # rows of the embedding; ids at or beyond `num_tokens` are padding
    num_tokens: int  # ids the tokenizer knows: [0, num_tokens) may be drafted
    hidden_size: int
    num_layers: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device

    def embed(self, ids: Tensor) -> Tensor:
        """(n,) int64 ids -> (n, H) embeddings, as the target's first layer receives them."""
        ...

    def lm_head(self, hidden: Tensor) -> Tensor:
        """(n, H) final-normed hidden states -> (n, V) logits, without the target's own scaling or soft cap."""
        ...


class Drafter(Protocol):
    """A drafting method. One module in `drafters/` each, found by its name, offering `Config` (a frozen dataclass) and
    `load(config, view) -> Drafter`; see docs/add-a-drafter.md."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden-state indices wanted: 0 = embeddings, i = output of decoder layer i counted from 1."""
        ...

    def reset(self, slots: Sequence[int]) -> None:
        """Forget everything about these sequences; their slots may be given to others."""
        ...

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        """One tree a sequence, with at most `budget[i]` draft tokens; its root is `new[i].history[-1]`."""
        ...


@dataclass(frozen=True)
class RoundRecord:
    """One round of one sequence, as it is counted (method, section 1). Times are milliseconds of the whole batch."""

    num_drafted: int
    num_accepted: int  # A: nodes walked
    num_committed: int  # M of the round: accepted + bonus, less what a stop cut off
    draft_ms: float
    verify_ms: float
    other_ms: float
    batch: int = 1


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds spent in each stage, summed."""

    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0

