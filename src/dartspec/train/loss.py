"""The distillation loss over a draft vocabulary, in chunks, with its gradient made on the way.

Method, section 3: `-sum_{v in D} q_v log p_v`, q the target's distribution over its whole vocabulary, not renormalised
over D; the gradient at a logit is `q(D) p_v - q_v`. The caller gives every row its weight (gamma^(t-1) over the number
of valid rows of that offset in the whole update), so that accumulation over micro-batches and processes is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Teaches(Protocol):
    """What a row is taught: a distribution over the whole vocabulary, of which the draft vocabulary sees its part."""

    def probabilities(self, rows: Tensor, ids: slice = ...) -> Tensor:
        """(n,) positions -> (n, |ids|) float32 probabilities of these draft ids; over all ids they sum to q(D) <= 1."""
        ...


class Teacher(NamedTuple):
    """The target's distribution over the draft vocabulary at U positions, without holding it.

    final:    (U, H) its last hidden states, final norm applied.
    head:     (V, H) its head's rows for the draft vocabulary.
    log_norm: (U,) float32 log-sum-exp of its logits over the whole vocabulary.
    """

    final: Tensor
    head: Tensor
    log_norm: Tensor

    def probabilities(self, rows: Tensor, ids: slice = slice(None)) -> Tensor:
        logits = (self.final[rows] @ self.head[ids].T).float()
        return logits.sub_(self.log_norm[rows][:, None]).exp_()


class Labels(NamedTuple):
    """One-hot: the token that stands behind each of U positions. To compare with; the paper distils.

    draft: (U,) int64 its draft id, -1 where it has none: q(D) is 0 there. size: of the draft vocabulary.
    """

    draft: Tensor
    size: int

    def probabilities(self, rows: Tensor, ids: slice = slice(None)) -> Tensor:
        begin, end, _ = ids.indices(self.size)
        return (self.draft[rows][:, None] == torch.arange(begin, end, device=rows.device)).float()


class _Rows(NamedTuple):
    """Some rows of a head: what their loss is made of, for any of the draft ids."""

    hidden: Tensor  # (n, H)
    head: Tensor  # (V, H) in the dtype of `hidden`
    teacher: Teaches
    asked: Tensor  # positions; rows that ask the same share its distribution: sorted rows ask few
    which: Tensor  # (n,) place in `asked`

    def logits(self, ids: slice = slice(None)) -> Tensor:
        return (self.hidden @ self.head[ids].T).float()

    def q(self, ids: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(n, |ids|) probabilities and (n,) their sums."""
        asked = self.teacher.probabilities(self.asked, ids)
        return asked[self.which], asked.sum(-1)[self.which]


def _in_rows(hidden: Tensor, head: Tensor, teacher: Teaches, position: Tensor, chunk: int) -> Iterator[_Rows]:
    w = head.to(hidden.dtype)
    for start in range(0, len(hidden), chunk):
        asked, which = torch.unique_consecutive(position[start : start + chunk], return_inverse=True)
        yield _Rows(hidden[start : start + chunk], w, teacher, asked, which)


class _DraftLoss(torch.autograd.Function):
    """Forward computes the gradients too: no (rows, V) tensor is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher: Teaches,
        position: Tensor,
        weight: Tensor,
        chunk: int,
        vocabulary_chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        per_row = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        mass = torch.empty_like(per_row)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None  # a frozen head costs none
        size = len(head)
        parts = [slice(at, min(at + vocabulary_chunk, size)) for at in range(0, size, vocabulary_chunk)]

        def add_gradient(rows: _Rows, span: slice, ids: slice, p: Tensor, q: Tensor) -> None:
            grad = p.mul_(mass[span][:, None]).sub_(q).mul_(weight[span][:, None]).to(hidden.dtype)
            grad_hidden[span] += grad @ rows.head[ids]
            if grad_head is not None:
                grad_head[ids] += grad.T @ rows.hidden

        grad_hidden.zero_()
        for number, rows in enumerate(_in_rows(hidden, head, teacher, position, chunk)):
            span = slice(number * chunk, (number + 1) * chunk)
            if len(parts) == 1:
                logits, (q, mass[span]) = rows.logits(), rows.q()
                log_norm = torch.logsumexp(logits, dim=-1)
                per_row[span] = mass[span] * log_norm - (q * logits).sum(-1)
                add_gradient(rows, span, parts[0], logits.sub_(log_norm[:, None]).exp_(), q)
                continue
            # the normaliser is known when all ids were seen, so logits are made twice
            log_norm = torch.full((len(rows.hidden),), float("-inf"), device=hidden.device)
            dot, in_all = torch.zeros_like(log_norm), torch.zeros_like(log_norm)
            for ids in parts:
                logits, (q, part_mass) = rows.logits(ids), rows.q(ids)
                log_norm = torch.logaddexp(log_norm, torch.logsumexp(logits, dim=-1))
                dot += (q * logits).sum(-1)
                in_all += part_mass
            mass[span] = in_all
            per_row[span] = in_all * log_norm - dot
            for ids in parts:
                add_gradient(rows, span, ids, rows.logits(ids).sub_(log_norm[:, None]).exp_(), rows.q(ids)[0])
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(per_row, mass)
        return (per_row * weight).sum(), per_row, mass

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> Any:
        grad_hidden, grad_head = ctx.saved_tensors
        on_head = None if grad_head is None else grad_head * grad_loss
        return grad_hidden * grad_loss.to(grad_hidden.dtype), on_head, None, None, None, None, None


def draft_loss(
    hidden: Tensor,
    head: Tensor,
    teacher: Teaches,
    position: Tensor,
    weight: Tensor,
    *,
    chunk: int = 128,
    vocabulary_chunk: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the rows' losses; each row's own unweighted loss (n,) and its q(D) (n,), both detached.

    hidden:   (n, H) the drafter's rows, final norm applied, in the compute dtype.
    head:     (V, H) the drafter's head, float32 master or compute dtype; no gradient is made where it wants none.
    position: (n,) int64, the row of `teacher` that each row is taught by. Neighbours that ask the same position cost
              one; the rows are best sorted by it.
    weight:   (n,) float32, constants.
    chunk, vocabulary_chunk: rows and draft ids whose float32 logits live at once. 0 ids: all, and logits are made
              once; in parts they are made twice, for half as many products again.
    """
    ids = vocabulary_chunk or len(head)
    loss, per_row, mass = _DraftLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, teacher, position, weight, chunk, ids
    )
    return loss, per_row, mass


@torch.no_grad()
def acceptance(hidden: Tensor, head: Tensor, teacher: Teaches, position: Tensor, *, chunk: int = 128) -> Tensor:
    """(n,) float32 sum_v min(p_v, q_v): the chance that a draw from the drafter's row is accepted."""
    found = [
        torch.minimum(rows.logits().softmax(-1), rows.q()[0]).sum(-1)
        for rows in _in_rows(hidden, head, teacher, position, chunk)
    ]
    return torch.cat(found) if found else torch.empty(0, device=hidden.device)
