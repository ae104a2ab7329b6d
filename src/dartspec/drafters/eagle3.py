"""EAGLE-3: one decoder layer that drafts token by token, a dynamic tree, features fused from three taps.

Source: arXiv 2503.01840; the tree is EAGLE-2's (arXiv 2406.16858). Row j of the layer's input holds the projected
features of token j and the embedding of token j + 1, and its output predicts token j + 2. Where the target has not been
yet, a row's features are the output of the row before it, not normed: so the layer drafts on from its own guesses, one
forward a level. In training the same is unrolled ("training-time test"): step s of a row sees its clean prefix and its
own steps up to s. The layer is DART's, without the masks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dartspec.drafters._checkpoint import DraftNet, LayerConfig, NetConfig, checked_net
from dartspec.drafters._grow import Growth
from dartspec.drafters._nn import (
    FusedLayer,
    Gated,
    Head,
    Norm,
    Prefix,
    Product,
    RMSNorm,
    RopeTable,
    attend_groups,
    attend_rows,
    news,
    rope_table,
    rotate,
    use_core,
)
from dartspec.drafters._train import Batch, Predicted, Start, copy_head, default_taps, draw, start_fused
from dartspec.target.attention import attend
from dartspec.types import Committed, TargetView, TokenTree

CHUNK_ROWS = 512  # rows a product while much text is read


@dataclass(frozen=True, kw_only=True)
class Config(LayerConfig):
    """An EAGLE-3 drafter's shape and what it was trained for; `config.json` beside its weights.

    d:     levels of the tree, one forward each; steps unrolled in training. The official program has 8.
    top_k: children of a node, and nodes of a level that are expanded.
    norm_before_residual: the residual is the normed features (an option of `speculators`).
    own_embedding: the checkpoint brings its input embedding; otherwise it is the target's.
    """

    title: ClassVar[str] = "EAGLE-3"
    name: ClassVar[str] = "eagle3"
    sizes: ClassVar[tuple[str, ...]] = (*LayerConfig.sizes, "top_k")
    settings: ClassVar[tuple[str, ...]] = ("d", "top_k")

    top_k: int = 10
    norm_before_residual: bool = False
    own_embedding: bool = False


class Eagle3Net(DraftNet):
    """The network, with the tensor names of `speculators`; SafeAILab's say `midlayer.` for `layers.0.`."""

    config_class = Config
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        c = config
        self.fc = nn.Linear(len(c.taps) * c.target_hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([FusedLayer(c, c.norm_before_residual)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)

    @property
    def layer(self) -> FusedLayer:
        layer = self.layers[0]
        assert isinstance(layer, FusedLayer)
        return layer

    def use(self, config: NetConfig) -> None:
        """Any number of levels: the layer goes on from its own outputs."""
        self.config = config  # type: ignore[assignment]

    @classmethod
    def from_tensors(cls, config: NetConfig, found: dict[str, Tensor], path: Path) -> Eagle3Net:
        """`midlayer.` is read as `layers.0.`."""
        found = {n.replace("midlayer.", "layers.0.", 1): t for n, t in found.items()}
        return super().from_tensors(config, found, path)


# --- training -------------------------------------------------------------------------------------------------------


def start(s: Start) -> Eagle3Net:
    """Fresh weights: the target's last layer where it fits, its head rows, the rest at random."""
    net = Eagle3Net(s.config(Config, s.taps or default_taps(s.num_layers), ("top_k",)))
    draw(net, s)
    start_fused(net.layer, net.fc, s)
    copy_head(net.lm_head.weight, s)
    return net


def read(folder: Path) -> Eagle3Net:
    return Eagle3Net.from_folder(folder)


def loss(net: Eagle3Net, batch: Batch) -> Any:
    """Offset 1 from the target's features; each later offset of an anchor from the outputs before it, with gradient."""
    c, layer, attn = net.config, net.layer, net.layer.self_attn
    heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def by_head(x: Tensor, n: int) -> Tensor:
        return x.view(-1, n, dim)

    def grouped(q: Tensor) -> Tensor:  # (n, heads, dim) -> (kv, group, n, dim)
        return q.view(-1, kv, heads // kv, dim).permute(1, 2, 0, 3)

    hidden, rows, offsets = [], [], []
    for s, base in zip(batch.sequences, batch.starts, strict=True):
        length = len(s.ids) - 1
        cos, sin = rope_table(torch.arange(length + c.d, device=s.ids.device), dim, c.rope_theta)
        features = net.fc(s.features[:-1].flatten(1))
        x = layer.inputs(batch.embed(s.ids[1:]), features)
        keys = rotate(by_head(attn.k_proj(x), kv), cos[:length, None], sin[:length, None]).transpose(0, 1)
        values = by_head(attn.v_proj(x), kv).transpose(0, 1)  # (kv, T - 1, dim)
        here = torch.arange(length, device=s.ids.device)
        asked = torch.cat((s.first, s.anchors))
        q = rotate(by_head(attn.q_proj(x[asked]), heads), cos[asked][:, None], sin[asked][:, None])
        out = attend_rows(grouped(q), keys, values, here[None, :] <= asked[:, None])
        out = layer.finish(features[asked], out.permute(2, 0, 1, 3).reshape(len(asked), heads * dim))
        hidden.append(out)
        rows.append(base + asked)
        offsets.append(torch.ones_like(asked))

        carried, own_k, own_v = out[len(s.first) :], list[Tensor](), list[Tensor]()  # (A, H)
        seen = here[None, :] <= s.anchors[:, None]
        for step in range(1, c.d):
            x = layer.inputs(batch.embed(s.known(s.anchors, 1 + step)), carried)
            at = s.anchors + step
            cos_at, sin_at = cos[at][:, None], sin[at][:, None]
            q = rotate(by_head(attn.q_proj(x), heads), cos_at, sin_at)
            own_k.append(rotate(by_head(attn.k_proj(x), kv), cos_at, sin_at).transpose(0, 1))
            own_v.append(by_head(attn.v_proj(x), kv).transpose(0, 1))  # (kv, A, dim)
            out = attend_groups(
                grouped(q)[:, :, :, None],
                keys,
                values,
                seen,
                torch.stack(own_k, dim=2),
                torch.stack(own_v, dim=2),
                torch.ones(1, step, dtype=torch.bool, device=s.ids.device),
            )
            carried = layer.finish(carried, out[:, :, :, 0].permute(2, 0, 1, 3).reshape(len(at), heads * dim))
            hidden.append(carried)
            rows.append(base + s.anchors)
            offsets.append(torch.full_like(s.anchors, 1 + step))
    normed = net.norm(torch.cat(hidden))
    return batch.loss([Predicted(normed, net.lm_head.weight, torch.cat(rows), torch.cat(offsets))])


# --- decoding -------------------------------------------------------------------------------------------------------


class Eagle3Drafter:
    """Drafts for any number of sequences: each level is one forward over the expanded nodes of all of them.

    net:       its weights are copied, in the target's dtype and on its device.
    search_ms: milliseconds spent on the trees so far; the engine shows it as a stage of its own.
    """

    def __init__(self, net: Eagle3Net, view: TargetView) -> None:
        self.config = c = net.config
        self.taps = c.taps
        self.view = view
        self.search_ms = 0.0
        self._prefixes: dict[int, Prefix] = {}
        dtype, device = view.dtype, view.device
        with torch.no_grad():
            net = net.converted(dtype, device)
            threads = self._threads = torch.get_num_threads()
            packed = use_core(device, dtype)
            layer, attn = net.layer, net.layer.self_attn
            self._embed = net.embed_tokens if c.own_embedding else view.embed
            self._fc = Product([net.fc.weight], packed, threads)
            self._qkv = Product([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight], packed, threads)
            self._kv = Product([attn.k_proj.weight, attn.v_proj.weight], packed, threads)
            self._q = Product([attn.q_proj.weight], packed, threads)
            self._o = Product([attn.o_proj.weight], packed, threads)
            self._mlp = Gated(layer.mlp, packed, threads)
            ids = net.target_ids().to(torch.int32)
            self._ids = ids.cpu()
            self._head = Head(net.lm_head.weight, ids >= view.num_tokens, packed, threads)
            self._embedding_norm = Norm(layer.input_layernorm, packed)
            self._feature_norm = Norm(layer.hidden_norm, packed)
            self._mlp_norm, self._final_norm = Norm(layer.post_attention_layernorm, packed), Norm(net.norm, packed)
        self._rope = RopeTable(c.head_dim, c.rope_theta, device)

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._prefixes.pop(slot, None)

    def fork(self, source: int, target: int, length: int) -> None:
        """See `types.Forks`: row p holds the features of position p and the token at p + 1."""
        self._prefixes[target] = self._prefixes[source].beginning(length)

    @torch.inference_mode()
    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        """One tree a sequence. `new[i].features` are the target's states at `taps`, unnormed, as hooks gave them."""
        if not new:
            return []
        x = self._read(new)
        width = min(self.config.top_k, max(1, *budget))
        growth = Growth([int(one.history[-1]) for one in new], budget, width, self.view.eos_token_ids)
        if max(budget) > 0:
            self._grow(growth, new, x, width)
        began = time.perf_counter()
        trees = growth.trees()
        self.search_ms += 1e3 * (time.perf_counter() - began)
        return trees

    def _read(self, new: Sequence[Committed]) -> Tensor:
        """The committed rows into their prefixes; (B, H) each sequence's output at its last row, not normed."""
        c = self.config
        prefixes = [self._prefix(one.slot) for one in new]
        told = [
            news(one, prefix.length, len(c.taps), c.target_hidden_size)
            for one, prefix in zip(new, prefixes, strict=True)
        ]
        lasts: list[tuple[Tensor, Tensor]] = []
        pending: list[tuple[Prefix, Tensor, Tensor]] = []
        for prefix, (features, ids) in zip(prefixes, told, strict=True):
            for at in range(0, len(ids) - CHUNK_ROWS, CHUNK_ROWS):  # long text by itself, the rest of all together
                self._keys([(prefix, features[at : at + CHUNK_ROWS], ids[at : at + CHUNK_ROWS])])
            rest = (len(ids) - 1) // CHUNK_ROWS * CHUNK_ROWS
            pending.append((prefix, features[rest:], ids[rest:]))
        lasts = self._keys(pending)
        residual = torch.stack([r for r, _ in lasts])
        positions = torch.tensor([p.length - 1 for p in prefixes], device=self.view.device)
        q = self._q(torch.stack([x for _, x in lasts])).view(len(new), c.num_attention_heads, c.head_dim)
        q = self._rope.turn(q, positions)
        attended = torch.cat([self._attend(q[i : i + 1], p, p.length, None) for i, p in enumerate(prefixes)])
        return self._finish(residual, attended)

    def _prefix(self, slot: int) -> Prefix:
        c = self.config
        if slot not in self._prefixes:
            self._prefixes[slot] = Prefix(c.num_key_value_heads, c.head_dim, self.view.dtype, self.view.device)
        return self._prefixes[slot]

    def _keys(self, parts: Sequence[tuple[Prefix, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of clean rows, all parts in one product; per part its last row's residual and input."""
        c, device = self.config, self.view.device
        sizes = [len(ids) for _, _, ids in parts]
        features = self._fc(torch.cat([f for _, f, _ in parts]).to(device, self.view.dtype))
        x = self._inputs(torch.cat([ids for _, _, ids in parts]).to(device), features)
        kv = self._kv(x).view(-1, 2, c.num_key_value_heads, c.head_dim)
        positions = torch.cat([torch.arange(p.length, p.length + n) for (p, _, _), n in zip(parts, sizes, strict=True)])
        keys = self._rope.turn(kv[:, 0], positions.to(device))
        at = 0
        for (prefix, _, _), n in zip(parts, sizes, strict=True):
            prefix.store(prefix.length, keys[at : at + n], kv[at : at + n, 1])
            prefix.length += n
            at += n
        ends = torch.tensor(sizes).cumsum(0) - 1
        return [(features[e], x[e]) for e in ends.tolist()]

    def _inputs(self, ids: Tensor, features: Tensor) -> Tensor:
        """(n,) ids, (n, H) features -> (n, 2H)."""
        H = self.config.hidden_size
        x = torch.empty(len(ids), 2 * H, dtype=features.dtype, device=features.device)
        self._embedding_norm(self._embed(ids).to(features.dtype), out=x[:, :H])
        self._feature_norm(features, out=x[:, H:])
        return x

    def _attend(self, q: Tensor, prefix: Prefix, length: int, mask: Tensor | None) -> Tensor:
        """(n, heads, dim) queries over the first `length` keys under mask (n, length) -> (n, heads * dim)."""
        out = attend(
            q.transpose(0, 1)[None],
            prefix.keys[None, :, :length],
            prefix.values[None, :, :length],
            None if mask is None else mask[None, None],
            num_threads=self._threads,
        )
        return out.view(len(q), -1)

    def _finish(self, features: Tensor, attended: Tensor) -> Tensor:
        """(n, H) features and attention output -> (n, H), not normed."""
        residual = self._feature_norm(features) if self.config.norm_before_residual else features
        x = residual + self._o(attended)
        x += self._mlp(self._mlp_norm(x))
        return x

    def _likeliest(self, x: Tensor, shape: tuple[int, int], k: int) -> tuple[Tensor, Tensor]:
        log_probs, index = self._head.likeliest(self._final_norm(x), k)
        return log_probs.view(*shape, -1), self._ids[index].view(*shape, -1)

    def _grow(self, growth: Growth, new: Sequence[Committed], x: Tensor, width: int) -> None:
        """Level by level until nothing more can enter a tree, or `d` levels. The nodes' keys lie behind the prefix."""
        c, device = self.config, self.view.device
        heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        batch = len(new)
        prefixes = [self._prefixes[one.slot] for one in new]
        for prefix in prefixes:
            prefix.reserve(prefix.length + c.d * width)  # moving later would lose the nodes' keys
        growth.add(*self._likeliest(x, (batch, 1), width))
        x = x[:, None]  # (B, w, H) of the nodes expanded last
        own = torch.zeros(batch, 1, 0, dtype=torch.bool)  # (B, w, scratch rows) what each of them sees, itself included
        for level in range(1, c.d):
            began = time.perf_counter()
            chosen = growth.choose()
            self.search_ms += 1e3 * (time.perf_counter() - began)
            if chosen is None:
                break
            tokens, parents = chosen
            w = tokens.shape[1]
            each = torch.arange(batch)[:, None]
            features = x[each.to(device), parents.to(device)].flatten(0, 1)
            own = torch.cat((own[each, parents], torch.eye(w, dtype=torch.bool).expand(batch, w, w)), dim=2)
            qkv = self._qkv(self._inputs(tokens.flatten().to(device), features)).view(batch * w, heads + 2 * kv, dim)
            positions = torch.tensor([p.length + level - 1 for p in prefixes], device=device).repeat_interleave(w)
            turned = self._rope.turn(qkv[:, : heads + kv], positions)
            attended = []
            for i, prefix in enumerate(prefixes):
                span = slice(i * w, (i + 1) * w)
                length = prefix.length + own.shape[2]
                prefix.store(length - w, turned[span, heads:], qkv[span, heads + kv :])
                mask = torch.ones(w, length, dtype=torch.bool)
                mask[:, prefix.length :] = own[i]
                attended.append(self._attend(turned[span, :heads], prefix, length, mask.to(device)))
            x = self._finish(features, torch.cat(attended))
            growth.add(*self._likeliest(x, (batch, w), width))
            x = x.view(batch, w, -1)


def load(source: Config | Eagle3Net | Path | str, view: TargetView) -> Eagle3Drafter:
    """The drafter of a folder or of a network: see `checked_net`."""
    return Eagle3Drafter(checked_net(source, Eagle3Net, view), view)
