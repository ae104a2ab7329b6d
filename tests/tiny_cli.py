"""A tiny model with a tiny tokenizer, saved as a folder: what the command line and the API load in tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tokenizer(extra: int = 0) -> Any:
    """Byte-level: 256 byte tokens, a few merges, three special tokens. `extra` merges make it another tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n"), ("o", "n")][: 3 + extra]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<|pad|>", "<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    return fast


def model(name: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random model over this tokenizer's ids."""
    ids = {"eos_token_id": tokenizer().eos_token_id, "pad_token_id": tokenizer().pad_token_id, "bos_token_id": None}
    return tiny.model(name, seed=seed, **{"vocab_size": len(tokenizer()) + 2, **ids, **changes})


def save(folder: Path, name: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Model and tokenizer as a Hugging Face folder."""
    model(name, seed, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
