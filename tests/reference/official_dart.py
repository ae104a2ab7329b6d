"""One call of the official DART drafter, written from the description of its checkpoints alone: no cache, one row at a
time, plain loops over heads. Tensor names and conventions are the official ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Half-split rotary embedding of one head's vector."""
    half = len(x) // 2
    angle = torch.tensor([position * theta ** (-2 * i / len(x)) for i in range(half)], dtype=torch.float64)
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat((x[:half] * c - x[half:] * s, x[half:] * c + x[:half] * s))


def logits(w: dict[str, Tensor], c: dict[str, Any], features: Tensor, embeddings: Tensor) -> Tensor:
    """(n, 3 * H_target) features at positions 0..n - 1 and (n, H) embeddings of the tokens at 1..n ->
    (draft_length + 1, draft_vocab) logits: the last prefix row's, then the masks'."""
    eps, theta, H = c["rms_norm_eps"], c["rope_theta"], c["hidden_size"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim") or H // heads
    projected = features @ w["fc.weight"].T
    rows = []
    for f, e in zip(projected, embeddings, strict=True):
        joined = torch.cat(
            (
                norm(e, w["midlayer.input_layernorm.weight"], eps),
                norm(f, w["midlayer.hidden_norm.weight"], eps),
            )
        )
        rows.append((f, joined))
    mask = w["midlayer.mask_rep"]
    rows += [(mask[:H], mask)] * c["draft_length"]  # appended after the norms; the residual is its first half
    inputs = torch.stack([x for _, x in rows])
    q, k, v = (inputs @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
    out = []
    for i in range(len(rows) - c["draft_length"] - 1, len(rows)):
        attended = []
        for head in range(heads):
            group = head // (heads // kv)
            query = turn(q[i, head * dim : (head + 1) * dim], i, theta)
            keys = torch.stack([turn(k[j, group * dim : (group + 1) * dim], j, theta) for j in range(i + 1)])
            weight = torch.softmax(keys @ query / math.sqrt(dim), 0)
            attended.append(weight @ v[: i + 1, group * dim : (group + 1) * dim])
        x = rows[i][0] + torch.cat(attended) @ w["midlayer.self_attn.o_proj.weight"].T
        y = norm(x, w["midlayer.post_attention_layernorm.weight"], eps)
        gate, up = y @ w["midlayer.mlp.gate_proj.weight"].T, y @ w["midlayer.mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        x = norm(norm(x, w["norm.weight"], eps), w["norm.weight"], eps)  # at the forward's end and before the head
        out.append(w["lm_head.weight"] @ x)
    return torch.stack(out)


def candidates(rows: Tensor, d2t: Tensor, k: int = 25) -> tuple[Tensor, Tensor]:
    """Target ids (rows, k) and their probabilities, softmax over the k alone."""
    best = rows.topk(min(k, rows.shape[-1]))
    return best.indices + d2t[best.indices], best.values.softmax(-1)
