"""Other people's EAGLE-3, Medusa, Hydra and DFlash: generated in exactly their layouts, they draft as their papers say.

No published weights were at hand; names, shapes and conventions are those of the public programs.
"""

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
from dartspec.drafters import none
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.interop.checkpoints import convert, described, inspect, load, problem, read
from dartspec.interop.rivals import default_dflash_taps
from dartspec.target.target import Target
from dartspec.types import Committed, Drafter, SamplingParams
from reference import dflash as dflash_reference
from reference import eagle3 as eagle3_reference
from reference import hydra as hydra_reference
from test_eagle3 import same, scored_paths
from tiny_net import HIDDEN as H
from tiny_net import VOCAB, View

DRAFT_VOCAB, LAYERS = 37, 9
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
}
Weights = dict[str, Tensor]
Change = Callable[[dict[str, Any], Weights], Any]


def view(**changes: Any) -> View:
    return View(**{"num_layers": LAYERS, **changes})


def made(seed: int, **shapes: tuple[int, ...]) -> Weights:
    """Random weights that bfloat16 can hold; a name's double underscores are dots. Vectors lie about 1."""
    g = torch.Generator().manual_seed(seed)
    return {
        name.replace("__", "."): (torch.randn(*s, generator=g) * 0.3 + (1.0 if len(s) == 1 else 0.0)).bfloat16().float()
        for name, s in shapes.items()
    }


def layer(prefix: str, seed: int, width: int, head_norm: bool = False) -> Weights:
    """A decoder layer whose attention reads rows of `width`."""
    q, kv, inner = 4 * 8, 2 * 8, 40
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm__weight": (H,),
        "post_attention_layernorm__weight": (H,),
        "self_attn__q_proj__weight": (q, width),
        "self_attn__k_proj__weight": (kv, width),
        "self_attn__v_proj__weight": (kv, width),
        "self_attn__o_proj__weight": (H, q),
        "mlp__gate_proj__weight": (inner, H),
        "mlp__up_proj__weight": (inner, H),
        "mlp__down_proj__weight": (H, inner),
    }
    if head_norm:
        shapes |= {"self_attn__q_norm__weight": (8,), "self_attn__k_norm__weight": (8,)}
    return {prefix + name: t for name, t in made(seed, **shapes).items()}


def draft_map(seed: int = 3) -> Weights:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": t2d}


def folder(path: Path, values: dict[str, Any], weights: Weights, change: Change | None = None, file: str = "") -> Path:
    values, weights = dict(values), dict(weights)
    if change is not None:
        change(values, weights)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    file = file or "model.safetensors"
    if file.endswith(".safetensors"):
        save_file({n: t.contiguous() for n, t in weights.items()}, path / file)
    else:
        torch.save(weights, path / file)
    return path


def text(taps: int, length: int = 5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCAB, (length,), generator=g), torch.randn(length - 1, taps, H, generator=g)


def propose(drafter: Drafter, taps: int, budget: int = 16) -> Any:
    ids, features = text(taps)
    (tree,) = drafter.propose([Committed(0, ids, 4, features)], [budget])
    return tree


def texts(t: Target, drafter: Drafter) -> list[int]:
    out: list[int] = []
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=4)
    for chunk in generate(t, drafter, [Request([5, 6, 7, 5, 6], params)], num_nodes=9):
        out += chunk.ids
    return out


# -- EAGLE-3 ---------------------------------------------------------------------------------------------------------


def eagle3(prefix: str) -> Weights:
    return {
        **made(1, fc__weight=(H, 3 * H), norm__weight=(H,), lm_head__weight=(DRAFT_VOCAB, H)),
        **layer(prefix, 2, 2 * H),
        **{prefix + "hidden_norm.weight": made(4, x=(H,))["x"]},
        **draft_map(),
    }


FLAT = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": DRAFT_VOCAB,
    "transformer_layer_config": LAYER,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
}
SPECFORGE = {
    **FLAT,
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
}


