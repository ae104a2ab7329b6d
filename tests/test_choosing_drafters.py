"""`load(drafter=...)`: names, folders of any layout, smaller models, and several at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dartspec
import tiny_cli
from dartspec import LM, DartspecError
from dartspec.drafters.mix import Mix
from dartspec.drafters.small_model import SmallModel
from dartspec.ngram import NgramIndex

MESSAGES = [{"role": "user", "content": "What is on the other thing in the thing?"}]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTSPEC_CACHE", str(tmp_path / "cache"))


def memory(drafter: Any = "none", **options: Any) -> LM:
    return dartspec.load(tiny_cli.model(num_hidden_layers=7), tiny_cli.tokenizer(), drafter=drafter, **options)


def official(folder: Path) -> Path:
    """A checkpoint of the official DART layout for the tiny model."""
    model = tiny_cli.model(num_hidden_layers=7)
    vocab, H = model.get_input_embeddings().weight.shape
    torch.manual_seed(1)
    shapes = {
        "fc": (H, 3 * H),
        "midlayer.input_layernorm": (H,),
        "midlayer.hidden_norm": (H,),
        "midlayer.self_attn.q_proj": (H, 2 * H),
        "midlayer.self_attn.k_proj": (H // 2, 2 * H),
        "midlayer.self_attn.v_proj": (H // 2, 2 * H),
        "midlayer.self_attn.o_proj": (H, H),
        "midlayer.post_attention_layernorm": (H,),
        "midlayer.mlp.gate_proj": (48, H),
        "midlayer.mlp.up_proj": (48, H),
        "midlayer.mlp.down_proj": (H, 48),
        "norm": (H,),
        "lm_head": (vocab, H),
    }
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    folder.mkdir()
    save_file({**weights, "midlayer.mask_rep": torch.randn(2 * H)}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": H,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "draft_length": 3,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def index(path: Path, lm: LM) -> Path:
    made = NgramIndex.build(
        [lm.text.encode("on the other thing in the thing")],
        vocab_size=lm.target.vocab_size,
        fingerprint=lm.text.fingerprint,
        name="tiny",
        description="tiny",
    )
    made.save(path)
    return path


def test_every_way_to_name_a_drafter_writes_the_same_text(tmp_path: Path) -> None:
    lm = memory()
    want = lm.generate(MESSAGES, max_tokens=24).ids
    checkpoint, small = official(tmp_path / "dart"), tiny_cli.save(tmp_path / "small", seed=1)
    grams = index(tmp_path / "x.ngram", lm)
    for drafter, given, name in (
        ("lookahead", "auto", "lookahead"),
        (checkpoint, "auto", "dart"),
        (checkpoint, grams, "dart"),
        (small, "auto", "small_model"),
        ("index", grams, "index"),
        (f"{checkpoint}+prompt_lookup", grams, f"{checkpoint}+prompt_lookup"),
        (f"prompt_lookup+{small}+index", grams, f"prompt_lookup+{small}+index"),
    ):
        other = lm.with_drafter(drafter, nodes=8, index=given)
        assert other.drafter_name == name
        assert other.generate(MESSAGES, max_tokens=24).ids == want
    assert isinstance(lm.with_drafter(small).drafter, SmallModel)


def test_parts_of_a_mixture_read_what_they_can(tmp_path: Path) -> None:
    lm = memory()
    grams = index(tmp_path / "x.ngram", lm)
    made = lm.with_drafter(f"{official(tmp_path / 'dart')}+prompt_lookup", index=grams).drafter
    assert isinstance(made, Mix)
    assert made.taps == (2, 3, 4)
    assert made.parts[0].index is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("drafter", "given", "words"),
    [
        ("index", "auto", "was given no n-gram index"),
        ("lookahead", "x.ngram", "the drafter lookahead reads none"),
        ("small_model", "auto", "no small_model drafter for"),
        ("mix", "auto", "no dart drafter for"),
        ("prompt_lookup+eagle9", "auto", "unknown drafter 'eagle9'"),
        ("prompt_lookup+mix", "auto", "two methods or more"),
    ],
)
def test_what_cannot_be_chosen_is_refused(drafter: str, given: str, words: str) -> None:
    with pytest.raises(DartspecError, match=words):
        memory().with_drafter(drafter, index=given)


def test_a_folder_of_a_method_without_weights_or_of_nothing_known(tmp_path: Path) -> None:
    lm = memory()
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"method": "none"}')
    with pytest.raises(DartspecError, match="names the method none, which has no weights"):
        lm.with_drafter(tmp_path)
    (tmp_path / "config.json").write_text('{"method": "eagle9"}')
    with pytest.raises(DartspecError, match="unknown drafter 'eagle9'"):
        lm.with_drafter(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(DartspecError, match="no drafter that is known"):
        lm.with_drafter(tmp_path)
