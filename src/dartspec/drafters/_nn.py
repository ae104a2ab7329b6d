"""Small layers that drafters share. They know shapes and dtypes, nothing of any drafting method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dartspec import _core
from dartspec.device import fetch
from dartspec.drafters._checkpoint import LayerConfig
from dartspec.errors import DartspecError
from dartspec.target.attention import attend
from dartspec.types import Committed, TargetView


class RMSNorm(nn.Module):
    """Llama's norm: computed in float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(..., H) -> (..., H), float32 inside."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """(n,) positions -> cos, sin, each (n, head_dim) float32, for half-split rotary embedding over the full head.

    Always float32: a table rounded to bfloat16 is wrong by whole radians at position 1,000 in its fast dimensions.
    """
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None] * (theta ** (-half / head_dim))[None, :]  # (n, head_dim / 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to (..., head_dim); cos and sin broadcast against it. float32 inside."""
    wide = x.float()
    low, high = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """The four projections of grouped-query attention, no bias; what is attended to is the caller's business."""

    def __init__(self, in_size: int, out_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(in_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(in_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(in_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, out_size, bias=False)


class GatedMLP(nn.Module):
    """Llama's MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class FusedLayer(nn.Module):
    """EAGLE-3's decoder layer, which DART has too: attention over [normed embedding ; normed features], the residual
    being the features before their norm (or after it, `norm_before_residual`)."""

    def __init__(self, c: LayerConfig, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(
            2 * c.hidden_size, c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        )
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def inputs(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """(n, H), (n, H) -> attention input (n, 2H) in the features' dtype."""
        normed = self.input_layernorm(embeddings), self.hidden_norm(features)
        return torch.cat((normed[0].to(normed[1].dtype), normed[1]), dim=-1)

    def finish(self, features: Tensor, attended: Tensor) -> Tensor:
        """(n, H) features, (n, heads * head_dim) attention output -> (n, H), not normed."""
        residual = self.hidden_norm(features) if self.norm_before_residual else features
        x = residual + self.self_attn.o_proj(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaLayer(nn.Module):
    """A decoder layer as Llama has it; with `head_norm` queries and keys are normed by head, as in Qwen3."""

    def __init__(self, c: LayerConfig, head_norm: bool = False) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim, self.head_norm = c.num_key_value_heads, c.head_dim, head_norm
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(
            c.hidden_size, c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        )
        if head_norm:
            self.self_attn.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.self_attn.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)

    def head_norms(self) -> tuple[RMSNorm | None, RMSNorm | None]:
        """Of queries and of keys."""
        norms = [getattr(self.self_attn, name, None) for name in ("q_norm", "k_norm")]
        return norms[0], norms[1]

    def queries(self, x: Tensor) -> Tensor:
        """(n, H) normed -> (n, heads, head_dim), not rotated."""
        q: Tensor = self.self_attn.q_proj(x).view(len(x), -1, self.head_dim)
        return self.self_attn.q_norm(q) if self.head_norm else q  # type: ignore[operator]

    def keys(self, x: Tensor) -> Tensor:
        """(n, H) normed -> (n, kv heads, head_dim), not rotated."""
        k: Tensor = self.self_attn.k_proj(x).view(len(x), self.num_kv_heads, self.head_dim)
        return self.self_attn.k_norm(k) if self.head_norm else k  # type: ignore[operator]

    def values(self, x: Tensor) -> Tensor:
        """(n, H) normed -> (n, kv heads, head_dim)."""
        out: Tensor = self.self_attn.v_proj(x).view(len(x), self.num_kv_heads, self.head_dim)
        return out

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """(n, H) residual, (n, heads * head_dim) attention output -> (n, H)."""
        x = residual + self.self_attn.o_proj(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def attend_rows(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """q (kv, group, R, dim), k and v (kv, T, dim), allowed (R, T) -> (kv, group, R, dim). Softmax in float32."""
    kv, group, n, dim = q.shape
    scores = (q.reshape(kv, group * n, dim) @ k.transpose(1, 2)).view(kv, group, n, k.shape[1]).float() * dim**-0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1).to(v.dtype)
    out: Tensor = weights.view(kv, group * n, k.shape[1]) @ v
    return out.view(kv, group, n, dim)


def attend_groups(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, own_k: Tensor, own_v: Tensor, own_allowed: Tensor
) -> Tensor:
    """Rows in groups of m: q (kv, group, A, m, dim); clean k, v (kv, T, dim) under allowed (A, T); own keys and values
    (kv, A, m', dim) under own_allowed (m, m'). One softmax over both -> (kv, group, A, m, dim)."""
    kv, group, n, m, dim = q.shape
    clean = (q.reshape(kv, group * n * m, dim) @ k.transpose(1, 2)).view(kv, group, n, m, k.shape[1]).float()
    own = (q @ own_k[:, None].transpose(-1, -2)).float()  # (kv, group, A, m, m')
    clean = clean.masked_fill(~allowed[:, None, :], float("-inf"))
    own = own.masked_fill(~own_allowed, float("-inf"))
    weights = (torch.cat((clean, own), dim=-1) * dim**-0.5).softmax(-1).to(v.dtype)
    on_clean, on_own = weights.split((clean.shape[-1], own.shape[-1]), dim=-1)
    out: Tensor = (on_clean.reshape(kv, group * n * m, k.shape[1]) @ v).view(kv, group, n, m, dim)
    return out.add(on_own @ own_v[:, None])


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, keeping nothing between forward and backward but its arguments: it is computed again there."""
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


# --- decoding: the same layers for a few rows, as few calls as possible ---------------------------------------------


def use_core(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the C++ core's packed bfloat16 kernels serve this device and dtype."""
    return device.type == "cpu" and dtype == torch.bfloat16 and _core.kernels_supported()


class Product:
    """x W^T for one or several weights side by side; packed for the core where it can serve, else `F.linear`."""

    def __init__(self, weights: Sequence[Tensor], packed: bool, num_threads: int) -> None:
        self.out_features = sum(len(w) for w in weights)
        self.in_features = weights[0].shape[1]
        self.num_threads = num_threads
        self.packed: _core.PackedLinear | None = None
        if packed:
            weights = [w.contiguous() for w in weights]
            parts = [(w.data_ptr(), len(w), self.in_features, 0) for w in weights]
            self.packed = _core.PackedLinear(parts, self.in_features)
        else:
            self._weight = torch.cat(list(weights)).contiguous()

    def __call__(self, x: Tensor, float32: bool = False) -> Tensor:
        """(n, in) -> (n, out) in x's dtype, or in float32 when asked."""
        if self.packed is None:
            y = nn.functional.linear(x, self._weight)
            return y.float() if float32 else y
        x = x if x.is_contiguous() else x.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=torch.float32 if float32 else x.dtype)
        self.packed.apply(
            x.data_ptr(), len(x), self.in_features, out.data_ptr(), self.out_features, float32, self.num_threads
        )
        return out


class Gated:
    """down(silu(gate(x)) * up(x)); one call of the core where it can serve."""

    def __init__(self, mlp: GatedMLP, packed: bool, num_threads: int) -> None:
        gate, up, down = (w.weight.detach() for w in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self.num_threads = num_threads
        self.gate_up: _core.PackedLinear | None = None
        if packed:
            gate, up, down = gate.contiguous(), up.contiguous(), down.contiguous()
            size, inner = gate.shape[1], len(gate)
            parts = [(w.data_ptr(), inner, size, 0) for w in (gate, up)]
            self.gate_up = _core.PackedLinear.gated(parts, size, 0)
            self.down = _core.PackedLinear([(down.data_ptr(), size, inner, 0)], inner)
        else:
            self._weights = torch.cat((gate, up)), down.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """(n, H) -> (n, H)."""
        if self.gate_up is None:
            gate_up, down = self._weights
            gate, up = nn.functional.linear(x, gate_up).chunk(2, dim=-1)
            return nn.functional.linear(nn.functional.silu(gate) * up, down)
        n, size = x.shape
        out = torch.empty_like(x)
        _core.gated_mlp(self.gate_up, self.down, x.data_ptr(), n, size, out.data_ptr(), size, self.num_threads)
        return out


class Norm:
    """RMSNorm of contiguous rows; one call of the core where it can serve."""

    def __init__(self, norm: RMSNorm, packed: bool) -> None:
        self.weight, self.eps, self.packed = norm.weight.detach().contiguous(), norm.eps, packed

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """(n, H) -> (n, H); written into `out` (rows may be wider apart) when given."""
        if not self.packed:
            y = rms_norm(x, self.weight, self.eps)
            return y if out is None else out.copy_(y)
        out = torch.empty_like(x) if out is None else out
        n, size = x.shape
        _core.rms_norm(
            x.data_ptr(), n, x.stride(0), size, self.weight.data_ptr(), self.eps, 0, out.data_ptr(), out.stride(0)
        )
        return out


class Head:
    """A drafter's head: rows to their likeliest tokens.

    Where the core can serve, with weights of 8 bits (half the memory to read; the text does not depend on drafts), and
    one pass over the logits instead of torch's sort and softmax.

    weight: (V, H). forbidden: (V,) bool, ids never to be drafted, or None. inner: applied to the rows first.
    """

    def __init__(
        self,
        weight: Tensor,
        forbidden: Tensor | None,
        packed: bool,
        num_threads: int,
        bias: Tensor | None = None,
        inner: Product | None = None,
    ) -> None:
        self._bias, self._inner = bias, inner
        self._forbidden = forbidden if forbidden is not None and bool(forbidden.any()) else None
        self._size, self.num_threads = len(weight), num_threads
        self._int8: _core.Int8Linear | None = None
        if packed and bias is None and _core.draft_kernels_supported():
            weight = weight.contiguous()
            self._int8 = _core.Int8Linear(weight.data_ptr(), *weight.shape)
        else:
            self._product = Product([weight], packed, num_threads)

    def likeliest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(n, H) -> log-probabilities over all V (n, k) float32, best first, their indices (n, k) int32; on the CPU.

        Where a row's logits are not finite, all of its log-probabilities are -inf. k is cut to V.
        """
        k = min(k, self._size)
        x = x if self._inner is None else self._inner(x)
        if self._int8 is None:
            logits = self._product(x, float32=True)
            return self._by_torch(logits if self._bias is None else logits.add_(self._bias), k)
        n = len(x)
        logits = torch.empty(n, self._size)
        self._int8.apply(x.data_ptr(), n, x.stride(0), logits.data_ptr(), self.num_threads)
        if self._forbidden is not None:
            logits[:, self._forbidden] = float("-inf")
        log_probs, index = torch.empty(n, k), torch.empty(n, k, dtype=torch.int32)
        _core.top_log_probs(logits.data_ptr(), n, self._size, k, log_probs.data_ptr(), index.data_ptr())
        return log_probs, index

    def _by_torch(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """One transfer where the logits lie on an accelerator."""
        log_probs, index = fetch(*self._likeliest(logits, k))
        return log_probs, index

    def likeliest_there(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """`likeliest` by torch alone, left where x lies; it can be recorded."""
        x = x if self._inner is None else self._inner(x)
        return self._likeliest(self._product(x, float32=True), min(k, self._size))

    def _likeliest(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(n, V) float32 logits, overwritten."""
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, float("-inf"))
        best, where = logits.topk(k, dim=-1)
        top = best[:, :1]
        log_probs = (best - top) - logits.sub_(top).exp_().sum(-1, keepdim=True).log_()
        # NaN sorts first, and infinity less infinity is NaN: the best entry tells
        log_probs = log_probs.masked_fill(~(log_probs[:, :1] > -1e30), float("-inf"))
        return log_probs, where.to(torch.int32)


def head_rows(view: TargetView, ids: Tensor) -> Tensor:
    """(V, H) float32 rows of the target's head, read through its public function: the images of the unit vectors."""
    with torch.no_grad():
        unit, ids = torch.eye(view.hidden_size, dtype=view.dtype, device=view.device), ids.to(view.device)
        parts = [view.lm_head(some)[:, ids].T.float().cpu() for some in torch.split(unit, 64)]  # not all ids at once
        return torch.cat(parts, dim=1).contiguous()


class Prefix:
    """Keys and values of one sequence's clean rows, rotated; room behind them is where the masks' entries go for the
    length of one forward. Grown by doubling, never concatenated."""

    def __init__(self, num_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0
        self.keys = torch.empty(num_heads, 0, dim, dtype=dtype, device=device)  # (kv, capacity, dim)
        self.values = torch.empty_like(self.keys)

    def store(self, at: int, keys: Tensor, values: Tensor) -> None:
        """(n, kv, dim) each from position `at` on; what lies behind `length` is lost when room is made."""
        end = at + len(keys)
        self.reserve(end)
        self.keys[:, at:end] = keys.transpose(0, 1)
        self.values[:, at:end] = values.transpose(0, 1)

    def reserve(self, length: int) -> None:
        capacity = self.keys.shape[1]
        if length <= capacity:
            return
        heads, _, dim = self.keys.shape
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(heads, max(length, 2 * capacity, 256), dim)
            new[:, : self.length] = old[:, : self.length]
            setattr(self, name, new)

    def beginning(self, length: int) -> Prefix:
        """A copy of the first `length` rows."""
        if length > self.length:
            raise DartspecError(f"a drafter has read {self.length} rows of a text, {length} of them were asked for")
        heads, _, dim = self.keys.shape
        made = Prefix(heads, dim, self.keys.dtype, self.keys.device)
        made.reserve(length)
        made.keys[:, :length], made.values[:, :length] = self.keys[:, :length], self.values[:, :length]
        made.length = length
        return made


class RopeTable:
    """Rotary tables of all positions so far, grown by doubling."""

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        self._head_dim, self._theta, self._device = head_dim, theta, device
        self.reserve(0)

    def reserve(self, length: int) -> None:
        positions = torch.arange(length, device=self._device)
        self.cos, self.sin = rope_table(positions, self._head_dim, self._theta)  # (length, head_dim) float32

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """(n, heads, head_dim) at (n,) positions, rotated."""
        if (most := int(positions.max()) + 1) > len(self.cos):
            self.reserve(max(most, 2 * len(self.cos), 512))
        return rotate(x, self.cos[positions][:, None], self.sin[positions][:, None])


def news(one: Committed, num_read: int, taps: int, width: int) -> tuple[Tensor, Tensor]:
    """What a sequence learned: features (n, taps * width) and the tokens at one position further on (n,).

    Refused where rows are missing between what the drafter has read (`num_read`) and what is new.
    """
    length, n = len(one.history), one.n_new
    if one.features is None or tuple(one.features.shape) != (n, taps, width):
        found = None if one.features is None else list(one.features.shape)
        raise DartspecError(f"the drafter wants features of shape {[n, taps, width]} for {n} new tokens, found {found}")
    if n < 1 or num_read != length - 1 - n:
        raise DartspecError(
            f"slot {one.slot}: {n} new of {length} committed tokens, but the drafter has read {num_read} rows; "
            "reset the slot and give every position since the start"
        )
    return one.features.flatten(1), one.history[length - n :]


def news_of_last(one: Committed, width: int) -> Tensor:
    """(width,) the state that predicted the last committed token; the rest of the history is not needed."""
    n = one.n_new
    if one.features is None or n < 1 or tuple(one.features.shape) != (n, 1, width):
        found = None if one.features is None else list(one.features.shape)
        raise DartspecError(f"the drafter wants features of shape {[n, 1, width]} for {n} new tokens, found {found}")
    return one.features[-1, 0]


class PackedLayer:
    """A `LlamaLayer` for decoding, over any number of prefixes."""

    def __init__(self, layer: LlamaLayer, packed: bool, num_threads: int) -> None:
        attn = layer.self_attn
        self.kv_heads, self.dim, self.num_threads = layer.num_kv_heads, layer.head_dim, num_threads
        self.heads = attn.q_proj.out_features // self.dim
        self.input_norm = Norm(layer.input_layernorm, packed)
        self.qkv = Product([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight], packed, num_threads)
        self.kv = Product([attn.k_proj.weight, attn.v_proj.weight], packed, num_threads)
        self._q_norm, self._k_norm = layer.head_norms()
        self._o = Product([attn.o_proj.weight], packed, num_threads)
        self._mlp_norm, self._mlp = Norm(layer.post_attention_layernorm, packed), Gated(layer.mlp, packed, num_threads)

    def keys_values(self, x: Tensor, positions: Tensor, rope: RopeTable) -> tuple[Tensor, Tensor]:
        """(n, H) rows as attention reads them -> rotated keys and values, (n, kv heads, dim)."""
        kv = self.kv(x).view(len(x), 2, self.kv_heads, self.dim)
        return self._turned(kv[:, 0], self._k_norm, positions, rope), kv[:, 1]

    def queries_keys_values(self, x: Tensor, positions: Tensor, rope: RopeTable) -> tuple[Tensor, Tensor, Tensor]:
        """The same with the queries (n, heads, dim) in front."""
        qkv = self.qkv(x).view(len(x), self.heads + 2 * self.kv_heads, self.dim)
        q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        return self._turned(q, self._q_norm, positions, rope), self._turned(k, self._k_norm, positions, rope), v

    def _turned(self, x: Tensor, norm: nn.Module | None, positions: Tensor, rope: RopeTable) -> Tensor:
        return rope.turn(x if norm is None else norm(x), positions)

    def attend(self, q: Tensor, prefix: Prefix, length: int, causal: bool = False) -> Tensor:
        """(n, heads, dim) queries over the first `length` keys -> (n, heads * dim). causal: they are the last rows."""
        keys, values = prefix.keys[None, :, :length], prefix.values[None, :, :length]
        q = q.transpose(0, 1)[None]
        return attend(q, keys, values, None, causal=causal, num_threads=self.num_threads).view(q.shape[2], -1)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """(n, H) and (n, heads * dim) -> (n, H)."""
        x = residual + self._o(attended)
        x += self._mlp(self._mlp_norm(x))
        return x