@pytest.mark.parametrize(
    ("values", "prefix", "file", "taps"),
    [
        (FLAT, "midlayer.", "pytorch_model.bin", (2, 4, 6)),  # SafeAILab, AngelSlim
        (FLAT, "midlayer.", "", (2, 4, 6)),
        (SPECFORGE, "midlayer.", "", (2, 5, 7)),  # its ids count layers' outputs from 0
        (SPECULATORS, "layers.0.", "", (2, 4, 6)),
        ({**SPECULATORS, "eagle_aux_hidden_state_layer_ids": [1, 3, 8]}, "layers.0.", "", (1, 3, 8)),
        ({**SPECULATORS, "norm_before_residual": True}, "layers.0.", "", (2, 4, 6)),
    ],
)
def test_every_layout_of_eagle3_drafts_as_the_papers_say(
    values: dict[str, Any], prefix: str, file: str, taps: tuple[int, ...], tmp_path: Path
) -> None:
    weights, v = eagle3(prefix), view()
    path = folder(tmp_path / "theirs", values, weights, file=file)
    assert problem(inspect(path), v) is None
    drafter = load(path, v)
    c = drafter.config  # type: ignore[attr-defined]
    assert (drafter.taps, c.d, c.top_k) == (taps, 8, 10)
    ids, features = text(3)
    named = {n.replace("midlayer.", "layers.0."): t for n, t in weights.items()}
    wanted = eagle3_reference.tree(named, c, v.table, ids, features.flatten(1), 16, {2})
    same(propose(drafter, 3), wanted)
    convert(path, v, tmp_path / "ours")
    assert load(tmp_path / "ours", v).taps == taps


def test_eagle3s_own_embedding_is_read_instead_of_the_targets(tmp_path: Path) -> None:
    weights, v = eagle3("midlayer."), view()
    table = made(7, x=(VOCAB, H))["x"]
    drafter = load(folder(tmp_path, FLAT, {**weights, "embed_tokens.weight": table}), v)
    ids, features = text(3)
    named = {n.replace("midlayer.", "layers.0."): t for n, t in weights.items()}
    wanted = eagle3_reference.tree(named, drafter.config, table, ids, features.flatten(1), 16, {2})  # type: ignore[attr-defined]
    same(propose(drafter, 3), wanted)


# -- Medusa ----------------------------------------------------------------------------------------------------------

MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "x"}


def medusa() -> Weights:
    out: Weights = {}
    for i in range(3):
        for j in range(2):
            out[f"{i}.{j}.linear.weight"] = made(10 * i + j, x=(H, H))["x"]
            out[f"{i}.{j}.linear.bias"] = made(10 * i + j + 5, x=(H,))["x"]
        out[f"{i}.2.weight"] = made(90 + i, x=(VOCAB, H))["x"]
    return out


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_official_medusa_drafts_as_the_paper_says(file: str, prefix: str, tmp_path: Path) -> None:
    v, w = view(), medusa()
    path = folder(tmp_path, MEDUSA, {prefix + n: t for n, t in w.items()}, file=file)
    assert problem(inspect(path), v) is None
    _, states = text(1)
    rows = []
    for i in range(3):
        x = states[-1, 0]
        for j in range(2):
            inner = w[f"{i}.{j}.linear.weight"] @ x + w[f"{i}.{j}.linear.bias"]
            x = x + inner * torch.sigmoid(inner)
        rows.append((w[f"{i}.2.weight"] @ x).log_softmax(0))
    wanted = dflash_reference.product_tree(torch.stack(rows), torch.arange(VOCAB), 10, 16, {2})
    same(propose(load(path, v), 1), wanted)


# -- Hydra -----------------------------------------------------------------------------------------------------------

HYDRA = {
    "hydra_num_heads": 3,
    "hydra_num_layers": 2,
    "hydra_head_arch": "mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "base_model_name_or_path": "x",
}


