"""Other people's drafter checkpoints: what a folder holds, for which target, and the same drafter as one of ours.

A layout says how to know a checkpoint by its `config.json` and the names of its tensors, and how its configuration and
tensors become ours. What does not fit is refused with both sides named; nothing is ever left at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dartspec import drafters
from dartspec.drafters import _settings
from dartspec.drafters._checkpoint import DraftNet, read_json, read_tensors
from dartspec.errors import DartspecError
from dartspec.lattice import SearchConfig
from dartspec.target.load import read_safetensors_header
from dartspec.types import Drafter, TargetView

WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    *(f"{heads}_lm_head.{kind}" for heads in ("medusa", "hydra") for kind in ("safetensors", "pt")),
)
LEAST_LAYERS = 7  # with fewer, two of the taps 2, N // 2 and N - 3 coincide
LAYER_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")


class Sizes(Protocol):
    """What of a target decides whether a drafter fits; a `TargetView` is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


@dataclass(frozen=True)
class Checkpoint:
    """A folder as it was found. shapes: of its tensors by name, as they are stored."""

    folder: Path
    layout: Layout
    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def method(self) -> str:
        """The drafter that runs it."""
        return self.layout.method or str(self.values["method"])

    @property
    def weights(self) -> Path:
        return _weights(self.folder)


@dataclass(frozen=True)
class Layout:
    """about: one line for people. fits: whether config and tensor names are of this kind. config: our configuration's
    fields for a target. tensors: our names for the tensors."""

    name: str
    method: str
    about: str
    fits: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], bool]
    config: Callable[[Checkpoint, Sizes], dict[str, Any]] | None = None
    tensors: Callable[[Checkpoint, dict[str, Tensor]], dict[str, Tensor]] = lambda _c, found: found


# -- what is there ---------------------------------------------------------------------------------------------------


def inspect(folder: str | Path) -> Checkpoint:
    """What the folder holds. Reads the configuration and the tensors' names, not the tensors of a safetensors file."""
    folder = Path(folder)
    values = read_json(folder / "config.json")
    shapes = _shapes(folder)
    for layout in layouts():
        if layout.fits(values, shapes):
            return Checkpoint(folder, layout, values, shapes)
    known = "; ".join(layout.about for layout in layouts())
    names = ", ".join(sorted(shapes)[:4]) or "no tensors"
    raise DartspecError(
        f"{folder} is no drafter that is known: its config.json has {', '.join(sorted(values)[:8])}, its weights "
        f"{names}; known are: {known}"
    )


