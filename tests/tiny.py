"""Tiny random models of many architectures, made in memory: nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_MOE, "head_dim": 8, "decoder_sparse_step": 1},
    "mistral": {"sliding_window": 8, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "gpt2": _GPT,
    "gpt_neox": {},
    "gptj": {**_GPT, "rotary_dim": 4},
    "codegen": {**_GPT, "rotary_dim": 4},
    "gpt_bigcode": _GPT,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "stablelm": {},
    "starcoder2": {"sliding_window": 8},
    "granite": {},
    "granitemoe": {"num_local_experts": 4},
    "cohere": {},
    "cohere2": {"sliding_window": 8},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 8},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
    "exaone4": {"sliding_window": 8, "head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "nemotron": {},
    "hunyuan_v1_dense": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "arcee": {},
    "persimmon": {},
    "biogpt": {},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": 2,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 48,
    },
}
# attention with sinks or a soft cap exists in eager form only
EAGER = {"gemma2", "gpt_oss"}


def has(name: str) -> bool:
    """Whether the installed transformers knows this architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return name in CONFIG_MAPPING_NAMES


@cache
def model(name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random model whose distributions are far from flat, so that a wrong mask or position shows."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **{**COMMON, **SERVED.get(name, {}), **changes})
    made = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if name in EAGER else "sdpa", dtype=torch.float32
    )
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return made.to(dtype).eval()
