"""What training and a method with weights say to each other, so that `train/` names no method.

A method that can be trained offers, beside `Config` and `load`,

* `start(s: Start) -> DraftNet`: a network with the weights that training begins with;
* `read(folder) -> DraftNet`: a trained one;
* `loss(net, batch)`: which hands `batch.loss` the rows that predict, and returns what that returns.

Alignment (DART, arXiv 2601.19278, section 3.3; EAGLE-3 pairs alike): row j of a sequence holds the features of its
token j and knows the token at j + 1; offset t of row j predicts token j + 1 + t, and the target's own logits at j + t
teach it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dartspec.drafters._checkpoint import DraftNet, NetConfig
from dartspec.drafters._nn import FusedLayer
from dartspec.errors import DartspecError

C = TypeVar("C", bound=NetConfig)


class Rows(NamedTuple):
    """One sequence of T tokens, as a method sees it.

    ids:      (T,) int64.
    features: (T, n_taps, H_target) the target's states at the method's taps, in the compute dtype.
    first:    (R,) int64, rows whose offset 1 is wanted.
    anchors:  (A,) int64, rows whose later offsets are wanted.
    """

    ids: Tensor
    features: Tensor
    first: Tensor
    anchors: Tensor

    def known(self, rows: Tensor, offset: int) -> Tensor:
        """(n,) the tokens that offset 1 .. `offset` of these rows build on last: token j + offset; cut at the end."""
        return self.ids[(rows + offset).clamp(max=len(self.ids) - 1)]


class Predicted(NamedTuple):
    """Rows that predict with one head.

    hidden: (n, H) ready for the head. head: (V, H) its weight, a row for each draft id.
    row:    (n,) int64, j counted over the tokens of all sequences end to end. offset: (n,) int64, t in 1..d.
    continuity: not the drafter's guess but that of its learned continuity (`_bigram`), which is counted apart.
    """

    hidden: Tensor
    head: Tensor
    row: Tensor
    offset: Tensor
    continuity: bool = False


class Batch(Protocol):
    """Sequences, and what becomes of the predictions: a loss in training, hits in evaluation.

    starts: place of each sequence's first token when all lie end to end.
    """

    sequences: Sequence[Rows]
    starts: Sequence[int]

    def embed(self, ids: Tensor) -> Tensor:
        """(n,) target ids -> (n, H) the target's embeddings in the compute dtype, without gradient."""
        ...

    def loss(self, predicted: Sequence[Predicted]) -> Any: ...


class Start(NamedTuple):
    """What a fresh network begins with.

    common:  the target's shape and identity, by the names of `NetConfig` and `LayerConfig`.
    taps:    asked for, or () for the method's own choice. options: the method's own settings.
    ids:     (V,) int64 draft vocabulary, ascending. head: (V, H) float32 the target's head rows for it.
    layer:   weights of the target's decoder layer of that number, from 0, by Llama's names; {} where they differ.
    """

    common: Mapping[str, Any]
    d: int
    taps: tuple[int, ...]
    options: Mapping[str, Any]
    ids: Tensor
    head: Tensor
    seed: int
    layer: Callable[[int], Mapping[str, Tensor]]

    @property
    def num_layers(self) -> int:
        return int(self.common["num_target_layers"])

    def config(self, kind: type[C], taps: tuple[int, ...], own: Sequence[str] = ()) -> C:
        """The method's config; `own` names the fields that `options` may set."""
        if unknown := sorted(set(self.options) - set(own)):
            may = f"its own are {', '.join(own)}" if own else "it has none of its own"
            raise DartspecError(f"{kind.title} has no option {unknown[0]!r}; {may}")
        names = {f.name for f in fields(kind)}
        common = {k: v for k, v in self.common.items() if k in names}
        return kind(**{**common, "d": self.d, "taps": taps, **self.options})


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle, high: (2, N // 2, N - 3), the official choice. Refused where two of them coincide (case 19)."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not 0 < taps[0] < taps[1] < taps[2]:
        raise DartspecError(
            f"a target of {num_layers} layers gives taps {taps}, which do not rise: set taps = [low, mid, high]"
        )
    return taps


def draw(net: DraftNet, s: Start) -> torch.Generator:
    """Matrices at random as in Llama (normal, 0.02; output projections scaled down), d2t from the vocabulary.

    Returns the generator, for what the method draws itself.
    """
    generator = torch.Generator().manual_seed(s.seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() == 2:
                scale = 0.02 / math.sqrt(2) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                p.normal_(0.0, scale, generator=generator)
        net.d2t.copy_(s.ids - torch.arange(len(s.ids)))
    return generator


def start_fused(layer: FusedLayer, fc: nn.Linear, s: Start) -> None:
    """Projection = identity on the highest tap; the layer from the target's last one where names and shapes agree:
    queries, keys and values on the features' half of the input, output projection, MLP and the norms before them.

    On SmolLM2 this start was worth 0.4 of the loss at offset 1 and 0.6 at offset 2 after 200 updates; starting the
    final norm from the target's made it worse (the head is then sure of the token that is already known).
    """
    size = int(s.common["hidden_size"])
    weights = s.layer(s.num_layers - 1)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            weight = weights.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
            if weight is None or name == "input_layernorm.weight":
                continue
            part = p[:, size:] if re.search(r"[qkv]_proj", name) else p
            if part.shape == weight.shape:
                part.copy_(weight)
    identity_on_highest(fc, s)


def identity_on_highest(fc: nn.Linear, s: Start) -> None:
    """The projection passes the highest tap's states on."""
    size, width = int(s.common["hidden_size"]), int(s.common["target_hidden_size"])
    with torch.no_grad():
        fc.weight.zero_()
        same = min(size, width)
        fc.weight[:same, -width:][:, :same] = torch.eye(same)


def copy_fitting(layer: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Weights whose names and shapes agree."""
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name in weights and weights[name].shape == p.shape:
                p.copy_(weights[name])


def copy_head(weight: Tensor, s: Start) -> None:
    """The target's head rows, where the widths agree."""
    if weight.shape == s.head.shape:
        with torch.no_grad():
            weight.copy_(s.head)
