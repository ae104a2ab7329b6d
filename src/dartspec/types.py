"""The nouns that the whole package passes around. Tensors and numbers only: no model, no text, no policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from dartspec.errors import DartspecError

Processor = Callable[[Tensor, Tensor], Tensor]
Perturb = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


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
    """

    path: list[int]
    bonus: int
    picks: Tensor

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
    n_new:    how many of them are new since the last `propose`, which rounds without drafting may have been skipped
              (after prefill: all but the first token; after `fork`: all but its `length` and the first token).
    features: (n_new, n_taps, H) or None when the drafter asked for no taps.
    tree:     the tree that was scored in the last round, or None after prefill.
    picks:    (N,) int32 as in `Verdict`, or None after prefill.
    perturb:  `(logits (V,), history, path) -> (num_tokens,) float32`, of which the target's pick after history and path
              is the argmax: its filters, and its noise at that position. A drafter with logits of its own puts them
              through it and so draws what the target would, were they the target's (Gumbel coupling). None: greedy.
    """

    slot: int
    history: Tensor
    n_new: int
    features: Tensor | None
    tree: TokenTree | None = None
    picks: Tensor | None = None
    perturb: Perturb | None = None


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
        """(n,) int64 ids -> (n, H) rows of the target's input embedding."""
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
        """One tree a sequence, with at most `budget[i]` draft tokens; its root is `new[i].history[-1]`.

        A sequence may be left out of any number of calls; what it learned meanwhile then comes at once. A budget of 0
        only asks to read it.
        """
        ...


@runtime_checkable
class Forks(Protocol):
    """What a drafter may offer so that its state is reused where two texts begin alike (a system prompt, a chat)."""

    def fork(self, source: int, target: int, length: int) -> None:
        """Lets the fresh slot `target` begin as `source` did, which stays as it is.

        length: rows that both share. A row is the pair (position p, token at p + 1), so the histories agree in
        the first `length + 1` tokens, and `source` has been told of at least `length` rows. The target's first
        `Committed` brings the rows behind them.
        """
        ...


class RoundTimes(NamedTuple):
    """What one round cost: milliseconds of the whole batch (see `RoundRecord`), and what the target's forward saw."""

    draft_ms: float
    search_ms: float
    verify_ms: float
    other_ms: float
    num_rows: int  # nodes verified, roots included
    num_padded_rows: int  # rows of the forward: sequences times the largest tree
    context: int  # committed tokens of the longest sequence before the round
    num_read: int  # rows that the drafter was told of, catching up included; 0 where it was not called


