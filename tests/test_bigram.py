"""The learned continuity and the other heads: what they compute, what they are taught, and that they change no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dartspec import _core
from dartspec.drafters import _bigram, dart
from dartspec.drafters._bigram import Bigram, Continuity
from dartspec.drafters._nn import head_rows
from dartspec.drafters._train import Start
from dartspec.errors import DartspecError
from dartspec.interop.peagle import export_peagle
from dartspec.lattice import SearchConfig, build_tree, build_trees
from dartspec.ngram import NgramIndex
from dartspec.train.loop import warm_start
from dartspec.types import Committed, SamplingParams
from reference import search as twin
from reference.prefixes import carries, row_weight
from test_dart_net import config, random_net
from test_lossless import plain, randomised, requests_for, run, target, tiny_layer
from test_train_loss import batch, our_step
from tiny_net import HIDDEN, VOCAB, View, text

RANK = 6


def learned_net(**changes: Any) -> dart.DartNet:
    return random_net(config(continuity_rank=RANK, **changes))


@pytest.fixture(scope="module")
def index() -> NgramIndex:
    generator = np.random.default_rng(0)
    documents = generator.integers(0, 8, (20, 12)).tolist()
    return NgramIndex.build(documents, vocab_size=8, fingerprint="", name="", description="")


@settings(max_examples=60, deadline=None)
@given(
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    with_index=st.booleans(),
    with_text=st.booleans(),
    at_level0=st.booleans(),
    seed=st.integers(0, 100),
)
def test_the_search_mixes_it_in_as_the_plain_twin_says(
    weight: float, with_index: bool, with_text: bool, at_level0: bool, seed: int, index: NgramIndex
) -> None:
    generator = np.random.default_rng(seed)
    config = replace(SearchConfig(), learned_weight=weight, beam=4, ngram_at_level0=at_level0)
    scores = torch.from_numpy(generator.normal(size=(4, 7)).astype(np.float32)).log_softmax(-1)
    tokens = torch.from_numpy(generator.integers(-1, 8, (4, 7)).astype(np.int32))
    g = generator.random((8, 8)).astype(np.float32)  # of the token after another one
    context = [3, 6, 5]
    before = np.concatenate([np.full((1, 7), 5), tokens[:-1].numpy()])
    table = torch.from_numpy(g[before[:, :, None], tokens.numpy()[:, None, :]])
    live = None
    if with_text:
        live = _core.LiveCounts(2, 0, np.empty(0, dtype=np.int32))
        live.add(np.array([1, 2, 5, 3, 5, 4, 5, 3], dtype=np.int32), 0)
    of_text = {1: {2: 1.0}, 2: {5: 1.0}, 5: {3: 2 / 3, 4: 1 / 3}, 3: {5: 1.0}, 4: {5: 1.0}}

    def continuity(path: Sequence[int], token: int) -> float:
        other = float(index.probabilities(path, [token])[0]) if with_index else 0.0
        if with_text:
            own = of_text.get(path[-1], {}).get(token, 0.0)
            other = 0.5 * other + 0.5 * own if with_index else own
        mixed = weight if with_index or with_text else 1.0
        return (1.0 - mixed) * other + mixed * float(g[path[-1], token])

    used = index if with_index else None
    tree = build_tree(5, scores, tokens, context, 30, used, config, frozenset({7}), live, table)
    wanted = twin.search(5, scores.tolist(), tokens.tolist(), context, 30, continuity, config, frozenset({7}))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == wanted[:2]
    np.testing.assert_allclose(tree.scores.numpy(), np.array(wanted[2]), rtol=1e-5)
    (batched,) = build_trees(
        scores[None], tokens[None], [context], [30], used, config, frozenset({7}), [live], learned=table[None]
    )
    assert all(torch.equal(a, b) for a, b in zip(tree, batched, strict=True))


def test_numbers_that_are_no_probability_count_as_none_and_shapes_are_checked() -> None:
    scores = torch.full((2, 2), 0.5).log()
    tokens = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    bad = torch.tensor([[[0.0, 0], [0, 0]], [[float("nan"), -1.0], [0.25, float("inf")]]])
    good = torch.tensor([[[0.0, 0], [0, 0]], [[0.0, 0.0], [0.25, 1.0]]])
    trees = [build_tree(0, scores, tokens, [0], 9, None, SearchConfig(), frozenset(), None, t) for t in (bad, good)]
    assert all(torch.equal(a, b) for a, b in zip(*trees, strict=True))
    with pytest.raises(DartspecError, match="learned has 1 rows or columns, expected 2"):
        build_tree(0, scores, tokens, [0], 9, None, SearchConfig(), frozenset(), None, good[:1])
    with pytest.raises(DartspecError, match=r"learned_weight is 1\.5"):
        SearchConfig(learned_weight=1.5)


@pytest.mark.parametrize("at_load", [37, 36])
def test_the_table_is_a_softmax_over_the_draft_vocabulary(at_load: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bigram, "MOST_AT_LOAD", at_load)
    generator = torch.Generator().manual_seed(0)
    bigram = Bigram(HIDDEN, RANK, 37)
    torch.nn.init.normal_(bigram.inner.weight, std=0.3, generator=generator)
    torch.nn.init.normal_(bigram.outer.weight, std=0.5, generator=generator)
    ids = torch.randperm(VOCAB, generator=generator)[:37].sort().values
    view = View()
    continuity = Continuity(bigram, view.embed(ids), ids, VOCAB)
    tokens = ids[torch.randint(0, 37, (2, 4, 5), generator=generator)].int()
    roots = torch.tensor([next(i for i in range(VOCAB) if i not in ids), int(ids[3])])  # one is no draft token
    table = continuity.table(tokens)
    assert not table[:, 0].any()
    continuity.add_root(table, view.embed(roots), tokens)
    place = {int(i): n for n, i in enumerate(ids)}

    def g(before: int, token: int) -> float:
        e = view.table[before]
        state = torch.cat((bigram.inner.weight @ (e / e.pow(2).mean().sqrt()), torch.tensor([RANK**0.5])))
        return float((bigram.outer.weight @ state).softmax(0)[place[token]].detach())

    for b in range(2):
        for level in range(4):
            for i in range(5 if level else 1):
                before = int(tokens[b, level - 1, i]) if level else int(roots[b])
                wanted = [g(before, t) for t in tokens[b, level].tolist()]
                torch.testing.assert_close(table[b, level, i], torch.tensor(wanted), rtol=1e-4, atol=1e-6)
    assert torch.equal(continuity.table(tokens)[:, 1:], table[:, 1:])  # known normalisers change nothing
    assert continuity.table(tokens[:, :1]).shape == (2, 1, 5, 5)


def test_it_is_taught_the_target_behind_the_known_token_and_counted_apart() -> None:
    net, view = learned_net(), View()
    drawn = batch(view)
    got = our_step(drawn, net, view)
    plain_net = random_net(config())
    plain_net.load_state_dict({n: t for n, t in net.state_dict().items() if not n.startswith("continuity.")})
    without = our_step(drawn, plain_net, view)
    for name in ("sums", "counts", "mass"):
        torch.testing.assert_close(getattr(got, name), getattr(without, name))
    examples = [one.example for one in drawn]
    losses, total = [], torch.zeros(())
    for one in drawn:
        for j in one.first.tolist():
            if carries(one.example, j, 1):
                e = view.table[one.example.ids[j + 1]]
                state = torch.cat(
                    (net.continuity.inner.weight @ (e / e.pow(2).mean().sqrt()), torch.tensor([RANK**0.5]))
                )
                q = view.lm_head(one.states.final[j + 1]).softmax(-1)[net.target_ids()]
                losses.append(-(q * (net.continuity.outer.weight @ state).log_softmax(-1)).sum())
                total = total + row_weight(one.example, one.first.tolist(), 1, examples) * losses[-1]
    torch.testing.assert_close(got.continuity, torch.stack((torch.stack(losses).sum(), torch.tensor(5.0))))
    torch.testing.assert_close(got.loss, without.loss + total)
    own = list(net.continuity.parameters())
    for ours, theirs in zip(torch.autograd.grad(got.loss, own), torch.autograd.grad(total, own), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_the_drafter_searches_by_it(index: NgramIndex) -> None:
    net, view = learned_net(), View()
    ids, features = text(12)
    news = [Committed(0, ids, 11, features)]
    (with_it,) = dart.DartDrafter(net, view).propose(news, [20])
    net.config = replace(net.config, continuity_rank=0)
    (without,) = dart.DartDrafter(random_net_without(net), view).propose(news, [20])
    assert with_it.tokens.tolist() != without.tokens.tolist()
    net.config = replace(net.config, continuity_rank=RANK)
    full = NgramIndex.build([ids.tolist() * 3], vocab_size=VOCAB, fingerprint="", name="", description="")
    joined = dart.DartDrafter(net, view, full).propose(news, [20])[0]
    assert joined.tokens.tolist() != with_it.tokens.tolist()
    alone = SearchConfig(learned_weight=1.0)
    replaced = dart.DartDrafter(net, view, full, alone).propose(news, [20])[0]
    assert replaced.tokens.tolist() == with_it.tokens.tolist()
    at_root = SearchConfig(ngram_at_level0=True)
    assert dart.DartDrafter(net, view, None, at_root).propose(news, [20])[0].num_drafts == 20


def random_net_without(net: dart.DartNet) -> dart.DartNet:
    plain_net = random_net(config())
    plain_net.load_state_dict({n: t for n, t in net.state_dict().items() if not n.startswith("continuity.")})
    return plain_net


@pytest.mark.parametrize(
    "changes",
    [{"continuity_rank": 4}, {"head": "target"}, {"head": "low_rank", "head_rank": 5}, {"shifted": False}],
)
def test_the_text_is_plain_decodings_and_a_checkpoint_says_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    goal = target()
    made = config(**{**tiny_layer(goal), "d": 5, "taps": (1, 2, 3), **changes})
    net = randomised(dart.DartNet(made), 3).to(torch.bfloat16).float()
    net.save(tmp_path)
    again = dart.load(tmp_path, goal)
    if made.head == "target":
        assert "lm_head.weight" not in dart.DartNet.from_folder(tmp_path).state_dict()
        net.target_head = head_rows(goal, net.target_ids())
    for params in (SamplingParams(max_tokens=20), SamplingParams(temperature=1.0, seed=3, max_tokens=20)):
        requests = requests_for(params)[:2]
        wanted = plain(goal, requests)
        got, metrics = run(goal, again, requests)[:2]
        assert got == wanted
        mine, same = run(goal, dart.DartDrafter(net, goal), requests)[:2]
        assert mine == wanted
        assert [r.num_accepted for m in metrics for r in m.rounds] == [r.num_accepted for m in same for r in m.rounds]


def start(**options: Any) -> Start:
    shape = {k: v for k, v in config().__dict__.items() if k not in ("d", "taps", "method", *dart.OPTIONS)}
    view = View()
    ids = torch.arange(37)
    return Start({**shape, "num_target_layers": 4}, 5, (1, 2, 4), options, ids, view.table[ids], 0, lambda _: {})


def test_a_fresh_head_is_the_targets_or_the_nearest_of_its_rank() -> None:
    head = start().head
    assert torch.equal(dart.start(start()).whole_head(), head)
    assert torch.equal(dart.start(start(head="target")).whole_head(), head)
    u, s, vh = torch.linalg.svd(head, full_matrices=False)
    low = dart.start(start(head="low_rank", head_rank=5)).whole_head()
    torch.testing.assert_close(low, u[:, :5] @ torch.diag(s[:5]) @ vh[:5], rtol=1e-3, atol=1e-3)
    with pytest.raises(DartspecError, match="attention is 'sparse'; must be block, dense, flex, or empty"):
        dart.start(start(attention="sparse"))
    assert dart.start(start(attention="dense")).form == "dense"


def test_a_frozen_head_learns_nothing_and_the_rest_does() -> None:
    net, view = random_net(config(head="target")), View()
    step = our_step(batch(view), net, view)
    step.loss.backward()
    assert net.target_head is not None
    assert net.target_head.grad is None
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in net.parameters())
    own = random_net(config())
    own.load_state_dict({**net.state_dict(), "lm_head.weight": net.target_head})
    torch.testing.assert_close(our_step(batch(view), own, view).loss, step.loss)


def test_a_head_of_low_rank_equals_its_product() -> None:
    net, view = random_net(config(head="low_rank", head_rank=5)), View()
    step = our_step(batch(view), net, view)
    own = random_net(config())
    shared = {n: t for n, t in net.state_dict().items() if "head" not in n}
    own.load_state_dict({**shared, "lm_head.weight": net.whole_head()})
    torch.testing.assert_close(our_step(batch(view), own, view).loss, step.loss, rtol=1e-5, atol=1e-5)


def test_a_drafter_without_its_targets_head_says_so() -> None:
    net = dart.DartNet(config(head="target"))
    with pytest.raises(DartspecError, match="load it with its target"):
        dart.DartDrafter(net, View())


def test_another_draft_vocabulary_takes_its_rows_along() -> None:
    old, new = learned_net(), dart.start(start(continuity_rank=RANK))
    before = new.continuity.outer.weight.clone()
    warm_start(new, old)
    place = {int(i): n for n, i in enumerate(old.target_ids())}
    for row, i in enumerate(new.target_ids().tolist()):
        wanted = old.continuity.outer.weight[place[i]] if i in place else before[row]
        assert torch.equal(new.continuity.outer.weight[row], wanted)
    with pytest.raises(DartspecError, match=r"continuity\.inner\.weight is nothing there"):
        warm_start(new, random_net(config()))
    with pytest.raises(DartspecError, match=r"lm_head\.weight is nothing there"):
        warm_start(random_net(config()), random_net(config(head="target")))
    with pytest.raises(DartspecError, match=r"lm_head\.weight is \[37, 7\] there, this run needs \[37, 5\]"):
        warm_start(dart.start(start(head="low_rank", head_rank=5)), random_net(config(head="low_rank", head_rank=7)))


def test_vllm_gets_the_whole_head_and_no_continuity(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net, table = learned_net(head="low_rank", head_rank=5), View().table
    export_peagle(net, table, tmp_path, model="m", architecture="a", mask_token_id=VOCAB - 1, steps=3)
    found = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(found["lm_head.weight"], net.whole_head())
    assert not any(name.startswith(("continuity", "head_in")) for name in found)
    with pytest.raises(DartspecError, match="unshifted"):
        export_peagle(
            random_net(config(shifted=False)), table, tmp_path, model="m", architecture="a", mask_token_id=1, steps=3
        )
