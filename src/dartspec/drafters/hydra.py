"""Hydra: heads on the target's last hidden state, each of which also sees the tokens drafted before it.

Source: arXiv 2402.05109. Head t reads the state that predicted the last committed token, the embedding of that token
and those of the t - 1 tokens drafted behind it, side by side; a residual block narrows them to one width, further
blocks and a linear layer of its own follow. Hydra++ adds a decoder layer over the states of the whole text in front
(`prefix`), and more blocks. Since a head depends on the path, the tree grows level by level, as EAGLE-2's does: best
leaves expanded, best of all kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dartspec.drafters._checkpoint import FINAL, DraftNet, LayerConfig, NetConfig, checked_net
from dartspec.drafters._grow import Growth
from dartspec.drafters._nn import (
    Head,
    LlamaLayer,
    Norm,
    PackedLayer,
    Prefix,
    Product,
    RMSNorm,
    RopeTable,
    attend_rows,
    news,
    news_of_last,
    rope_table,
    rotate,
    use_core,
)
from dartspec.drafters._train import Batch, Predicted, Start, copy_fitting, copy_head, draw
from dartspec.errors import DartspecError
from dartspec.types import Committed, TargetView, TokenTree

CHUNK_ROWS = 512  # rows a product while much text is read


@dataclass(frozen=True, kw_only=True)
class Config(LayerConfig):
    """Hydra's heads; `config.json` beside their weights.

    d:          heads. num_blocks: residual blocks of each. prefix: Hydra++'s decoder layer over the states.
    top_k:      children of a node, and nodes of a level that are expanded.
    head_bias:  the heads' last layers have a bias (the official ones do).
    """

    title: ClassVar[str] = "Hydra"
    name: ClassVar[str] = "hydra"
    sizes: ClassVar[tuple[str, ...]] = (*LayerConfig.sizes, "num_blocks", "top_k")
    settings: ClassVar[tuple[str, ...]] = ("d", "top_k")

    num_blocks: int = 1
    prefix: bool = False
    top_k: int = 10
    head_bias: bool = False

    def _check_taps(self) -> None:
        self.refuse_unless(self.taps == (FINAL,), f"taps is {list(self.taps)}; heads read the last state, [{FINAL}]")


class HydraBlock(nn.Module):
    """x + silu(linear(x)); the first of a head narrows, so its way around is a layer too."""

    def __init__(self, size: int, num_inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs * size, size)
        if num_inputs > 1:
            self.res_connection = nn.Linear(num_inputs * size, size)

    def forward(self, x: Tensor) -> Tensor:
        around: Tensor = self.res_connection(x) if hasattr(self, "res_connection") else x
        return around + nn.functional.silu(self.linear(x))


class HydraHead(nn.Module):
    def __init__(self, c: Config, number: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HydraBlock(c.hidden_size, number + 2 if i == 0 else 1) for i in range(c.num_blocks))
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=c.head_bias)

    def states(self, x: Tensor) -> Tensor:
        """(n, (t + 1) * H) -> (n, H), ready for the last layer."""
        for block in self.blocks:
            x = block(x)
        return x


class HydraPrefix(nn.Module):
    """A decoder layer and its norm over the target's last states."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.layer = LlamaLayer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class HydraNet(DraftNet):
    """heads.{t}.blocks.{i}.linear / res_connection, heads.{t}.lm_head, and with `prefix` prefix.layer, prefix.norm."""

    config_class = Config
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(HydraHead(config, i) for i in range(config.d))
        if config.prefix:
            self.prefix = HydraPrefix(config)

    def use(self, config: NetConfig) -> None:
        """The first `d` heads."""
        super().use(config)
        self.heads = self.heads[: config.d]

    @property
    def by_vocabulary(self) -> tuple[str, ...]:
        names = [f"heads.{i}.lm_head.weight" for i in range(self.config.d)]
        return (*names, *(n.replace("weight", "bias") for n in names if self.config.head_bias))

    def head(self, t: int) -> HydraHead:
        """The head of offset t, from 1."""
        head = self.heads[t - 1]
        assert isinstance(head, HydraHead)
        return head


# --- training -------------------------------------------------------------------------------------------------------


