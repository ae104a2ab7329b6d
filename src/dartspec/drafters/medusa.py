"""Medusa: several heads on the target's last hidden state, each for one position further on; no drafter layer.

Source: arXiv 2401.10774, Medusa-1. The state that predicted the last committed token also guesses the `d` tokens
after it: head t is a few residual blocks x + silu(W x + b) and a linear layer of its own. The guesses are independent
of one another, so the tree is a product of their likeliest tokens: the best paths by probability, or a fixed shape of
ranks (`choices`, the paper's static tree).

The paper's typical acceptance changes what the target would have written. It is off unless the setting `typical` asks
for it, with a warning, and what it writes is marked lossy.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dartspec.drafters._checkpoint import FINAL, DraftNet, NetConfig, checked_net
from dartspec.drafters._grow import best_first
from dartspec.drafters._nn import Head, Product, news_of_last, use_core
from dartspec.drafters._train import Batch, Predicted, Start, copy_head, draw
from dartspec.tree import merge_paths
from dartspec.types import Committed, TargetView, TokenTree


@dataclass(frozen=True, kw_only=True)
class Config(NetConfig):
    """Medusa's heads; `config.json` beside their weights.

    d:       heads. num_blocks: residual blocks of each.
    top_k:   tokens of a head that are considered.
    choices: a fixed tree as paths of ranks, best first: (0, 2) is the second head's third choice under the first's
             first. Empty: the likeliest paths, which is what such a tree approximates.
    typical: LOSSY: the threshold epsilon of the paper's typical acceptance; None keeps the target's text.
    """

    title: ClassVar[str] = "Medusa"
    name: ClassVar[str] = "medusa"
    sizes: ClassVar[tuple[str, ...]] = (*NetConfig.sizes, "num_blocks", "top_k")
    settings: ClassVar[tuple[str, ...]] = ("d", "top_k", "typical")

    num_blocks: int = 1
    top_k: int = 10
    choices: tuple[tuple[int, ...], ...] = ()
    typical: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_unless(
            self.typical is None or (isinstance(self.typical, float) and 0 < self.typical < 1),
            f"typical is {self.typical!r}; must be a threshold between 0 and 1, or null",
        )
        object.__setattr__(self, "choices", tuple(tuple(path) for path in self.choices))
        known: set[tuple[int, ...]] = {()}
        for path in self.choices:
            good = all(type(rank) is int and 0 <= rank < self.top_k for rank in path)
            self.refuse_unless(
                good and 1 <= len(path) <= self.d and path[:-1] in known,
                f"choices has {list(path)}; a path has 1 to {self.d} ranks below {self.top_k} and stands behind its "
                "beginning",
            )
            known.add(path)

    def _check_taps(self) -> None:
        self.refuse_unless(self.taps == (FINAL,), f"taps is {list(self.taps)}; heads read the last state, [{FINAL}]")


class ResidualBlock(nn.Module):
    """x + silu(linear(x))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaNet(DraftNet):
    """The heads, with the tensor names of the official checkpoints behind `medusa_head.`."""

    config_class = Config
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        c = config
        self.medusa_head = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(c.hidden_size) for _ in range(c.num_blocks)),
                nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False),
            )
            for _ in range(c.d)
        )

    def use(self, config: NetConfig) -> None:
        """The first `d` heads."""
        super().use(config)
        self.medusa_head = self.medusa_head[: config.d]

    @property
    def by_vocabulary(self) -> tuple[str, ...]:
        c = self.config
        return tuple(f"medusa_head.{i}.{c.num_blocks}.weight" for i in range(c.d))

    def blocks(self, t: int) -> list[ResidualBlock]:
        """The residual blocks of offset t, from 1."""
        head = self.medusa_head[t - 1]
        assert isinstance(head, nn.Sequential)
        return [block for block in head if isinstance(block, ResidualBlock)]

    def head_weight(self, t: int) -> Tensor:
        head = self.medusa_head[t - 1]
        assert isinstance(head, nn.Sequential)
        weight = head[-1].weight
        assert isinstance(weight, Tensor)
        return weight


# --- training -------------------------------------------------------------------------------------------------------


def start(s: Start) -> MedusaNet:
    """As in the paper: each head starts as the target's own, behind blocks that do nothing yet."""
    net = MedusaNet(s.config(Config, (FINAL,), ("num_blocks", "top_k")))
    draw(net, s)
    with torch.no_grad():
        for t in range(1, net.config.d + 1):
            for block in net.blocks(t):
                block.linear.weight.zero_()
                block.linear.bias.zero_()
            copy_head(net.head_weight(t), s)
    return net


