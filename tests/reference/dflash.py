"""DFlash the slow way: one block, every row written out, from the paper's description alone (arXiv 2602.06036)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.dart_dense import norm, rotary


def block(w: dict[str, Tensor], c, features: Tensor, root: Tensor) -> Tensor:
    """(T, taps * H) features of tokens 0 .. T - 1, (H,) embedding of token T -> (d, draft_vocab) log-probabilities of
    tokens T + 1 .. T + d, each at its own position."""
    heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], c.rms_norm_eps)
    x = torch.cat((root[None], w["mask_embedding"].expand(c.d, -1)))
    T = len(features)
    positions = torch.arange(T + len(x))
    for i in range(c.num_layers):
        p = f"layers.{i}."
        y = norm(x, w[p + "input_layernorm.weight"], c.rms_norm_eps)
        read = torch.cat((context, y))
        q = (y @ w[p + "self_attn.q_proj.weight"].T).view(len(x), heads, dim)
        k = (read @ w[p + "self_attn.k_proj.weight"].T).view(len(read), kv, dim)
        v = (read @ w[p + "self_attn.v_proj.weight"].T).view(len(read), kv, dim)
        if c.head_norm:
            q = norm(q, w[p + "self_attn.q_norm.weight"], c.rms_norm_eps)
            k = norm(k, w[p + "self_attn.k_norm.weight"], c.rms_norm_eps)
        q, k = rotary(q, positions[T:], c.rope_theta), rotary(k, positions, c.rope_theta)
        out = []
        for h in range(heads):
            g = h // (heads // kv)
            out.append((q[:, h] @ k[:, g].T / math.sqrt(dim)).softmax(-1) @ v[:, g])
        x = x + torch.cat(out, dim=-1) @ w[p + "self_attn.o_proj.weight"].T
        z = norm(x, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = z @ w[p + "mlp.gate_proj.weight"].T, z @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return (norm(x[1:], w["norm.weight"], c.rms_norm_eps) @ w["lm_head.weight"].T).log_softmax(-1)


def product_tree(
    log_probs: Tensor, ids: Tensor, top_k: int, budget: int, ends: set[int]
) -> dict[tuple[int, ...], float]:
    """The likeliest `budget` paths of independent positions, by looking at all of them."""
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for row in log_probs:
        best = row.topk(min(top_k, len(row)))
        level = {
            (*path, int(ids[i])): value + float(step)
            for path, value in level.items()
            if not path or path[-1] not in ends
            for step, i in zip(best.values, best.indices, strict=True)
        }
        found |= level
    kept = sorted(found, key=lambda p: -found[p])[:budget]
    return {p: found[p] for p in kept}
