"""Where two texts of one request part, and whether rounding explains it.

In float32 the texts are equal, and tests assert it. In bfloat16 a tree's forward rounds otherwise than a one-token
forward, and where two tokens are nearly tied either may win: the first divergence is reported with the gap there. A gap
of more than a few units in the last place is a bug (docs/losslessness.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dartspec.errors import DartspecError
from dartspec.sampling import Sampler
from dartspec.target.target import Target
from dartspec.types import SamplingParams


@dataclass(frozen=True)
class Divergence:
    """The first difference of two answers to one request.

    index:            of the new token; both answers agree before it.
    token_a, token_b: what each wrote there; None where it had ended.
    gap:              between the two best perturbed logits there, `log q_v + G` (greedy: the processed logits), when
                      the target scores the shared text again in one plain forward. At least 0; infinite where the
                      request leaves one token only.
    gap_ulps:         the same in units in the last place of the target's dtype, at the size of the raw logits of those
                      two tokens, carried through the temperature. Rounding explains a few.

    A filter's edge (top-k, top-p, min-p) can part two texts as well: the token that one of them wrote is then not
    among the survivors when scored again, and `gap` says nothing about it.
    """

    index: int
    token_a: int | None
    token_b: int | None
    gap: float
    gap_ulps: float


def first_divergence(
    target: Target,
    sampler_params: SamplingParams,
    prompt_ids: Sequence[int],
    a: Sequence[int],
    b: Sequence[int],
    sample: int = 0,
) -> Divergence | None:
    """Compares two answers (new ids, without the prompt) to one request; None when they are equal.

    sampler_params: the request's. Its seed must be the one that both used, when it samples: without one this raises
                    DartspecError, because the noise cannot be had again.
    sample:         the request's index among the answers to its prompt.
    """
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if index == max(len(a), len(b)):
        return None
    if sampler_params.temperature > 0 and sampler_params.seed is None:
        raise DartspecError("the gap needs the noise that was used: give the seed that the answers were made with")
    history = [*prompt_ids, *a[:index]]
    raw = target.session(1, len(history)).prefill(0, history).logits[-1]  # (V,)
    sampler = Sampler(sampler_params, target.num_tokens, len(prompt_ids), sample)
    row = sampler.perturbed(raw, history)  # (num_tokens,)
    best = row.topk(min(2, len(row)))
    gap = float(best.values[0] - best.values[-1]) if len(row) > 1 else math.inf
    unit = ulp(raw[best.indices].abs().max()) / (sampler_params.temperature or 1.0)
    return Divergence(
        index,
        a[index] if index < len(a) else None,
        b[index] if index < len(b) else None,
        gap,
        gap / unit,
    )


def ulp(value: Tensor) -> float:
    """The unit in the last place of one number, in its own dtype."""
    info = torch.finfo(value.dtype)
    size = abs(float(value))
    exponent = math.floor(math.log2(size)) if size >= info.smallest_normal else math.log2(info.smallest_normal)
    return float(2.0**exponent * info.eps)
