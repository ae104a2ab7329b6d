"""Layouts of the official Medusa, Hydra and DFlash checkpoints, and of DFlash in the package `speculators`.

Names, shapes and conventions as their public programs have them (Medusa and Hydra: Apache-2.0; DFlash as SpecForge and
speculators write it: MIT and Apache-2.0). Nothing of their code is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dartspec.drafters._checkpoint import FINAL
from dartspec.errors import DartspecError
from dartspec.interop.checkpoints import Checkpoint, Layout, Sizes, layer_fields

Shapes = Mapping[str, tuple[int, ...]]


def _number(c: Checkpoint, name: str, least: int = 1) -> int:
    value = c.values.get(name)
    if type(value) is not int or value < least:
        raise DartspecError(f"{c.folder / 'config.json'}: {name} is {value!r}; must be a whole number from {least}")
    return value


def _shape(c: Checkpoint, name: str) -> tuple[int, ...]:
    if name not in c.shapes:
        raise DartspecError(f"{c.weights}: weight {name} is missing; a drafter is never run with random weights")
    return c.shapes[name]


def _refuse(c: Checkpoint, name: str, wanted: str, *right: Any) -> None:
    if (found := c.values.get(name, right[0])) not in right:
        raise DartspecError(f"{c.folder / 'config.json'}: {name} is {found!r}; only {wanted} is supported")


# -- Medusa ----------------------------------------------------------------------------------------------------------


def _medusa_name(name: str) -> str:
    """`{head}.{block}...`, which a whole model's file has behind `medusa_head.`."""
    return "medusa_head." + name.removeprefix("medusa_head.")


def _medusa(c: Checkpoint, target: Sizes) -> dict[str, Any]:
    blocks = _number(c, "medusa_num_layers")
    last = next((n for n in c.shapes if _medusa_name(n) == f"medusa_head.0.{blocks}.weight"), f"0.{blocks}.weight")
    vocab, width = _shape(c, last)
    return {**_heads(vocab, width, target), "d": _number(c, "medusa_num_heads"), "num_blocks": blocks}


def _heads(vocab: int, width: int, target: Sizes) -> dict[str, Any]:
    return {
        "taps": (FINAL,),
        "hidden_size": width,
        "draft_vocab_size": vocab,
        "vocab_size": vocab,
        "target_hidden_size": width,
        "num_target_layers": target.num_layers,
    }


# -- Hydra -----------------------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(.+)")
_PREFIX = "prefix_embeding_layer."  # spelt so