class Controller(Protocol):
    """Says how many nodes a round drafts and verifies; `budget.Fixed` is the simplest. `engine.Rounds` asks it.

    `slots` are the sequences of a round, in an order that is the same in its three calls. Whatever it answers, the text
    stays the same.
    """

    @property
    def most_nodes(self) -> int:
        """Nodes that it will ever ask for at once; caches are sized by it."""
        ...

    def join(self, slot: int, params: SamplingParams, length: int) -> None:
        """A sequence begins, with so many committed tokens. Where `params.is_reshaped`, its rounds say nothing about
        others."""
        ...

    def leave(self, slot: int) -> None:
        """It has ended; its number may come again."""
        ...

    def ask(self, slots: Sequence[int], room: Sequence[int]) -> list[int]:
        """Nodes to draft for each sequence, at most `room[i]`. The drafter reads and drafts for those above 0 alone,
        and is not called where all are 0: what the others learn waits for it."""
        ...

    def cut(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Which drafted nodes to verify: each tree whole, or fewer nodes of it, closed under ancestors, root kept."""
        ...

    def observe(
        self, slots: Sequence[int], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: RoundTimes
    ) -> None:
        """How the round went: the verified trees and what became of them. A sequence that failed is left out."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. Checked when made; `sampling.py` alone interprets it.

    Order, as in transformers: penalties and bias, then `processors`, then temperature, top-k, top-p, min-p.

    temperature:        0 is greedy; otherwise logits are divided by it.
    top_k, top_p, min_p: 0, 1.0 and 0.0 switch the filter off.
    repetition_penalty: over prompt and output, multiplicative (transformers' rule).
    presence_penalty, frequency_penalty: over the output, subtracted (OpenAI's rule).
    logit_bias:         token id -> number added to its logit.
    processors:         callables `(ids (1, L) int64, logits (1, V) float32) -> logits (1, V)`, as transformers'
                        `LogitsProcessor`; called for every node on that node's own path, so they must keep no state.
    seed:               the text is a function of (prompt, seed); None draws a fresh one from the system.
    max_tokens:         new tokens at most.
    stop:               stop strings, cut from the text. stop_token_ids: in addition to the model's end-of-text ids.
    ignore_eos:         the model's end-of-text ids do not stop (stop_token_ids still do).
    logprobs:           None, or how many likeliest alternatives to report beside each token's log-probability.
    speculate:          "auto", "off", or the most nodes that a tree of this request may have; the text is the same.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: tuple[Processor, ...] = ()
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculate: str | int = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        lists: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
            ("stop", lambda item: isinstance(item, str), "a list of strings"),
            ("stop_token_ids", lambda item: isinstance(item, int), "a list of token ids"),
            ("processors", callable, "a list of callables"),
        )
        for name, is_right, what in lists:
            given = getattr(self, name)
            _check(isinstance(given, Iterable), name, repr(given), what)
            object.__setattr__(self, name, tuple(given))
            _check(all(map(is_right, getattr(self, name))), name, repr(given), what)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _check(isinstance(getattr(self, name), int | float), name, repr(getattr(self, name)), "a number")
        for name, optional in (("top_k", False), ("max_tokens", False), ("seed", True), ("logprobs", True)):
            value = getattr(self, name)
            good = (optional and value is None) or (isinstance(value, int) and not isinstance(value, bool))
            _check(good, name, repr(value), "a whole number" + (" or None" if optional else ""))
        good = isinstance(self.logit_bias, Mapping) and all(
            isinstance(token, int) and isinstance(number, int | float) for token, number in self.logit_bias.items()
        )
        _check(good, "logit_bias", repr(self.logit_bias), "a mapping from token ids to numbers")
        # far below 1e-6 the division overflows float32 and ties appear where the logits have none
        good = self.temperature == 0 or 1e-6 <= self.temperature < math.inf
        _check(good, "temperature", self.temperature, "0 (greedy), or finite and at least 1e-6")
        _check(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]; 1 switches it off")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]; 0 switches it off")
        _check(
            0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0 and finite; 1 switches it off",
        )
        _check(abs(self.presence_penalty) < math.inf, "presence_penalty", self.presence_penalty, "finite")
        _check(abs(self.frequency_penalty) < math.inf, "frequency_penalty", self.frequency_penalty, "finite")
        _check(not any(map(math.isnan, self.logit_bias.values())), "logit_bias", self.logit_bias, "without NaN")
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _check(self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "in [0, 2^64)")
        _check(self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs", self.logprobs, "in [0, 100]")
        _check(all(self.stop), "stop", self.stop, "without empty strings")
        number = isinstance(self.speculate, int) and not isinstance(self.speculate, bool) and self.speculate >= 0
        good = number or self.speculate in ("auto", "off")
        _check(good, "speculate", repr(self.speculate), "'auto', 'off', or the most nodes of a tree")

    @property
    def uses_history(self) -> bool:
        """Whether a row's distribution depends on the tokens before it, other than through the target."""
        return bool(self.processors or self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def is_reshaped(self) -> bool:
        """Whether penalties, bias or processors make the picks other than the model's own: such a request's rounds say
        nothing about how well drafts fit other requests."""
        return self.uses_history or bool(self.logit_bias)

    @property
    def most_nodes(self) -> int | None:
        """Nodes that `speculate` allows a tree, 0 for "off"; None where it sets no limit."""
        return {"auto": None, "off": 0}[self.speculate] if isinstance(self.speculate, str) else self.speculate


def _check(good: bool, name: str, found: object, expected: str) -> None:
    if not good:
        raise DartspecError(f"{name} is {found}; it must be {expected}")


@dataclass(frozen=True)
class RoundRecord:
    """One round of one sequence, as it is counted (method, section 1). Times are milliseconds of the whole batch."""

    num_drafted: int
    num_accepted: int  # A: draft tokens walked
    num_committed: int  # M: accepted + bonus, less what a stop or the length limit cut off
    draft_ms: float  # T_D: the drafter, without its search
    search_ms: float  # T_S: from the drafter's guesses to the tree
    verify_ms: float  # T_V: the target's forward over the tree
    other_ms: float  # picking, moving the cache, text, the loop itself
    batch: int = 1  # sequences that shared these times
    pick_ms: float = 0.0  # of other_ms, what picking the tokens took

    @property
    def round_ms(self) -> float:
        return self.draft_ms + self.search_ms + self.verify_ms + self.other_ms
