"""From examples and target states to one packed batch: which rows are run, who teaches them, with what weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dartspec.drafters.dart import DartNet, SharedRows
from dartspec.train.data import Example, loss_mask
from dartspec.train.features import States
from dartspec.train.loss import Teacher, draft_loss


class Drawn(NamedTuple):
    """One example with its states and the rows drawn from it."""

    example: Example
    states: States
    first: Tensor  # (R,) int64 rows whose offset 1 is trained
    anchors: Tensor  # (A,) int64 rows that a mask group follows


def draw_rows(
    example: Example, *, num_first: int, num_anchors: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows with a valid offset 1 for `first`, rows with a valid offset 2 for `anchors`; all where there are few.

    Drawn without replacement, ascending. Every row is as likely as any other, so the mean over rows estimates the
    mean over all prefixes, which is the paper's loss.
    """
    valid = loss_mask(len(example.ids), example.num_prompt, 2)
    return _some(valid[:, 0], num_first, generator), _some(valid[:, 1], num_anchors, generator)


def _some(valid: Tensor, most: int, generator: torch.Generator) -> Tensor:
    rows = valid.nonzero().flatten()
    if len(rows) > most:
        rows = rows[torch.randperm(len(rows), generator=generator)[:most]].sort().values
    return rows


class Targets(NamedTuple):
    """For every predicted row: its teacher's row, its offset, and whether it counts.

    Rows stand in the order of `DartNet.shared_forward`: all first rows, then the masks, group by group.
    """

    final: Tensor  # (U, H) teacher states of all sequences, end to end
    log_norm: Tensor  # (U,)
    position: Tensor  # (n,) int64 into `final`
    offset: Tensor  # (n,) int64, 1..d
    valid: Tensor  # (n,) bool


def targets_of(batch: Sequence[Drawn], d: int) -> Targets:
    """Alignment of method.md section 3: offset t of row j is taught by the target's logits at j + t."""
    finals, norms, pos_first, pos_mask, ok_first, ok_mask = [], [], [], [], [], []
    offset = torch.arange(2, d + 1)
    base = 0
    for s in batch:
        valid = loss_mask(len(s.example.ids), s.example.num_prompt, d)
        finals.append(s.states.final)
        norms.append(s.states.log_norm)
        pos_first.append(base + s.first + 1)
        ok_first.append(valid[s.first, 0])
        # beyond the end: clamped, and not valid
        last = len(s.example.ids) - 1
        pos_mask.append(base + (s.anchors[:, None] + offset).clamp(max=last).flatten())
        ok_mask.append(valid[s.anchors, 1:].flatten())
        base += len(s.example.ids)
    n_first = sum(len(p) for p in pos_first)
    n_groups = sum(len(s.anchors) for s in batch)
    return Targets(
        torch.cat(finals),
        torch.cat(norms),
        torch.cat([*pos_first, *pos_mask]),
        torch.cat((torch.ones(n_first, dtype=torch.int64), offset.repeat(n_groups))),
        torch.cat([*ok_first, *ok_mask]),
    )


def rows_of(batch: Sequence[Drawn], embed: Callable[[Tensor], Tensor], dtype: torch.dtype) -> SharedRows:
    """Clean rows 0 .. T - 2 of each sequence: features of token j beside the embedding of token j + 1."""
    features = torch.cat([s.states.features[:-1].flatten(1) for s in batch]).to(dtype)
    ids = torch.cat([torch.tensor(s.example.ids[1:]) for s in batch])
    return SharedRows(
        features,
        embed(ids).to(dtype),
        [len(s.example.ids) - 1 for s in batch],
        [s.first for s in batch],
        [s.anchors for s in batch],
    )


class Step(NamedTuple):
    """loss: the weighted sum, to be differentiated. sums, counts: (d,) per-offset sum of row losses and valid rows."""

    loss: Tensor
    sums: Tensor
    counts: Tensor


def count_valid(targets: Targets, d: int) -> Tensor:
    """(d,) float32 valid rows at each offset."""
    return torch.bincount(targets.offset[targets.valid] - 1, minlength=d).float()


def batch_loss(
    net: DartNet,
    rows: SharedRows,
    targets: Targets,
    teacher_head: Tensor,
    offset_weight: Tensor,
    *,
    chunk: int = 256,
) -> Step:
    """One packed batch through the net and the loss.

    teacher_head: (V, H) the target's head rows of the draft vocabulary.
    offset_weight: (d,) float32, gamma^(t-1) over the number of valid rows of the whole update.
    """
    first, masks = net.shared_forward(rows)
    hidden = torch.cat((first, masks.flatten(0, 1)))
    keep = targets.valid.nonzero().flatten()
    keep = keep[targets.position[keep].argsort(stable=True)]  # neighbours then share their teacher
    offset = targets.offset[keep]
    teacher = Teacher(targets.final.to(hidden.dtype), teacher_head.to(hidden.dtype), targets.log_norm)
    loss, per_row = draft_loss(
        hidden[keep],
        net.lm_head.weight,
        teacher,
        targets.position[keep],
        offset_weight[offset - 1],
        chunk=chunk,
    )
    d = net.config.d
    sums = torch.zeros(d).index_add_(0, offset - 1, per_row.detach())
    return Step(loss, sums, count_valid(targets, d))
