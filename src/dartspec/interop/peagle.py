"""Our DART drafter out: a `speculators` folder of type `peagle`, which vLLM serves as a chain.

The layouts are the same but for the mask: there its embedding is a row of the drafter's own embedding, so a token id
that no text holds lends its row, and `mask_hidden` is its features before the projection. vLLM verifies chains, not
trees: what it drafts is this drafter's first choice at each position, without index and tree search.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from dartspec.drafters.dart import DartNet
    from dartspec.text import Text

LAYOUT_VERSION = "0.9.0"  # of the package whose folders these are


def unused_token(text: Text, vocab_size: int) -> int:
    """An id that no text of this tokenizer holds: a padding row of the embedding, or a special token that neither ends
    a text nor stands in the chat template."""
    if text.num_tokens < vocab_size:
        return vocab_size - 1
    template, ends = text.chat_template or "", text.eos_token_ids()
    free = [i for i in text.special_ids if i not in ends and text.decode([i], skip_special=False) not in template]
    if not free:
        raise DartspecError(
            f"the tokenizer has no id to spare for the mask: all of its {vocab_size} rows stand for text, and none of "
            f"its {len(text.special_ids)} special tokens is unused"
        )
    return max(free)


def export_peagle(
    net: DartNet, embedding: Tensor, out: Path, *, model: str, architecture: str, mask_token_id: int, steps: int
) -> None:
    """Writes the folder: `config.json` and `model.safetensors`, aside and renamed.

    embedding: (V, H) the target's input embedding. model, architecture: of the target, as vLLM is to load it.
    steps:     tokens drafted a round, at most the drafter's d.
    """
    from dartspec.drafters._checkpoint import write_folder

    c = net.config
    if c.mask != "pair" or c.final_norm_twice:
        twice = " with the final norm applied twice" if c.final_norm_twice else ""
        raise DartspecError(
            f"a mask of the form {c.mask!r}{twice} cannot be written as peagle: it must be (embedding row, features "
            "before the projection), normed once"
        )
    if not c.shifted:
        raise DartspecError("a drafter that was trained with unshifted prediction cannot be written as peagle")
    if tuple(embedding.shape) != (c.vocab_size, c.hidden_size):
        raise DartspecError(
            f"the target's embedding has shape {list(embedding.shape)}, the drafter is for "
            f"{[c.vocab_size, c.hidden_size]}"
        )
    if not 1 <= steps <= c.d or not 0 <= mask_token_id < c.vocab_size:
        raise DartspecError(
            f"{steps} tokens a round and mask token {mask_token_id}: the drafter predicts {c.d} positions, ids are "
            f"below {c.vocab_size}"
        )
    ours = (
        "mask_embedding",
        "mask_features",
        "lm_head.weight",
        "head_in.weight",
    )  # the learned continuity is for trees
    weights = {n: t.detach() for n, t in net.state_dict().items() if n not in ours and not n.startswith("continuity.")}
    weights["lm_head.weight"] = net.whole_head()
    table = embedding.detach().clone()
    table[mask_token_id] = net.mask_embedding.detach().to(table.dtype)
    taken = torch.zeros(c.vocab_size, dtype=torch.bool)
    taken[net.target_ids().cpu()] = True
    weights |= {"embed_tokens.weight": table, "mask_hidden": net.mask_features.detach()[None, None], "t2d": taken}
    config = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_version": LAYOUT_VERSION,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "mask_token_id": mask_token_id,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": c.hidden_act,
            "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": c.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
            "max_position_embeddings": 1 << 17,
            "vocab_size": c.vocab_size,
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": model, "architectures": [architecture]},
        },
    }
    write_folder(out, {n: t.contiguous() for n, t in weights.items()}, json.dumps(config, indent=1) + "\n")
