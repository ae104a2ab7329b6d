"""Hydra the slow way: one path at a time, from the paper's description alone (arXiv 2402.05109)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.dart_dense import norm, rotary


def prefixed(w: dict[str, Tensor], c, states: Tensor) -> Tensor:
    """(T, H) last states -> (T, H): Hydra++'s decoder layer and norm over them, or the states themselves."""
    if not c.prefix:
        return states
    p, heads, kv, dim = "prefix.layer.", c.num_attention_heads, c.num_key_value_heads, c.head_dim
    y = norm(states, w[p + "input_layernorm.weight"], c.rms_norm_eps)
    at = torch.arange(len(y))
    q = rotary((y @ w[p + "self_attn.q_proj.weight"].T).view(-1, heads, dim), at, c.rope_theta)
    k = rotary((y @ w[p + "self_attn.k_proj.weight"].T).view(-1, kv, dim), at, c.rope_theta)
    v = (y @ w[p + "self_attn.v_proj.weight"].T).view(-1, kv, dim)
    future = torch.ones(len(y), len(y), dtype=torch.bool).triu(1)
    out = []
    for h in range(heads):
        g = h // (heads // kv)
        out.append((q[:, h] @ k[:, g].T / math.sqrt(dim)).masked_fill(future, -math.inf).softmax(-1) @ v[:, g])
    x = states + torch.cat(out, dim=-1) @ w[p + "self_attn.o_proj.weight"].T
    z = norm(x, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
    gate, up = z @ w[p + "mlp.gate_proj.weight"].T, z @ w[p + "mlp.up_proj.weight"].T
    x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, w["prefix.norm.weight"], c.rms_norm_eps)


def log_probs(w: dict[str, Tensor], c, state: Tensor, path: Tensor) -> Tensor:
    """(H,) state, (t, H) embeddings of the last committed token and the drafts after it -> (draft_vocab,)."""
    p = f"heads.{len(path) - 1}."
    x = torch.cat((state, *path))
    for i in range(c.num_blocks):
        b = f"{p}blocks.{i}."
        inner = w[b + "linear.weight"] @ x + w[b + "linear.bias"]
        if i == 0:
            x = w[b + "res_connection.weight"] @ x + w[b + "res_connection.bias"]
        x = x + inner * torch.sigmoid(inner)
    out = w[p + "lm_head.weight"] @ x
    return (out + w[p + "lm_head.bias"] if c.head_bias else out).log_softmax(0)


def tree(w: dict[str, Tensor], c, table: Tensor, ids: Tensor, states: Tensor, budget: int, ends: set[int]):
    """{path of target ids: its log-probability}, the best `budget` of all that expansion finds."""
    target = torch.arange(len(w["d2t"])) + w["d2t"]
    state = prefixed(w, c, states)[-1]
    found: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(c.d):
        new: dict[tuple[int, ...], float] = {}
        for path in frontier:
            scores = log_probs(w, c, state, table[torch.tensor([int(ids[-1]), *path])])
            for i in scores.topk(min(c.top_k, len(scores))).indices.tolist():
                new[(*path, int(target[i]))] = found.get(path, 0.0) + float(scores[i])
        found |= new
        frontier = [p for p in sorted(new, key=lambda p: -new[p])[: c.top_k] if p[-1] not in ends]
    kept = sorted(found, key=lambda p: -found[p])[:budget]
    return {p: found[p] for p in kept}
