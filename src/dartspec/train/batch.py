"""From examples and target states to one packed batch: which rows are run, who teaches them, with what weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dartspec.drafters._checkpoint import FINAL
from dartspec.drafters._train import Predicted, Rows
from dartspec.errors import DartspecError
from dartspec.train.data import Example, loss_mask
from dartspec.train.features import States
from dartspec.train.loss import Teacher, draft_loss
from dartspec.types import TargetView


class Drawn(NamedTuple):
    """One example with its states and the rows drawn from it."""

    example: Example
    states: States
    first: Tensor  # (R,) int64 rows whose offset 1 is trained
    anchors: Tensor  # (A,) int64 rows whose later offsets are trained


def draw_rows(
    example: Example, *, num_first: int, num_anchors: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows with a valid offset 1 for `first`, rows with a valid offset 2 for `anchors`; all where there are few.

    Drawn without replacement, ascending. Every row is as likely as any other, so the mean over rows estimates the
    mean over all prefixes, which is the paper's loss.
    """
    valid = loss_mask(example, 2)
    return _some(valid[:, 0], num_first, generator), _some(valid[:, 1], num_anchors, generator)


def _some(valid: Tensor, most: int, generator: torch.Generator) -> Tensor:
    rows = valid.nonzero().flatten()
    if len(rows) > most:
        rows = rows[torch.randperm(len(rows), generator=generator)[:most]].sort().values
    return rows


def select_taps(states: States, kept: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """(T, len(wanted), H) of states that were kept at the taps `kept`, and after the final norm."""
    if tuple(kept) == tuple(wanted):
        return states.features
    if missing := sorted(set(wanted) - {*kept, FINAL}):
        raise DartspecError(f"the drafter reads tap {missing[0]}, the states hold taps {list(kept)} and the last one")
    return torch.stack([states.final if t == FINAL else states.features[:, list(kept).index(t)] for t in wanted], dim=1)


class Sequences:
    """Drawn examples as a method sees them (`drafters._train.Batch`, but for `loss`).

    kept: taps of the states. taps: the method's. dtype: of the forward.
    """

    def __init__(
        self, drawn: Sequence[Drawn], view: TargetView, kept: Sequence[int], taps: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.drawn, self.view, self.dtype = drawn, view, dtype
        self.sequences = [
            Rows(torch.tensor(d.example.ids), select_taps(d.states, kept, taps).to(dtype), d.first, d.anchors)
            for d in drawn
        ]
        lengths = torch.tensor([0, *(len(d.example.ids) for d in drawn)])
        self.starts: list[int] = lengths.cumsum(0)[:-1].tolist()
        self._end = torch.cat([base + torch.full((n,), n) for base, n in self._spans()])  # by row: its sequence's end
        self._is_answer = torch.cat([d.example.is_answer() for d in drawn])

    def _spans(self) -> list[tuple[int, int]]:
        return [(base, len(d.example.ids)) for base, d in zip(self.starts, self.drawn, strict=True)]

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """(n,) ids -> (n, H) in the compute dtype."""
        return self.view.embed(ids).to(self.dtype)

    def taught(self, p: Predicted) -> tuple[Tensor, Tensor]:
        """Per predicted row the position of its teacher among all tokens, end to end, and whether it counts.

        Offset t of row j is taught by the target's logits at j + t, and counts where token j + 1 + t lies in an
        answer. A position beyond the end is cut to it, and does not count.
        """
        end, token = self._end[p.row], p.row + 1 + p.offset
        return (p.row + p.offset).minimum(end - 1), self._is_answer[token.minimum(end - 1)] & (token < end)

    def teacher(self, head: Tensor, dtype: torch.dtype) -> Teacher:
        final = torch.cat([d.states.final for d in self.drawn])
        return Teacher(final.to(dtype), head.to(dtype), torch.cat([d.states.log_norm for d in self.drawn]))


class Step(NamedTuple):
    """loss: the weighted sum, to be differentiated. sums, counts: (d,) per-offset sum of row losses and valid rows."""

    loss: Tensor
    sums: Tensor
    counts: Tensor


class TrainBatch(Sequences):
    """`loss` is the distillation loss of an update.

    teacher_head: (V, H) the target's head rows of the draft vocabulary.
    gamma:  weight gamma^(t-1) of offset t, each averaged over its valid rows of the whole update.
    counts: (d,) those valid rows, where the update has more batches than this one.
    """

    def __init__(
        self,
        drawn: Sequence[Drawn],
        view: TargetView,
        kept: Sequence[int],
        taps: Sequence[int],
        dtype: torch.dtype,
        teacher_head: Tensor,
        d: int,
        gamma: float,
        *,
        chunk: int = 256,
        counts: Tensor | None = None,
    ) -> None:
        super().__init__(drawn, view, kept, taps, dtype)
        self.teacher_head, self.gamma, self.d, self.chunk, self.counts = teacher_head, gamma, d, chunk, counts

    def loss(self, predicted: Sequence[Predicted]) -> Step:
        taught = [self.taught(p) for p in predicted]
        offsets = torch.cat([p.offset[ok] for p, (_, ok) in zip(predicted, taught, strict=True)])
        valid = torch.bincount(offsets - 1, minlength=self.d).float()
        counts = valid if self.counts is None else self.counts
        weight = self.gamma ** torch.arange(self.d, dtype=torch.float32) / counts.clamp(min=1.0)
        total, sums = torch.zeros(()), torch.zeros(self.d)
        for p, (position, ok) in zip(predicted, taught, strict=True):
            keep = ok.nonzero().flatten()
            keep = keep[position[keep].argsort(stable=True)]  # neighbours then share their teacher
            offset = p.offset[keep] - 1
            loss, per_row = draft_loss(
                p.hidden[keep],
                p.head,
                self.teacher(self.teacher_head, p.hidden.dtype),
                position[keep],
                weight[offset],
                chunk=self.chunk,
            )
            total = total + loss
            sums.index_add_(0, offset, per_row.detach())
        return Step(total, sums, valid)