def layouts() -> tuple[Layout, ...]:
    """Every layout, in the order in which they are tried."""
    from dartspec.interop import rivals

    return (*rivals.LAYOUTS, *LAYOUTS)


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the configuration says of the drafter and of its target, where it says it; JSON-ready."""
    values: Mapping[str, Any] = checkpoint.values
    layer = values.get("transformer_layer_config")
    layer = layer if isinstance(layer, Mapping) else {}
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    target = values.get("target") or verifier.get("name_or_path") or values.get("base_model_name_or_path")
    if checkpoint.method == "small_model":
        return {"target": "any model; another tokenizer is bridged through the text"}
    # what a layout counts, and how many positions that is beside it
    counted = {"d": 0, "draft_length": 1, "block_size": -1, "medusa_num_heads": 0, "hydra_num_heads": 0}
    positions = [values[n] + more for n, more in counted.items() if type(values.get(n)) is int]
    return {
        "target": target or None,
        "target_vocab_size": values.get("vocab_size", layer.get("vocab_size")),
        "target_hidden_size": values.get("target_hidden_size") or values.get("hidden_size", layer.get("hidden_size")),
        "target_layers": values.get("num_target_layers"),
        "draft_vocab_size": values.get("draft_vocab_size"),
        "positions": next(iter(positions), None),
        "tokenizer_fingerprint": values.get("tokenizer_fingerprint"),
        "num_weights": sum(math.prod(shape) for shape in checkpoint.shapes.values()),
    }


def problem(checkpoint: Checkpoint, target: Sizes) -> str | None:
    """Why the checkpoint would not run on the target, or None. Sizes and names only: no weight is looked at."""
    try:
        if checkpoint.layout.name == "causal-lm":
            return None  # it drafts ids or text, whatever the sizes
        config = _config(checkpoint, target)
        _check_sizes(config, target)
        _check_shapes(checkpoint, config)
    except DartspecError as error:
        return str(error)
    return None


def read(checkpoint: Checkpoint, target: Sizes) -> DraftNet:
    """The drafter's network with the checkpoint's weights in their stored dtype, for this target."""
    if checkpoint.layout.name == "causal-lm":
        raise DartspecError(f"{checkpoint.folder} is a whole model: it is loaded as the drafter small_model")
    config = _config(checkpoint, target)
    _check_sizes(config, target)
    found = checkpoint.layout.tensors(checkpoint, _read_weights(checkpoint.weights))
    return _net_class(checkpoint.method).from_tensors(config, found, checkpoint.weights)


def load(folder: str | Path, view: TargetView, settings: Mapping[str, str] | None = None, **options: Any) -> Drafter:
    """The drafter of a folder of any known layout; `options` (such as `index`) go to its module's `load`.

    settings: how it drafts, where that is not as the folder says (`drafters.get(method).Config.settings`); of a method
              that searches a lattice, the search's numbers too.
    """
    checkpoint = inspect(folder)
    module = drafters.get(checkpoint.method)
    if checkpoint.layout.name == "causal-lm":
        (own,) = _settings.read(settings or {}, module.Config, method=checkpoint.method)
        made: Drafter = module.load(module.Config(str(folder), **own), view, **options)
        return made
    _net_class(checkpoint.method)  # refuses a method without weights
    own_folder = checkpoint.layout.config is None and not settings
    source: Any = Path(folder) if own_folder else read(checkpoint, view)
    if settings:
        searches = "search" in signature(module.load).parameters
        kinds = [module.Config, SearchConfig] if searches else [module.Config]
        own, *search = _settings.read(settings, *kinds, method=checkpoint.method)
        source.use(replace(source.config, **own))
        if searches:
            options["search"] = source.config.searching(**search[0])
    made = module.load(source, view, **options)
    return made


def convert(folder: str | Path, sizes: Sizes, out: Path, **about: str | None) -> DraftNet:
    """Writes the folder's drafter in our layout, weights in bfloat16.

    sizes: of its target. about: `target`, `tokenizer_fingerprint`, ... for the configuration: whose it is.
    """
    checkpoint = inspect(folder)
    if out.resolve() == checkpoint.folder.resolve():
        raise DartspecError(f"{out} is the folder that is converted: name another one")
    net = read(checkpoint, sizes)
    net.config = replace(net.config, **{name: value for name, value in about.items() if value})  # type: ignore[arg-type]
    net.save(out, {"converted_from": f"{checkpoint.layout.name} {checkpoint.folder.name}"})
    return net


# -- reading ---------------------------------------------------------------------------------------------------------


def _weights(folder: Path) -> Path:
    found = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    if not found:
        raise DartspecError(f"{folder} holds no weights: expected {' or '.join(WEIGHTS)}")
    return found[0]


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in the folder's file of weights; none where they are in several, which no drafter's are."""
    if any(folder.glob("*.index.json")) or any(folder.glob("*.gguf")):
        return {}
    path = _weights(folder)
    if path.suffix == ".safetensors":
        return {name: tuple(entry["shape"]) for name, entry in read_safetensors_header(path).items()}
    return {name: tuple(tensor.shape) for name, tensor in _read_weights(path).items()}


