"""From examples and target states to one packed batch: which rows are run, who teaches them, with what weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dartspec.drafters._checkpoint import FINAL
from dartspec.drafters._train import Predicted, Rows
from dartspec.errors import DartspecError
from dartspec.train.data import Example, loss_mask
from dartspec.train.features import States
from dartspec.train.loss import Labels, Teacher, Teaches, acceptance, draft_loss
from dartspec.types import TargetView


class Drawn(NamedTuple):
    """One example with its states and the rows drawn from it."""

    example: Example
    states: States
    first: Tensor  # (R,) int64 rows whose offset 1 is trained
    anchors: Tensor  # (A,) int64 rows whose later offsets are trained


def draw_rows(
    example: Example, *, num_first: int, num_anchors: int, generator: torch.Generator, share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Rows with a valid offset 1 for `first`, rows with a valid offset 2 for `anchors`; all where there are few.

    share: where above 0, that share of either, at least one, in place of the two numbers; 1 is every prefix.

    Drawn without replacement, ascending. Every row is as likely as any other, and `TrainBatch` lets each stand for as
    many as it was drawn from: in expectation its loss is that of all prefixes, the paper's.
    """
    valid = loss_mask(example, 2)
    if share:
        num_first, num_anchors = (max(1, round(share * int(n))) for n in valid.sum(0))
    return _some(valid[:, 0], num_first, generator), _some(valid[:, 1], num_anchors, generator)


def num_valid(examples: Iterable[Example], d: int) -> Tensor:
    """(d,) float32: positions that carry loss at each offset when every prefix is trained. A prefix has later offsets
    where it has the second."""
    total = torch.zeros(d)
    for example in examples:
        valid = loss_mask(example, d)
        total[0] += valid[:, 0].sum()
        total[1:] += (valid[:, 1:] & valid[:, 1:2]).sum(0)
    return total


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
        self.drawn, self.view, self.dtype, self.device = drawn, view, dtype, view.device
        self.sequences = [
            Rows(
                torch.tensor(d.example.ids, device=self.device),
                select_taps(d.states, kept, taps).to(self.device, dtype),
                d.first.to(self.device),
                d.anchors.to(self.device),
            )
            for d in drawn
        ]
        lengths = torch.tensor([0, *(len(d.example.ids) for d in drawn)])
        self.starts: list[int] = lengths.cumsum(0)[:-1].tolist()
        self._end = torch.cat([base + torch.full((n,), n) for base, n in self._spans()])  # by row: its sequence's end
        self._end = self._end.to(self.device)
        self._is_answer = torch.cat([d.example.is_answer() for d in drawn]).to(self.device)

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
        final = torch.cat([d.states.final for d in self.drawn]).to(self.device, dtype)
        return Teacher(final, head.to(dtype), torch.cat([d.states.log_norm for d in self.drawn]).to(self.device))


class Step(NamedTuple):
    """loss: the weighted sum, to be differentiated. By offset, (d,) each, sums over the rows drawn: `sums` of their
    losses, `mass` of q(D), `counts` how many were valid. continuity: (2,) the loss summed, and rows, of the learned
    continuity."""

    loss: Tensor
    sums: Tensor
    counts: Tensor
    mass: Tensor
    continuity: Tensor


