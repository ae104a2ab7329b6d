"""One attention function for every target, hung into transformers' public registries under the name "dartspec".

Grouped-query attention without repeating key/value heads. On a CPU with AVX512_BF16 it is our own kernel, whose rows do
not depend on one another (see `csrc/core/kernels.hpp`); elsewhere it is torch's, in one of several `WAYS`, by default
with the heads of a group folded into the rows. It knows tensors only: no cache, no tree. Importing this module changes
nothing; `register()` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dartspec import _core
from dartspec.errors import DartspecError

NAME = "dartspec"
_KERNEL_DTYPES = (torch.bfloat16, torch.float32)


def register(way: str | None = None) -> str:
    """Adds the function and its mask builder (the one of sdpa) to transformers; returns the name to load models with
    (`attn_implementation=`). Calling it again changes nothing.

    way: one of `WAYS`, for accelerators; None for the one that runs everywhere."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if way is not None and way not in WAYS:
        raise DartspecError(f"attention has no way {way!r}; it has {', '.join(WAYS)}")
    name = NAME if way is None else f"{NAME}_{way}"
    AttentionInterface.register(name, attention_forward if way is None else partial(attention_forward, way=way))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    way: str = "folded",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature that transformers calls: query (B, H, N, D), key and value (B, Hkv, K, D), mask (B, 1 or H, N, K)
    bool or additive, or None; returns ((B, N, H, D) contiguous, None). Without a mask a module that says it is causal
    gets a causal mask over its own N keys, as with sdpa."""
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise DartspecError(
                f"attention with {name} was asked of {type(module).__name__}, which 'dartspec' attention does not do: "
                "load the model with attn_implementation='eager'"
            )
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    causal = causal and attention_mask is None and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:  # an empty static cache: only the new keys exist
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if dropout:
        raise DartspecError(f"attention dropout is {dropout}, expected 0: put the model into eval() mode")
    return attend(query, key, value, attention_mask, scale=scaling, softcap=softcap, causal=causal, way=way), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    num_threads: int | None = None,
    way: str = "folded",
) -> Tensor:
    """softmax(scale q k^T) v over the keys that `mask` allows.

    query (B, H, N, D); key, value (B, Hkv, K, D) and (B, Hkv, K, Dv), any strides; mask (B or 1, 1 or H, N, >= K) bool,
    True where a key may be seen, or additive, or None; scale defaults to D^-0.5; softcap c turns scores s into
    c tanh(s / c); causal: without a mask row n sees keys up to K - N + n. Returns (B, N, H, Dv), contiguous.
    num_threads defaults to torch's. With the kernel, a row that sees no key gives zeros. way: one of `WAYS`, where the
    work is torch's and there is no soft cap.
    """
    if mask is not None and mask.shape[-1] > key.shape[2]:
        mask = mask[..., : key.shape[2]]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if _kernel_takes(query, key, value, mask):
        return _by_kernel(query, key, value, mask, scale, softcap or 0.0, causal, num_threads)
    if softcap:
        return _by_hand(query, key, value, mask, scale, softcap, causal)
    return WAYS[way](query, key, value, mask, scale, causal)


def _kernel_takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return (
        query.dtype in _KERNEL_DTYPES
        and key.dtype == query.dtype == value.dtype
        and query.device.type == "cpu"
        and (mask is None or (mask.dtype == torch.bool and mask.device.type == "cpu"))
        and _core.kernels_supported()
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    )


def broadcast_strides(mask: Tensor) -> tuple[int, int, int]:
    """Strides by batch, head and row, 0 where there is one for all."""
    by_batch, by_head, by_row, _ = mask.stride()
    batch, heads, rows, _ = mask.shape
    return by_batch if batch > 1 else 0, by_head if heads > 1 else 0, by_row if rows > 1 else 0


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
    num_threads: int | None,
) -> Tensor:
    B, H, N, D = query.shape
    _, Hkv, K, Dv = value.shape
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    mask_address, mask_stride = 0, (0, 0, 0)
    if mask is not None:
        mask = mask if mask.stride(3) == 1 or K == 1 else mask.contiguous()
        mask_address, mask_stride = mask.data_ptr(), broadcast_strides(mask)
    out = query.new_empty(B, N, H, Dv)
    _core.attention(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        mask_address,
        out.data_ptr(),
        (B, H, Hkv, N, K, D, Dv),
        query.stride()[:3],
        key.stride()[:3],
        value.stride()[:3],
        mask_stride,
        (N * H * Dv, Dv, H * Dv),
        scale,
        softcap,
        causal,
        query.dtype == torch.float32,
        torch.get_num_threads() if num_threads is None else num_threads,
    )
    return out


def _folded(query: Tensor, mask: Tensor | None, num_kv_heads: int) -> tuple[Tensor, Tensor | None]:
    """The G heads of a group become rows: (B, H, N, D) -> (B, Hkv, G N, D), the mask likewise."""
    B, H, N, D = query.shape
    G = H // num_kv_heads
    query = query.reshape(B, num_kv_heads, G * N, D)
    if mask is None or G == 1:
        return query, mask
    if mask.shape[1] == 1:
        mask = mask[:, :, None].expand(-1, -1, G, N, -1)  # (B, 1, G, N, K)
        return query, mask.reshape(mask.shape[0], 1, G * N, mask.shape[-1])
    return query, mask.reshape(mask.shape[0], num_kv_heads, G * N, mask.shape[-1])


def _with_causal(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    if mask is not None or not causal:
        return mask
    N, K = query.shape[2], key.shape[2]
    return torch.ones(N, K, dtype=torch.bool, device=query.device).tril(K - N)[None, None]


def _by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    B, H, N, _ = query.shape
    Hkv = key.shape[1]
    if causal and Hkv == H and key.shape[2] == N:  # torch's own causal kernels, no mask to build
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    else:
        folded, mask = _folded(query, _with_causal(query, key, mask, causal), Hkv)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.reshape(B, H, N, value.shape[-1]).transpose(1, 2).contiguous()


def _by_gqa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """torch's own grouped-query attention; which of its kernels takes a mask there is torch's choice."""
    mask = _with_causal(query, key, mask, causal)
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


def _by_strides(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Every key/value head is a sequence of its own, which its group's heads see with a stride of 0."""
    B, H, N, D = query.shape
    Hkv, K = key.shape[1], key.shape[2]
    G = H // Hkv
    mask = _with_causal(query, key, mask, causal)
    if mask is not None:
        heads = mask.shape[1]
        wide = mask[:, :, None] if heads == 1 else mask.reshape(mask.shape[0], Hkv, G, N, -1)
        mask = wide.expand(B, Hkv, wide.shape[2], N, K).flatten(0, 1)
    key, value = (x.flatten(0, 1)[:, None].expand(B * Hkv, G, K, x.shape[-1]) for x in (key, value))
    out = F.scaled_dot_product_attention(query.reshape(B * Hkv, G, N, D), key, value, attn_mask=mask, scale=scale)
    return out.view(B, H, N, value.shape[-1]).transpose(1, 2).contiguous()


