"""Drafter networks of a few thousand random weights, the sizes of their target, and texts for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from dartspec.drafters._checkpoint import DraftNet

VOCAB, HIDDEN = 61, 24
TARGET: Mapping[str, Any] = {"vocab_size": VOCAB, "target_hidden_size": HIDDEN, "num_target_layers": 4}
LAYER: Mapping[str, Any] = {
    **TARGET,
    "taps": (1, 2, 4),
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "draft_vocab_size": 37,
}
Net = TypeVar("Net", bound=DraftNet)


def randomised(net: Net, seed: int = 0, vectors: float = 1.0) -> Net:
    """Every weight and the draft vocabulary drawn; vectors around 1, as norms are."""
    generator, c = torch.Generator().manual_seed(seed), net.config
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0.0, 0.3, generator=generator)
            if p.dim() == 1:
                p.add_(vectors)
        ids = torch.randperm(c.vocab_size, generator=generator)[: c.draft_vocab_size].sort().values
        net.d2t.copy_(ids - torch.arange(c.draft_vocab_size))
    return net


class View:
    """A target's sizes and embedding; nothing else is needed to draft."""

    def __init__(self, dtype: torch.dtype = torch.float32, num_tokens: int = VOCAB, **changes: Any) -> None:
        self.vocab_size, self.num_tokens, self.hidden_size, self.num_layers = VOCAB, num_tokens, HIDDEN, 4
        self.eos_token_ids = frozenset({2})
        self.dtype, self.device = dtype, torch.device("cpu")
        self.table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
        self.__dict__.update(changes)

    def embed(self, ids: Tensor) -> Tensor:
        return self.table[ids]

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.table.T


def text(length: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(L,) ids and (L - 1, taps, H) features."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (length,), generator=generator)
    return ids, torch.randn(length - 1, 3, HIDDEN, generator=generator).to(dtype)