def read(folder: Path) -> MedusaNet:
    return MedusaNet.from_folder(folder)


def loss(net: MedusaNet, batch: Batch) -> Any:
    """Offset 1 at the `first` rows and the anchors, later offsets at the anchors."""
    predicted = []
    for t in range(1, net.config.d + 1):
        wanted = [torch.cat((s.first, s.anchors)) if t == 1 else s.anchors for s in batch.sequences]
        states = torch.cat([s.features[rows, 0] for s, rows in zip(batch.sequences, wanted, strict=True)])
        for block in net.blocks(t):
            states = block(states)
        rows = torch.cat([base + rows for base, rows in zip(batch.starts, wanted, strict=True)])
        predicted.append(Predicted(states, net.head_weight(t), rows, torch.full_like(rows, t)))
    return batch.loss(predicted)


# --- decoding -------------------------------------------------------------------------------------------------------


class MedusaDrafter:
    """Drafts for any number of sequences: each head sees all their last states at once.

    net: its weights are copied, in the target's dtype and on its device.
    typical: for the engine: a lossy rule of acceptance, or None.
    """

    def __init__(self, net: MedusaNet, view: TargetView) -> None:
        self.config = c = net.config
        self.typical = c.typical
        if c.typical is not None:
            warnings.warn(
                f"typical acceptance (typical={c.typical:g}) is lossy: sampled text is no longer what the target would "
                "have written; leave the setting out to keep it",
                stacklevel=2,
            )
        self.taps = c.taps
        self.view = view
        with torch.no_grad():
            net = net.converted(view.dtype, view.device)
            threads, packed = torch.get_num_threads(), use_core(view.device, view.dtype)
            ids = net.target_ids().to(torch.int32)
            self._ids = ids.cpu()
            self._blocks = [
                [(Product([b.linear.weight], packed, threads), b.linear.bias) for b in net.blocks(t)]
                for t in range(1, c.d + 1)
            ]
            self._heads = [Head(net.head_weight(t), ids >= view.num_tokens, packed, threads) for t in range(1, c.d + 1)]

    def reset(self, slots: Sequence[int]) -> None:
        """Nothing is remembered."""

    def fork(self, source: int, target: int, length: int) -> None:
        """See `types.Forks`: the last state is all that is read."""

    @torch.inference_mode()
    def lattice(self, new: Sequence[Committed]) -> tuple[Tensor, Tensor]:
        """Per sequence and offset the likeliest tokens: log-probabilities and target ids, (B, d, k), best first."""
        states = torch.stack([news_of_last(one, self.config.target_hidden_size) for one in new])
        states = states.to(self.view.device, self.view.dtype)
        found = []
        for blocks, head in zip(self._blocks, self._heads, strict=True):
            x = states
            for product, bias in blocks:
                x = x + nn.functional.silu(product(x) + bias)
            found.append(head.likeliest(x, self.config.top_k))
        log_probs, index = (torch.stack(parts, dim=1) for parts in zip(*found, strict=True))
        return log_probs, self._ids[index]

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        """One tree a sequence. `new[i].features` are the target's last states, behind its final norm."""
        if not new:
            return []
        log_probs, tokens = self.lattice(new)
        roots = [int(one.history[-1]) for one in new]
        return [
            self._tree(root, log_probs[i], tokens[i], b) for i, (root, b) in enumerate(zip(roots, budget, strict=True))
        ]

    def _tree(self, root: int, log_probs: Tensor, tokens: Tensor, budget: int) -> TokenTree:
        ends = self.view.eos_token_ids
        if not self.config.choices:
            return best_first(root, log_probs, tokens, budget, ends, self.config.top_k)
        table, there = tokens.tolist(), torch.isfinite(log_probs).tolist()
        paths = []
        for ranks in self.config.choices:
            if all(r < len(table[i]) and there[i][r] for i, r in enumerate(ranks)):
                path = [table[i][r] for i, r in enumerate(ranks)]
                if root not in ends and not ends.intersection(path[:-1]):
                    paths.append(path)
        return merge_paths(root, paths, budget)


def load(source: Config | MedusaNet | Path | str, view: TargetView) -> MedusaDrafter:
    """The drafter of a folder or of a network: see `checked_net`."""
    return MedusaDrafter(checked_net(source, MedusaNet, view), view)