class TrainBatch(Sequences):
    """`loss` is the distillation loss of an update.

    teacher_head: (V, H) the target's head rows of the draft vocabulary.
    gamma:  weight gamma^(t-1) of offset t, each averaged over its valid positions of the whole update; 1 is uniform.
    counts: (d,) those positions (`num_valid`), where the update has more batches than this one.
    objective: "kl" to the target's distribution; "one_hot", the token that stands in the answer in its place, which
        needs `draft_ids`; "acceptance": kl, each later offset weighted by how likely the drafter's own guesses before
        it are accepted, the product of `loss.acceptance` over the earlier offsets of its prefix (where one was not
        drawn, the batch's mean).
    draft_ids: (V,) int64 the target's id of each draft id.
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
        vocabulary_chunk: int = 0,
        counts: Tensor | None = None,
        objective: str = "kl",
        draft_ids: Tensor | None = None,
    ) -> None:
        super().__init__(drawn, view, kept, taps, dtype)
        self.teacher_head, self.gamma, self.d, self.chunk = teacher_head, gamma, d, chunk
        self.vocabulary_chunk, self.objective, self.draft_ids = vocabulary_chunk, objective, draft_ids
        self._whole = torch.stack([num_valid([one.example], d) for one in drawn]).to(self.device)  # (sequences, d)
        self.counts = self._whole.sum(0) if counts is None else counts
        lengths = torch.tensor([len(one.example.ids) for one in drawn])
        self._sequence = torch.arange(len(drawn)).repeat_interleave(lengths).to(self.device)  # by row

    def labels(self) -> Labels:
        if self.draft_ids is None:
            raise DartspecError("the one-hot objective needs the draft vocabulary's ids")
        following = torch.cat([torch.cat((s.ids[1:], s.ids.new_tensor([-1]))) for s in self.sequences])
        place = torch.searchsorted(self.draft_ids, following).clamp(max=len(self.draft_ids) - 1)
        return Labels(place.where(self.draft_ids[place] == following, -1), len(self.draft_ids))

    def loss(self, predicted: Sequence[Predicted]) -> Step:
        valid: list[tuple[Predicted, Tensor]] = []
        for p in predicted:
            position, ok = self.taught(p)
            keep = ok.nonzero().flatten()
            keep = keep[position[keep].argsort(stable=True)]  # neighbours then share their teacher
            valid.append((p._replace(hidden=p.hidden[keep], row=p.row[keep], offset=p.offset[keep]), position[keep]))
        zeros = self._whole.new_zeros
        by_offset = self.gamma ** torch.arange(self.d, device=self.device) / self.counts.clamp(min=1.0)
        reached = self._reached(valid) if self.objective == "acceptance" else None
        total, continuity = zeros(()), zeros(2)
        sums, counts, mass = zeros(self.d), zeros(self.d), zeros(self.d)
        for p, position in valid:
            at = p.offset - 1
            weight = by_offset[at] * self._stands_for(p, valid)
            if reached is not None and not p.continuity:
                weight = weight * reached[p.row, at]
            loss, per_row, in_draft = draft_loss(
                p.hidden,
                p.head,
                self._taught_by(p.hidden.dtype),
                position,
                weight,
                chunk=self.chunk,
                vocabulary_chunk=self.vocabulary_chunk,
            )
            total = total + loss
            if p.continuity:
                continuity += torch.stack((per_row.sum(), zeros(()) + len(per_row)))
                continue
            for into, values in ((sums, per_row), (counts, torch.ones_like(per_row)), (mass, in_draft)):
                into.index_add_(0, at, values)
        return Step(total, sums, counts, mass, continuity)

    def _taught_by(self, dtype: torch.dtype) -> Teaches:
        return self.labels() if self.objective == "one_hot" else self.teacher(self.teacher_head, dtype)

    def _stands_for(self, p: Predicted, valid: Sequence[tuple[Predicted, Tensor]]) -> Tensor:
        """(n,) for how many prefixes of its sequence each row of `p` stands: all there are over those drawn, which at
        later offsets are those drawn for the second."""
        drawn = torch.zeros_like(self._whole)
        for other, _ in valid:
            if other.continuity == p.continuity:
                one = drawn.new_ones(())
                drawn.index_put_((self._sequence[other.row], other.offset - 1), one, accumulate=True)
        scale = (self._whole / drawn.clamp(min=1.0))[:, :2]
        return scale[self._sequence[p.row], (p.offset > 1).long()]

    def _reached(self, valid: Sequence[tuple[Predicted, Tensor]]) -> Tensor:
        """(rows, d) how likely all guesses before each offset of a row are accepted."""
        accepted = self._whole.new_full((len(self._sequence), self.d), float("nan"))
        for p, position in valid:
            if not p.continuity:
                teacher = self._taught_by(p.hidden.dtype)
                accepted[p.row, p.offset - 1] = acceptance(p.hidden, p.head, teacher, position, chunk=self.chunk)
        mean = accepted.nanmean(0).nan_to_num(1.0)
        accepted = accepted.where(~accepted.isnan(), mean)
        return torch.cat((torch.ones_like(accepted[:, :1]), accepted[:, :-1].cumprod(1)), dim=1)
