"""DFlash: a block of masks filled in one forward, each layer attending to the target's features of the whole text.

Source: arXiv 2602.06036. The target's states at several taps are projected and normed once per token; every layer makes
keys and values of them, at the tokens' own positions ("context"). The block, the embedding of the last committed token
and `d` masks behind it, attends to the context and to all of itself, in both directions; the mask at a position
predicts the token of that very position. The distributions are independent of one another: the tree is the best of
their products (best first), or a chain of first choices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dartspec.drafters._checkpoint import DraftNet, LayerConfig, checked_net
from dartspec.drafters._grow import best_first
from dartspec.drafters._nn import (
    Head,
    LlamaLayer,
    Norm,
    PackedLayer,
    Prefix,
    Product,
    RMSNorm,
    RopeTable,
    attend_groups,
    news,
    rope_table,
    rotate,
    use_core,
)
from dartspec.drafters._train import (
    Batch,
    Predicted,
    Start,
    copy_fitting,
    copy_head,
    default_taps,
    draw,
    identity_on_highest,
)
from dartspec.errors import DartspecError
from dartspec.types import Committed, TargetView, TokenTree

CHUNK_ROWS = 512  # rows a product while much text is read


@dataclass(frozen=True, kw_only=True)
class Config(LayerConfig):
    """A DFlash drafter's shape and what it was trained for; `config.json` beside its weights.

    d:          masks of a block, and so positions predicted; the official `block_size` counts the root too.
    num_layers: decoder layers of the drafter.
    head_norm:  queries and keys are normed by head (the official drafters, which are Qwen3's layers).
    mask_token_id: the mask's embedding is this row of the target's; None: the drafter has its own.
    own_head:   False: the head is the target's.
    tree:       "best_first", or "chain".
    top_k:      tokens of a position that are considered.
    """

    title: ClassVar[str] = "DFlash"
    name: ClassVar[str] = "dflash"
    sizes: ClassVar[tuple[str, ...]] = (*LayerConfig.sizes, "num_layers", "top_k")
    settings: ClassVar[tuple[str, ...]] = ("d", "tree", "top_k")

    num_layers: int = 1
    head_norm: bool = False
    mask_token_id: int | None = None
    own_head: bool = True
    tree: str = "best_first"
    top_k: int = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.tree in ("best_first", "chain")
        mask, whole = self.mask_token_id, self.draft_vocab_size == self.vocab_size
        self.refuse_unless(
            mask is None or (type(mask) is int and 0 <= mask < self.vocab_size),
            f"mask_token_id is {mask!r}; must be an id below {self.vocab_size}, or null",
        )
        self.refuse_unless(
            self.own_head or whole, f"a draft vocabulary of {self.draft_vocab_size} needs a head of its own"
        )
        self.refuse_unless(good, f"tree is {self.tree!r}; must be 'best_first' or 'chain'")


class DFlashNet(DraftNet):
    """The network, with the tensor names of the official checkpoints. These take the mask's embedding and the head from
    the target; ours have their own."""

    config_class = Config
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        c = config
        self.fc = nn.Linear(len(c.taps) * c.target_hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(LlamaLayer(c, c.head_norm) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.own_head:
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.zeros(c.hidden_size))

    def decoder_layers(self) -> list[LlamaLayer]:
        return [layer for layer in self.layers if isinstance(layer, LlamaLayer)]


# --- training -------------------------------------------------------------------------------------------------------


def start(s: Start) -> DFlashNet:
    """Fresh weights: the target's last layers where they fit, its head rows, the projection as identity on the highest
    tap, normed as the target's layer norms it, the mask as small noise."""
    own = ("num_layers", "head_norm", "top_k", "tree", "intermediate_size")
    net = DFlashNet(s.config(Config, s.taps or default_taps(s.num_layers), own))
    c = net.config
    generator = draw(net, s)
    with torch.no_grad():
        for i, layer in enumerate(net.decoder_layers()):
            weights = s.layer(s.num_layers - c.num_layers + i)
            copy_fitting(layer, weights)
            norm = weights.get("input_layernorm.weight")
            if i == 0 and norm is not None and norm.shape == net.hidden_norm.weight.shape:
                net.hidden_norm.weight.copy_(norm)
        identity_on_highest(net.fc, s)
        net.mask_embedding.normal_(0.0, 0.02, generator=generator)
    copy_head(net.lm_head.weight, s)
    return net


def read(folder: Path) -> DFlashNet:
    return DFlashNet.from_folder(folder)


def loss(net: DFlashNet, batch: Batch) -> Any:
    """A block behind every anchor, which predicts all d offsets; `first` rows would cost a block each and are left."""
    c = net.config
    if not c.own_head or c.mask_token_id is not None:
        raise DartspecError("DFlash that shares the target's head or mask is for loading only: train with its own")
    heads, kv, dim, m = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.d + 1
    hidden, rows = [], []
    for s, base in zip(batch.sequences, batch.starts, strict=True):
        length, n, device = len(s.ids) - 1, len(s.anchors), s.ids.device
        cos, sin = rope_table(torch.arange(length + m, device=device), dim, c.rope_theta)
        own_allowed = torch.ones(m, m, dtype=torch.bool, device=device)
        context = net.hidden_norm(net.fc(s.features[:-1].flatten(1)))
        seen = torch.arange(length, device=device)[None, :] <= s.anchors[:, None]
        at = (s.anchors[:, None] + torch.arange(1, m + 1, device=device)).flatten()  # positions of the blocks
        cos_at, sin_at = cos[at][:, None], sin[at][:, None]
        masks = net.mask_embedding.to(context.dtype).expand(n, c.d, -1)
        x = torch.cat((batch.embed(s.known(s.anchors, 1))[:, None].to(masks.dtype), masks), dim=1).flatten(0, 1)
        for layer in net.decoder_layers():
            keys = rotate(layer.keys(context), cos[:length, None], sin[:length, None]).transpose(0, 1)
            values = layer.values(context).transpose(0, 1)  # (kv, T - 1, dim)
            y = layer.input_layernorm(x)
            q = rotate(layer.queries(y), cos_at, sin_at).view(n, m, kv, heads // kv, dim).permute(2, 3, 0, 1, 4)
            own_k = rotate(layer.keys(y), cos_at, sin_at).view(n, m, kv, dim).permute(2, 0, 1, 3)
            own_v = layer.values(y).view(n, m, kv, dim).permute(2, 0, 1, 3)
            out = attend_groups(q, keys, values, seen, own_k, own_v, own_allowed)
            x = layer.finish(x, out.permute(2, 3, 0, 1, 4).reshape(n * m, heads * dim))
        hidden.append(x.view(n, m, -1)[:, 1:].flatten(0, 1))
        rows.append((base + s.anchors).repeat_interleave(c.d))
    row = torch.cat(rows)
    offset = torch.arange(1, m, device=row.device).repeat(len(row) // c.d)
    return batch.loss([Predicted(net.norm(torch.cat(hidden)), net.lm_head.weight, row, offset)])


# --- decoding -------------------------------------------------------------------------------------------------------


class _TargetHead(Head):
    """The target's head in the place of a drafter's."""

    def __init__(self, lm_head: Callable[[Tensor], Tensor], forbidden: Tensor) -> None:
        self._lm_head, self._size = lm_head, len(forbidden)
        self._forbidden = forbidden if bool(forbidden.any()) else None

    def likeliest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self._by_torch(self._lm_head(x).float(), min(k, self._size))


class DFlashDrafter:
    """Drafts for any number of sequences: one forward over their blocks. The context's keys and values are kept.

    net: its weights are copied, in the target's dtype and on its device.
    search_ms: milliseconds spent on the trees so far; the engine shows it as a stage of its own.
    """

    def __init__(self, net: DFlashNet, view: TargetView) -> None:
        self.config = c = net.config
        self.taps = c.taps
        self.view = view
        self.search_ms = 0.0
        self._prefixes: dict[int, list[Prefix]] = {}  # per slot, a layer each
        dtype, device = view.dtype, view.device
        with torch.no_grad():
            net = net.converted(dtype, device)
            threads, packed = torch.get_num_threads(), use_core(device, dtype)
            self._fc, self._context_norm = Product([net.fc.weight], packed, threads), Norm(net.hidden_norm, packed)
            self._layers = [PackedLayer(layer, packed, threads) for layer in net.decoder_layers()]
            self._final_norm = Norm(net.norm, packed)
            ids = net.target_ids().to(torch.int32)
            self._ids = ids.cpu()
            forbidden = ids >= view.num_tokens
            self._head = (
                Head(net.lm_head.weight, forbidden, packed, threads)
                if c.own_head
                else _TargetHead(view.lm_head, forbidden)
            )
            token = c.mask_token_id
            mask = net.mask_embedding if token is None else view.embed(torch.tensor([token], device=device))[0]
            self._masks = mask.detach().to(dtype).expand(c.d, -1)
        self._rope = RopeTable(c.head_dim, c.rope_theta, device)

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._prefixes.pop(slot, None)

    def fork(self, source: int, target: int, length: int) -> None:
        """See `types.Forks`: row p holds the features of position p."""
        self._prefixes[target] = [prefix.beginning(length) for prefix in self._prefixes[source]]

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        """One tree a sequence. `new[i].features` are the target's states at `taps`, unnormed, as hooks gave them."""
        if not new:
            return []
        log_probs, tokens = self.lattice(new)
        began = time.perf_counter()
        k = 1 if self.config.tree == "chain" else self.config.top_k
        ends = self.view.eos_token_ids
        trees = [
            best_first(int(one.history[-1]), log_probs[i], tokens[i], budget[i], ends, k) for i, one in enumerate(new)
        ]
        self.search_ms += 1e3 * (time.perf_counter() - began)
        return trees

    @torch.inference_mode()
    def lattice(self, new: Sequence[Committed]) -> tuple[Tensor, Tensor]:
        """Per sequence and offset the likeliest tokens: log-probabilities and target ids, (B, d, k), best first."""
        self._read(new)
        c, device = self.config, self.view.device
        m = c.d + 1
        prefixes = [self._prefixes[one.slot] for one in new]
        roots = torch.stack([one.history[-1] for one in new]).to(device)
        embedded = self.view.embed(roots)[:, None].to(self._masks.dtype)
        x = torch.cat((embedded, self._masks.expand(len(new), -1, -1)), dim=1).flatten(0, 1)
        starts = torch.tensor([p[0].length for p in prefixes], device=device)
        positions = (starts[:, None] + torch.arange(m, device=device)).flatten()
        for number, layer in enumerate(self._layers):
            q, k, v = layer.queries_keys_values(layer.input_norm(x), positions, self._rope)
            attended = []
            for i, own in enumerate(prefixes):
                prefix, span = own[number], slice(i * m, (i + 1) * m)
                prefix.store(prefix.length, k[span], v[span])  # behind the context, and overwritten next time
                attended.append(layer.attend(q[span], prefix, prefix.length + m))
            x = layer.finish(x, torch.cat(attended))
        x = x.view(len(new), m, -1)[:, 1:].reshape(len(new) * c.d, -1)
        log_probs, index = self._head.likeliest(self._final_norm(x), c.top_k)
        return log_probs.view(len(new), c.d, -1), self._ids[index].view(len(new), c.d, -1)

    def _read(self, new: Sequence[Committed]) -> None:
        """The features of what was committed, into the context of every layer; all sequences' rows in one product."""
        c, device = self.config, self.view.device
        parts: list[tuple[list[Prefix], Tensor]] = []
        for one in new:
            if one.slot not in self._prefixes:
                self._prefixes[one.slot] = [
                    Prefix(c.num_key_value_heads, c.head_dim, self.view.dtype, device) for _ in self._layers
                ]
            prefixes = self._prefixes[one.slot]
            features, _ = news(one, prefixes[0].length, len(c.taps), c.target_hidden_size)
            parts += [(prefixes, features[at : at + CHUNK_ROWS]) for at in range(0, len(features), CHUNK_ROWS)]
        while parts:
            taken: list[tuple[list[Prefix], Tensor]] = []
            while parts and (not taken or sum(len(f) for _, f in taken) + len(parts[0][1]) <= CHUNK_ROWS):
                taken.append(parts.pop(0))
            context = self._context_norm(self._fc(torch.cat([f for _, f in taken]).to(device, self.view.dtype)))
            begins, reached = [], dict[int, int]()
            for prefixes, f in taken:
                begins.append(reached.get(id(prefixes), prefixes[0].length))
                reached[id(prefixes)] = begins[-1] + len(f)
            positions = torch.cat([torch.arange(b, b + len(f)) for b, (_, f) in zip(begins, taken, strict=True)])
            for number, layer in enumerate(self._layers):
                keys, values = layer.keys_values(context, positions.to(device), self._rope)
                at = 0
                for begin, (prefixes, f) in zip(begins, taken, strict=True):
                    prefixes[number].store(begin, keys[at : at + len(f)], values[at : at + len(f)])
                    prefixes[number].length = begin + len(f)
                    at += len(f)


def load(source: Config | DFlashNet | Path | str, view: TargetView) -> DFlashDrafter:
    """The drafter of a folder or of a network: see `checked_net`."""
    return DFlashDrafter(checked_net(source, DFlashNet, view), view)