def _by_flex(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """torch's FlexAttention, compiled on an accelerator (once a shape), with the mask read by the score's modifier."""
    mask = _with_causal(query, key, mask, causal)
    modifier = None
    if mask is not None:
        seen = mask.expand(query.shape[0], mask.shape[1], -1, -1)
        by_head = mask.shape[1] > 1

        def modifier(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            entry = seen[b, h if by_head else 0, q, k]
            return torch.where(entry, score, -torch.inf) if seen.dtype == torch.bool else score + entry

    grouped = query.shape[1] != key.shape[1]
    flex = _flex(query.device.type)
    out: Tensor = flex(query, key, value, score_mod=modifier, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


@cache
def _flex(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    made: Any = flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=False)
    return made  # type: ignore[no-any-return]


WAYS = {"folded": _by_torch, "gqa": _by_gqa, "strides": _by_strides, "flex": _by_flex}
"""Grouped-query attention by torch, all equal but for rounding. `benchmarks/gpu` times them; "folded", which every
kernel of torch takes, is the default."""


def _by_hand(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float, causal: bool
) -> Tensor:
    """The same in single operations, float32 scores: for soft-capped scores, which torch's function does not know."""
    B, H, N, _ = query.shape
    folded, mask = _folded(query, _with_causal(query, key, mask, causal), key.shape[1])
    scores = (folded @ key.transpose(2, 3)).float() * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    out = torch.softmax(scores, dim=-1).to(value.dtype) @ value
    return out.reshape(B, H, N, value.shape[-1]).transpose(1, 2).contiguous()
