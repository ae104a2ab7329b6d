"""Medusa and Hydra: their trees and losses against references written from the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dartspec.drafters import hydra, medusa
from dartspec.drafters._checkpoint import DraftNet, NetConfig
from dartspec.errors import DartspecError
from dartspec.train.batch import Drawn, TrainBatch
from dartspec.train.data import loss_mask
from dartspec.types import Committed
from reference import hydra as reference
from reference.dflash import product_tree
from reference.prefixes import row_weight
from test_eagle3 import drawn, same, scored_paths
from tiny_net import HIDDEN, LAYER, TARGET, VOCAB, View, randomised

COMMON: dict[str, Any] = {
    "d": 3,
    "taps": (-1,),
    "hidden_size": HIDDEN,
    "draft_vocab_size": 37,
    **TARGET,
}


def medusa_config(**changes: Any) -> medusa.Config:
    return medusa.Config(**{**COMMON, "top_k": 4, **changes})


def hydra_config(**changes: Any) -> hydra.Config:
    return hydra.Config(**{**LAYER, **COMMON, "top_k": 3, **changes})


def random_net(kind: type[DraftNet], c: NetConfig, seed: int = 0) -> Any:
    return randomised(kind(c), seed, vectors=0.0)


def text(length: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(L,) ids and (L - 1, 1, H) last states."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (length,), generator=generator)
    return ids, torch.randn(length - 1, 1, HIDDEN, generator=generator)


def weights(net: DraftNet) -> dict[str, Tensor]:
    return {n: t.detach() for n, t in net.state_dict().items()}


def medusa_log_probs(w: dict[str, Tensor], c: medusa.Config, state: Tensor, t: int) -> Tensor:
    """Head t of the paper, section 2.1.1: softmax(W2 (silu(W1 h) + h))."""
    x = state
    for i in range(c.num_blocks):
        inner = w[f"medusa_head.{t - 1}.{i}.linear.weight"] @ x + w[f"medusa_head.{t - 1}.{i}.linear.bias"]
        x = x + inner * torch.sigmoid(inner)
    return (w[f"medusa_head.{t - 1}.{c.num_blocks}.weight"] @ x).log_softmax(0)


# -- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("budget", [1, 7, 100])
def test_medusa_drafts_the_likeliest_paths_of_its_heads(num_blocks: int, budget: int) -> None:
    net, view = random_net(medusa.MedusaNet, medusa_config(num_blocks=num_blocks)), View()
    ids, states = text(9)
    (got,) = medusa.MedusaDrafter(net, view).propose([Committed(0, ids, 8, states)], [budget])
    rows = torch.stack([medusa_log_probs(weights(net), net.config, states[-1, 0], t) for t in (1, 2, 3)])
    same(got, product_tree(rows, net.target_ids(), 4, budget, {2}))


def test_medusa_fills_a_fixed_tree_in_its_order() -> None:
    choices = ((0,), (0, 0), (1,), (0, 1), (0, 0, 3), (1, 2))
    net, view = random_net(medusa.MedusaNet, medusa_config(choices=choices)), View()
    ids, states = text(9)
    rows = [medusa_log_probs(weights(net), net.config, states[-1, 0], t).topk(4).indices for t in (1, 2, 3)]
    ranked = [net.target_ids()[r].tolist() for r in rows]
    for budget in (6, 3):
        (got,) = medusa.MedusaDrafter(net, view).propose([Committed(0, ids, 8, states)], [budget])
        assert list(scored_paths(got)) == [tuple(ranked[i][r] for i, r in enumerate(p)) for p in choices[:budget]]
    for wrong in (((0, 0),), ((0,), (0, 4)), ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)), ((),)):
        with pytest.raises(DartspecError, match="Medusa config: choices has"):
            medusa_config(choices=wrong)


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 3}, {"prefix": True, "num_blocks": 2}, {"head_bias": True}])
@pytest.mark.parametrize("budget", [1, 5, 60])
def test_hydra_drafts_are_those_of_the_paper(changes: dict[str, Any], budget: int) -> None:
    net, view = random_net(hydra.HydraNet, hydra_config(**changes)), View()
    ids, states = text(9)
    (got,) = hydra.HydraDrafter(net, view).propose([Committed(0, ids, 8, states)], [budget])
    wanted = reference.tree(weights(net), net.config, view.table, ids, states[:, 0], budget, {2})
    same(got, wanted)
    assert len(wanted) >= min(budget, 18)  # an end of text has no children


@pytest.mark.parametrize("which", ["medusa", "hydra", "hydra++"])
def test_told_bit_by_bit_in_a_batch_or_at_once_the_tree_is_the_same(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View()
    monkeypatch.setattr(hydra, "CHUNK_ROWS", 4)

    def fresh() -> Any:
        if which == "medusa":
            return medusa.MedusaDrafter(random_net(medusa.MedusaNet, medusa_config()), view)
        return hydra.HydraDrafter(random_net(hydra.HydraNet, hydra_config(prefix=which == "hydra++")), view)

    a, b = text(23, seed=4), text(14, seed=5)
    drafter = fresh()

    def told(slot: int, what: tuple[Tensor, Tensor], old: int, end: int) -> Committed:
        return Committed(slot, what[0][:end], end - 1 - old, what[1][old : end - 1])

    drafter.propose([told(3, a, 0, 6)], [12])
    drafter.propose([told(3, a, 5, 8), told(7, b, 0, 4)], [12, 3])
    drafter.propose([told(7, b, 3, 9), told(3, a, 7, 20)], [0, 0])
    got = drafter.propose([told(3, a, 19, 23), told(7, b, 8, 14)], [12, 12])
    for tree, what in zip(got, (a, b), strict=True):
        (alone,) = fresh().propose([told(0, what, 0, len(what[0]))], [12])
        same(tree, scored_paths(alone))
    drafter.reset([3])
    same(drafter.propose([told(3, b, 0, 14)], [12])[0], scored_paths(got[1]))
    drafter.fork(7, 8, 5)
    same(drafter.propose([told(8, b, 5, 14)], [12])[0], scored_paths(got[1]))
    with pytest.raises(DartspecError, match=r"features of shape \[13, 1, 24\] for 13 new tokens, found None"):
        drafter.propose([Committed(9, b[0], 13, None)], [4])


# -- training --------------------------------------------------------------------------------------------------------


def examples(view: View) -> list[Drawn]:
    return [drawn(12, 5, 1, view, [4, 9], [3, 6, 9]), drawn(8, 3, 2, view, [], [2, 5])]


def check_loss(module: Any, net: Any, view: View, predict: Any) -> None:
    """predict(weights, config, example, row, t) -> (V,) log-probabilities."""
    c, gamma = net.config, 0.8
    head = view.table[net.target_ids()]
    step = module.loss(net, TrainBatch(examples(view), view, (1, 2, 4), c.taps, torch.float32, head, c.d, gamma))
    named = dict(net.named_parameters())
    losses: list[list[Tensor]] = [[] for _ in range(c.d)]
    for e in examples(view):
        valid = loss_mask(e.example, c.d)
        wanted = [(j, 1) for j in e.first.tolist()] + [(a, t) for a in e.anchors.tolist() for t in range(1, c.d + 1)]
        for j, t in wanted:
            if valid[j, t - 1]:
                q = view.lm_head(e.states.final[j + t]).softmax(0)[net.target_ids()]
                rows = [row for row, offset in wanted if offset == t]
                weight = row_weight(e.example, rows, t, [one.example for one in examples(view)])
                losses[t - 1].append(-weight * (q * predict(named, c, e, j, t)).sum())
    assert step.counts.tolist() == [len(x) for x in losses]
    total = sum(gamma**t * torch.stack(x).sum() for t, x in enumerate(losses))
    torch.testing.assert_close(step.loss, total, rtol=1e-5, atol=1e-5)
    names, parameters = zip(*net.named_parameters(), strict=True)
    ours, theirs = torch.autograd.grad(step.loss, parameters), torch.autograd.grad(total, parameters)
    for name, x, y in zip(names, ours, theirs, strict=True):
        assert float(y.abs().max()) > 0, name
        torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-5 * float(y.abs().max()), msg=name)


def test_medusas_loss_and_gradients_are_the_papers() -> None:
    net, view = random_net(medusa.MedusaNet, medusa_config(num_blocks=2)), View()
    check_loss(medusa, net, view, lambda w, c, e, j, t: medusa_log_probs(w, c, e.states.final[j], t))


@pytest.mark.parametrize("prefix", [False, True])
def test_hydras_loss_and_gradients_are_the_papers(prefix: bool) -> None:
    net, view = random_net(hydra.HydraNet, hydra_config(prefix=prefix, num_blocks=2)), View()

    def predict(w: dict[str, Tensor], c: hydra.Config, e: Drawn, j: int, t: int) -> Tensor:
        state = reference.prefixed(w, c, e.states.final)[j]
        return reference.log_probs(w, c, state, view.table[torch.tensor(e.example.ids[j + 1 : j + 1 + t])])

    check_loss(hydra, net, view, predict)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "kind", "drafter", "config"),
    [
        (medusa, medusa.MedusaNet, medusa.MedusaDrafter, medusa_config()),
        (hydra, hydra.HydraNet, hydra.HydraDrafter, hydra_config(prefix=True)),
    ],
)
def test_saved_heads_load_and_draft_the_same(
    module: Any, kind: Any, drafter: Any, config: NetConfig, tmp_path: Path
) -> None:
    net = random_net(kind, config)
    net.save(tmp_path)
    ids, states = text(9)
    one = [Committed(0, ids, 8, states)]
    (wanted,) = drafter(net.to(torch.bfloat16).float(), View()).propose(one, [12])
    same(module.load(tmp_path, View()).propose(one, [12])[0], scored_paths(wanted))
    with pytest.raises(DartspecError, match="a vocabulary of 61, this target has 64"):
        module.load(tmp_path, View(vocab_size=64))
    with pytest.raises(DartspecError, match="no weights: give the folder"):
        module.load(config, View())
    with pytest.raises(DartspecError, match=r"taps is \[2\]; heads read the last state, \[-1\]"):
        type(config)(**{**vars(config), "taps": (2,)})
