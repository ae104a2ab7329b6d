"""Who may see whom in a prefix-shared pass (DART, arXiv 2601.19278, section 3.3): one rule, and three ways to attend.

Clean rows of several sequences lie end to end, groups of masks behind them. A clean row sees the clean rows of its
sequence up to itself; a mask sees the clean rows up to its anchor, and the masks of its own group up to itself. What a
row is (sequence, group, position, last clean row seen) says it all.

* `dense`: the rule as an (n, n) matrix; the reference.
* `flex`: the rule as it stands, compiled into FlexAttention, which skips blocks that nobody may see. For CUDA: torch
  has no backward of it for the CPU.
* the block form (`attend_rows` and `attend_groups` in `_nn`, called by the network): clean prefix and own group apart,
  joined in one softmax. It computes the pairs that are allowed and the rest of a rectangle around them; for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Layout(NamedTuple):
    """All rows of a pass, (n,) int64 each.

    sequence: which one. group: of masks, -1 for clean rows. position: in the sequence; masks run on from their anchor.
    last: the last clean row, by its position, that the row may see; a clean row's own.
    """

    sequence: Tensor
    group: Tensor
    position: Tensor
    last: Tensor

    def may_see(self, query: Any, key: Any) -> Tensor:
        """The rule, for row numbers of any shapes that broadcast."""
        clean = (self.group[key] < 0) & (self.position[key] <= self.last[query])
        own = (self.group[key] == self.group[query]) & (self.position[key] <= self.position[query])
        return (self.sequence[key] == self.sequence[query]) & (clean | own)

    def matrix(self) -> Tensor:
        """(n, n) bool."""
        rows = torch.arange(len(self.group), device=self.group.device)
        return self.may_see(rows[:, None], rows[None, :])


def layout(lengths: Sequence[int], groups: Sequence[tuple[Sequence[Tensor], int]]) -> Layout:
    """Clean rows of sequences of these lengths, then, for each (anchors by sequence, number of masks), the masks of
    every anchor, sequence after sequence."""
    device = groups[0][0][0].device
    clean = torch.cat([torch.arange(n, device=device) for n in lengths])
    number = torch.arange(len(lengths), device=device)
    sequence = [number.repeat_interleave(torch.tensor(list(lengths), device=device))]
    group, position, last, taken = [torch.full_like(clean, -1)], [clean], [clean], 0
    for anchors, num_masks in groups:
        flat = torch.cat(list(anchors))
        of = number.repeat_interleave(torch.tensor([len(a) for a in anchors], device=device))
        own = torch.arange(1, num_masks + 1, device=device)
        sequence.append(of.repeat_interleave(num_masks))
        group.append((taken + torch.arange(len(flat), device=device)).repeat_interleave(num_masks))
        position.append((flat[:, None] + own).flatten())
        last.append(flat.repeat_interleave(num_masks))
        taken += len(flat)
    return Layout(*(torch.cat(parts) for parts in (sequence, group, position, last)))


def attend_dense(q: Tensor, k: Tensor, v: Tensor, rows: Layout) -> Tensor:
    """q (n, heads, dim), k and v (n, kv, dim) -> (n, heads, dim)."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=rows.matrix(), enable_gqa=True)
    return out[0].transpose(0, 1)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, rows: Layout) -> Tensor:
    """The same by FlexAttention; compiled on CUDA, as it stands (forward only) on the CPU."""
    flex, block_mask = _flex(q.device.type)
    n = len(q)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rows.may_see(query, key)

    mask = block_mask(mask_mod, None, None, n, n, device=str(q.device))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out: Tensor = flex(q, k, v, block_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


@cache
def _flex(device: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device == "cpu":
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)