def start(s: Start) -> HydraNet:
    """Heads start as the target's own on the state alone; the prefix layer from the target's last where it fits."""
    net = HydraNet(s.config(Config, (FINAL,), ("num_blocks", "prefix", "top_k")))
    c = net.config
    draw(net, s)
    with torch.no_grad():
        for t in range(1, c.d + 1):
            for block in net.head(t).blocks:
                assert isinstance(block, HydraBlock)
                block.linear.weight.zero_()
                block.linear.bias.zero_()
                if hasattr(block, "res_connection"):
                    block.res_connection.bias.zero_()
                    block.res_connection.weight[:, : c.hidden_size] = torch.eye(c.hidden_size)
            copy_head(net.head(t).lm_head.weight, s)
        if c.prefix:
            copy_fitting(net.prefix.layer, s.layer(s.num_layers - 1))
    return net


def read(folder: Path) -> HydraNet:
    return HydraNet.from_folder(folder)


def loss(net: HydraNet, batch: Batch) -> Any:
    """Offset 1 at the `first` rows and the anchors, later offsets at the anchors; true tokens stand in for drafts."""
    c = net.config
    if c.head_bias:
        raise DartspecError("Hydra heads with a bias are for loading only: train without")
    states = [_prefixed(net, s.features[:, 0]) if c.prefix else s.features[:, 0] for s in batch.sequences]
    predicted = []
    for t in range(1, c.d + 1):
        inputs, rows = [], []
        for s, state, base in zip(batch.sequences, states, batch.starts, strict=True):
            wanted = torch.cat((s.first, s.anchors)) if t == 1 else s.anchors
            known = [batch.embed(s.known(wanted, i)).to(state.dtype) for i in range(1, t + 1)]
            inputs.append(torch.cat((state[wanted], *known), dim=-1))
            rows.append(base + wanted)
        head, row = net.head(t), torch.cat(rows)
        predicted.append(Predicted(head.states(torch.cat(inputs)), head.lm_head.weight, row, torch.full_like(row, t)))
    return batch.loss(predicted)


def _prefixed(net: HydraNet, states: Tensor) -> Tensor:
    """(T, H) last states of a whole sequence -> (T, H)."""
    layer, c, here = net.prefix.layer, net.config, torch.arange(len(states), device=states.device)
    cos, sin = (x[:, None] for x in rope_table(here, c.head_dim, c.rope_theta))
    x = layer.input_layernorm(states)
    q = rotate(layer.queries(x), cos, sin)
    q = q.view(len(x), c.num_key_value_heads, -1, c.head_dim).permute(1, 2, 0, 3)
    k, v = rotate(layer.keys(x), cos, sin).transpose(0, 1), layer.values(x).transpose(0, 1)
    out = attend_rows(q, k, v, here[None, :] <= here[:, None])
    done: Tensor = net.prefix.norm(layer.finish(states, out.permute(2, 0, 1, 3).reshape(len(x), -1)))
    return done


# --- decoding -------------------------------------------------------------------------------------------------------


