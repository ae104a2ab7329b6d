"""EAGLE-3: its drafts, its loss and its caches against a reference written from the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dartspec.drafters import eagle3
from dartspec.drafters._grow import Growth
from dartspec.drafters.eagle3 import Config, Eagle3Drafter, Eagle3Net
from dartspec.errors import DartspecError
from dartspec.train.batch import Drawn, TrainBatch
from dartspec.train.data import Example, loss_mask
from dartspec.train.features import States
from dartspec.tree import check
from dartspec.types import Committed, TokenTree
from reference import eagle3 as reference
from reference.prefixes import row_weight
from tiny_net import HIDDEN, LAYER, VOCAB, View, randomised, text


def config(**changes: Any) -> Config:
    return Config(**{**LAYER, "d": 4, "top_k": 3, **changes})


def random_net(c: Config, seed: int = 0) -> Eagle3Net:
    return randomised(Eagle3Net(c), seed)


def scored_paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return dict(zip(paths[1:], tree.scores.tolist()[1:], strict=True))


def same(got: TokenTree, wanted: dict[tuple[int, ...], float]) -> None:
    check(got)
    found = scored_paths(got)
    assert found.keys() == wanted.keys()
    assert [found[p] for p in wanted] == pytest.approx([wanted[p] for p in wanted], abs=1e-4)


@pytest.mark.parametrize("changes", [{}, {"top_k": 1}, {"norm_before_residual": True}, {"num_key_value_heads": 4}])
@pytest.mark.parametrize("budget", [1, 5, 16, 60])
def test_drafts_are_those_of_the_papers(changes: dict[str, Any], budget: int) -> None:
    c, view = config(**changes), View()
    net = random_net(c)
    ids, features = text(9)
    (got,) = Eagle3Drafter(net, view).propose([Committed(0, ids, 8, features)], [budget])
    weights = {n: t.detach() for n, t in net.state_dict().items()}
    wanted = reference.tree(weights, c, view.table, ids, features.flatten(1), budget, {2})
    same(got, wanted)
    assert len(wanted) == min(budget, c.d if c.top_k == 1 else 3 + 9 * (c.d - 1))


def test_told_bit_by_bit_in_a_batch_or_at_once_the_tree_is_the_same() -> None:
    """Rows of the last round's tree leave nothing behind; neighbours and their lengths change nothing."""
    net, view = random_net(config()), View()
    a, b = text(23, seed=4), text(14, seed=5)
    drafter = Eagle3Drafter(net, view)

    def told(slot: int, what: tuple[Tensor, Tensor], old: int, end: int) -> Committed:
        return Committed(slot, what[0][:end], end - 1 - old, what[1][old : end - 1])

    drafter.propose([told(3, a, 0, 6)], [12])
    drafter.propose([told(3, a, 5, 8), told(7, b, 0, 4)], [12, 3])
    drafter.propose([told(7, b, 3, 9), told(3, a, 7, 20)], [0, 0])  # no drafts, but the news are read
    got = drafter.propose([told(3, a, 19, 23), told(7, b, 8, 14)], [12, 12])
    for tree, what in zip(got, (a, b), strict=True):
        (alone,) = Eagle3Drafter(net, view).propose([told(0, what, 0, len(what[0]))], [12])
        same(tree, scored_paths(alone))
    drafter.reset([3])
    (again,) = drafter.propose([told(3, b, 0, 14)], [12])
    same(again, scored_paths(got[1]))
    drafter.fork(7, 8, 5)  # another text that begins as this one
    (forked,) = drafter.propose([told(8, b, 5, 14)], [12])
    same(forked, scored_paths(got[1]))
    with pytest.raises(DartspecError, match="has read 13 rows of a text, 14 of them were asked for"):
        drafter.fork(7, 9, 14)


