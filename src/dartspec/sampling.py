"""Logits -> distribution -> token. The only file that knows temperature, filters, penalties and noise.

A pick is a pure function of (the row's logits, the tokens before it, seed, sample index, absolute position): the argmax
of the processed logits when greedy, else `argmax_v (log q_v + G(seed, sample, position, v))` with G counter-based
Gumbel noise (docs/losslessness.md). Nothing here knows of trees or drafters.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dartspec import _core
from dartspec.errors import DartspecError
from dartspec.types import SamplingParams

Noise = Callable[[int, int], Tensor]
"""`noise(position, V) -> (V,) float32` Gumbel values; the same arguments always give the same values."""


def uniform(seed: int, sample: int, position: int, size: int, device: torch.device | None = None) -> Tensor:
    """Counter-based uniform numbers: Philox4x32-10 keyed by the seed, counted by (v // 4, position, sample).

    Value v is word v % 4 of its block, as (x + 0.5) * 2^-32 in float32, at most 1 - 2^-24. The CPU takes the C++ core,
    other devices the same integers in torch.

    Returns (size,) float32 in (0, 1).
    """
    if device is None or device.type == "cpu":
        out = torch.empty(size, dtype=torch.float32)
        _core.philox_uniform(seed, sample, position, out.numpy())
        return out
    return uniform_torch(seed, sample, position, size, device)


def uniform_torch(seed: int, sample: int, position: int, size: int, device: torch.device) -> Tensor:
    """`uniform` in torch integers, for accelerators; bit-equal to the core's."""
    low = 0xFFFFFFFF
    blocks = torch.arange((size + 3) // 4, dtype=torch.int64, device=device)
    c = [blocks, torch.full_like(blocks, position & low)]
    c += [torch.full_like(blocks, sample & low), torch.full_like(blocks, sample >> 32 & low)]
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(10):
        h0, l0 = _mul_hi_lo(c[0], 0xD2511F53)
        h1, l1 = _mul_hi_lo(c[2], 0xCD9E8D57)
        c = [h1 ^ c[1] ^ k0, l1, h0 ^ c[3] ^ k1, l0]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    x = torch.stack(c, dim=1).flatten()[:size]
    return ((x.double() + 0.5) * 2.0**-32).float().clamp_(max=1 - 2.0**-24)


def _mul_hi_lo(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * m for 32-bit values held in int64, without overflowing it."""
    low = a * (m & 0xFFFF)  # < 2^48
    high = a * (m >> 16) + (low >> 16)  # < 2^49
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def gumbel(seed: int, sample: int, position: int, size: int, device: torch.device | None = None) -> Tensor:
    """(size,) float32 standard Gumbel values. -log(-log1p(-w)) keeps the upper tail, which decides picks, fine."""
    w = uniform(seed, sample, position, size, device)
    return w.neg_().log1p_().neg_().log_().neg_()


class Sampler:
    """The picks of one sequence.

    params:      the request. num_tokens: ids at or beyond it (padding rows of the head) are never picked.
    num_prompt:  length of the prompt; penalties over the output need it.
    sample:      index among the answers asked for one prompt (`n > 1`); part of the noise's counter.
    noise:       replaces the Philox noise; tests enumerate it.
    """

    def __init__(
        self, params: SamplingParams, num_tokens: int, num_prompt: int, sample: int = 0, noise: Noise | None = None
    ) -> None:
        self.params = params
        self.num_tokens = num_tokens
        self.num_prompt = num_prompt
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._sample = sample
        self._noise = noise
        bad = [i for i in params.logit_bias if not 0 <= i < num_tokens]
        if bad:
            raise DartspecError(f"logit_bias names token {bad[0]}; the tokenizer has ids 0 to {num_tokens - 1}")
        self._bias = (
            torch.tensor(list(params.logit_bias), dtype=torch.long),
            torch.tensor(list(params.logit_bias.values()), dtype=torch.float32),
        )

    def process(self, logits: Tensor, history: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        """(V,) raw logits of one row -> (V,) float32 processed logits; what is filtered out is -inf.

        history: committed tokens, prompt included. path: draft tokens from the root's child to this row's node. The row
        is the distribution of the token that follows them.
        """
        p = self.params
        row = logits[: self.num_tokens].float()
        if p.uses_history or len(self._bias[0]):
            row = self._penalise(row.clone() if row.data_ptr() == logits.data_ptr() else row, [*history, *path])
        return filter_logits(row, p)

    def pick(self, logits: Tensor, history: Sequence[int], path: Sequence[int] = ()) -> int:
        """The target's token after `history + path`; arguments as in `process`. Ties go to the lowest id."""
        row = self.perturbed(logits, history, path)
        best = int(row.argmax())
        if not float(row[best]) > -torch.inf:  # NaN too
            raise no_token()
        return best

    def perturbed(self, logits: Tensor, history: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        """(num_tokens,) float32 of which a pick is the argmax: processed logits, plus the noise when sampling."""
        row = self.process(logits, history, path)
        if self.params.temperature > 0:
            row = row + self._gumbel(len(history) + len(path), len(row), row.device)
        return row

    def pick_rows(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """All rows at once, for accelerators: (N, V) logits and the absolute position of each token to be picked.

        Only for requests whose distributions do not depend on the path (`params.uses_history` is false). A row that
        leaves no token gets -1: an error only if the walk comes there.
        """
        rows = torch.stack([self.process(row, ()) for row in logits])  # (N, num_tokens)
        if self.params.temperature > 0:
            noise = {q: self._gumbel(q, rows.shape[1], rows.device) for q in set(positions)}
            rows = rows + torch.stack([noise[q] for q in positions])
        best = rows.max(-1)
        return [int(i) for i in torch.where(best.values > -torch.inf, best.indices, -1).tolist()]

    def log_probs(self, logits: Tensor, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
        """Log-probability (natural) of `token` under the target's raw distribution, and the `top` likeliest tokens."""
        row = torch.log_softmax(logits[: self.num_tokens].float(), -1)
        best = row.topk(min(top, len(row)))
        return float(row[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def _gumbel(self, position: int, size: int, device: torch.device) -> Tensor:
        if self._noise is not None:
            return self._noise(position, size)
        return gumbel(self.seed, self._sample, position, size, device)

    def _penalise(self, row: Tensor, ids: list[int]) -> Tensor:
        """Penalties, bias and the user's processors; `row` is ours to change."""
        p = self.params
        if p.repetition_penalty != 1:  # transformers' RepetitionPenaltyLogitsProcessor: prompt and output
            # a prompt may hold ids beyond the tokenizer's, which have no column here
            seen = torch.tensor(sorted({i for i in ids if i < len(row)}), dtype=torch.long, device=row.device)
            value = row[seen]
            row[seen] = torch.where(value < 0, value * p.repetition_penalty, value / p.repetition_penalty)
        if p.presence_penalty or p.frequency_penalty:  # OpenAI's: the output alone
            out = torch.tensor(ids[self.num_prompt :], dtype=torch.long, device=row.device)
            seen, count = torch.unique(out, return_counts=True)
            row[seen] -= p.presence_penalty + p.frequency_penalty * count
        if len(self._bias[0]):
            row[self._bias[0].to(row.device)] += self._bias[1].to(row.device)
        if p.processors:
            context = torch.tensor([ids], dtype=torch.long, device=row.device)
            for processor in p.processors:
                made = processor(context, row[None])
                if not isinstance(made, Tensor) or made.shape != (1, len(row)):
                    found = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                    raise DartspecError(f"a processor returned {found}; it must be logits of shape {(1, len(row))}")
                row = made[0]
        return row


def no_token() -> DartspecError:
    """What to raise where a row leaves nothing to pick."""
    return DartspecError(
        "no token can follow: the target's logits are not numbers (load it with dtype bfloat16 or float32),"
        " or logit_bias and processors ruled out every token"
    )


def filter_logits(row: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p, min-p on one (V,) float32 row, as transformers means them. Does not modify `row`.

    Ties at top-k's edge are kept (transformers does the same); at least one token always survives.
    """
    p = params
    if p.temperature == 0:
        return row
    row = row / p.temperature
    if 0 < p.top_k < len(row):
        row = row.masked_fill(row < row.topk(p.top_k).values[-1], -torch.inf)
    if p.top_p < 1:
        ordered, index = row.sort(descending=False)
        # the smallest tokens whose mass together is at most 1 - top_p go; summed upwards as transformers does
        out = ordered.softmax(-1).cumsum(-1) <= 1 - p.top_p
        out[-1] = False
        row = row.masked_fill(torch.zeros_like(out).scatter_(0, index, out), -torch.inf)
    if p.min_p > 0:
        prob = row.softmax(-1)
        row = row.masked_fill(prob < p.min_p * prob.max(), -torch.inf)
    return row
