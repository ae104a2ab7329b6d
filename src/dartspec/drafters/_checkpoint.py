"""A trained drafter's folder, `config.json` and `model.safetensors`: read strictly, written whole. Knows no method."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from dartspec.errors import DartspecError
from dartspec.files import written_aside
from dartspec.types import TargetView

MOST_STEPS = 256  # positions guessed in one round; far above what can be guessed
FINAL = -1  # the tap behind the target's final norm


@dataclass(frozen=True, kw_only=True)
class NetConfig:
    """What every trained drafter says of itself and of the target that it was trained for.

    d: positions that are predicted. taps: hidden states of the target that are read; FINAL alone for heads.
    acceptance: mean committed tokens a round on held-out answers, by tree size; for `doctor` and live comparison.
    """

    title: ClassVar[str]  # how errors call it
    name: ClassVar[str]  # the method
    settings: ClassVar[tuple[str, ...]] = ("d",)  # may be changed for trained weights: how they draft
    sizes: ClassVar[tuple[str, ...]] = (
        "d",
        "hidden_size",
        "draft_vocab_size",
        "vocab_size",
        "target_hidden_size",
        "num_target_layers",
    )

    d: int
    taps: tuple[int, ...]
    hidden_size: int
    draft_vocab_size: int
    vocab_size: int
    target_hidden_size: int
    num_target_layers: int
    method: str = ""
    target: str = ""
    tokenizer_fingerprint: str | None = None
    weights_fingerprint: str | None = None
    template_hash: str | None = None
    acceptance: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.refuse_unless(
            isinstance(self.taps, list | tuple) and all(type(tap) is int for tap in self.taps),
            f"taps is {self.taps!r}; must be a list of whole numbers",
        )
        object.__setattr__(self, "taps", tuple(self.taps))
        for name in self.sizes:
            value = getattr(self, name)
            self.refuse_unless(type(value) is int and value >= 1, f"{name} is {value!r}; must be a positive integer")
        self.refuse_unless(self.d <= MOST_STEPS, f"d is {self.d}; must be at most {MOST_STEPS}")
        try:
            good = all(int(nodes) >= 0 and float(mean) >= 1 for nodes, mean in self.acceptance.items())
        except (AttributeError, TypeError, ValueError):
            good = False
        self.refuse_unless(good, f"acceptance is {self.acceptance!r}; must map tree sizes to committed tokens a round")
        if not self.method:
            object.__setattr__(self, "method", self.name)
        self.refuse_unless(self.method == self.name, f"method is {self.method!r}, expected {self.name!r}")
        self.refuse_unless(
            self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}",
        )
        self._check_taps()

    def _check_taps(self) -> None:
        taps = self.taps
        rising = all(a < b for a, b in itertools.pairwise(taps))
        self.refuse_unless(
            bool(taps) and rising and taps[0] >= 0 and taps[-1] <= self.num_target_layers,
            f"taps {list(taps)} must rise within 0..{self.num_target_layers} (0 = embeddings, i = output of layer i)",
        )

    def refuse_unless(self, good: bool, problem: str) -> None:
        if not good:
            raise DartspecError(f"{self.title} config: {problem}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise DartspecError(f"{cls.title} config: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
        required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
        if missing := sorted(required - set(values)):
            raise DartspecError(f"{cls.title} config: {missing[0]!r} is missing")
        return cls(**values)

    @classmethod
    def from_json(cls, path: Path) -> Self:
        return cls.from_dict(read_json(path))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True, kw_only=True)
class LayerConfig(NetConfig):
    """A drafter with decoder layers as Llama has them."""

    sizes: ClassVar[tuple[str, ...]] = (
        *NetConfig.sizes,
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            good = type(value) in (int, float) and 0 < value < math.inf
            self.refuse_unless(good, f"{name} is {value!r}; must be a number above 0")
        self.refuse_unless(self.hidden_act == "silu", f"hidden_act is {self.hidden_act!r}; only 'silu' is supported")
        self.refuse_unless(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"{self.num_attention_heads} attention heads are no multiple of {self.num_key_value_heads} key/value heads",
        )
        self.refuse_unless(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}; rotary embedding needs an even one")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a drafter's config.json."""
    if not path.is_file():
        raise DartspecError(f"{path}: no such file; a drafter folder holds config.json and model.safetensors")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DartspecError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise DartspecError(f"{path}: a JSON object was expected, found {type(values).__name__}")
    return values


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, as they are stored."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise DartspecError(f"{path}: no such file; a drafter folder holds config.json and model.safetensors")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise DartspecError(
            f"{path}: not a whole safetensors file ({error}); it may be truncated, fetch it again"
        ) from None
    return tensors


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: str) -> None:
    """`model.safetensors`, then `config.json`, each written aside and renamed."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with written_aside(folder / "model.safetensors") as aside:
        save_file(dict(tensors), aside, metadata={"format": "pt"})
    with written_aside(folder / "config.json") as aside:
        aside.write_text(config, encoding="utf-8")


class DraftNet(nn.Module):
    """A network over a draft vocabulary, saved and loaded by the names of its tensors.

    d2t: (draft_vocab,) int64; the target's id of a draft id is draft id + d2t[draft id].
    """

    config_class: ClassVar[type[NetConfig]]
    config: NetConfig
    d2t: Tensor

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def by_vocabulary(self) -> tuple[str, ...]:
        """Names of the tensors that have a row for each draft id."""
        return ("lm_head.weight",)

    def use(self, config: NetConfig) -> None:
        """The same weights with other settings; at most the positions that were trained."""
        self.config.refuse_unless(config.d <= self.config.d, f"d is {config.d}; it was trained for {self.config.d}")
        self.config = config

    def target_ids(self) -> Tensor:
        """(draft_vocab,) int64: the target's id of each draft id."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def save(self, folder: Path, provenance: Mapping[str, Any] | None = None) -> None:
        """`model.safetensors` (matrices and vectors in bfloat16) and `config.json`, each written aside and renamed."""
        tensors = {
            name: (t.detach().to(torch.bfloat16) if t.is_floating_point() else t.detach()).contiguous().clone()
            for name, t in self.state_dict().items()
        }
        config = replace(self.config, provenance=dict(provenance)) if provenance is not None else self.config
        write_folder(folder, tensors, config.to_json())

    def converted(self, dtype: torch.dtype, device: torch.device) -> Self:
        """A copy for decoding: parameters in `dtype` on `device`, d2t untouched."""
        copy = type(self)(self.config)
        copy.load_state_dict(self.state_dict())
        return copy.to(device=device, dtype=dtype).eval().requires_grad_(False)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read a drafter folder. Missing, unexpected, misshapen or truncated weights are refused by name."""
        return cls.from_weights(cls.config_class.from_json(folder / "config.json"), folder / "model.safetensors")

    @classmethod
    def from_weights(cls, config: NetConfig, path: Path) -> Self:
        """Weights of a safetensors file in their stored dtype."""
        return cls.from_tensors(config, read_tensors(path), path)

    @classmethod
    def from_tensors(cls, config: NetConfig, found: dict[str, Tensor], path: Path) -> Self:
        """Weights by name in their stored dtype; `path` is for messages. `t2d` says nothing that `d2t` does not, and is
        skipped; `d2t` may be absent where the draft vocabulary is the whole."""
        found = {name: t for name, t in found.items() if name != "t2d"}
        if "d2t" not in found and config.draft_vocab_size == config.vocab_size:
            found["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
        with torch.device("meta"):
            net = cls(config)
        wanted = net.state_dict()
        for name, tensor in wanted.items():
            if name not in found:
                raise DartspecError(f"{path}: weight {name} is missing; a drafter is never run with random weights")
            if found[name].shape != tensor.shape:
                raise DartspecError(
                    f"{path}: {name} has shape {list(found[name].shape)}, config.json asks for {list(tensor.shape)}"
                )
            if tensor.is_floating_point() != found[name].is_floating_point():
                kind = "floating-point" if tensor.is_floating_point() else "whole"
                raise DartspecError(f"{path}: {name} is {found[name].dtype}; must hold {kind} numbers")
            if not bool(torch.isfinite(found[name]).all()):
                raise DartspecError(f"{path}: {name} holds numbers that are not finite; its training went wrong")
        if unexpected := sorted(set(found) - set(wanted)):
            raise DartspecError(f"{path}: unexpected weight {unexpected[0]}; the file does not fit its config.json")
        found["d2t"] = found["d2t"].to(torch.int64)
        net.load_state_dict(found, assign=True)
        ids = net.target_ids()
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) != len(ids):
            raise DartspecError(
                f"{path}: d2t maps draft ids to {int(ids.min())}..{int(ids.max())}, not to different ids in "
                f"0..{config.vocab_size - 1}"
            )
        return net


def check_target(config: NetConfig, view: TargetView, *, own_embedding: bool = False) -> None:
    """Refuse a drafter that was trained for another target; warn where only the weights differ."""
    for what, ours, theirs in (
        ("a hidden size of", config.target_hidden_size, view.hidden_size),
        ("layers numbering", config.num_target_layers, view.num_layers),
        ("a vocabulary of", config.vocab_size, view.vocab_size),
    ):
        if ours != theirs:
            raise DartspecError(
                f"drafter trained for a target with {what} {ours}, this target has {theirs}: "
                "use the drafter of this model or train one with `dartspec train`"
            )
    if config.hidden_size != view.hidden_size and not own_embedding:
        raise DartspecError(
            f"drafter of width {config.hidden_size} on a target of width {view.hidden_size}: it reads the target's "
            "embeddings, so both must be equal"
        )
    tokenizer: str | None = getattr(view, "tokenizer_fingerprint", None)
    if config.tokenizer_fingerprint and tokenizer and config.tokenizer_fingerprint != tokenizer:
        raise DartspecError(
            f"drafter trained with tokenizer {config.tokenizer_fingerprint}, the target uses {tokenizer}: "
            "its token ids mean other text; train a drafter for this tokenizer"
        )
    weights: str | None = getattr(view, "weights_fingerprint", None)
    if config.weights_fingerprint and weights and config.weights_fingerprint != weights:
        warnings.warn(
            f"drafter trained for weights {config.weights_fingerprint}, the target has {weights} (fine-tuned?): "
            "output stays exact, fewer drafts may be accepted",
            stacklevel=3,
        )


N = TypeVar("N", bound=DraftNet)


def checked_net(source: NetConfig | N | Path | str, kind: type[N], view: TargetView) -> N:
    """The network of a folder (`config.json`, `model.safetensors`), or the one given, checked against the target.

    A bare config names no weights and is refused: a drafter is never run with random ones.
    """
    if isinstance(source, NetConfig):
        raise DartspecError(
            f"a config of {source.title} has no weights: give the folder that holds config.json and model.safetensors"
        )
    net = source if isinstance(source, kind) else kind.from_folder(Path(source))  # type: ignore[arg-type]
    check_target(net.config, view, own_embedding=getattr(net.config, "own_embedding", False))
    return net
