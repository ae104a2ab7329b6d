"""The slow plain twin of `_core.philox_uniform`: Philox4x32-10 in int64 torch arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MUL = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _mul_hi_lo(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """32 x 32 -> 64 bits in int64 without overflow: 16-bit halves of the constant."""
    low, high = a * (m & 0xFFFF), a * (m >> 16)  # each below 2^48
    middle = high + (low >> 16)
    return (middle >> 16) & _MASK, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32_10(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """(n, 4) int64 words below 2^32, two key words -> (n, 4) int64 random words."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _mul_hi_lo(c0, _MUL[0])
        high1, low1 = _mul_hi_lo(c2, _MUL[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack([c0, c1, c2, c3], dim=-1)


def uniform(seed: int, sample: int, position: int, size: int) -> Tensor:
    """(size,) float32 as documented at `_core.philox_uniform`."""
    n = (size + 3) // 4
    fixed = torch.tensor([position, sample & _MASK, sample >> 32]).expand(n, 3)
    counter = torch.cat([torch.arange(n)[:, None], fixed], dim=1)
    words = philox4x32_10(counter, (seed & _MASK, seed >> 32)).reshape(-1)[:size]
    w = ((words.double() + 0.5) * 2.0**-32).float()
    return w.clamp(max=1 - 2.0**-24)
