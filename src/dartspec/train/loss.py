"""The distillation loss over a draft vocabulary, in chunks of rows, with its gradient made on the way.

Method, section 3: `-sum_{v in D} q_v log p_v`, q the target's distribution over its whole vocabulary, not renormalised
over D; the gradient at a logit is `q(D) p_v - q_v`. The caller gives every row its weight (gamma^(t-1) over the number
of valid rows of that offset in the whole update), so that accumulation over micro-batches and processes is exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Teacher(NamedTuple):
    """The target's distribution over the draft vocabulary at U positions, without holding it.

    final:    (U, H) its last hidden states, final norm applied.
    head:     (V, H) its head's rows for the draft vocabulary.
    log_norm: (U,) float32 log-sum-exp of its logits over the whole vocabulary.
    """

    final: Tensor
    head: Tensor
    log_norm: Tensor

    def probabilities(self, rows: Tensor) -> Tensor:
        """(n,) positions -> (n, V) float32 probabilities; they sum to q(D) <= 1."""
        logits = (self.final[rows] @ self.head.T).float()
        return logits.sub_(self.log_norm[rows][:, None]).exp_()


class _DraftLoss(torch.autograd.Function):
    """Forward computes the gradients too: no (rows, V) tensor is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, teacher: Teacher, position: Tensor, weight: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        w = head.to(hidden.dtype)
        per_row = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head)
        for start in range(0, len(hidden), chunk):
            span = slice(start, start + chunk)
            h = hidden[span]
            logits = (h @ w.T).float()  # (n, V)
            # rows that ask the same position share its distribution: sorted rows ask few
            asked, which = torch.unique_consecutive(position[span], return_inverse=True)
            q_asked = teacher.probabilities(asked)
            mass = q_asked.sum(-1)[which]  # q(D)
            q = q_asked[which]
            log_norm = torch.logsumexp(logits, dim=-1)
            per_row[span] = mass * log_norm - (q * logits).sum(-1)
            p = logits.sub_(log_norm[:, None]).exp_()
            grad = p.mul_(mass[:, None]).sub_(q).mul_(weight[span][:, None]).to(h.dtype)
            grad_hidden[span] = grad @ w
            grad_head += grad.T @ h
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(per_row)
        return (per_row * weight).sum(), per_row

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> Any:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad_loss
        return grad_hidden * scale.to(grad_hidden.dtype), grad_head * scale, None, None, None, None


def draft_loss(
    hidden: Tensor, head: Tensor, teacher: Teacher, position: Tensor, weight: Tensor, *, chunk: int = 128
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the rows' losses, and each row's own unweighted loss (n,), detached.

    hidden:   (n, H) the drafter's rows, final norm applied, in the compute dtype.
    head:     (V, H) the drafter's head, float32 master or compute dtype.
    position: (n,) int64, the row of `teacher` that each row is taught by. Neighbours that ask the same position cost
              one; the rows are best sorted by it.
    weight:   (n,) float32, constants.
    """
    loss, per_row = _DraftLoss.apply(hidden, head, teacher, position, weight, chunk)  # type: ignore[no-untyped-call]
    return loss, per_row