def hydra(dropout: bool, bias: bool, prefix: bool) -> Weights:
    """dropout: blocks are numbered with the dropouts before them."""
    out: Weights = {}
    head = "1." if dropout else ""
    for i in range(3):
        for j in range(2):
            at = f"hydra_mlp.{i}.{2 * j + 1 if dropout else j}."
            width = (i + 2) * H if j == 0 else H
            out[at + "linear.weight"] = made(10 * i + j, x=(H, width))["x"]
            out[at + "linear.bias"] = made(10 * i + j + 5, x=(H,))["x"]
            if j == 0:
                out[at + "res_connection.weight"] = made(30 + i, x=(H, width))["x"]
                out[at + "res_connection.bias"] = made(40 + i, x=(H,))["x"]
        out[f"hydra_lm_head.{i}.{head}weight"] = made(90 + i, x=(VOCAB, H))["x"]
        if bias:
            out[f"hydra_lm_head.{i}.{head}bias"] = made(80 + i, x=(VOCAB,))["x"]
    if prefix:
        out |= layer("prefix_embeding_layer.layers.0.", 7, H)
        out["prefix_embeding_layer.norm.weight"] = made(8, x=(H,))["x"]
        out["prefix_embeding_layer.embed_tokens.weight"] = torch.zeros(VOCAB, H)
        out["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    return out


@pytest.mark.parametrize(
    ("dropout", "bias", "prefix"), [(False, False, False), (True, True, False), (True, True, True)]
)
def test_official_hydra_drafts_as_the_paper_says(dropout: bool, bias: bool, prefix: bool, tmp_path: Path) -> None:
    v, w = view(), hydra(dropout, bias, prefix)
    values = {**LAYER, **HYDRA, "hydra_head_arch": "prefix-mlp"} if prefix else HYDRA
    path = folder(tmp_path, values, w, file="hydra_lm_head.pt")
    assert problem(inspect(path), v) is None
    drafter = load(path, v)
    ours: Weights = {"d2t": torch.zeros(VOCAB, dtype=torch.int64)}
    for i in range(3):
        for j in range(2):
            for part in ("linear", "res_connection"):
                for kind in ("weight", "bias"):
                    name = f"hydra_mlp.{i}.{2 * j + 1 if dropout else j}.{part}.{kind}"
                    if name in w:
                        ours[f"heads.{i}.blocks.{j}.{part}.{kind}"] = w[name]
        for kind in ("weight", "bias") if bias else ("weight",):
            ours[f"heads.{i}.lm_head.{kind}"] = w[f"hydra_lm_head.{i}.{'1.' if dropout else ''}{kind}"]
    if prefix:
        ours["prefix.norm.weight"] = w["prefix_embeding_layer.norm.weight"]
        ours |= {n.replace("prefix_embeding_layer.layers.0.", "prefix.layer."): t for n, t in w.items()}
    ids, states = text(1)
    wanted = hydra_reference.tree(ours, drafter.config, v.table, ids, states[:, 0], 16, {2})  # type: ignore[attr-defined]
    same(propose(drafter, 1), wanted)


def test_hydras_layer_takes_its_heads_from_the_target(tmp_path: Path) -> None:
    """The official file says nothing of them."""
    t = Target(tiny.model("llama", num_hidden_layers=LAYERS, hidden_size=H, vocab_size=VOCAB, head_dim=8))
    values = {**HYDRA, "hydra_head_arch": "prefix-mlp"}
    path = folder(tmp_path, values, hydra(True, True, True), file="hydra_lm_head.pt")
    with pytest.raises(
        DartspecError, match=r"up_proj.weight has shape \[40, 24\]|gate_proj.weight has shape \[40, 24\]"
    ):
        load(path, t)  # its MLP is 48 wide, the layer's 40
    w = hydra(True, True, True)
    at = "prefix_embeding_layer.layers.0.mlp."
    w |= {at + f"{n}_proj.weight": torch.randn(48, H) for n in ("gate", "up")}
    w[at + "down_proj.weight"] = torch.randn(H, 48)
    path = folder(tmp_path / "fits", values, w, file="hydra_lm_head.pt")
    drafter = load(path, t)
    c = drafter.config  # type: ignore[attr-defined]
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size) == (4, 2, 8, 48)
    assert texts(t, drafter) == texts(t, none.Plain())