class HydraDrafter:
    """Drafts for any number of sequences: each level is one product over the expanded nodes of all of them.

    net: its weights are copied, in the target's dtype and on its device.
    search_ms: milliseconds spent on the trees so far; the engine shows it as a stage of its own.
    """

    def __init__(self, net: HydraNet, view: TargetView) -> None:
        self.config = c = net.config
        self.taps = c.taps
        self.view = view
        self.search_ms = 0.0
        self._prefixes: dict[int, Prefix] = {}
        with torch.no_grad():
            net = net.converted(view.dtype, view.device)
            threads, packed = torch.get_num_threads(), use_core(view.device, view.dtype)
            ids = net.target_ids().to(torch.int32)
            self._ids = ids.cpu()
            heads = [net.head(t) for t in range(1, c.d + 1)]
            self._blocks = [[_Block(b, packed, threads) for b in h.blocks if isinstance(b, HydraBlock)] for h in heads]
            self._heads = [
                Head(h.lm_head.weight, ids >= view.num_tokens, packed, threads, h.lm_head.bias) for h in heads
            ]
            self._layer = PackedLayer(net.prefix.layer, packed, threads) if c.prefix else None
            self._norm = Norm(net.prefix.norm, packed) if c.prefix else None
        self._rope = RopeTable(c.head_dim, c.rope_theta, view.device)

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._prefixes.pop(slot, None)

    def fork(self, source: int, target: int, length: int) -> None:
        """See `types.Forks`: without the prefix layer the last state is all that is read."""
        if self.config.prefix:
            self._prefixes[target] = self._prefixes[source].beginning(length)

    @torch.inference_mode()
    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        """One tree a sequence. `new[i].features` are the target's last states, behind its final norm."""
        if not new:
            return []
        states = torch.stack([self._state(one) for one in new])
        roots = torch.stack([one.history[-1] for one in new])
        width = min(self.config.top_k, max(1, *budget))
        growth = Growth(roots.tolist(), budget, width, self.view.eos_token_ids)
        if max(budget) > 0:
            self._grow(growth, states, roots, width)
        began = time.perf_counter()
        trees = growth.trees()
        self.search_ms += 1e3 * (time.perf_counter() - began)
        return trees

    def _grow(self, growth: Growth, states: Tensor, roots: Tensor, width: int) -> None:
        device, batch = self.view.device, len(states)
        # (B, w, (t + 1) * H): the state and the embeddings down to each expanded node
        x = torch.cat((states, self._embed(roots)), dim=-1)[:, None]
        for t, (blocks, head) in enumerate(zip(self._blocks, self._heads, strict=True)):
            if t:
                began = time.perf_counter()
                chosen = growth.choose()
                self.search_ms += 1e3 * (time.perf_counter() - began)
                if chosen is None:
                    break
                tokens, parents = chosen
                embedded = self._embed(tokens.flatten()).view(batch, tokens.shape[1], -1)
                x = torch.cat((x[torch.arange(batch, device=device)[:, None], parents.to(device)], embedded), dim=-1)
            y = x.flatten(0, 1)
            for block in blocks:
                y = block(y)
            log_probs, index = head.likeliest(y, width)
            shape = (batch, x.shape[1], -1)
            growth.add(log_probs.view(shape), self._ids[index].view(shape))

    def _embed(self, ids: Tensor) -> Tensor:
        return self.view.embed(ids.to(self.view.device)).to(self.view.dtype)

    def _state(self, one: Committed) -> Tensor:
        """(H,) what the heads read of a sequence."""
        c, dtype, device = self.config, self.view.dtype, self.view.device
        if self._layer is None or self._norm is None:
            return news_of_last(one, c.target_hidden_size).to(device, dtype)
        if one.slot not in self._prefixes:
            self._prefixes[one.slot] = Prefix(c.num_key_value_heads, c.head_dim, dtype, device)
        prefix = self._prefixes[one.slot]
        states, _ = news(one, prefix.length, 1, c.target_hidden_size)
        states = states.to(device, dtype)
        last = len(states) - 1
        for at in range(0, last, CHUNK_ROWS):
            rows = states[at : min(at + CHUNK_ROWS, last)]
            x = self._layer.input_norm(rows)
            positions = torch.arange(prefix.length, prefix.length + len(rows), device=device)
            prefix.store(prefix.length, *self._layer.keys_values(x, positions, self._rope))
            prefix.length += len(rows)
        x = self._layer.input_norm(states[last:])
        position = torch.tensor([prefix.length], device=device)
        q, k, v = self._layer.queries_keys_values(x, position, self._rope)
        prefix.store(prefix.length, k, v)
        prefix.length += 1
        return self._norm(self._layer.finish(states[last:], self._layer.attend(q, prefix, prefix.length)))[0]


class _Block:
    """A `HydraBlock` for decoding."""

    def __init__(self, block: HydraBlock, packed: bool, num_threads: int) -> None:
        around = getattr(block, "res_connection", None)
        linears = [block.linear] if around is None else [block.linear, around]
        self._product = Product([linear.weight for linear in linears], packed, num_threads)
        self._bias = torch.cat([linear.bias for linear in linears])
        self._narrows = around is not None

    def __call__(self, x: Tensor) -> Tensor:
        y = self._product(x) + self._bias
        if not self._narrows:
            return x + nn.functional.silu(y)
        inner, around = y.chunk(2, dim=-1)
        return around + nn.functional.silu(inner)


def load(source: Config | HydraNet | Path | str, view: TargetView) -> HydraDrafter:
    """The drafter of a folder or of a network: see `checked_net`."""
    return HydraDrafter(checked_net(source, HydraNet, view), view)
