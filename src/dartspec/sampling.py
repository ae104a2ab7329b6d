"""Logits -> distribution -> token. The only file that knows temperature, filters, penalties and noise.

A pick is a pure function of (the row's logits, the tokens before it, seed, sample index, absolute position): the argmax
of the processed logits when greedy, else `argmax_v (log q_v + G(seed, sample, position, v))` with G counter-based
Gumbel noise (docs/losslessness.md). Nothing here knows of trees or drafters.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dartspec import _core
from dartspec.device import Recorder, Recording, Staged, send
from dartspec.errors import DartspecError
from dartspec.types import SamplingParams

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57  # Philox 4x32
_WEYL = 0x9E3779B9, 0xBB67AE85

CONTENDERS = 256  # room for the values that can win a pick; a few are usual

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
    return uniform_rows(torch.tensor([noise_words(seed, sample, position)], device=device), size)[0]


def noise_words(seed: int, sample: int, position: int) -> tuple[int, int, int, int, int]:
    """What names one row of noise, in 32-bit words: seed low and high, position, sample low and high."""
    return seed & _LOW, seed >> 32 & _LOW, position & _LOW, sample & _LOW, sample >> 32 & _LOW


def uniform_rows(words: Tensor, size: int) -> Tensor:
    """Rows of `uniform`, (n, size) float32, for (n, 5) int64 `noise_words` on any device. A fixed list of operations on
    tensors: it can be recorded."""
    n, device = len(words), words.device
    blocks = torch.arange((size + 3) // 4, dtype=torch.int64, device=device)
    key, position, sample_low, sample_high = words[:, :2].t()[..., None], words[:, 2:3], words[:, 3:4], words[:, 4:]
    even = torch.stack((blocks.expand(n, -1), sample_low.expand(n, len(blocks))))  # counter words 0 and 2
    odd = torch.stack((position, sample_high))  # 1 and 3, (2, n, 1)
    pair = [torch.full((1, 1, 1), m, dtype=torch.int64, device=device) for m in (*_MULTIPLIERS, *_WEYL)]
    multiplier, weyl = torch.cat(pair[:2]), torch.cat(pair[2:])
    for _ in range(10):
        # int64 products wrap; their low and high words are those of the unsigned product all the same
        product = (even * multiplier).flip(0)
        even = product >> 32 & _LOW ^ odd ^ key
        odd = product & _LOW
        key = key + weyl & _LOW
    x = torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1).view(n, -1)[:, :size]
    return ((x.double() + 0.5) * 2.0**-32).float().clamp_(max=1 - 2.0**-24)


def gumbel(seed: int, sample: int, position: int, size: int, device: torch.device | None = None) -> Tensor:
    """(size,) float32 standard Gumbel values. -log(-log1p(-w)) keeps the upper tail, which decides picks, fine."""
    return _gumbel_of(uniform(seed, sample, position, size, device))


def _gumbel_of(w: Tensor) -> Tensor:
    """In place. Logarithms are float32 everywhere: devices may differ by an ulp there, never in the integers before."""
    return w.neg_().log1p_().neg_().log_().neg_()


class GumbelRows:
    """Gumbel values of many (seed, sample, position) at once on one device.

    recorder: its hundred small operations are recorded, by number of rows, rounded up to a power of two.
    """

    def __init__(self, size: int, device: torch.device, recorder: Recorder | None = None) -> None:
        self._size, self._device, self._recorder = size, device, recorder
        self._recorded: dict[int, tuple[Staged, Recording]] = {}

    def __call__(self, words: Sequence[tuple[int, ...]]) -> Tensor:
        """(n, 5) `noise_words` -> (at least n, size) float32. Recorded ones hold until the next call."""
        if self._recorder is None:
            return self._run(send({"words": np.array(words, dtype=np.int64)}, self._device)["words"])
        n = 1 << (len(words) - 1).bit_length()
        if n not in self._recorded:
            staged = Staged(self._device, {"words": ((n, 5), torch.int64)})
            recording = self._recorder.record(lambda: (self._run(staged.device["words"]),))
            self._recorded = {n: (staged, recording)}  # one at a time: its result can be large
        staged, recording = self._recorded[n]
        staged.wait()
        staged.host["words"][: len(words)] = torch.tensor(words)
        staged.send()
        recording.replay()
        return recording.outputs[0]

    def _run(self, words: Tensor) -> Tensor:
        return _gumbel_of(uniform_rows(words, self._size))


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
        bad = [i for i in params.stop_token_ids if not 0 <= i < num_tokens]
        if bad:
            raise DartspecError(f"stop_token_ids names token {bad[0]}; the tokenizer has ids 0 to {num_tokens - 1}")
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
        row = self.process(logits, history, path)
        if self.params.temperature > 0:
            position = len(history) + len(path)
            if (best := self._likely_pick(row, position)) is not None:
                return best
            row = row + self._gumbel(position, len(row), row.device)
        # NumPy's takes a tenth of torch's time on the CPU; both name the first of equals, and NaN before all
        best = int(row.detach().numpy().argmax() if row.device.type == "cpu" else row.argmax())
        if not float(row[best]) > -torch.inf:  # NaN too
            raise no_token()
        return best

    def _likely_pick(self, row: Tensor, position: int) -> int | None:
        """The argmax of the processed row plus its noise, from the few values that can be it; None where all must be
        looked at. On the CPU only: logarithms of a whole vocabulary are most of what a pick costs there."""
        if row.device.type != "cpu" or self._noise is not None:
            return None
        ids, w = np.empty(CONTENDERS, dtype=np.int64), np.empty(CONTENDERS, dtype=np.float32)
        n = _core.gumbel_contenders(self.seed, self._sample, position, row.detach().numpy(), ids, w)
        if n <= 0:
            return None
        values = row[torch.from_numpy(ids[:n])] + _gumbel_of(torch.from_numpy(w[:n]))
        return int(ids[values.numpy().argmax()])

    def perturbed(self, logits: Tensor, history: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        """(num_tokens,) float32 of which a pick is the argmax: processed logits, plus the noise when sampling."""
        row = self.process(logits, history, path)
        if self.params.temperature > 0:
            row = row + self._gumbel(len(history) + len(path), len(row), row.device)
        return row

    def log_probs(self, logits: Tensor, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
        """Log-probability (natural) of `token` under the target's raw distribution, and the `top` likeliest tokens."""
        row = torch.log_softmax(logits[: self.num_tokens].float(), -1)
        best = row.topk(min(top, len(row)))
        return float(row[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    @property
    def is_pure(self) -> bool:
        """Whether a row's pick needs no tokens before it: then all rows can be picked at once (`pick_together`)."""
        return not self.params.uses_history

    def noise_words(self, position: int) -> tuple[int, int, int, int, int]:
        return noise_words(self.seed, self._sample, position)

    def bias_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids and numbers of `logit_bias`, possibly none."""
        if self._bias[0].device != device:
            self._bias = self._bias[0].to(device), self._bias[1].to(device)
        return self._bias

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
            ids_biased, numbers = self.bias_on(row.device)
            row[ids_biased] += numbers
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
        row = _nucleus(row, p.top_p)
    if p.min_p > 0:
        prob = row.softmax(-1)
        row = row.masked_fill(prob < p.min_p * prob.max(), -torch.inf)
    return row


NUCLEUS = 256  # likeliest tokens that are looked at before all are sorted


def _nucleus(row: Tensor, top_p: float) -> Tensor:
    """(V,) without the smallest tokens whose mass together is at most 1 - top_p, which are -inf.

    A nucleus is small where top_p matters: then its tokens alone are sorted, not the vocabulary.
    """
    if row.device.type == "cpu" and len(row) > 4 * NUCLEUS:
        best, index = row.topk(NUCLEUS)
        mass = (best - torch.logsumexp(row, -1)).double().exp().cumsum(-1)
        if float(mass[-1]) >= top_p:  # false for NaN as well
            count = int((mass < top_p).sum()) + 1
            edge = best[count - 1]
            above = int((best > edge).sum())
            equal = (row == edge).nonzero()[above - count :, 0]  # of equals the highest ids stay
            kept = torch.cat((index[:above], equal))
            return torch.full_like(row, -torch.inf).index_copy_(0, kept, row[kept])
    ordered, index = row.sort(descending=False)
    # summed upwards as transformers does
    out = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    out[-1] = False
    return row.masked_fill(torch.zeros_like(out).scatter_(0, index, out), -torch.inf)


# -- all rows of a round at once ---------------------------------------------------------------------------------------


def pick_together(
    rows: Tensor, samplers: Sequence[Sampler], counts: Sequence[int], positions: Sequence[int], noise: GumbelRows
) -> Tensor:
    """What `Sampler.pick` picks for every row, on the rows' device and without waiting for it.

    rows:      (R, V) raw logits of several sequences, laid end to end: `counts[i]` of `samplers[i]`, all of them
               `is_pure` and of one tokenizer.
    positions: R, the absolute position of each token to be picked.

    Returns (R,) int64; -1 for a row that leaves no token.
    """
    num_tokens = samplers[0].num_tokens
    rows = rows[:, :num_tokens]
    params = [s.params for s in samplers]
    if not all(p.temperature == 0 and not p.logit_bias for p in params):
        wide = torch.float32 if rows.device.type == "cpu" else torch.float64
        rows = _filtered_together(_biased(rows.float(), samplers, counts), params, counts, wide)
        rows = _with_noise(rows, samplers, counts, positions, noise)
    best = rows.max(-1)  # the lowest of equal ids; NaN wins, and is no token
    return best.indices.masked_fill(~(best.values > -torch.inf), -1)


def _biased(rows: Tensor, samplers: Sequence[Sampler], counts: Sequence[int]) -> Tensor:
    if not any(s.params.logit_bias for s in samplers):
        return rows
    rows, at = rows.clone(), 0
    for sampler, count in zip(samplers, counts, strict=True):
        if sampler.params.logit_bias:
            ids, numbers = sampler.bias_on(rows.device)
            rows[at : at + count, ids] += numbers
        at += count
    return rows


def _filtered_together(
    rows: Tensor, params: Sequence[SamplingParams], counts: Sequence[int], wide: torch.dtype
) -> Tensor:
    """`filter_logits` with each row's own numbers.

    wide: dtype of probabilities and their sums. In float32 these are the same operations in the same order, so the same
          bits on the CPU. A GPU sums a row in an order that depends on how many there are and where it lies, and that
          must not decide where a filter cuts: float64 there.
    """
    size = rows.shape[1]
    numbers = np.array(
        [
            (
                p.temperature or 1.0,
                p.top_k if p.temperature and 0 < p.top_k < size else size,
                1 - p.top_p if p.temperature else 0.0,
                p.min_p if p.temperature else 0.0,
            )
            for p in params
        ]
    ).repeat(counts, axis=0)
    k, cut, least = (numbers[:, i] for i in (1, 2, 3))
    columns = {"temperature": numbers[:, :1], "cut": cut[:, None], "least": least[:, None]}
    sent = send(
        {**{n: c.astype(np.float32) for n, c in columns.items()}, "k": k[:, None].astype(np.int64)}, rows.device
    )
    rows = rows / sent["temperature"]  # a tensor: by a number, a GPU would multiply with its rounded inverse
    if (some := k[k < size]).size:
        largest = rows.topk(int(some.max()), dim=-1).values
        edge = largest.gather(1, sent["k"].clamp(max=largest.shape[1]) - 1)
        rows = rows.masked_fill((rows < edge) & (sent["k"] < size), -torch.inf)
    if (cut > 0).any():
        ordered, index = rows.sort(dim=-1, stable=True)
        sums = ordered.softmax(-1, dtype=wide).cumsum(-1)
        out = (sums <= sent["cut"]) & (sent["cut"] > 0)
        out[:, -1] = False
        rows = rows.masked_fill(torch.zeros_like(out).scatter_(1, index, out), -torch.inf)
    if (least > 0).any():
        prob = rows.softmax(-1, dtype=wide)
        rows = rows.masked_fill(prob < sent["least"] * prob.amax(-1, keepdim=True), -torch.inf)
    return rows


def _with_noise(
    rows: Tensor, samplers: Sequence[Sampler], counts: Sequence[int], positions: Sequence[int], noise: GumbelRows
) -> Tensor:
    """Adds each sampled row's noise; rows of one sequence at one position share it."""
    place: dict[tuple[int, int], int] = {}
    owners = [i for i, count in enumerate(counts) for _ in range(count)]
    at = [
        place.setdefault((i, q), len(place)) if samplers[i].params.temperature > 0 else -1
        for i, q in zip(owners, positions, strict=True)
    ]
    if not place:
        return rows
    if any(samplers[i]._noise is not None for i, _ in place):
        made = torch.stack([samplers[i]._gumbel(q, rows.shape[1], rows.device) for i, q in place])
    else:
        made = noise([samplers[i].noise_words(q) for i, q in place])
    sent = send({"at": np.array(at, dtype=np.int64)}, rows.device)["at"]
    added = made.index_select(0, sent.clamp(min=0))
    return rows + (added if min(at) >= 0 else added.masked_fill(sent[:, None] < 0, 0.0))
