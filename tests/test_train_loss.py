"""The loss: its value and gradients against the dense twin, its normalisation, its alignment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dartspec.drafters import dart
from dartspec.drafters._train import Predicted
from dartspec.train.batch import Drawn, Sequences, Step, TrainBatch
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
    rows = [torch.tensor(r, dtype=torch.int64) for r in (first, anchors)]
    return Drawn(Example.answered(ids, num_prompt), states, *rows)


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


def our_step(
    drawn: list[Drawn], net: torch.nn.Module, view: View, counts: Tensor | None = None, chunk: int = 256
) -> Step:
    c = net.config
    head = view.table[net.target_ids()]
    batch = TrainBatch(drawn, view, c.taps, c.taps, torch.float32, head, c.d, GAMMA, chunk=chunk, counts=counts)
    step: Step = dart.loss(net, batch)  # type: ignore[arg-type]
    return step


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_value_and_gradients_equal_the_dense_twin(chunk: int) -> None:
    net, view = random_net(config()), View()
    drawn = batch(view)
    got, wanted = our_step(drawn, net, view, chunk=chunk).loss, reference_loss(drawn, net, view)
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
    counts = our_step(drawn, net, view).counts
    each = [our_step([one], net, view).counts for one in drawn]
    assert not torch.equal(each[0], each[1])  # else the control below would prove nothing
    together = our_step(drawn, net, view).loss
    apart = our_step(drawn[:1], net, view, counts).loss + our_step(drawn[1:], net, view, counts).loss
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=1e-6)
    wrong = (our_step(drawn[:1], net, view).loss + our_step(drawn[1:], net, view).loss) / 2
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
    before = our_step(drawn, net, view).loss
    one = drawn[0]
    assert one.example.num_prompt == 6
    final, norm = one.states.final.clone(), one.states.log_norm.clone()
    final[:5], norm[:5] = float("nan"), float("nan")  # the first answer token's teacher is position 5
    broken = [one._replace(states=one.states._replace(final=final, log_norm=norm)), drawn[1]]
    assert torch.equal(our_step(broken, net, view).loss, before)
    final[5] = float("nan")
    assert bool(torch.isnan(our_step(broken, net, view).loss))


def test_the_teacher_of_offset_t_is_the_target_at_j_plus_t() -> None:
    view = View()
    net = random_net(config())
    seen: list[tuple[list[int], list[int], list[bool]]] = []

    class Asked(Sequences):
        def loss(self, predicted: list[Predicted]) -> None:
            for p in predicted:
                position, valid = self.taught(p)
                seen.append((p.offset.tolist(), position.tolist(), valid.tolist()))

    def ask(length: int, num_prompt: int, first: list[int], anchors: list[int]) -> None:
        # another sequence before it: positions count over both
        drawn = [example(5, 2, 3, view, [], []), example(length, num_prompt, 1, view, first, anchors)]
        dart.loss(net, Asked(drawn, view, net.config.taps, net.config.taps, torch.float32))

    ask(14, 6, [4, 7], [8])
    assert seen[0] == ([1, 1, 2, 3, 4, 5], [10, 13, 15, 16, 17, 18], [True] * 5 + [False])  # the last is beyond
    ask(14, 6, [12], [10, 12])
    assert seen[1][1] == [18, 17, 18, 18, 18, 18, 18, 18, 18]
    assert seen[1][2] == [False, True, False, False, False, False, False, False, False]
    ask(14, 6, [3, 4], [9])
    assert seen[2][2][:2] == [False, True]  # row 4 knows the last of the prompt and predicts the first of the answer
