"""EAGLE-3 the slow way: one path at a time, every row's attention written out, from the papers' description alone.

arXiv 2503.01840, section 3: the layer reads [normed embedding ; normed features]; where the target has not been, the
features are the layer's own last output. arXiv 2406.16858, section 4: expand the best of each level, keep the best of
all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.dart_dense import norm, rotary


def outputs(w: dict[str, Tensor], c, features: Tensor, embeddings: Tensor) -> Tensor:
    """(T, taps * H) features of the target, (T + m, H) embeddings -> (T + m, H), not normed.

    Row i from T on has no features of the target: it takes the output of row i - 1.
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []
    out: list[Tensor] = []
    heads, kv, dim, layer = c.num_attention_heads, c.num_key_value_heads, c.head_dim, "layers.0."
    for i, e in enumerate(embeddings):
        f = w["fc.weight"] @ features[i] if i < len(features) else out[i - 1]
        normed = norm(f, w[layer + "hidden_norm.weight"], c.rms_norm_eps)
        x = torch.cat((norm(e, w[layer + "input_layernorm.weight"], c.rms_norm_eps), normed))
        at = torch.tensor([i])
        q = rotary((w[layer + "self_attn.q_proj.weight"] @ x).view(1, heads, dim), at, c.rope_theta)[0]
        keys.append(rotary((w[layer + "self_attn.k_proj.weight"] @ x).view(1, kv, dim), at, c.rope_theta)[0])
        values.append((w[layer + "self_attn.v_proj.weight"] @ x).view(kv, dim))
        attended = []
        for h in range(heads):
            g = h // (heads // kv)
            scores = torch.stack([q[h] @ k[g] for k in keys]) / math.sqrt(dim)
            attended.append(scores.softmax(0) @ torch.stack([v[g] for v in values]))
        y = (normed if c.norm_before_residual else f) + w[layer + "self_attn.o_proj.weight"] @ torch.cat(attended)
        z = norm(y, w[layer + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = w[layer + "mlp.gate_proj.weight"] @ z, w[layer + "mlp.up_proj.weight"] @ z
        out.append(y + w[layer + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
    return torch.stack(out)


def log_probs(w: dict[str, Tensor], c, x: Tensor) -> Tensor:
    """(H,) output -> (draft_vocab,)."""
    return (w["lm_head.weight"] @ norm(x, w["norm.weight"], c.rms_norm_eps)).log_softmax(0)


def tree(w: dict[str, Tensor], c, table: Tensor, ids: Tensor, features: Tensor, budget: int, ends: set[int]):
    """{path of target ids: its log-probability}, the best `budget` of all that expansion finds."""
    target = torch.arange(len(w["d2t"])) + w["d2t"]
    found: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(c.d):
        new: dict[tuple[int, ...], float] = {}
        for path in frontier:
            embeddings = table[torch.cat((ids[1:], torch.tensor(path, dtype=torch.int64)))]
            scores = log_probs(w, c, outputs(w, c, features, embeddings)[-1])
            for i in scores.topk(min(c.top_k, len(scores))).indices.tolist():
                new[(*path, int(target[i]))] = found.get(path, 0.0) + float(scores[i])
        found |= new
        ranked = sorted(new, key=lambda p: -new[p])[: c.top_k]
        frontier = [p for p in ranked if p[-1] not in ends]
    best = sorted(found, key=lambda p: -found[p])[:budget]
    return {p: found[p] for p in best}
