"""DART's prefix-shared training pass the slow way: every row in one attention under one dense mask, loops, no chunks.

Written from method.md section 3 alone, without the package's own forward, masks or loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dartspec.drafters.dart import DartNet
from dartspec.train.data import Example
from reference.prefixes import carries, row_weight


def layout(num_clean: int, anchors: list[int], m: int) -> tuple[Tensor, Tensor]:
    """Positions (n,) and allowed attention (n, n) of num_clean clean rows followed by a group of m masks an anchor."""
    kind = [("clean", j, 0) for j in range(num_clean)]
    kind += [("mask", g, i) for g in range(len(anchors)) for i in range(1, m + 1)]
    positions = [a if k == "clean" else anchors[a] + i for k, a, i in kind]
    allowed = torch.zeros(len(kind), len(kind), dtype=torch.bool)
    for row, (k, a, i) in enumerate(kind):
        for column, (k2, a2, i2) in enumerate(kind):
            if k == "clean":
                allowed[row, column] = k2 == "clean" and a2 <= a
            elif k2 == "clean":
                allowed[row, column] = a2 <= anchors[a]
            else:
                allowed[row, column] = a2 == a and i2 <= i
    return torch.tensor(positions), allowed


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """(n, heads, dim), by pairs (i, i + dim / 2)."""
    dim = x.shape[-1]
    out = torch.empty_like(x)
    for i in range(dim // 2):
        angle = positions.double() * theta ** (-2 * i / dim)
        c, s = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
        a, b = x[:, :, i], x[:, :, i + dim // 2]
        out[:, :, i], out[:, :, i + dim // 2] = a * c - b * s, b * c + a * s
    return out


def dense_forward(net: DartNet, features: Tensor, embeddings: Tensor, anchors: list[int]) -> Tensor:
    """One sequence: (T, taps * H) features, (T, H) embeddings -> (T + A * m, H) rows, ready for the head.

    m masks follow an anchor: d - 1 where the last clean row predicts offset 1 (shifted prediction), else d.
    """
    c = net.config
    w = dict(net.named_parameters())
    layer = "layers.0."
    m = c.num_masks
    clean_residual = features @ w["fc.weight"].T
    clean_x = torch.cat(
        (
            norm(embeddings, w[layer + "input_layernorm.weight"], c.rms_norm_eps),
            norm(clean_residual, w[layer + "hidden_norm.weight"], c.rms_norm_eps),
        ),
        dim=-1,
    )
    if c.mask == "pair":
        mask_residual = w["fc.weight"] @ w["mask_features"]
        mask_x = torch.cat(
            (
                norm(w["mask_embedding"], w[layer + "input_layernorm.weight"], c.rms_norm_eps),
                norm(mask_residual, w[layer + "hidden_norm.weight"], c.rms_norm_eps),
            )
        )
    else:
        mask_x = w[layer + "mask_rep"]
        mask_residual = mask_x[: c.hidden_size]
    count = len(anchors) * m
    residual = torch.cat((clean_residual, mask_residual.expand(count, -1)))
    x = torch.cat((clean_x, mask_x.expand(count, -1)))
    positions, allowed = layout(len(features), anchors, m)

    n, heads, kv, dim = len(x), c.num_attention_heads, c.num_key_value_heads, c.head_dim
    q = rotary((x @ w[layer + "self_attn.q_proj.weight"].T).view(n, heads, dim), positions, c.rope_theta)
    k = rotary((x @ w[layer + "self_attn.k_proj.weight"].T).view(n, kv, dim), positions, c.rope_theta)
    v = (x @ w[layer + "self_attn.v_proj.weight"].T).view(n, kv, dim)
    outs = []
    for h in range(heads):
        group = h // (heads // kv)
        scores = q[:, h] @ k[:, group].T / math.sqrt(dim)
        outs.append(scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v[:, group])
    x = residual + torch.stack(outs, dim=1).reshape(n, heads * dim) @ w[layer + "self_attn.o_proj.weight"].T
    y = norm(x, w[layer + "post_attention_layernorm.weight"], c.rms_norm_eps)
    gate, up = y @ w[layer + "mlp.gate_proj.weight"].T, y @ w[layer + "mlp.up_proj.weight"].T
    x = x + (gate * torch.sigmoid(gate) * up) @ w[layer + "mlp.down_proj.weight"].T
    for _ in range(2 if c.final_norm_twice else 1):
        x = norm(x, w["norm.weight"], c.rms_norm_eps)
    return x


def dense_loss(
    net: DartNet, sequences: list[tuple[Example, Tensor, Tensor, Tensor, list[int], list[int]]], gamma: float
) -> Tensor:
    """The loss of one update over several sequences, each offset averaged over the valid positions of all prefixes.

    A sequence: its ids and answers, features (T, taps * H) of tokens 0..T-1, embeddings of tokens 1..T-1, the target's
    full-vocabulary logits (T, V), rows whose offset 1 counts, anchors whose offsets 2..d count.
    """
    d, m = net.config.d, net.config.num_masks
    draft_ids = net.target_ids()
    examples = [one[0] for one in sequences]
    total = torch.zeros(())
    for example, features, embeddings, logits, first, anchors in sequences:
        n = len(example.ids) - 1
        rows = dense_forward(net, features[:n], embeddings, [*first, *anchors])
        masks = rows[n:].view(-1, m, rows.shape[-1])
        for g, j in enumerate(first):
            row = rows[j] if net.config.shifted else masks[g, 0]
            if carries(example, j, 1):
                q = logits[j + 1].softmax(-1)[draft_ids]
                loss = -(q * (row @ net.lm_head.weight.T).log_softmax(-1)).sum()
                total = total + row_weight(example, first, 1, examples) * loss
        for g, a in enumerate(anchors, len(first)):
            for t in range(2, d + 1):
                if carries(example, a, t):
                    q = logits[a + t].softmax(-1)[draft_ids]
                    row = masks[g, t - 1 - (d - m)]
                    loss = -(q * (row @ net.lm_head.weight.T).log_softmax(-1)).sum()
                    total = total + gamma ** (t - 1) * row_weight(example, anchors, t, examples) * loss
    return total
