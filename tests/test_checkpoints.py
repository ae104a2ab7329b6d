"""Official DART checkpoints and others: generated in exactly their layout, at Qwen3's shape scaled down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny
from dartspec.drafters import dart, none
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.interop.checkpoints import convert, inspect, load, problem, read
from dartspec.target.target import Target
from dartspec.types import Committed, Drafter, SamplingParams
from reference import official_dart

VOCAB, DRAFT_VOCAB, H = 151, 60, 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMDart"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # Qwen3's heads are wider than hidden_size / heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "pretraining_tp": 1,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "draft_length": 4,
}
EAGLE3 = {k: v for k, v in CONFIG.items() if k != "draft_length"} | {"architectures": ["LlamaForCausalLMEagle3"]}
Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def target(**changes: Any) -> Target:
    sizes = {"hidden_size": H, "num_hidden_layers": 9, "vocab_size": VOCAB, "head_dim": 24, **changes}
    return Target(tiny.model("qwen3", **sizes), name="a tiny Qwen3")


def tensors(mask: bool = True, prefix: str = "midlayer.", seed: int = 5) -> dict[str, Tensor]:
    """Random weights under the official names; values as bfloat16 holds them, stored in float32."""
    g = torch.Generator().manual_seed(seed)
    q, kv = 4 * 24, 2 * 24

    def made(*shape: int, about: float = 0.0, std: float = 0.2) -> Tensor:
        return (about + std * torch.randn(*shape, generator=g)).bfloat16().float()

    out = {
        "fc.weight": made(H, 3 * H),
        f"{prefix}input_layernorm.weight": made(H, about=1),
        f"{prefix}hidden_norm.weight": made(H, about=1),
        f"{prefix}self_attn.q_proj.weight": made(q, 2 * H),
        f"{prefix}self_attn.k_proj.weight": made(kv, 2 * H),
        f"{prefix}self_attn.v_proj.weight": made(kv, 2 * H),
        f"{prefix}self_attn.o_proj.weight": made(H, q),
        f"{prefix}post_attention_layernorm.weight": made(H, about=1),
        f"{prefix}mlp.gate_proj.weight": made(80, H),
        f"{prefix}mlp.up_proj.weight": made(80, H),
        f"{prefix}mlp.down_proj.weight": made(H, 80),
        "norm.weight": made(H, about=1),
        "lm_head.weight": made(DRAFT_VOCAB, H),
    }
    if mask:
        out[f"{prefix}mask_rep"] = made(2 * H, std=1.0)
    ids = torch.randperm(VOCAB, generator=g)[:DRAFT_VOCAB].sort().values
    out["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    out["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return out


def folder(
    path: Path, config: dict[str, Any], weights: dict[str, Tensor], change: Change | None = None, pickle: bool = False
) -> Path:
    config, weights = dict(config), dict(weights)
    if change is not None:
        change(config, weights)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if pickle:
        torch.save(weights, path / "pytorch_model.bin")
    else:
        save_file(weights, path / "model.safetensors")
    return path


def texts(t: Target, drafter: Drafter, params: SamplingParams) -> list[int]:
    return [i for chunk in generate(t, drafter, [Request([5, 6, 7, 8], params)], num_nodes=20) for i in chunk.ids]


# -- official DART ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_length", [1, 4, 7])
def test_official_checkpoints_make_the_same_drafts(tmp_path: Path, draft_length: int) -> None:
    """Round by round with a cache, against the reference without one: ids and probabilities of every row."""
    config = {**CONFIG, "draft_length": draft_length}
    w = tensors()
    t = target()
    drafter = load(folder(tmp_path, config, w), t)
    assert isinstance(drafter, dart.DartDrafter)
    assert drafter.taps == (2, 9 // 2, 9 - 3)
    ids = [(7 * i) % 140 + 3 for i in range(24)]
    with torch.inference_mode():
        states = t.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    features = torch.stack([states[tap][0] for tap in drafter.taps], dim=1)  # (24, 3, H)
    before = 0
    for length in (9, 10, 14, 24):  # committed tokens; the last one is the root
        n = length - 1 - before
        one = Committed(0, torch.tensor(ids[:length]), n, features[before : length - 1])
        log_probs, tokens = drafter.lattice([one])
        rows = official_dart.logits(w, config, features[: length - 1].flatten(1), t.embed(torch.tensor(ids[1:length])))
        want_ids, want = official_dart.candidates(rows, w["d2t"])
        assert tokens.shape == (1, draft_length + 1, 25)
        got = log_probs[0].softmax(-1)  # the search takes the softmax over the kept
        for row in range(draft_length + 1):
            found = dict(zip(tokens[0, row].tolist(), got[row].tolist(), strict=True))
            assert found == pytest.approx(
                dict(zip(want_ids[row].tolist(), want[row].tolist(), strict=True)), rel=2e-3, abs=1e-6
            )
        before = length - 1


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=1.0, seed=3)]
)
def test_text_is_plain_decodings_with_an_official_checkpoint(tmp_path: Path, params: SamplingParams) -> None:
    t = target()
    drafter = load(folder(tmp_path, CONFIG, tensors()), t)
    assert texts(t, drafter, params) == texts(t, none.Plain(), params)


def test_what_it_is_and_whether_it_would_run(tmp_path: Path) -> None:
    c = inspect(folder(tmp_path, CONFIG, tensors()))
    assert (c.layout.name, c.layout.method) == ("dart-official", "dart")
    assert problem(c, target()) is None
    assert "at least 7 are needed" in str(problem(c, target(num_hidden_layers=6)))
    assert "vocabulary of 151, this target has a" not in str(problem(c, target(vocab_size=97)))
    assert str(problem(c, target(vocab_size=97))).endswith("a vocabulary of 151, this target has 97")
    assert str(problem(c, target(hidden_size=32))).endswith("a hidden size of 64, this target has 32")
    net = read(c, target())
    assert (net.config.d, net.config.final_norm_twice) == (5, True)  # type: ignore[attr-defined]


def test_converted_it_drafts_the_same(tmp_path: Path) -> None:
    t = target()
    source = folder(tmp_path / "official", CONFIG, tensors())
    convert(source, t, tmp_path / "ours", target="a tiny Qwen3", tokenizer_fingerprint=None)
    c = inspect(tmp_path / "ours")
    assert c.layout.name == "dartspec"
    assert problem(c, t) is None
    assert c.values["target"] == "a tiny Qwen3"
    assert c.values["provenance"] == {"converted_from": "dart-official official"}
    features = torch.randn(6, 3, H)
    one = Committed(0, torch.tensor([3, 4, 5, 6, 7, 8, 9]), 6, features)
    a, b = (load(f, t).lattice([one]) for f in (source, tmp_path / "ours"))  # type: ignore[attr-defined]
    assert torch.equal(a[1], b[1])
    assert torch.allclose(a[0], b[0])
    with pytest.raises(DartspecError, match="is the folder that is converted"):
        convert(tmp_path / "ours", t, tmp_path / "ours")


def without(name: str) -> Change:
    return lambda _, w: w.__delitem__(name)


def put(name: str, value: Tensor) -> Change:
    return lambda _, w: w.__setitem__(name, value)


def setting(**values: Any) -> Change:
    return lambda c, _: c.update(values)


REFUSED: dict[str, tuple[Change, str]] = {
    "mask": (without("midlayer.mask_rep"), r"weight layers\.0\.mask_rep is missing"),
    "norm": (without("midlayer.hidden_norm.weight"), r"weight layers\.0\.hidden_norm\.weight is missing"),
    "head": (without("lm_head.weight"), r"weight lm_head\.weight is missing"),
    "map": (without("d2t"), "weight d2t is missing"),
    "extra": (
        put("midlayer.self_attn.q_proj.bias", torch.zeros(96)),
        r"unexpected weight layers\.0\.self_attn\.q_proj",
    ),
    "shape": (
        put("fc.weight", torch.zeros(H, 2 * H)),
        r"fc\.weight has shape \[64, 128\], config.json asks for \[64, 192\]",
    ),
    "head_dim": (setting(head_dim=None), r"q_proj.weight has shape \[96, 128\], config.json asks for \[64, 128\]"),
    "draft vocabulary": (
        setting(draft_vocab_size=61),
        r"d2t has shape \[60\], config.json asks for \[61\]",
    ),
    "length": (setting(draft_length="7"), "draft_length is '7'; must be a positive whole number"),
    "rope": (setting(rope_scaling={"rope_type": "yarn", "factor": 4}), "rope_scaling is of type 'yarn'"),
    "slices": (setting(pretraining_tp=2), "pretraining_tp is 2; only 1"),
    "activation": (setting(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "heads": (setting(num_key_value_heads=None), "'num_key_value_heads' is missing"),
    "theta": (setting(rope_theta=None), "'rope_theta' is missing"),
    "vocabulary": (setting(vocab_size=200), "a vocabulary of 200, this target has 151"),
    "width": (setting(target_hidden_size=32), "a hidden size of 32, this target has 64"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_with_both_sides_named(tmp_path: Path, change: Change, message: str) -> None:
    path = folder(tmp_path, CONFIG, tensors(), change)
    with pytest.raises(DartspecError, match=message):
        load(path, target())
    with pytest.raises(DartspecError, match=message):  # and so by looking at names and sizes alone
        raise DartspecError(str(problem(inspect(path), target())))


def test_numbers_that_cannot_be_are_found_when_loaded(tmp_path: Path) -> None:
    bad = tensors()["d2t"].clone()
    bad[3] = bad[3] + 1000
    with pytest.raises(DartspecError, match="d2t maps draft ids"):
        load(folder(tmp_path, CONFIG, tensors(), put("d2t", bad)), target())
    with pytest.raises(DartspecError, match=r"norm\.weight holds numbers that are not finite"):
        load(folder(tmp_path, CONFIG, tensors(), put("norm.weight", torch.full((H,), torch.nan))), target())


def test_the_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    def whole(c: dict[str, Any], w: dict[str, Tensor]) -> None:
        del w["d2t"], w["t2d"]
        w["lm_head.weight"] = torch.randn(VOCAB, H)
        c["draft_vocab_size"] = VOCAB

    path = folder(tmp_path, CONFIG, tensors(), whole)
    assert problem(inspect(path), target()) is None
    drafter = load(path, target())
    assert isinstance(drafter, dart.DartDrafter)


# -- EAGLE-3, and what else there is -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pickle", [False, True])
def test_without_a_mask_it_is_eagle3(tmp_path: Path, pickle: bool) -> None:
    t = target()
    path = folder(tmp_path, EAGLE3, tensors(mask=False), pickle=pickle)
    c = inspect(path)
    assert (c.layout.name, c.layout.method) == ("eagle3", "eagle3")
    assert problem(c, t) is None
    assert texts(t, load(path, t), SamplingParams(max_tokens=16)) == texts(
        t, none.Plain(), SamplingParams(max_tokens=16)
    )


def test_eagle3_may_bring_its_own_embedding(tmp_path: Path) -> None:
    path = folder(tmp_path, EAGLE3, tensors(mask=False), put("embed_tokens.weight", torch.randn(VOCAB, H)))
    assert read(inspect(path), target()).config.own_embedding  # type: ignore[attr-defined]


def speculators(kind: str, **more: Any) -> dict[str, Any]:
    layer = {k: v for k, v in EAGLE3.items() if k not in ("architectures", "draft_vocab_size", "pretraining_tp")}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "transformer_layer_config": layer,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]},
        **more,
    }


def test_folders_of_speculators(tmp_path: Path) -> None:
    t = target()
    w = tensors(mask=False, prefix="layers.0.")
    one = folder(tmp_path / "eagle3", speculators("eagle3", norm_before_residual=True), w)
    net = read(inspect(one), t)
    assert net.config.norm_before_residual  # type: ignore[attr-defined]
    table, hidden = torch.randn(VOCAB, H), torch.randn(1, 3 * H)
    more = {**w, "embed_tokens.weight": table, "mask_hidden": hidden}
    ids = {"mask_token_id": 7, "eagle_aux_hidden_state_layer_ids": [1, 4, 8]}
    two = folder(tmp_path / "peagle", speculators("peagle", **ids), more)
    c = inspect(two)
    assert c.layout.method == "dart"
    assert problem(c, t) is None
    net = read(c, t)
    assert (net.config.d, net.config.taps, net.config.mask) == (5, (1, 4, 8), "pair")  # type: ignore[attr-defined]
    assert torch.equal(net.mask_embedding, table[7])
    assert torch.equal(net.mask_features, hidden[0])
    lacking = folder(tmp_path / "lacking", speculators("peagle", mask_token_id=999), more)
    with pytest.raises(DartspecError, match=r"mask_token_id is 999 and embed_tokens.weight has 151 rows"):
        read(inspect(lacking), t)


def test_whole_models_and_strangers(tmp_path: Path) -> None:
    tiny.model("llama").save_pretrained(tmp_path / "model")
    c = inspect(tmp_path / "model")
    assert (c.layout.name, c.layout.method) == ("causal-lm", "small_model")
    assert problem(c, target()) is None
    strange = folder(tmp_path / "strange", {"model_type": "bert"}, {"pooler.weight": torch.zeros(2, 2)})
    with pytest.raises(
        DartspecError, match=r"no drafter that is known: its config.json has model_type, its weights pooler"
    ):
        inspect(strange)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DartspecError, match="no such file"):
        inspect(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(DartspecError, match="holds no weights"):
        inspect(tmp_path / "empty")
    cut = folder(tmp_path / "cut", CONFIG, tensors())
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(DartspecError, match="cut off"):
        inspect(cut)