def _read_weights(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_tensors(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch have one each
        raise DartspecError(f"{path}: not a file of tensors ({type(error).__name__}); fetch it again") from None
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise DartspecError(f"{path}: holds {type(found).__name__}, expected tensors by name")
    return found


def _net_class(method: str) -> type[DraftNet]:
    module = drafters.get(method)
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, DraftNet) and value is not DraftNet:
            return value
    raise DartspecError(f"config.json names the method {method}, which has no weights to load")


def _config(checkpoint: Checkpoint, target: Sizes) -> Any:
    layout = checkpoint.layout
    if layout.config is None:
        _net_class(checkpoint.method)
        return drafters.get(checkpoint.method).Config.from_dict(checkpoint.values)
    fields = layout.config(checkpoint, target)
    return drafters.get(checkpoint.method).Config(**fields)


def _check_sizes(config: Any, target: Sizes) -> None:
    for what, ours, theirs in (
        ("a hidden size of", config.target_hidden_size, target.hidden_size),
        ("layers numbering", config.num_target_layers, target.num_layers),
        ("a vocabulary of", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise DartspecError(f"the drafter is for a target with {what} {ours}, this target has {theirs}")


def _check_shapes(checkpoint: Checkpoint, config: Any) -> None:
    """Names and sizes against the network that the configuration asks for."""
    meta = {name: torch.empty(shape, device="meta") for name, shape in checkpoint.shapes.items()}
    found = checkpoint.layout.tensors(checkpoint, meta)
    found = {name.replace("midlayer.", "layers.0.", 1): t for name, t in found.items() if name != "t2d"}
    with torch.device("meta"):
        wanted = _net_class(checkpoint.method)(config).state_dict()
    if config.draft_vocab_size == config.vocab_size:
        found.setdefault("d2t", wanted["d2t"])
    where = checkpoint.weights
    for name, tensor in wanted.items():
        if name not in found:
            raise DartspecError(f"{where}: weight {name} is missing; a drafter is never run with random weights")
        if found[name].shape != tensor.shape:
            raise DartspecError(
                f"{where}: {name} has shape {list(found[name].shape)}, config.json asks for {list(tensor.shape)}"
            )
    if unexpected := sorted(set(found) - set(wanted)):
        raise DartspecError(f"{where}: unexpected weight {unexpected[0]}; the file does not fit its config.json")


def layer_fields(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Our names for the fields of a Llama-like layer's configuration."""
    if missing := [name for name in LAYER_FIELDS if values.get(name) is None]:
        raise DartspecError(f"{where}: {missing[0]!r} is missing; expected the fields of a Llama layer")
    rope = values.get("rope_parameters") or {}
    theta = values.get("rope_theta") or rope.get("rope_theta")
    if theta is None:
        raise DartspecError(f"{where}: 'rope_theta' is missing; expected the base of the rotary embedding")
    scaling = values.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise DartspecError(f"{where}: rope_scaling is of type {kind!r}; only plain rotary embedding is supported")
    if values.get("pretraining_tp") not in (None, 1):
        raise DartspecError(f"{where}: pretraining_tp is {values['pretraining_tp']}; only 1 is supported")
    return {
        **{name: values[name] for name in LAYER_FIELDS},
        "head_dim": values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        "rope_theta": float(theta),
        "hidden_act": values.get("hidden_act", "silu"),
    }


def _common_fields(c: Checkpoint, values: Mapping[str, Any], target: Sizes) -> dict[str, Any]:
    """Fields of a layer that reads three hidden states of the target."""
    where = c.folder / "config.json"
    if target.num_layers < LEAST_LAYERS:
        raise DartspecError(
            f"{c.folder} reads the hidden states 2, N // 2 and N - 3 of its target; this one has {target.num_layers} "
            f"layers, at least {LEAST_LAYERS} are needed"
        )
    fields = layer_fields(values, where)
    draft_vocab = c.values.get("draft_vocab_size") or values.get("vocab_size")
    return {
        **fields,
        "taps": (2, target.num_layers // 2, target.num_layers - 3),
        "draft_vocab_size": draft_vocab,
        "vocab_size": values.get("vocab_size"),
        "target_hidden_size": c.values.get("target_hidden_size") or fields["hidden_size"],
        "num_target_layers": target.num_layers,
    }


# -- the layouts -----------------------------------------------------------------------------------------------------


def _official_dart(c: Checkpoint, target: Sizes) -> dict[str, Any]:
    """`draft_length` masks give one row more; the final norm is applied twice, as the official program does."""
    length = c.values.get("draft_length")
    if type(length) is not int or length < 1:
        raise DartspecError(f"{c.folder / 'config.json'}: draft_length is {length!r}; must be a positive whole number")
    return {**_common_fields(c, c.values, target), "d": length + 1, "mask": "official", "final_norm_twice": True}


def _eagle3(c: Checkpoint, target: Sizes) -> dict[str, Any]:
    """SpecForge may name the target's layers, in `eagle_config`: outputs counted from 0, so taps are one higher."""
    fields = {**_common_fields(c, c.values, target), "d": 8, "own_embedding": "embed_tokens.weight" in c.shapes}
    ids = (c.values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return {**fields, "taps": tuple(i + 1 for i in ids)} if ids else fields


def _speculators(c: Checkpoint, target: Sizes) -> dict[str, Any]:
    """A folder of the package `speculators`: the layer's configuration is a part of its own."""
    values = c.values.get("transformer_layer_config")
    if not isinstance(values, Mapping):
        raise DartspecError(f"{c.folder / 'config.json'}: 'transformer_layer_config' is missing")
    fields = _common_fields(c, values, target)
    taps = c.values.get("eagle_aux_hidden_state_layer_ids")
    return {**fields, "taps": tuple(taps)} if taps else fields


def _speculators_eagle3(c: Checkpoint, target: Sizes) -> dict[str, Any]:
    if c.values.get("norm_before_fc"):
        raise DartspecError(f"{c.folder / 'config.json'}: norm_before_fc is set; only features as they are can be read")
    return {
        **_speculators(c, target),
        "d": 8,
        "own_embedding": "embed_tokens.weight" in c.shapes,
        "norm_before_residual": bool(c.values.get("norm_before_residual", False)),
    }


def _speculators_peagle(c: Checkpoint, target: Sizes) -> dict[str, Any]:
    try:
        steps = c.values["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        raise DartspecError(
            f"{c.folder / 'config.json'}: speculators_config.proposal_methods[0].speculative_tokens is missing"
        ) from None
    if c.values.get("norm_before_residual"):
        raise DartspecError(f"{c.folder / 'config.json'}: norm_before_residual is set; DART's residual is not normed")
    return {**_speculators(c, target), "d": steps, "mask": "pair"}


def _peagle_tensors(c: Checkpoint, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mask's embedding is a row of the drafter's own embedding, of which nothing else differs from the target's."""
    token = c.values.get("mask_token_id")
    table = found.get("embed_tokens.weight")
    if table is None or type(token) is not int or not 0 <= token < len(table):
        rows = None if table is None else len(table)
        raise DartspecError(f"{c.folder}: mask_token_id is {token!r} and embed_tokens.weight has {rows} rows")
    out = {n: t for n, t in found.items() if n not in ("embed_tokens.weight", "mask_hidden")}
    if "mask_hidden" in found:
        out["mask_features"] = found["mask_hidden"].flatten()
    return {**out, "mask_embedding": table[token]}


def _of(kind: str) -> Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], bool]:
    return lambda values, _shapes: values.get("speculators_model_type") == kind


LAYOUTS = (
    Layout("dartspec", "", "this package's own (config.json names the method)", lambda values, _: "method" in values),
    Layout("speculators-eagle3", "eagle3", "EAGLE-3 of the package speculators", _of("eagle3"), _speculators_eagle3),
    Layout(
        "speculators-peagle",
        "dart",
        "P-EAGLE of the package speculators",
        _of("peagle"),
        _speculators_peagle,
        _peagle_tensors,
    ),
    Layout(
        "dart-official",
        "dart",
        "official DART (midlayer.mask_rep)",
        lambda values, shapes: "midlayer.mask_rep" in shapes or "draft_length" in values,
        _official_dart,
    ),
    Layout(
        "eagle3",
        "eagle3",
        "EAGLE-3 of SafeAILab, AngelSlim and SpecForge (fc and midlayer without a mask)",
        lambda _, shapes: "fc.weight" in shapes and "midlayer.hidden_norm.weight" in shapes,
        _eagle3,
    ),
    Layout(
        "causal-lm",
        "small_model",
        "any smaller causal LM of transformers",
        lambda values, _: any(str(a).endswith("ForCausalLM") for a in values.get("architectures") or ()),
    ),
)