# -- DFlash ----------------------------------------------------------------------------------------------------------

DFLASH = {
    **LAYER,
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "num_target_layers": LAYERS,
    "layer_types": ["full_attention"] * 2,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 59, "target_layer_ids": [1, 4, 6]},
}
SPECULATORS_DFLASH = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": {**LAYER, "model_type": "qwen3", "num_hidden_layers": 2},
    "draft_vocab_size": DRAFT_VOCAB,
    "block_size": 4,
    "mask_token_id": 59,
    "aux_hidden_state_layer_ids": [2, 5, 7],
}


def dflash() -> Weights:
    out = made(1, fc__weight=(H, 3 * H), hidden_norm__weight=(H,), norm__weight=(H,))
    for i in range(2):
        out |= layer(f"layers.{i}.", 20 + i, H, head_norm=True)
    return out


@pytest.mark.parametrize("own_head", [False, True])
def test_official_dflash_drafts_as_the_paper_says(own_head: bool, tmp_path: Path) -> None:
    v, w = view(num_tokens=VOCAB - 2), dflash()
    values: dict[str, Any] = DFLASH
    head, target_ids = v.table, torch.arange(VOCAB)
    if own_head:
        w |= {"lm_head.weight": made(6, x=(DRAFT_VOCAB, H))["x"], **draft_map()}
        values, head = SPECULATORS_DFLASH, w["lm_head.weight"]
        target_ids = torch.arange(DRAFT_VOCAB) + w["d2t"]
    path = folder(tmp_path / "theirs", values, w)
    assert problem(inspect(path), v) is None
    drafter = load(path, v)
    c = drafter.config  # type: ignore[attr-defined]
    assert (drafter.taps, c.d) == ((2, 5, 7), 3)
    forbidden = target_ids >= v.num_tokens
    named = {**w, "mask_embedding": v.table[59], "lm_head.weight": head}
    ids, features = text(3)
    # ids beyond the tokenizer's have no probability: the others share it
    log_probs = dflash_reference.block(named, c, features.flatten(1), v.table[ids[-1]])
    log_probs = log_probs.masked_fill(forbidden, -torch.inf).log_softmax(-1)
    wanted = dflash_reference.product_tree(log_probs, target_ids, 25, 16, {2})
    same(propose(drafter, 3), wanted)
    convert(path, v, tmp_path / "ours")
    again = load(tmp_path / "ours", v)
    same(propose(again, 3), scored_paths(propose(load(path, v), 3)))
    assert again.taps == drafter.taps


def test_dflashs_default_taps_are_spread_over_the_target() -> None:
    assert default_dflash_taps(36, 5) == (2, 10, 18, 26, 34)
    assert default_dflash_taps(36, 1) == (19,)


@pytest.mark.parametrize(
    ("values", "weights", "method", "positions"),
    [
        (FLAT, eagle3("midlayer."), "eagle3", None),
        (MEDUSA, medusa(), "medusa", 3),
        (HYDRA, hydra(True, True, False), "hydra", 3),
        (DFLASH, dflash(), "dflash", 3),
        (SPECULATORS_DFLASH, dflash(), "dflash", 3),
    ],
)
def test_what_it_is_is_said_without_reading_weights(
    values: dict[str, Any], weights: Weights, method: str, positions: int | None, tmp_path: Path
) -> None:
    found = inspect(folder(tmp_path, values, weights))
    about = described(found)
    assert (found.method, about["positions"]) == (method, positions)
    assert about["num_weights"] == sum(t.numel() for t in weights.values())
    assert json.dumps(about)


