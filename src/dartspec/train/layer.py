"""What of a target's own layer a fresh drafter can start from, whatever family the target is of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

GELU_AS_SILU = 1.702  # gelu(x) is silu(1.702 x) / 1.702 to 0.02

# A norm behind a product has no place in a Llama layer: its mean effect goes into the product's rows.
_BEHIND = {
    "self_attn.q_norm": "self_attn.q_proj",  # Qwen3, Gemma 3, OLMo 2
    "self_attn.k_norm": "self_attn.k_proj",
    "post_self_attn_layernorm": "self_attn.o_proj",  # GLM 4
    "post_mlp_layernorm": "mlp.down_proj",
}
_BEHIND_BOTH = {  # Gemma 2 and 3, OLMo 2, where `post_attention_layernorm` is not the MLP's
    "post_attention_layernorm": "self_attn.o_proj",
    "post_feedforward_layernorm": "mlp.down_proj",
}


@torch.no_grad()
def llama_layer(model: nn.Module, number: int, ids: Tensor) -> dict[str, Tensor]:
    """Weights of the decoder layer of that number, from 0, by the names of a Llama layer that does nearly the same
    (`self_attn.q_proj.weight`, ...); {} for a target whose layers are named or numbered otherwise.

    A norm's weight is what the norm multiplies by (Gemma stores it less 1). Norms behind queries, keys and outputs
    become gains of the rows that they norm, the median over one forward over `ids` (n,) int64; gelu becomes silu, and a
    scale of the attention's own enters the queries.
    """
    pattern = re.compile(rf"(?:^|\.)layers\.{number}$")
    layer = next((m for name, m in model.named_modules() if pattern.search(name)), None)
    if layer is None:
        return {}
    # a quantised weight means nothing without its scale
    whole = {n: w for n, w in layer.state_dict().items() if w.dtype in (torch.float32, torch.bfloat16, torch.float16)}
    found = {name: weight.detach().float().clone() for name, weight in whole.items()}
    parts = dict(layer.named_modules())
    behind = dict(_BEHIND)
    if "post_feedforward_layernorm" in parts:
        behind |= _BEHIND_BOTH
    for name, gain in _gains(model, {n: parts[n] for n in behind if n in parts}, ids).items():
        rows = found.get(f"{behind[name]}.weight")
        if rows is not None and len(rows) % len(gain) == 0:
            rows *= gain.repeat(len(rows) // len(gain))[:, None]
        del found[f"{name}.weight"]
    for name, weight in found.items():
        if weight.dim() == 1 and "norm" in name and name.endswith(".weight"):
            found[name] = _multiplier(parts[name.removesuffix(".weight")], weight)
    if (before := found.pop("pre_feedforward_layernorm.weight", None)) is not None:
        found["post_attention_layernorm.weight"] = before
    if re.search("gelu", str(getattr(layer, "mlp", "")), re.IGNORECASE) and "mlp.gate_proj.weight" in found:
        found["mlp.gate_proj.weight"] *= GELU_AS_SILU
        found["mlp.up_proj.weight"] /= GELU_AS_SILU
    attention = parts.get("self_attn")
    scale, width = getattr(attention, "scaling", None), getattr(attention, "head_dim", None)
    if isinstance(scale, float) and isinstance(width, int) and "self_attn.q_proj.weight" in found:
        found["self_attn.q_proj.weight"] *= scale * width**0.5
    return found


def _gains(model: nn.Module, norms: Mapping[str, nn.Module], ids: Tensor) -> dict[str, Tensor]:
    """(size,) float32 of each norm: what it multiplied its input by, the median over one forward over `ids`."""
    gains: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def after(_module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            ratio = out.float() / args[0].float()
            gains[name] = ratio.flatten(0, -2).nanmedian(0).values.nan_to_num(1.0)

        return after

    handles = [norm.register_forward_hook(watch(name)) for name, norm in norms.items()]
    try:
        if norms:
            model(input_ids=ids[None].to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {name: gain.cpu() for name, gain in gains.items()}


def _multiplier(norm: nn.Module, weight: Tensor) -> Tensor:
    """What an RMSNorm multiplies by: its answer to ones. A norm that takes the mean off keeps its weight."""
    ones = torch.ones(1, len(weight), dtype=next(norm.parameters()).dtype, device=next(norm.parameters()).device)
    answer: Tensor = norm(ones)[0].float()
    return answer if bool(answer.any()) else weight


def rope_theta(config: Any) -> float:
    """The base of the target's rotary embedding; of its full attention where kinds of layers differ, because a drafter
    sees the whole prefix."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope:
        kinds = [r for r in rope.values() if isinstance(r, Mapping)]
        rope = rope.get("full_attention") or (kinds[-1] if kinds else {})
    return float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