def test_long_text_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    net, view = random_net(config()), View()
    ids, features = text(30)
    one = [Committed(0, ids, 29, features)]
    whole = Eagle3Drafter(net, view).propose(one, [16])[0]
    for rows in (1, 7, 28, 29):
        monkeypatch.setattr(eagle3, "CHUNK_ROWS", rows)
        same(Eagle3Drafter(net, view).propose(one, [16])[0], scored_paths(whole))


def test_nothing_follows_an_end_and_no_padding_is_drafted() -> None:
    net = random_net(config(draft_vocab_size=VOCAB))
    net.d2t.zero_()
    view = View(num_tokens=VOCAB - 20)
    with torch.no_grad():
        net.lm_head.weight[2] += (
            3.0 * net.lm_head.weight.norm(dim=1).max() * torch.nn.functional.normalize(net.lm_head.weight[2], dim=0)
        )
    ends = 0
    for seed in range(6):
        ids, features = text(9, seed=seed)
        (tree,) = Eagle3Drafter(net, view).propose([Committed(0, ids, 8, features)], [30])
        assert int(tree.tokens[1:].max()) < VOCAB - 20
        parents = set(tree.parents.tolist())
        ends += sum(t == 2 for t in tree.tokens[1:].tolist())
        assert not any(t == 2 and i in parents for i, t in enumerate(tree.tokens.tolist()) if i)
    assert ends > 0


def test_logits_that_are_not_finite_make_no_node() -> None:
    net, view = random_net(config()), View()
    ids, features = text(9)
    broken = features.clone()
    broken[-1] = float("nan")
    (tree,) = Eagle3Drafter(net, view).propose([Committed(0, ids, 8, broken)], [12])
    assert tree.num_drafts == 0
    assert int(tree.tokens[0]) == int(ids[-1])


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (lambda i, f: Committed(0, i, 8, None), r"wants features of shape \[8, 3, 24\] for 8 new tokens, found None"),
        (lambda i, f: Committed(0, i, 8, f[:, :2]), r"found \[8, 2, 24\]"),
        (lambda i, f: Committed(0, i, 3, f[:3]), "3 new of 9 committed tokens, but the drafter has read 0 rows"),
    ],
)
def test_news_that_leave_gaps_are_refused(one: Any, message: str) -> None:
    ids, features = text(9)
    with pytest.raises(DartspecError, match=message):
        Eagle3Drafter(random_net(config()), View()).propose([one(ids, features)], [4])


# -- the tree --------------------------------------------------------------------------------------------------------


def test_growth_stops_only_where_nothing_can_enter() -> None:
    """Two sequences: one has its tree after the first level, the other needs the second."""
    growth = Growth([5, 6], [2, 3], 2, {9})
    tokens = torch.tensor([[[1, 2]], [[3, 9]]], dtype=torch.int32)
    growth.add(torch.tensor([[[-0.1, -0.2]], [[-0.5, -0.6]]]), tokens)
    chosen, parents = growth.choose() or pytest.fail("the second tree has room")
    assert chosen.tolist() == [[1, 2], [3, 9]]
    assert parents.tolist() == [[0, 0], [0, 0]]
    step = torch.tensor([[[-1.0, -2.0]] * 2, [[-0.2, float("nan")], [-0.0, -0.1]]])
    growth.add(step, torch.tensor([[[7, 8], [7, 8]], [[4, 5], [7, 8]]], dtype=torch.int32))
    assert growth.choose() is None  # full, and what is left is worse
    first, second = (scored_paths(t) for t in growth.trees())
    assert first == pytest.approx({(1,): -0.1, (2,): -0.2})
    assert second == pytest.approx({(3,): -0.5, (9,): -0.6, (3, 4): -0.7})  # nothing after the end, 9


def test_equal_scores_keep_parents_first() -> None:
    growth = Growth([0], [3], 2, set())
    for _ in range(3):
        w = 1 if growth._count == 1 else 2
        growth.add(torch.zeros(1, w, 2), torch.tensor([[[1, 2]] * w], dtype=torch.int32))
        if growth.choose() is None:
            break
    (tree,) = growth.trees()
    check(tree)
    assert tree.num_drafts == 3


