"""DART's network: block form against the dense reference, decoding against training, isolation of mask groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dartspec.drafters.dart import Config, DartDrafter, DartNet, SharedRows
from dartspec.errors import DartspecError
from dartspec.lattice import SearchConfig
from dartspec.ngram import NgramIndex
from dartspec.types import Committed
from reference.dart_dense import dense_forward, layout
from tiny_net import HIDDEN, LAYER, VOCAB, View, randomised, text


def config(**changes: Any) -> Config:
    return Config(**{**LAYER, "d": 5, **changes})


def random_net(c: Config, seed: int = 0) -> DartNet:
    net = randomised(DartNet(c), seed)
    if c.head == "target":
        net.target_head = View().table[net.target_ids()]
    return net


def shared_rows(view: View, ids: Tensor, features: Tensor, first: list[int], anchors: list[int]) -> SharedRows:
    return SharedRows(
        features.flatten(1), view.embed(ids[1:]), [len(ids) - 1], [torch.tensor(first)], [torch.tensor(anchors)]
    )


def training_log_probs(net: DartNet, view: View, ids: Tensor, features: Tensor) -> Tensor:
    """(d, V) of the rows that predict by the training-time forward."""
    last = len(ids) - 2
    first, masks = net.shared_forward(shared_rows(view, ids, features, [last], [last]))
    return (net.for_head(torch.cat((first, masks[0]))) @ net.head_weight.T).log_softmax(-1)


FORMS = [{}, {"mask": "official"}, {"final_norm_twice": True}, {"d": 2}, {"num_key_value_heads": 4}, {"taps": (3,)}]
FORMS.append({"shifted": False})
HEADS = [{"head": "target"}, {"head": "low_rank", "head_rank": 7}]


@pytest.mark.parametrize("changes", FORMS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("form", ["block", "blocks of 9", "dense", "flex"])
def test_three_forms_equal_the_dense_twin_in_rows_and_gradients(
    changes: dict[str, Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dartspec.drafters import dart

    c = config(**changes)
    net, view = random_net(c), View()
    if form == "blocks of 9":
        monkeypatch.setattr(dart, "ROWS_A_BLOCK", 9)
    net.form = form.split("s ")[0]
    has_backward = form != "flex"  # torch has none of FlexAttention on the CPU
    (ids_a, f_a), (ids_b, f_b) = text(13, 1), text(7, 2)
    f_a, f_b = f_a[:, : len(c.taps)], f_b[:, : len(c.taps)]
    firsts, anchors = ([2, 5, 11], [0, 5]), ([3, 5, 11], [0, 1, 4])
    a = shared_rows(view, ids_a, f_a, firsts[0], anchors[0])
    b = shared_rows(view, ids_b, f_b, firsts[1], anchors[1])
    packed = SharedRows(*(torch.cat((x, y)) if isinstance(x, Tensor) else [*x, *y] for x, y in zip(a, b, strict=True)))
    with torch.set_grad_enabled(has_backward):
        first, masks = net.shared_forward(packed)
    got = torch.cat((first, masks.flatten(0, 1)))

    wanted_first, wanted_masks = [], []
    for ids, f, rows, groups in ((ids_a, f_a, firsts[0], anchors[0]), (ids_b, f_b, firsts[1], anchors[1])):
        n = len(ids) - 1
        if c.shifted:
            dense = dense_forward(net, f.flatten(1), view.embed(ids[1:]), groups)
            wanted_first.append(dense[rows])
            wanted_masks.append(dense[n:])
        else:  # offset 1 is predicted by the first mask, whichever row it follows
            dense = dense_forward(net, f.flatten(1), view.embed(ids[1:]), rows + groups)[n:].view(-1, c.d, HIDDEN)
            wanted_first.append(dense[: len(rows), 0])
            wanted_masks.append(dense[len(rows) :, 1:].flatten(0, 1))
    wanted = torch.cat([*wanted_first, *wanted_masks])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    if not has_backward:
        return

    probe = torch.randn(got.shape, generator=torch.Generator().manual_seed(3))
    head_free = [p for n, p in net.named_parameters() if n != "lm_head.weight"]
    for ours, theirs in zip(
        torch.autograd.grad((got * probe).sum(), head_free),
        torch.autograd.grad((wanted * probe).sum(), head_free),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()) + 1e-6)


@pytest.mark.parametrize("form", ["block", "dense"])
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize(("first", "anchors"), [([2, 5], []), ([], [3]), ([], [])])
def test_rows_of_one_kind_only_or_none(form: str, shifted: bool, first: list[int], anchors: list[int]) -> None:
    c = config(shifted=shifted)
    net, view = random_net(c), View()
    net.form = form
    ids, features = text(9)
    whole_first, whole_masks = net.shared_forward(shared_rows(view, ids, features, [2, 5], [3]))
    some = shared_rows(view, ids, features, [], [])._replace(
        first=[torch.tensor(first, dtype=torch.int64)], anchors=[torch.tensor(anchors, dtype=torch.int64)]
    )
    got_first, got_masks = net.shared_forward(some)
    assert got_first.shape == (len(first), HIDDEN)
    assert got_masks.shape == (len(anchors), c.d - 1, HIDDEN)
    torch.testing.assert_close(got_first, whole_first[: len(first)], rtol=0, atol=1e-5)
    torch.testing.assert_close(got_masks, whole_masks[: len(anchors)], rtol=0, atol=1e-5)


def test_dense_layout_is_the_papers_union() -> None:
    positions, allowed = layout(4, [1, 3], 2)
    assert positions.tolist() == [0, 1, 2, 3, 2, 3, 4, 5]
    as_text = ["".join("x" if a else "." for a in row) for row in allowed.tolist()]
    assert as_text == [
        "x.......",
        "xx......",
        "xxx.....",
        "xxxx....",
        "xx..x...",
        "xx..xx..",
        "xxxx..x.",
        "xxxx..xx",
    ]


def test_a_group_sees_no_later_token_and_no_other_group() -> None:
    net, view = random_net(config()), View()
    ids, features = text(12)
    anchors = [3, 6]
    _, masks = net.shared_forward(shared_rows(view, ids, features, [3], anchors))
    later_ids, later_features = ids.clone(), features.clone()
    later_ids[5:] = (later_ids[5:] + 7) % VOCAB  # row 4 and on
    later_features[4:] += 3.0
    _, changed = net.shared_forward(shared_rows(view, later_ids, later_features, [3], anchors))
    assert torch.equal(masks[0], changed[0])
    assert not torch.allclose(masks[1], changed[1], atol=1e-2)
    _, alone = net.shared_forward(shared_rows(view, ids, features, [3], [6]))
    torch.testing.assert_close(masks[1], alone[0], rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    form=st.sampled_from([*FORMS[:4], FORMS[-1], *HEADS]),
)
def test_decoding_equals_training_on_the_same_sequence(
    seed: int, pieces: list[int], form: dict[str, Any]
) -> None:  # case 25
    c = config(**form)
    net, view = random_net(c, seed), View()
    length = 1 + sum(pieces)
    ids, features = text(length, seed)
    drafter = DartDrafter(net, view)
    done = 0
    for n in pieces:
        done += n
        news = Committed(7, ids[: done + 1], n, features[done - n : done])
        log_probs, tokens = drafter.lattice([news])
        wanted = training_log_probs(net, view, ids[: done + 1], features[:done])
        best = wanted.topk(25)
        torch.testing.assert_close(log_probs[0], best.values, rtol=1e-5, atol=1e-5)
        shown = dict(zip(net.target_ids().tolist(), wanted.T.tolist(), strict=True))
        for row, (values, names) in enumerate(zip(log_probs[0].tolist(), tokens[0].tolist(), strict=True)):
            assert values == pytest.approx([shown[name][row] for name in names], abs=2e-5, rel=5e-6)


def test_long_prompts_are_read_in_chunks_and_the_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    from dartspec.drafters import dart

    monkeypatch.setattr(dart, "PREFILL_ROWS", 50)
    net, view = random_net(config()), View()
    ids, features = text(700)
    drafter = DartDrafter(net, view)
    for begin, end in ((0, 600), (600, 633), (633, 699)):
        log_probs, _ = drafter.lattice([Committed(0, ids[: end + 1], end - begin, features[begin:end])])
        wanted = training_log_probs(net, view, ids[: end + 1], features[:end])
        torch.testing.assert_close(log_probs[0], wanted.topk(25).values, rtol=1e-4, atol=5e-5)


def test_a_batch_of_unequal_lengths_equals_each_alone() -> None:
    net, view = random_net(config()), View()
    together, alone = DartDrafter(net, view), [DartDrafter(net, view) for _ in range(3)]
    texts = [text(40, 1), text(9, 2), text(23, 3)]
    lengths = [[30, 39], [3, 8], [5, 22]]
    begin = [0, 0, 0]
    for step in range(2):
        ends = [rounds[step] for rounds in lengths]
        news = [
            Committed(10 + i, ids[: e + 1], e - b, f[b:e])
            for i, ((ids, f), b, e) in enumerate(zip(texts, begin, ends, strict=True))
        ]
        trees = together.propose(news, [6, 11, 3])
        for i, (tree, budget) in enumerate(zip(trees, [6, 11, 3], strict=True)):
            (single,) = alone[i].propose([news[i]], [budget])
            assert tree.tokens.tolist() == single.tokens.tolist()
            assert tree.parents.tolist() == single.parents.tolist()
            assert tree.num_drafts == budget
            assert int(tree.tokens[0]) == int(news[i].history[-1])
        begin = ends


def test_masks_leave_nothing_behind() -> None:
    net, view = random_net(config()), View()
    ids, features = text(20)
    stepwise, fresh = DartDrafter(net, view), DartDrafter(net, view)
    for n in range(1, 20):
        last = stepwise.lattice([Committed(0, ids[: n + 1], 1, features[n - 1 : n])])
    whole = fresh.lattice([Committed(0, ids, 19, features)])
    torch.testing.assert_close(last[0], whole[0], rtol=1e-5, atol=1e-5)
    kept, again = stepwise._prefixes[0], fresh._prefixes[0]
    torch.testing.assert_close(kept.keys[:, :19], again.keys[:, :19], rtol=1e-5, atol=1e-5)


def test_reset_forgets_and_a_gap_is_refused() -> None:
    net, view = random_net(config()), View()
    ids, features = text(12)
    drafter = DartDrafter(net, view)
    drafter.propose([Committed(0, ids[:6], 5, features[:5])], [4])
    with pytest.raises(DartspecError, match=r"2 new of 10 committed tokens, but the drafter has read 5 rows"):
        drafter.propose([Committed(0, ids[:10], 2, features[7:9])], [4])
    drafter.reset([0, 5])
    (tree,) = drafter.propose([Committed(0, ids[:10], 9, features[:9])], [4])
    (wanted,) = DartDrafter(net, view).propose([Committed(3, ids[:10], 9, features[:9])], [4])
    assert tree.tokens.tolist() == wanted.tokens.tolist()


def test_features_of_another_shape_are_refused() -> None:
    drafter = DartDrafter(random_net(config()), View())
    ids, features = text(6)
    with pytest.raises(DartspecError, match=r"\[5, 3, 24\] for 5 new tokens, found \[5, 2, 24\]"):
        drafter.propose([Committed(0, ids, 5, features[:, :2])], [4])
    with pytest.raises(DartspecError, match="found None"):
        drafter.propose([Committed(0, ids, 5, None)], [4])


def test_ids_beyond_the_tokenizer_are_never_drafted() -> None:
    net = random_net(config())
    few = 30
    ids, features = text(9)
    everything = DartDrafter(net, View()).propose([Committed(0, ids, 8, features)], [200])[0]
    assert int(everything.tokens[1:].max()) >= few  # the control: they would be drafted
    tree = DartDrafter(net, View(num_tokens=few)).propose([Committed(0, ids, 8, features)], [200])[0]
    assert tree.num_drafts > 0
    assert int(tree.tokens[1:].max()) < few


def test_nothing_follows_an_end_of_text_token() -> None:
    net = random_net(config())
    ids, features = text(9)
    free = DartDrafter(net, View(eos_token_ids=frozenset())).propose([Committed(0, ids, 8, features)], [300])[0]
    inner = {int(free.tokens[p]) for p in free.parents[1:].tolist() if p > 0}
    eos = frozenset(inner)
    assert eos  # the control: without an end of text these tokens are extended
    tree = DartDrafter(net, View(eos_token_ids=eos)).propose([Committed(0, ids, 8, features)], [300])[0]
    extended = {int(tree.tokens[p]) for p in tree.parents[1:].tolist() if p > 0}
    assert not extended & eos
    assert set(tree.tokens[1:].tolist()) & eos


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_make_no_node(bad: float) -> None:  # case 16
    net = random_net(config())
    with torch.no_grad():
        net.norm.weight[3] = bad
    ids, features = text(9)
    (tree,) = DartDrafter(net, View()).propose([Committed(0, ids, 8, features)], [16])
    assert tree.tokens.tolist() == [int(ids[-1])]
    assert tree.parents.tolist() == [-1]


def test_one_logit_that_is_not_finite_makes_its_position_empty() -> None:
    drafter = DartDrafter(random_net(config()), View())
    logits = torch.randn(5, 37)
    for row, bad in ((1, float("nan")), (3, float("inf"))):
        broken = logits.clone()
        broken[row, 4] = bad
        log_probs, _ = drafter._head._by_torch(broken, 25)
        assert torch.isinf(log_probs[row]).all()
        others = [r for r in range(5) if r != row]
        assert torch.isfinite(log_probs[others]).all()
    broken = logits.clone()
    broken[2, 4] = float("-inf")  # a token that cannot be: the others stand
    log_probs, index = drafter._head._by_torch(broken, 25)
    assert torch.isfinite(log_probs).all()
    assert 4 not in index[2].tolist()


def test_bfloat16_agrees_with_float32_on_rounded_weights() -> None:
    net = random_net(config(hidden_size=HIDDEN)).to(torch.bfloat16)
    ids, features = text(40, dtype=torch.bfloat16)
    half, single = View(torch.bfloat16), View()
    single.table = half.table.float()
    news = Committed(0, ids, 39, features)
    low, low_ids = DartDrafter(net, half).lattice([news])
    high, high_ids = DartDrafter(net, single).lattice([news._replace(features=features.float())])
    for i in range(5):
        wanted = dict(zip(high_ids[0, i].tolist(), high[0, i].tolist(), strict=True))
        pairs = [(v, wanted[t]) for v, t in zip(low[0, i].tolist(), low_ids[0, i].tolist(), strict=True) if t in wanted]
        assert len(pairs) >= 22
        assert max(abs(a - b) for a, b in pairs) < 0.25


def test_search_time_is_reported_apart() -> None:
    drafter = DartDrafter(random_net(config()), View())
    ids, features = text(9)
    assert drafter.search_ms == 0
    drafter.propose([Committed(0, ids, 8, features)], [16])
    assert drafter.search_ms > 0


@pytest.mark.parametrize("top_k", [3, 40])
def test_the_search_says_how_many_candidates_a_position_has(top_k: int) -> None:
    drafter = DartDrafter(random_net(config()), View(), search=SearchConfig(top_k=top_k))
    ids, features = text(9)
    log_probs, tokens = drafter.lattice([Committed(0, ids, 8, features)])
    assert log_probs.shape == tokens.shape == (1, drafter.config.d, min(top_k, drafter.config.draft_vocab_size))


def test_an_index_of_a_high_order_reads_all_the_text_that_it_can_use() -> None:
    """Four-grams see three committed tokens at the first position: what follows all three beats what follows two."""
    net, view = random_net(config()), View()
    ids, features = text(9)
    a, b, c = ids[-3:].tolist()
    other = next(t for t in range(view.num_tokens) if t != a)
    rare, common = sorted(set(net.target_ids().tolist()) - {a, b, c, other})[:2]
    index = NgramIndex.build(
        [[a, b, c, rare], *[[other, b, c, common]] * 9],
        order=4, vocab_size=view.vocab_size, fingerprint="", name="", description="",
    )  # fmt: skip
    search = SearchConfig(top_k=10**6, ngram_weight=1e3, ngram_at_level0=True)
    (tree,) = DartDrafter(net, view, index, search).propose([Committed(0, ids, 8, features)], [1])
    assert tree.tokens.tolist() == [c, rare]


def test_no_sequences_no_trees() -> None:
    assert DartDrafter(random_net(config()), View()).propose([], []) == []


def test_config_survives_json_and_refuses_what_it_does_not_know(tmp_path: Any) -> None:
    c = config(mask="official", acceptance={"16": 2.3}, provenance={"steps": 7}, template_hash="ab")
    path = tmp_path / "config.json"
    path.write_text(c.to_json())
    assert Config.from_json(path) == c
    with pytest.raises(DartspecError, match="unknown key 'colour'"):
        Config.from_dict({**c.__dict__, "colour": 1})
    with pytest.raises(DartspecError, match="'rope_theta' is missing"):
        Config.from_dict({k: v for k, v in c.__dict__.items() if k != "rope_theta"})
    for changes, message in (
        ({"taps": (2, 2, 4)}, "must rise"),
        ({"taps": (1, 2, 5)}, r"must rise within 0\.\.4"),
        ({"mask": "none"}, "'pair' or 'official'"),
        ({"shifted": 1}, "true or false"),
        ({"head": "tied"}, "own, target, low_rank"),
        ({"head": "low_rank"}, "must be 1 to 24 with the head 'low_rank'"),
        ({"head_rank": 3}, "must be 0 to 0 with the head 'own'"),
        ({"head": "target", "target_hidden_size": 32}, "is for rows of 32, not of hidden_size 24"),
        ({"continuity_rank": -1}, "must be 0 to 24"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 7}, "even"),
        ({"draft_vocab_size": 99}, "exceeds"),
        ({"hidden_act": "gelu"}, "only 'silu'"),
        ({"d": 0}, "positive integer"),
        ({"method": "eagle3"}, "expected 'dart'"),
    ):
        with pytest.raises(DartspecError, match=message):
            replace(c, **changes)