def _hydra(c: Checkpoint, target: Sizes) -> dict[str, Any]:
    _refuse(c, "grounded_heads", "true (heads that see the path)", True)
    _refuse(c, "hidden_state_offset", "0 (the last hidden state)", 0)
    _refuse(c, "hydra_head_arch", "'mlp' (Hydra) or 'prefix-mlp' (Hydra++)", "mlp", "prefix-mlp")
    head = next((n for n in c.shapes if re.fullmatch(r"hydra_lm_head\.0\.(1\.)?weight", n)), "hydra_lm_head.0.weight")
    vocab, width = _shape(c, head)
    prefix = c.values.get("hydra_head_arch", "mlp") == "prefix-mlp"
    if prefix:
        # the file says nothing of the layer's heads: it is one of the target's own
        known: Any = getattr(target, "config", None)
        own = known.to_dict() if hasattr(known, "to_dict") else {}
        layer = layer_fields({**own, **c.values}, c.folder / "config.json")
    else:  # no layer: the smallest that is one
        layer = dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), 1)
        layer |= {"head_dim": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    return {
        **layer,
        **_heads(vocab, width, target),
        "d": _number(c, "hydra_num_heads"),
        "num_blocks": _number(c, "hydra_num_layers"),
        "prefix": prefix,
        "head_bias": any(re.fullmatch(r"hydra_lm_head\.\d+\.(1\.)?bias", n) for n in c.shapes),
    }


def _hydra_tensors(_: Checkpoint, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Blocks are numbered with the dropouts between them, or without; repeated blocks are stored each time."""
    places: dict[str, list[int]] = {}
    for name in found:
        if match := _BLOCK.fullmatch(name):
            places.setdefault(match[1], []).append(int(match[2]))
    order = {head: sorted(set(numbers)) for head, numbers in places.items()}
    out = {}
    for name, tensor in found.items():
        if match := _BLOCK.fullmatch(name):
            out[f"heads.{match[1]}.blocks.{order[match[1]].index(int(match[2]))}.{match[3]}"] = tensor
        elif match := re.fullmatch(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)", name):
            out[f"heads.{match[1]}.lm_head.{match[2]}"] = tensor
        elif name.startswith(_PREFIX + "layers.0.") and not name.endswith("inv_freq"):
            out["prefix.layer." + name.removeprefix(_PREFIX + "layers.0.")] = tensor
        elif name == _PREFIX + "norm.weight":
            out["prefix.norm.weight"] = tensor
        elif name != _PREFIX + "embed_tokens.weight" and not name.endswith("inv_freq"):
            out[name] = tensor  # unexpected, and will be named
    return out


# -- DFlash ----------------------------------------------------------------------------------------------------------


def _dflash_layers(c: Checkpoint, values: Mapping[str, Any]) -> dict[str, Any]:
    if kinds := set(values.get("layer_types") or ()) - {"full_attention"}:
        raise DartspecError(
            f"{c.folder / 'config.json'}: layer_types has {sorted(kinds)[0]!r}; only full attention is supported"
        )
    fields = layer_fields(values, c.folder / "config.json")
    return {
        **fields,
        "vocab_size": values.get("vocab_size"),
        "target_hidden_size": fields["hidden_size"],
        "num_layers": values.get("num_hidden_layers", 1),
        "head_norm": True,
    }


def default_dflash_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Where the file names none: evenly from the second layer to the third but last; its ids count layers' outputs from
    0, taps count them from 1."""
    if num_layers == 1:
        return (num_target_layers // 2 + 1,)
    span = num_target_layers - 4
    return tuple(1 + round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def _dflash(c: Checkpoint, target: Sizes) -> dict[str, Any]:
    """The official folder: mask and head are the target's, layers count from 0, `block_size` counts the root too."""
    where, own = c.folder / "config.json", c.values.get("dflash_config")
    if not isinstance(own, Mapping):
        raise DartspecError(f"{where}: 'dflash_config' is missing; expected mask_token_id and target_layer_ids")
    if (kind := own.get("projector_type") or "dflash") != "dflash":
        raise DartspecError(f"{where}: projector_type is {kind!r}; only 'dflash' is supported")
    if own.get("mask_token_id") is None:
        raise DartspecError(f"{where}: dflash_config.mask_token_id is missing; expected an id of the target's")
    fields = _dflash_layers(c, c.values)
    ids = own.get("target_layer_ids")
    layers = _number(c, "num_target_layers") if "num_target_layers" in c.values else target.num_layers
    return {
        **fields,
        "taps": tuple(i + 1 for i in ids) if ids else default_dflash_taps(layers, fields["num_layers"]),
        "num_target_layers": layers,
        "d": _number(c, "block_size", 2) - 1,
        "draft_vocab_size": fields["vocab_size"],
        "mask_token_id": own["mask_token_id"],
        "own_head": False,
    }


def _speculators_dflash(c: Checkpoint, target: Sizes) -> dict[str, Any]:
    """A folder of `speculators`: a draft vocabulary may be smaller, and then brings its head; ids are taps."""
    where, layer = c.folder / "config.json", c.values.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise DartspecError(f"{where}: 'transformer_layer_config' is missing")
    _refuse(c, "sample_from_anchor", "false (masks behind the last token)", False, None)
    _refuse(c, "projector_type", "'dflash'", "dflash", None)
    ids = c.values.get("aux_hidden_state_layer_ids")
    if not ids:
        raise DartspecError(
            f"{where}: aux_hidden_state_layer_ids is {ids!r}; expected the target's layers that are read"
        )
    fields = _dflash_layers(c, layer)
    return {
        **fields,
        "taps": tuple(ids),
        "num_target_layers": target.num_layers,
        "target_hidden_size": c.values.get("target_hidden_size") or fields["hidden_size"],
        "d": _number(c, "block_size", 2) - 1,
        "draft_vocab_size": c.values.get("draft_vocab_size") or fields["vocab_size"],
        "mask_token_id": _number(c, "mask_token_id", 0),
        "own_head": "lm_head.weight" in c.shapes,
    }


def _without_the_targets(_: Checkpoint, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The embedding is the target's, whose rows it repeats."""
    return {name: t for name, t in found.items() if name != "embed_tokens.weight"}


LAYOUTS = (
    Layout(
        "medusa",
        "medusa",
        "official Medusa (medusa_num_heads)",
        lambda values, _: "medusa_num_heads" in values,
        _medusa,
        lambda _, found: {_medusa_name(name): t for name, t in found.items()},
    ),
    Layout(
        "hydra",
        "hydra",
        "official Hydra and Hydra++ (hydra_num_heads)",
        lambda values, _: "hydra_num_heads" in values,
        _hydra,
        _hydra_tensors,
    ),
    Layout(
        "speculators-dflash",
        "dflash",
        "DFlash of the package speculators",
        lambda values, _: values.get("speculators_model_type") == "dflash",
        _speculators_dflash,
        _without_the_targets,
    ),
    Layout(
        "dflash",
        "dflash",
        "official DFlash (dflash_config)",
        lambda values, _: "dflash_config" in values,
        _dflash,
        _without_the_targets,
    ),
)