# -- training --------------------------------------------------------------------------------------------------------


def drawn(length: int, num_prompt: int, seed: int, view: View, first: list[int], anchors: list[int]) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
    features = torch.randn(length, 3, HIDDEN, generator=generator)
    final = torch.randn(length, HIDDEN, generator=generator)
    states = States(features, final, torch.logsumexp(view.lm_head(final), -1))
    rows = [torch.tensor(r, dtype=torch.int64) for r in (first, anchors)]
    return Drawn(Example.answered(ids, num_prompt), states, *rows)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_the_unrolled_loss_and_its_gradients_are_the_papers(norm_before_residual: bool) -> None:
    """Training-time test: step s of an anchor is the drafter run on from its own outputs over the true tokens."""
    net, view, gamma = random_net(config(norm_before_residual=norm_before_residual)), View(), 0.8
    c = net.config
    examples = [drawn(12, 5, 1, view, [4, 9], [3, 6, 9]), drawn(8, 3, 2, view, [], [2, 5])]
    head = view.table[net.target_ids()]
    step = eagle3.loss(net, TrainBatch(examples, view, c.taps, c.taps, torch.float32, head, c.d, gamma))
    weights = dict(net.named_parameters()) | {"d2t": net.d2t}
    losses: list[list[Tensor]] = [[] for _ in range(c.d)]
    for e in examples:
        ids = torch.tensor(e.example.ids)
        features = e.states.features.flatten(1)
        valid = loss_mask(e.example, c.d)
        wanted = [(j, 1) for j in e.first.tolist()] + [(a, t) for a in e.anchors.tolist() for t in range(1, c.d + 1)]
        for j, t in wanted:
            if valid[j, t - 1]:
                embeddings = view.table[ids[1 : j + 1 + t]]
                x = reference.outputs(weights, c, features[: j + 1], embeddings)[-1]
                q = view.lm_head(e.states.final[j + t]).softmax(0)[net.target_ids()]
                rows = [row for row, offset in wanted if offset == t]
                weight = row_weight(e.example, rows, t, [one.example for one in examples])
                losses[t - 1].append(-weight * (q * reference.log_probs(weights, c, x)).sum())
    assert step.counts.tolist() == [len(x) for x in losses]
    total = sum(gamma**t * torch.stack(x).sum() for t, x in enumerate(losses))
    torch.testing.assert_close(step.loss, total, rtol=1e-5, atol=1e-5)
    names, parameters = zip(*net.named_parameters(), strict=True)
    ours, theirs = torch.autograd.grad(step.loss, parameters), torch.autograd.grad(total, parameters)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert float(b.abs().max()) > 0, name
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5 * float(b.abs().max()), msg=name)


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_saved_drafter_loads_and_drafts_the_same(tmp_path: Path) -> None:
    net = random_net(config())
    net.save(tmp_path, {"steps": 3})
    ids, features = text(9)
    one = [Committed(0, ids, 8, features)]
    (got,) = eagle3.load(tmp_path, View()).propose(one, [12])
    (wanted,) = Eagle3Drafter(net.to(torch.bfloat16).float(), View()).propose(one, [12])
    same(got, scored_paths(wanted))
    assert eagle3.read(tmp_path).config.provenance == {"steps": 3}
    with pytest.raises(DartspecError, match="a hidden size of 24, this target has 32"):
        eagle3.load(tmp_path, View(hidden_size=32))
    with pytest.raises(DartspecError, match="no weights: give the folder"):
        eagle3.load(config(), View())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "EAGLE-3 config: top_k is 0"),
        ({"taps": (3, 1)}, "must rise"),
        ({"method": "dart"}, "method is 'dart', expected 'eagle3'"),
        ({"num_key_value_heads": 3}, "no multiple"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DartspecError, match=message):
        config(**changes)
