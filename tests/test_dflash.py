"""DFlash: its block, its trees and its loss against a reference written from the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dartspec.drafters import dflash
from dartspec.drafters.dflash import Config, DFlashDrafter, DFlashNet
from dartspec.errors import DartspecError
from dartspec.train.batch import TrainBatch
from dartspec.train.data import loss_mask
from dartspec.tree import check
from dartspec.types import Committed
from reference import dflash as reference
from reference.prefixes import row_weight
from test_eagle3 import drawn, same, scored_paths
from tiny_net import LAYER, View, randomised, text


def config(**changes: Any) -> Config:
    return Config(**{**LAYER, "d": 3, "num_layers": 2, "head_norm": True, "top_k": 4, **changes})


def random_net(c: Config, seed: int = 0) -> DFlashNet:
    return randomised(DFlashNet(c), seed)


def weights(net: DFlashNet) -> dict[str, torch.Tensor]:
    return {n: t.detach() for n, t in net.state_dict().items()}


@pytest.mark.parametrize("changes", [{}, {"head_norm": False, "num_layers": 1}, {"tree": "chain"}])
@pytest.mark.parametrize("budget", [1, 2, 16, 100])
def test_drafts_are_those_of_the_paper(changes: dict[str, Any], budget: int) -> None:
    net, view = random_net(config(**changes)), View()
    c = net.config
    ids, features = text(9)
    (got,) = DFlashDrafter(net, view).propose([Committed(0, ids, 8, features)], [budget])
    log_probs = reference.block(weights(net), c, features.flatten(1), view.table[ids[-1]])
    k = 1 if c.tree == "chain" else c.top_k
    wanted = reference.product_tree(log_probs, net.target_ids(), k, budget, {2})
    same(got, wanted)
    assert len(wanted) == min(budget, 3 if k == 1 else 4 + 16 + 64)


def test_told_bit_by_bit_in_a_batch_or_at_once_the_tree_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    net, view = random_net(config()), View()
    a, b = text(23, seed=4), text(14, seed=5)

    def told(slot: int, what: tuple[torch.Tensor, torch.Tensor], old: int, end: int) -> Committed:
        return Committed(slot, what[0][:end], end - 1 - old, what[1][old : end - 1])

    alone = [DFlashDrafter(net, view).propose([told(0, w, 0, len(w[0]))], [12])[0] for w in (a, b)]
    for rows in (512, 5, 1):
        monkeypatch.setattr(dflash, "CHUNK_ROWS", rows)
        drafter = DFlashDrafter(net, view)
        drafter.propose([told(3, a, 0, 6)], [12])
        drafter.propose([told(3, a, 5, 8), told(7, b, 0, 4)], [12, 3])
        drafter.propose([told(7, b, 3, 9), told(3, a, 7, 20)], [0, 0])
        got = drafter.propose([told(3, a, 19, 23), told(7, b, 8, 14)], [12, 12])
        for tree, wanted in zip(got, alone, strict=True):
            same(tree, scored_paths(wanted))
        drafter.reset([3])
        same(drafter.propose([told(3, b, 0, 14)], [12])[0], scored_paths(alone[1]))
        drafter.fork(7, 8, 5)
        same(drafter.propose([told(8, b, 5, 14)], [12])[0], scored_paths(alone[1]))
    with pytest.raises(DartspecError, match="2 new of 20 committed tokens, but the drafter has read 0 rows"):
        drafter.propose([told(9, a, 17, 20)], [4])


def test_the_loss_and_its_gradients_are_the_papers() -> None:
    net, view, gamma = random_net(config()), View(), 0.8
    c = net.config
    examples = [drawn(12, 5, 1, view, [4, 9], [3, 6, 9]), drawn(8, 3, 2, view, [], [2, 5])]
    head = view.table[net.target_ids()]
    step = dflash.loss(net, TrainBatch(examples, view, c.taps, c.taps, torch.float32, head, c.d, gamma))
    named = dict(net.named_parameters())
    losses: list[list[torch.Tensor]] = [[] for _ in range(c.d)]
    for e in examples:
        ids = torch.tensor(e.example.ids)
        valid = loss_mask(e.example, c.d)
        for a in e.anchors.tolist():
            log_probs = reference.block(named, c, e.states.features[: a + 1].flatten(1), view.table[ids[a + 1]])
            for t in range(1, c.d + 1):
                if valid[a, t - 1]:
                    q = view.lm_head(e.states.final[a + t]).softmax(0)[net.target_ids()]
                    weight = row_weight(e.example, e.anchors.tolist(), t, [one.example for one in examples])
                    losses[t - 1].append(-weight * (q * log_probs[t - 1]).sum())
    assert step.counts.tolist() == [len(x) for x in losses]
    total = sum(gamma**t * torch.stack(x).sum() for t, x in enumerate(losses))
    torch.testing.assert_close(step.loss, total, rtol=1e-5, atol=1e-5)
    names, parameters = zip(*net.named_parameters(), strict=True)
    ours, theirs = torch.autograd.grad(step.loss, parameters), torch.autograd.grad(total, parameters)
    for name, x, y in zip(names, ours, theirs, strict=True):
        assert float(y.abs().max()) > 0, name
        torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-5 * float(y.abs().max()), msg=name)


def test_a_saved_drafter_loads_and_drafts_the_same(tmp_path: Path) -> None:
    net = random_net(config())
    net.save(tmp_path)
    ids, features = text(9)
    one = [Committed(0, ids, 8, features)]
    (got,) = dflash.load(tmp_path, View()).propose(one, [12])
    (wanted,) = DFlashDrafter(net.to(torch.bfloat16).float(), View()).propose(one, [12])
    check(got)
    same(got, scored_paths(wanted))
    with pytest.raises(DartspecError, match="a hidden size of 24, this target has 32"):
        dflash.load(tmp_path, View(hidden_size=32))
    with pytest.raises(DartspecError, match="no weights: give the folder"):
        dflash.load(config(), View())
    with pytest.raises(DartspecError, match="tree is 'bush'; must be 'best_first' or 'chain'"):
        config(tree="bush")
