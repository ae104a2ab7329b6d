"""The loss: its value and gradients against the dense twin, its normalisation, its alignment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dartspec.train.batch import Drawn, batch_loss, count_valid, rows_of, targets_of
from dartspec.train.data import Example
from dartspec.train.features import States
from dartspec.train.loss import Teacher, draft_loss
from reference.dart_dense import dense_loss
from test_dart_net import HIDDEN, VOCAB, View, config, random_net

GAMMA = 0.6


def example(length: int, num_prompt: int, seed: int, view: View, first: list[int], anchors: list[int]) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
    features = torch.randn(length, 3, HIDDEN, generator=generator)
    final = torch.randn(length, HIDDEN, generator=generator)
    states = States(features, final, torch.logsumexp(view.lm_head(final), -1))
    return Drawn(Example(ids, num_prompt), states, torch.tensor(first), torch.tensor(anchors))


def batch(view: View) -> list[Drawn]:
    """Two sequences of unequal length; some offsets leave the sequence, some predict prompt tokens."""
    return [
        example(14, 6, 1, view, [4, 7, 11], [3, 8, 11]),
        example(9, 3, 2, view, [1, 6, 7], [0, 5, 6]),
    ]


def reference_loss(drawn: list[Drawn], net: torch.nn.Module, view: View) -> Tensor:
    return dense_loss(
        net,  # type: ignore[arg-type]
        [
            (
                d.states.features.flatten(1),
                view.embed(torch.tensor(d.example.ids[1:])),
                view.lm_head(d.states.final),
                len(d.example.ids),
                d.example.num_prompt,
                d.first.tolist(),
                d.anchors.tolist(),
            )
            for d in drawn
        ],
        GAMMA,
    )


def our_loss(drawn: list[Drawn], net: torch.nn.Module, view: View, counts: Tensor, chunk: int = 256) -> Tensor:
    d = net.config.d
    targets = targets_of(drawn, d)
    weight = GAMMA ** torch.arange(d, dtype=torch.float32) / counts.clamp(min=1)
    head = view.table[net.target_ids()]
    rows = rows_of(drawn, view.embed, torch.float32)
    return batch_loss(net, rows, targets, head, weight, chunk=chunk).loss


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_value_and_gradients_equal_the_dense_twin(chunk: int) -> None:
    net, view = random_net(config()), View()
    drawn = batch(view)
    counts = count_valid(targets_of(drawn, net.config.d), net.config.d)
    got, wanted = our_loss(drawn, net, view, counts, chunk), reference_loss(drawn, net, view)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    names, parameters = zip(*net.named_parameters(), strict=True)
    ours = torch.autograd.grad(got, parameters)
    theirs = torch.autograd.grad(wanted, parameters)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert float(b.abs().max()) > 0, name
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()), msg=name)


def test_accumulation_normalises_over_the_whole_update() -> None:
    net, view = random_net(config()), View()
    drawn = batch(view)
    d = net.config.d
    counts = count_valid(targets_of(drawn, d), d)
    each = [count_valid(targets_of([one], d), d) for one in drawn]
    assert not torch.equal(each[0], each[1])  # else the control below would prove nothing
    together = our_loss(drawn, net, view, counts)
    apart = our_loss(drawn[:1], net, view, counts) + our_loss(drawn[1:], net, view, counts)
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=1e-6)
    wrong = (our_loss(drawn[:1], net, view, each[0]) + our_loss(drawn[1:], net, view, each[1])) / 2
    assert abs((wrong - together).item()) > 1e-3


def test_gradient_at_a_logit_is_mass_times_p_less_q() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.eye(4).requires_grad_()  # so that the head's rows are the logits
    logits = torch.randn(5, 4, generator=generator)
    final, target_head = torch.randn(6, 3, generator=generator), torch.randn(9, 3, generator=generator)
    drafted = torch.tensor([0, 2, 3, 7, 8])
    norm = torch.logsumexp(final @ target_head.T, -1)
    teacher = Teacher(final, target_head[drafted], norm)
    position, weight = torch.tensor([1, 1, 2, 5]), torch.tensor([0.5, 2.0, 0.0, 1.0])
    head = torch.nn.Parameter(logits)
    loss, per_row = draft_loss(hidden, head, teacher, position, weight, chunk=3)
    q = (final @ target_head.T).softmax(-1)[position][:, drafted]
    assert bool((q.sum(-1) < 1).all())  # not renormalised: mass outside the draft vocabulary teaches nothing
    p = logits.T.softmax(-1)
    torch.testing.assert_close(per_row, -(q * logits.T.log_softmax(-1)).sum(-1))
    torch.testing.assert_close(loss, (weight * per_row).sum())
    loss.backward()
    wanted = weight[:, None] * (q.sum(-1, keepdim=True) * p - q)
    torch.testing.assert_close(head.grad, wanted.T)
    torch.testing.assert_close(hidden.grad, wanted @ logits)


def test_no_loss_where_nothing_is_predicted_in_the_answer() -> None:
    """A teacher at a position that carries no loss may be anything, NaN included."""
    net, view = random_net(config()), View()
    drawn = batch(view)
    d = net.config.d
    counts = count_valid(targets_of(drawn, d), d)
    before = our_loss(drawn, net, view, counts)
    one = drawn[0]
    assert one.example.num_prompt == 6
    final, norm = one.states.final.clone(), one.states.log_norm.clone()
    final[:5], norm[:5] = float("nan"), float("nan")  # the first answer token's teacher is position 5
    broken = [one._replace(states=one.states._replace(final=final, log_norm=norm)), drawn[1]]
    assert torch.equal(our_loss(broken, net, view, counts), before)
    final[5] = float("nan")
    assert bool(torch.isnan(our_loss(broken, net, view, counts)))


def test_the_teacher_of_offset_t_is_the_target_at_j_plus_t() -> None:
    view = View()
    drawn = [example(14, 6, 1, view, [4, 7], [8])]
    targets = targets_of(drawn, 4)
    assert targets.position.tolist() == [5, 8, 10, 11, 12]
    assert targets.offset.tolist() == [1, 1, 2, 3, 4]
    assert targets.valid.tolist() == [True] * 5
    late = targets_of([example(14, 6, 1, view, [12], [10, 12])], 4)
    assert late.valid.tolist() == [False, True, False, False, False, False, False]