# -- what does not fit -----------------------------------------------------------------------------------------------


def put(name: str, value: Any) -> Change:
    return lambda c, w: w.update({name: value}) if isinstance(value, Tensor) else c.update({name: value})


def drop(name: str) -> Change:
    return lambda c, w: (w.pop(name, None), c.pop(name, None))


@pytest.mark.parametrize(
    ("values", "weights", "change", "message"),
    [
        (FLAT, eagle3("midlayer."), drop("midlayer.mlp.up_proj.weight"), r"layers\.0\.mlp\.up_proj\.weight is missing"),
        (FLAT, eagle3("midlayer."), put("vocab_size", 99), "vocabulary of 99, this target has 61"),
        (
            FLAT,
            eagle3("midlayer."),
            put("fc.weight", torch.zeros(H, 2 * H)),
            r"\[24, 48\], config.json asks for \[24, 72\]",
        ),
        (FLAT, eagle3("midlayer."), put("rope_scaling", {"rope_type": "llama3"}), "rope_scaling is of type 'llama3'"),
        (SPECULATORS, eagle3("layers.0."), put("norm_before_fc", True), "norm_before_fc is set"),
        (SPECULATORS, eagle3("layers.0."), put("layers.1.mlp.up_proj.weight", torch.zeros(2, 2)), "unexpected weight"),
        (MEDUSA, medusa(), put("medusa_num_heads", 4), r"weight medusa_head\.3\.0\.linear\.weight is missing"),
        (MEDUSA, medusa(), put("medusa_num_layers", 1), r"weight 0\.1\.weight is missing"),
        (MEDUSA, medusa(), put("medusa_num_layers", "2"), "medusa_num_layers is '2'; must be a whole number from 1"),
        (MEDUSA, medusa(), put("0.2.weight", torch.zeros(50, H)), "vocabulary of 50, this target has 61"),
        (HYDRA, hydra(True, True, False), put("grounded_heads", False), "grounded_heads is False; only true"),
        (HYDRA, hydra(True, True, False), put("hydra_head_arch", "cross-attn"), "is 'cross-attn'; only 'mlp'"),
        (HYDRA, hydra(True, True, False), put("hidden_state_offset", 1), "hidden_state_offset is 1; only 0"),
        (HYDRA, hydra(True, True, False), put("strange.weight", torch.zeros(2)), "unexpected weight strange.weight"),
        (DFLASH, dflash(), put("num_target_layers", 36), "layers numbering 36, this target has 9"),
        (DFLASH, dflash(), put("dflash_config", {"target_layer_ids": [1]}), "mask_token_id is missing"),
        (DFLASH, dflash(), put("dflash_config", {"mask_token_id": 61}), "mask_token_id is 61; must be an id below 61"),
        (DFLASH, dflash(), put("layer_types", ["sliding_attention"]), "layer_types has 'sliding_attention'"),
        (DFLASH, dflash(), drop("layers.1.self_attn.q_norm.weight"), "q_norm.weight is missing"),
        (SPECULATORS_DFLASH, dflash(), put("block_size", 1), "block_size is 1; must be a whole number from 2"),
        (SPECULATORS_DFLASH, dflash(), drop("x"), "draft vocabulary of 37 needs a head of its own"),
        (SPECULATORS_DFLASH, dflash(), put("aux_hidden_state_layer_ids", None), "aux_hidden_state_layer_ids is None"),
        (SPECULATORS_DFLASH, dflash(), put("sample_from_anchor", True), "sample_from_anchor is True; only false"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sides_named(
    values: dict[str, Any], weights: Weights, change: Change, message: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, values, weights, change, file="model.safetensors")
    assert problem(inspect(path), view()) is not None
    with pytest.raises(DartspecError, match=message) as caught:
        read(inspect(path), view())
    assert "\n" not in str(caught.value)
