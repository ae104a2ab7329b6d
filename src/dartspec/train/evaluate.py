"""How good a drafter is on answers it never saw: loss, hit@1 and hit@10 at every offset. No text, no tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dartspec.drafters.dart import DartNet
from dartspec.train.batch import Drawn, rows_of, targets_of
from dartspec.train.data import Example, loss_mask
from dartspec.train.features import States
from dartspec.train.loss import Teacher
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
        rows = loss_mask(len(example.ids), example.num_prompt, 1)[:, 0].nonzero().flatten()[::stride]
        batch.append(Drawn(example, s, rows, rows))
        choice = torch.full((len(example.ids),), -1, dtype=torch.int64)
        begin = max(0, example.num_prompt - 1)
        with torch.no_grad():
            for at in range(begin, len(example.ids), 64):
                choice[at : at + 64] = view.lm_head(s.final[at : at + 64].to(view.dtype)).argmax(-1).cpu()
        choices.append(choice)
    return Held(batch, choices)


@torch.no_grad()
def evaluate(net: DartNet, held: Held, view: TargetView, teacher_head: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Per offset 1..d over the held-out rows: `loss` (as trained), `hit1` and `hit10` (share of positions where the
    target's first choice is the drafter's first, among its ten first), `mass` q(D); `chain`: mean number of leading
    offsets at which the drafter's first choice is the token that stands in the answer."""
    d = net.config.d
    ids = net.target_ids()
    zero = torch.zeros(d, dtype=torch.float64)
    loss, hit1, hit10, mass, count = (zero.clone() for _ in range(5))
    chain_sum, chain_count = 0.0, 0
    net.eval()
    for drawn, choice in zip(held.batch, held.choices, strict=True):
        targets = targets_of([drawn], d)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            first, masks = net.shared_forward(rows_of([drawn], view.embed, dtype))
            hidden = torch.cat((first, masks.flatten(0, 1)))
            teacher = Teacher(targets.final.to(dtype), teacher_head.to(dtype), targets.log_norm)
            answer = torch.tensor(drawn.example.ids)
            right = torch.zeros(len(hidden), dtype=torch.bool)
            for at in range(0, len(hidden), 128):
                span = slice(at, at + 128)
                position, offset, ok = targets.position[span], targets.offset[span] - 1, targets.valid[span]
                logits = net.lm_head(hidden[span]).float()
                q = teacher.probabilities(position)
                row_loss = -(q * logits.log_softmax(-1)).sum(-1)
                best = ids[logits.topk(min(NUM_HITS, logits.shape[-1])).indices]  # (n, 10) target ids
                hits = best == choice[position][:, None]
                for total, value in (
                    (loss, row_loss),
                    (hit1, hits[:, 0]),
                    (hit10, hits.any(-1)),
                    (mass, q.sum(-1)),
                    (count, ok),
                ):
                    total.index_add_(0, offset, value.double() * ok)
                # the token after the teacher's position is the one that stands there
                follows = answer[(position + 1).clamp(max=len(answer) - 1)]
                right[span] = (best[:, 0] == follows) & ok
        n = len(drawn.first)
        by_row = torch.cat((right[:n, None], right[n:].view(n, d - 1)), dim=1)
        whole = torch.cat((targets.valid[:n, None], targets.valid[n:].view(n, d - 1)), dim=1).all(-1)
        chain_sum += float(by_row[whole].cumprod(-1).sum())
        chain_count += int(whole.sum())
    net.train()

    def mean(total: Tensor) -> list[float]:
        return [round(x, 4) for x in (total / count.clamp(min=1)).tolist()]

    return {
        "hit1": mean(hit1),
        "hit10": mean(hit10),
        "loss": mean(loss),
        "mass": mean(mass),
        "chain": round(chain_sum / max(1, chain_count), 4),
    }
