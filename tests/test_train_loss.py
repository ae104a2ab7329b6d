"""The loss: its value and gradients against the dense twin, its normalisation, its alignment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dartspec.drafters import dart
from dartspec.drafters._train import Predicted
from dartspec.drafters.dart import DartNet
from dartspec.errors import DartspecError
from dartspec.train.batch import Drawn, Sequences, Step, TrainBatch, draw_rows, num_valid
from dartspec.train.data import Example, loss_mask
from dartspec.train.features import States
from dartspec.train.loss import Teacher, acceptance, draft_loss
from reference.dart_dense import dense_loss
from reference.prefixes import carries
from test_dart_net import config, random_net, shared_rows
from tiny_net import HIDDEN, VOCAB, View

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
                d.example,
                d.states.features.flatten(1),
                view.embed(torch.tensor(d.example.ids[1:])),
                view.lm_head(d.states.final),
                d.first.tolist(),
                d.anchors.tolist(),
            )
            for d in drawn
        ],
        GAMMA,
    )


def our_step(drawn: list[Drawn], net: DartNet, view: View, **settings: Any) -> Step:
    c = net.config
    head = view.table[net.target_ids()]
    settings = {"gamma": GAMMA, "draft_ids": net.target_ids(), **settings}
    step: Step = dart.loss(net, TrainBatch(drawn, view, c.taps, c.taps, torch.float32, head, c.d, **settings))
    return step


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize(("chunk", "ids"), [(1, 0), (3, 5), (256, 36), (256, 0)])
def test_value_and_gradients_equal_the_dense_twin(chunk: int, ids: int, shifted: bool) -> None:
    net, view = random_net(config(shifted=shifted)), View()
    drawn = batch(view)
    got, wanted = our_step(drawn, net, view, chunk=chunk, vocabulary_chunk=ids).loss, reference_loss(drawn, net, view)
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
    counts = num_valid([one.example for one in drawn], net.config.d)
    each = [num_valid([one.example], net.config.d) for one in drawn]
    assert not torch.equal(each[0], each[1])  # else the control below would prove nothing
    together = our_step(drawn, net, view).loss
    apart = [our_step([one], net, view, counts=counts).loss for one in drawn]
    torch.testing.assert_close(together, torch.stack(apart).sum(), rtol=1e-6, atol=1e-6)
    wrong = (our_step(drawn[:1], net, view).loss + our_step(drawn[1:], net, view).loss) / 2
    assert abs((wrong - together).item()) > 1e-3


def every_prefix(view: View) -> list[Drawn]:
    """Three answers of unequal length, one of them in two parts."""
    drawn = [example(n, p, seed, view, [], []) for n, p, seed in ((10, 4, 1), (8, 5, 2), (12, 3, 4))]
    drawn[2] = drawn[2]._replace(example=Example(drawn[2].example.ids, ((3, 6), (9, 12))))
    out = []
    for one in drawn:
        valid = loss_mask(one.example, 2)
        out.append(one._replace(first=valid[:, 0].nonzero().flatten(), anchors=valid[:, 1].nonzero().flatten()))
    return out


def predicted_rows(net: DartNet, view: View, one: Drawn) -> Iterator[tuple[int, int, Tensor]]:
    """j, t and the row that predicts, where it carries loss."""
    first, anchors = one.first.tolist(), one.anchors.tolist()
    ids = torch.tensor(one.example.ids)
    rows, masks = net.shared_forward(shared_rows(view, ids, one.states.features[:-1], first, anchors))
    for i, j in enumerate(first):
        if carries(one.example, j, 1):
            yield j, 1, rows[i]
    for i, a in enumerate(anchors):
        for t in range(2, net.config.d + 1):
            if carries(one.example, a, t):
                yield a, t, masks[i, t - 2]


def test_a_sample_of_prefixes_is_unbiased() -> None:
    """The mean over all samples of rows that can be drawn is the loss of all prefixes, value and gradient."""
    net, view = random_net(config()), View()
    whole = every_prefix(view)
    wanted = our_step(whole, net, view).loss
    torch.testing.assert_close(wanted, reference_loss(whole, net, view), rtol=1e-5, atol=1e-5)
    # the rows of a sequence enter sums, and the two kinds apart: one sequence, one kind at a time shows it all
    weight = net.lm_head.weight
    (wanted_grad,) = torch.autograd.grad(wanted, weight)
    for kind in ("first", "anchors"):
        for number in range(3):
            rows = getattr(whole[number], kind)
            losses, grads = [], []
            for some in itertools.combinations(rows.tolist(), 2):
                drawn = list(whole)
                drawn[number] = whole[number]._replace(**{kind: torch.tensor(some)})
                losses.append(our_step(drawn, net, view).loss)
                grads.append(torch.autograd.grad(losses[-1], weight)[0])
            assert len(losses) > 1
            torch.testing.assert_close(torch.stack(losses).mean(), wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(torch.stack(grads).mean(0), wanted_grad, rtol=1e-4, atol=1e-5)
            assert float(torch.stack(losses).detach().std()) > 1e-3


@pytest.mark.parametrize(("share", "wanted"), [(1.0, (6, 6)), (0.5, (3, 3)), (0.01, (1, 1)), (0.0, (2, 3))])
def test_rows_are_drawn_by_number_or_by_share(share: float, wanted: tuple[int, int]) -> None:
    one = example(10, 4, 1, View(), [], []).example
    seen: list[set[int]] = [set(), set()]
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        rows = draw_rows(one, num_first=2, num_anchors=3, generator=generator, share=share)
        assert tuple(map(len, rows)) == wanted
        for kind, drawn in zip(seen, rows, strict=True):
            assert drawn.tolist() == sorted(set(drawn.tolist()))
            kind |= set(drawn.tolist())
    assert seen == [set(range(2, 8)), set(range(1, 7))]  # token j + 1 + t is one of 4 ... 9


def test_a_batch_without_rows_of_a_kind_has_a_loss() -> None:
    net, view = random_net(config()), View()
    both = batch(view)
    nothing = torch.empty(0, dtype=torch.int64)
    without_anchors = our_step([one._replace(anchors=nothing) for one in both], net, view)
    assert without_anchors.counts.tolist() == [5, 0, 0, 0, 0]
    without_first = our_step([one._replace(first=nothing) for one in both], net, view)
    assert without_first.counts[0] == 0
    torch.testing.assert_close(without_anchors.loss + without_first.loss, our_step(both, net, view).loss)
    none = our_step([one._replace(first=nothing, anchors=nothing) for one in both], net, view)
    assert none.loss == 0
    none.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in net.parameters())


def test_a_uniform_weight_is_gamma_one() -> None:
    net, view = random_net(config()), View()
    drawn = every_prefix(view)
    step = our_step(drawn, net, view, gamma=1.0)
    torch.testing.assert_close(step.loss, (step.sums / step.counts).sum())
    step = our_step(drawn, net, view)
    assert step.loss < our_step(drawn, net, view, gamma=1.0).loss
    torch.testing.assert_close(step.loss, (step.sums / step.counts * GAMMA ** torch.arange(5)).sum())


def test_one_hot_is_cross_entropy_with_the_token_that_stands_there() -> None:
    net, view = random_net(config()), View()
    drawn = every_prefix(view)
    got = our_step(drawn, net, view, objective="one_hot")
    ids = net.target_ids().tolist()
    sums, mass = torch.zeros(5), torch.zeros(5)
    for one in drawn:
        for j, t, row in predicted_rows(net, view, one):
            if one.example.ids[j + 1 + t] in ids:
                label = ids.index(one.example.ids[j + 1 + t])
                sums[t - 1] -= (net.lm_head.weight @ row).log_softmax(-1)[label]
                mass[t - 1] += 1
    torch.testing.assert_close(got.sums, sums, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.mass, mass)  # tokens outside the draft vocabulary teach nothing
    assert 0 < float(mass.sum()) < float(got.counts.sum())
    with pytest.raises(DartspecError, match="needs the draft vocabulary's ids"):
        our_step(drawn, net, view, objective="one_hot", draft_ids=None)


def test_acceptance_weights_a_later_offset_by_what_comes_before_it() -> None:
    net, view = random_net(config()), View()
    drawn = every_prefix(view)
    got = our_step(drawn, net, view, objective="acceptance", gamma=1.0)
    losses: dict[tuple[int, int, int], Tensor] = {}
    accepted: dict[tuple[int, int, int], float] = {}
    for number, one in enumerate(drawn):
        for j, t, row in predicted_rows(net, view, one):
            q = view.lm_head(one.states.final[j + t]).softmax(-1)[net.target_ids()]
            p = (net.lm_head.weight @ row).softmax(-1)
            losses[number, j, t] = -(q * p.log()).sum()
            accepted[number, j, t] = float(torch.minimum(p, q).sum().detach())
    mean = [torch.tensor([a for (_, _, u), a in accepted.items() if u == t]).mean() for t in range(1, 6)]
    counts = num_valid([one.example for one in drawn], 5)
    wanted = torch.zeros(())
    for (number, j, t), loss in losses.items():
        weight = math.prod(accepted.get((number, j, i), float(mean[i - 1])) for i in range(1, t))
        wanted = wanted + weight * loss / counts[t - 1]
    torch.testing.assert_close(got.loss, wanted, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(
        torch.autograd.grad(got.loss, list(net.parameters())),
        torch.autograd.grad(wanted, list(net.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


def test_the_chance_of_acceptance_is_the_overlap() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(7, 3, generator=generator), torch.randn(5, 3, generator=generator)
    final, norm = torch.randn(4, 3, generator=generator), torch.full((4,), 3.0)
    teacher, position = Teacher(final, head, norm), torch.tensor([0, 0, 1, 1, 2, 3, 3])
    got = acceptance(hidden, head, teacher, position, chunk=3)
    q = (final @ head.T - 3.0).exp()[position]
    torch.testing.assert_close(got, torch.minimum((hidden @ head.T).softmax(-1), q).sum(-1))


@pytest.mark.parametrize("ids", [0, 2])
def test_gradient_at_a_logit_is_mass_times_p_less_q(ids: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.eye(4).requires_grad_()  # so that the head's rows are the logits
    logits = torch.randn(5, 4, generator=generator)
    final, target_head = torch.randn(6, 3, generator=generator), torch.randn(9, 3, generator=generator)
    drafted = torch.tensor([0, 2, 3, 7, 8])
    norm = torch.logsumexp(final @ target_head.T, -1)
    teacher = Teacher(final, target_head[drafted], norm)
    position, weight = torch.tensor([1, 1, 2, 5]), torch.tensor([0.5, 2.0, 0.0, 1.0])
    head = torch.nn.Parameter(logits)
    loss, per_row, mass = draft_loss(hidden, head, teacher, position, weight, chunk=3, vocabulary_chunk=ids)
    q = (final @ target_head.T).softmax(-1)[position][:, drafted]
    assert bool((q.sum(-1) < 1).all())  # not renormalised: mass outside the draft vocabulary teaches nothing
    p = logits.T.softmax(-1)
    torch.testing.assert_close(mass, q.sum(-1))
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
