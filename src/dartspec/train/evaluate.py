"""How good a drafter is on answers it never saw: loss, hit@1 and hit@10 at every offset. No text, no tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dartspec.drafters._checkpoint import DraftNet
from dartspec.drafters._train import Predicted
from dartspec.train.batch import Drawn, Sequences
from dartspec.train.data import Example, loss_mask
from dartspec.train.features import States
from dartspec.types import TargetView

NUM_HITS = 10


class Held(NamedTuple):
    """Held-out sequences with their rows, and the target's own first choice at each of their positions."""

    batch: list[Drawn]
    choices: list[Tensor]  # per sequence (T,) int64; -1 where no teacher is read


def prepare_held_out(examples: Sequence[Example], states: Sequence[States], view: TargetView, stride: int) -> Held:
    """Every `stride`-th answer row, at all offsets."""
    batch, choices = [], []
    for example, s in zip(examples, states, strict=True):
        rows = loss_mask(example, 1)[:, 0].nonzero().flatten()[::stride]
        batch.append(Drawn(example, s, rows, rows))
        choice = torch.full((len(example.ids),), -1, dtype=torch.int64)
        begin = max(0, example.num_prompt - 1)
        with torch.no_grad():
            for at in range(begin, len(example.ids), 64):
                final = s.final[at : at + 64].to(view.device, view.dtype)
                choice[at : at + 64] = view.lm_head(final).argmax(-1).cpu()
        choices.append(choice)
    return Held(batch, choices)


class _Tested(Sequences):
    """Held-out sequences whose `loss` counts instead: how good every prediction is."""

    def __init__(
        self,
        drawn: Drawn,
        choice: Tensor,
        view: TargetView,
        kept: Sequence[int],
        net: DraftNet,
        teacher_head: Tensor,
        dtype: torch.dtype,
    ) -> None:
        super().__init__([drawn], view, kept, net.config.taps, dtype)
        self.choice, self.head, self.ids = choice.to(self.device), teacher_head, net.target_ids().to(self.device)
        # (T, d): was the drafter's first choice the token that stands there, and did it count
        self.right = torch.zeros(len(choice), net.config.d, dtype=torch.bool, device=self.device)
        self.whole = self.right.clone()

    def loss(self, predicted: Sequence[Predicted]) -> Tensor:
        """(5, d) float64 sums over the valid rows of each offset: loss, hit@1, hit@10, mass, and their number."""
        sums = torch.zeros(5, self.right.shape[1], dtype=torch.float64, device=self.device)
        answer = self.sequences[0].ids
        for p in predicted:
            if p.continuity:
                continue
            teacher = self.teacher(self.head, self.dtype)
            positions, valid = self.taught(p)
            for at in range(0, len(p.hidden), 128):
                span = slice(at, at + 128)
                position, offset, ok = positions[span], p.offset[span] - 1, valid[span]
                logits = (p.hidden[span] @ p.head.to(p.hidden.dtype).T).float()
                q = teacher.probabilities(position)
                best = self.ids[logits.topk(min(NUM_HITS, logits.shape[-1])).indices]  # (n, 10) target ids
                hits = best == self.choice[position][:, None]
                row_loss = -(q * logits.log_softmax(-1)).sum(-1)
                values = torch.stack((row_loss, hits[:, 0], hits.any(-1), q.sum(-1), torch.ones_like(row_loss)))
                sums.index_add_(1, offset, (values * ok).double())
                # the token after the teacher's position is the one that stands there
                follows = answer[(position + 1).clamp(max=len(answer) - 1)]
                self.right[p.row[span], offset] = (best[:, 0] == follows) & ok
                self.whole[p.row[span], offset] = ok
        return sums


@torch.no_grad()
def evaluate(
    loss: Callable[[Any, Any], Any],
    net: DraftNet,
    held: Held,
    view: TargetView,
    kept: Sequence[int],
    teacher_head: Tensor,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Per offset 1..d over the held-out rows: `loss` (as trained), `hit1` and `hit10` (share of positions where the
    target's first choice is the drafter's first, among its ten first), `mass` q(D); `chain`: mean number of leading
    offsets at which the drafter's first choice is the token that stands in the answer.

    loss: the method's. kept: taps of the states."""
    sums = torch.zeros(5, net.config.d, dtype=torch.float64)
    chain_sum, chain_count = 0.0, 0
    net.eval()
    for drawn, choice in zip(held.batch, held.choices, strict=True):
        with torch.autocast(view.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            tested = _Tested(drawn, choice, view, kept, net, teacher_head, dtype)
            sums += loss(net, tested).cpu()
        whole = tested.whole.all(-1)
        chain_sum += float(tested.right[whole].long().cumprod(-1).sum())
        chain_count += int(whole.sum())
    net.train()
    names = ("loss", "hit1", "hit10", "mass")
    means = {
        name: [round(x, 4) for x in (row / sums[4].clamp(min=1)).tolist()]
        for name, row in zip(names, sums, strict=False)
    }
    return {
        **{name: means[name] for name in ("hit1", "hit10", "loss", "mass")},
        "chain": round(chain_sum / max(1, chain_count), 4),
    }
