"""The controller: what it verifies is the best that its numbers allow, and it learns from what it sees."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from dartspec import _core, drafters
from dartspec.budget import Adaptive, Fixed
from dartspec.budget.calibration import DEPTHS, MOST_TRIALS, STEPS, Calibration
from dartspec.budget.controller import LAST_PERIOD
from dartspec.budget.cost import CostModel, Times
from dartspec.drafters import oracle
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.tree import check, depths, subtree
from dartspec.types import RoundTimes, SamplingParams, TokenTree, Verdict

FREE = {1: 10.0, 600: 10.0}
LINEAR = {1: 10.0, 600: 6000.0}


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    n = draw(st.integers(1, 20))
    parents = [-1] + [draw(st.integers(0, i)) for i in range(n)]
    scores = [0.0]
    for p in parents[1:]:
        scores.append(scores[p] - draw(st.floats(0, 9)))
    tokens = torch.arange(n + 1, dtype=torch.int32)
    return TokenTree(tokens, torch.tensor(parents, dtype=torch.int32), torch.tensor(scores, dtype=torch.float32))


def times_of(trees_: list[TokenTree], ms: float = 10.0) -> RoundTimes:
    most = max(len(t.tokens) for t in trees_)
    read = sum(t.num_drafts > 0 for t in trees_)
    return RoundTimes(0.5 * read, 0.1 * read, ms, 0.1, most, most * len(trees_), 100, read)


def one_round(controller: Adaptive, tree: TokenTree, path: list[int], ms: float = 10.0) -> TokenTree:
    """A round of slot 0 whose walk is what of `path` was verified."""
    tokens = [int(tree.tokens[i]) for i in path]
    if not controller.ask([0], [24])[0]:
        tree = subtree(tree, [0])
    (cut,) = controller.cut([0], [tree])
    kept = {int(t): i for i, t in enumerate(cut.tokens)}
    walked = [kept[t] for t in tokens if t in kept]
    controller.observe([0], [cut], [Verdict(walked, 0, torch.zeros(0))], times_of([cut], ms))
    return cut


# -- the calibration -----------------------------------------------------------------------------------------------


def weighed(
    tree: TokenTree, made: Calibration, own: float = 0.0
) -> tuple[list[int], list[float], list[float], list[int]]:
    n = len(tree.parents)
    cells, chance = np.empty(n, np.int32), np.empty(n, np.float32)
    value, order = np.empty(n, np.float32), np.empty(n - 1, np.int32)
    arrays = made.steps, made.log_odds, tree.parents.numpy(), tree.scores.numpy()
    _core.weigh_tree(*arrays, own, cells, chance, value, order)
    return cells.tolist(), chance.tolist(), value.tolist(), order.tolist()


def by_hand(tree: TokenTree, made: Calibration, own: float = 0.0) -> tuple[list[int], list[float], list[float]]:
    """The same in Python."""
    cells, chance, value = [0], [1.0], [1.0]
    for i in range(1, len(tree.parents)):
        p = int(tree.parents[i])
        step = np.float32(tree.scores[i]) - (np.float32(tree.scores[p]) if p else np.float32(0))
        row = min(int(depths(tree)[i]), DEPTHS) - 1
        cells.append(row * (len(STEPS) + 1) + int((made.steps <= step).sum()))
        chance.append(1 / (1 + math.exp(-float(made.log_odds[cells[-1]]) - own)))
        value.append(value[p] * chance[-1])
    return cells, chance, value


@given(tree=trees(), own=st.floats(-3, 3))
def test_the_core_weighs_as_python_does(tree: TokenTree, own: float) -> None:
    made = Calibration()
    cells, chance, value, order = weighed(tree, made, own)
    expected = by_hand(tree, made, own)
    assert cells == expected[0]
    assert chance == pytest.approx(expected[1], rel=1e-5)
    assert value == pytest.approx(expected[2], rel=1e-5)
    assert sorted(order) == list(range(1, len(tree.tokens)))
    falling = [value[i] for i in order]
    assert falling == sorted(falling, reverse=True)
    place = {0: -1} | {node: k for k, node in enumerate(order)}
    assert all(place[int(tree.parents[i])] < place[i] for i in order)


@given(tree=trees(), data=st.data())
def test_the_core_learns_as_python_does(tree: TokenTree, data: st.DataObject) -> None:
    made = Calibration()
    cells, chance, value, order = weighed(tree, made)
    nodes = [0, *sorted(order[: data.draw(st.integers(0, len(order)))])]
    path = [0]
    while children := [i for i in nodes if int(tree.parents[i]) == path[-1]]:
        if data.draw(st.booleans()):
            break
        path.append(data.draw(st.sampled_from(children)))
    hits, trials, bins = np.zeros(made.hits.size), np.zeros(made.hits.size), np.zeros(60)
    arrays = tree.parents.numpy(), np.array(cells, np.int32), np.array(chance, np.float32), np.array(value, np.float32)
    places = [nodes.index(i) for i in path]
    surprise, spread = _core.learn_tree(*arrays, nodes, places, hits, trials, bins, True)
    labels = [i for i in nodes[1:] if int(tree.parents[i]) in path]
    assert surprise == pytest.approx(sum((i in path) - chance[i] for i in labels), abs=1e-5)
    assert spread == pytest.approx(sum(chance[i] * (1 - chance[i]) for i in labels), abs=1e-5)
    for cell in set(cells):
        assert trials[cell] == sum(cells[i] == cell for i in labels)
        assert hits[cell] == sum(cells[i] == cell for i in labels if i in path)
    assert bins.reshape(20, 3).sum(0)[:2].tolist() == [len(nodes) - 1, len(path) - 1]
    before = hits.copy(), trials.copy(), bins.copy()
    _core.learn_tree(*arrays, nodes, places, hits, trials, bins, False)
    assert all(np.array_equal(a, b) for a, b in zip(before, (hits, trials, bins), strict=True))


def test_counts_become_probabilities_that_rise_with_the_step() -> None:
    made = Calibration()
    generator = random.Random(0)
    shares = {2: 0.02, 6: 0.3, 12: 0.2, 16: 0.9}  # by cell of depth 1
    for _ in range(20_000):
        cell = generator.choice(list(shares))
        made.trials[0, cell] += 1
        made.hits[0, cell] += generator.random() < shares[cell]
    made.refresh()
    odds = made.log_odds[list(shares)].tolist()
    assert odds == sorted(odds)
    assert odds[0] < -3 < odds[1] < -0.9 < 1.5 < odds[3]
    assert odds[1] == pytest.approx(odds[2], abs=0.2)  # they were seen to fall: pooled
    assert made.trials.max() <= MOST_TRIALS  # old labels have faded
    assert (np.diff(made.log_odds.reshape(DEPTHS, -1), axis=1) >= 0).all()


@pytest.mark.parametrize("bad", ["parents", "sizes", "path"])
def test_the_core_refuses_what_does_not_fit(bad: str) -> None:
    made, n = Calibration(), 3
    parents = np.array([-1, 2 if bad == "parents" else 0, 1], np.int32)
    out = np.empty(n, np.int32), np.empty(n, np.float32), np.empty(n, np.float32)
    order = np.empty(n if bad == "sizes" else n - 1, np.int32)
    scores = np.zeros(n, np.float32)
    if bad != "path":
        with pytest.raises(ValueError, match=r"weigh_tree"):
            _core.weigh_tree(made.steps, made.log_odds, parents, scores, 0.0, *out, order)
        return
    _core.weigh_tree(made.steps, made.log_odds, parents, scores, 0.0, *out, order)
    zeros = np.zeros(made.hits.size)
    for nodes, path in (([0, 1], [0, 2]), ([0, 7], [0]), ([1], [0]), ([0], [-1])):
        with pytest.raises(ValueError, match=r"learn_tree"):
            _core.learn_tree(parents, *out, nodes, path, zeros, zeros, np.zeros(3), True)


def test_a_calibration_is_kept_beside_the_weights(tmp_path: Path) -> None:
    made = Calibration()
    made.hits[1, 8] += 100
    made.trials[1, 8] += 100
    made.save(tmp_path, "dart", made_from="a test")
    again = Calibration.load(tmp_path, "dart")
    assert np.array_equal(again.hits, made.hits.round(1))
    assert np.array_equal(again.trials, made.trials.round(1))
    assert [p.name for p in tmp_path.iterdir()] == ["calibration-dart.json"]
    assert np.array_equal(Calibration.load(tmp_path / "nowhere", "dart").hits, Calibration().hits)


@pytest.mark.parametrize("change", [{"version": 9}, {"steps": [1]}, {"hits": [[1]]}, {"hits": None}, {"trials": "x"}])
def test_a_calibration_that_does_not_fit_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    Calibration().save(tmp_path, "dart")
    path = tmp_path / "calibration-dart.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DartspecError, match=r"calibration"):
        Calibration.load(tmp_path, "dart")
    path.write_text("{")
    with pytest.raises(DartspecError, match=r"delete it"):
        Calibration.load(tmp_path, "dart")


# -- cutting -------------------------------------------------------------------------------------------------------


@given(tree=trees(), data=st.data())
def test_a_subtree_keeps_its_nodes_and_their_parents(tree: TokenTree, data: st.DataObject) -> None:
    nodes = {0}
    for i in range(1, len(tree.tokens)):
        if int(tree.parents[i]) in nodes and data.draw(st.booleans()):
            nodes.add(i)
    cut = subtree(tree, sorted(nodes))
    check(cut)
    assert cut.tokens.tolist() == sorted(nodes)  # tokens name the nodes here
    for i in range(1, len(cut.tokens)):
        assert int(cut.tokens[cut.parents[i]]) == int(tree.parents[cut.tokens[i]])
    assert depths(cut).tolist() == [int(depths(tree)[i]) for i in sorted(nodes)]


@given(tree=trees(), slope=st.floats(0.01, 5), rate=st.floats(0.01, 1))
def test_the_cut_is_the_best_of_all_sizes(tree: TokenTree, slope: float, rate: float) -> None:
    controller = Adaptive(CostModel(Times({1: 10.0, 101: 10.0 + 100 * slope})), Calibration())
    controller.join(0, SamplingParams(), 10)
    controller.ask([0], [24])
    controller._rate = rate
    (cut,) = controller.cut([0], [tree])
    check(cut)
    value = by_hand(tree, controller.calibration)[2]
    best = sorted(value[1:], reverse=True)
    worth = [sum(best[:n]) - rate * (10.0 + slope * n) for n in range(len(best) + 1)]
    assert worth[cut.num_drafts] == pytest.approx(max(worth), abs=1e-5)
    assert sum(value[int(t)] for t in cut.tokens[1:]) == pytest.approx(sum(best[: cut.num_drafts]), abs=1e-5)


# -- learning ------------------------------------------------------------------------------------------------------

CHAIN = TokenTree(
    torch.arange(9, dtype=torch.int32),
    torch.arange(-1, 8, dtype=torch.int32),
    torch.arange(0, -9, -1, dtype=torch.float32) * 0.5,
)


def test_drafts_that_are_always_wrong_end_drafting_and_are_tried_ever_less() -> None:
    controller = Adaptive(CostModel(Times(LINEAR)), Calibration())
    controller.join(0, SamplingParams(), 10)
    drafted = [one_round(controller, CHAIN, [0], ms=10.0).num_drafts > 0 for _ in range(600)]
    assert not any(drafted[-100:])  # cut to the root even where it looks
    controller = Adaptive(CostModel(Times(FREE)), Calibration())
    controller.join(0, SamplingParams(), 10)
    asked = []
    for _ in range(1200):
        asked.append(bool(controller.ask([0], [24])[0]))
        tree = CHAIN if asked[-1] else subtree(CHAIN, [0])
        (cut,) = controller.cut([0], [tree])
        controller.observe([0], [cut], [Verdict([0], 0, torch.zeros(0))], times_of([cut]))
    assert 2 <= sum(asked[-600:]) < 60  # and still looked at


def test_it_comes_back_when_drafts_are_right_again() -> None:
    controller = Adaptive(CostModel(Times(FREE)), Calibration())
    controller.join(0, SamplingParams(), 10)
    for _ in range(300):
        one_round(controller, CHAIN, [0])
    accepted = [len(one_round(controller, CHAIN, list(range(9))).tokens) - 1 for _ in range(700)]
    assert sum(accepted[-50:]) == 50 * 8  # free rows, all right: everything is verified
    assert controller.num_plain_rounds > 0


def test_a_reshaped_request_teaches_the_others_nothing() -> None:
    controller = Adaptive(CostModel(Times(FREE)), Calibration())
    before = controller.calibration.trials.copy()
    controller.join(0, SamplingParams(logit_bias={3: 50.0}), 10)
    for _ in range(20):
        one_round(controller, CHAIN, [0])
    assert np.array_equal(controller.calibration.trials, before)
    assert not controller.reliability()
    controller.leave(0)
    controller.join(0, SamplingParams(), 10)
    one_round(controller, CHAIN, [0, 1, 2])
    assert not np.array_equal(controller.calibration.trials, before)
    assert sum(n for _, _, n in controller.reliability()) == 8


def test_reliability_tells_predicted_from_seen() -> None:
    controller = Adaptive(CostModel(Times(FREE)), Calibration())
    controller.join(0, SamplingParams(), 10)
    generator = random.Random(1)
    for _ in range(3000):  # every token of the chain is right with probability 0.7, given the one before
        walked = [0]
        while len(walked) < 9 and generator.random() < 0.7:
            walked.append(len(walked))
        one_round(controller, CHAIN, walked)
    late = Adaptive(CostModel(Times(FREE)), controller.calibration)
    late.join(0, SamplingParams(), 10)
    for _ in range(1500):
        walked = [0]
        while len(walked) < 9 and generator.random() < 0.7:
            walked.append(len(walked))
        one_round(late, CHAIN, walked)
    for predicted, seen, nodes in late.reliability():
        if nodes > 500:
            assert seen == pytest.approx(predicted, abs=0.06)


def test_some_sequences_may_draft_and_others_not() -> None:
    controller = Adaptive(CostModel(Times({1: 10.0, 9: 12.0, 200: 400.0})), Calibration())
    right, wrong = list(range(9)), [0]
    for slot in (0, 1):
        controller.join(slot, SamplingParams(), 10)
    asked = [0, 0]
    for k in range(400):
        ask = controller.ask([0, 1], [8, 8])
        given_trees = [CHAIN if n else subtree(CHAIN, [0]) for n in ask]
        cut = controller.cut([0, 1], given_trees)
        paths = [[i for i in p if i < len(t.tokens)] for p, t in zip((right, wrong), cut, strict=True)]
        verdicts = [Verdict(p, 0, torch.zeros(0)) for p in paths]
        controller.observe([0, 1], cut, verdicts, times_of(cut))
        if k >= 200:
            asked = [a + bool(n) for a, n in zip(asked, ask, strict=True)]
    assert asked[0] == 200
    assert asked[1] < 100


@pytest.fixture(autouse=True)
def _look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look takes on this machine decides nothing in these tests."""
    monkeypatch.setattr(Adaptive, "_next_look", lambda self: 1)


class Still(CostModel):
    """Times that no clock of this machine changes."""

    def observe(self, times: RoundTimes, sequences: int, drafted: int, context: float = 0) -> None:
        pass


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_the_text_is_that_of_plain_decoding(rate: float, temperature: float) -> None:
    target = Target(tiny.model("llama"), tiny.VOCAB, frozenset({2}))
    none = drafters.get("none").load(drafters.get("none").Config(), target)
    params = [SamplingParams(temperature=temperature, seed=s, max_tokens=30, ignore_eos=True) for s in range(5)]
    requests = [Request([5 + s, 9, 11, 3 * s + 1], p) for s, p in enumerate(params)]

    def texts(drafter: object, controller: Fixed | Adaptive, batch: int) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in requests]
        for chunk in generate(target, drafter, requests, num_nodes=controller, batch=batch):  # type: ignore[arg-type]
            out[chunk.index] += chunk.ids
        return out

    plain = texts(none, Fixed(0), 1)
    whole = tuple(tuple(r.prompt) + tuple(ids) for r, ids in zip(requests, plain, strict=True))
    for batch in (1, 3):
        controller = Adaptive(Still(Times({1: 5.0, 40: 8.0})), Calibration(), most_nodes=9)
        drafter = oracle.load(oracle.Config(texts=whole, rate=rate, length=4, branches=1), target)
        assert texts(drafter, controller, batch) == plain
        assert controller.num_rounds > 0
        if rate == 1:
            assert controller.num_plain_rounds < controller.num_rounds / 2


def test_between_looks_the_plan_stands() -> None:
    controller = Adaptive(CostModel(Times(FREE)), Calibration())
    controller.join(0, SamplingParams(), 10)
    one_round(controller, CHAIN, list(range(9)))
    controller._period = 4
    before = controller.calibration.trials.copy(), controller.bins.copy()
    sizes = [controller._plan[0]]
    for _ in range(3):
        asked = controller.ask([0], [24])
        assert asked == sizes
        (cut,) = controller.cut([0], [CHAIN])
        assert cut is CHAIN
        controller.observe([0], [cut], [Verdict([0, 1], 0, torch.zeros(0))], times_of([cut]))
    assert np.array_equal(before[0], controller.calibration.trials)
    assert np.array_equal(before[1], controller.bins)
    assert controller._plan[0] > 3
    controller._period = 9
    assert controller.ask([0], [3]) == [3]  # never more than there is room for
    controller._period = 1
    controller.ask([0], [24])
    assert controller._looks
    controller.join(1, SamplingParams(), 5)
    assert len(controller.ask([0, 1], [24, 24])) == 2  # others came: a look at once
    assert controller._looks


def test_a_slot_that_comes_again_gets_a_look_of_its_own() -> None:
    controller = Adaptive(CostModel(Times(FREE)), Calibration())
    controller.join(0, SamplingParams(), 10)
    one_round(controller, CHAIN, list(range(9)))
    controller._period = 8
    controller.leave(0)
    controller.join(0, SamplingParams(), 20)
    controller.ask([0], [24])
    assert controller._looks
    controller._period = 8
    controller.ask([0], [24])
    assert not controller._looks


def test_looks_take_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    controller = Adaptive(CostModel(Times(FREE)), Calibration())
    controller._own_ms, controller._round_ms = 0.3, 10.0
    assert controller._next_look() == 3
    controller._own_ms = 0.05
    assert controller._next_look() == 1
    controller._own_ms = 50.0
    assert controller._next_look() == LAST_PERIOD


def test_a_hostile_request_takes_nothing_from_the_others() -> None:
    """One whose bias makes every draft wrong stops drafting; its neighbour drafts as beside one that never would."""
    sizes: dict[bool, list[int]] = {}
    for hostile in (False, True):
        controller = Adaptive(CostModel(Times({1: 10.0, 9: 11.0, 200: 300.0})), Calibration())
        controller.join(0, SamplingParams(), 10)
        controller.join(1, SamplingParams(logit_bias={3: 100.0}), 10)
        sizes[hostile], asked_late = [], 0
        for k in range(300):
            asked = controller.ask([0, 1], [8, 8 if hostile else 0])
            cut = controller.cut([0, 1], [CHAIN if n else subtree(CHAIN, [0]) for n in asked])
            paths = [list(range(len(cut[0].tokens)))[:7], [0]]
            controller.observe([0, 1], cut, [Verdict(p, 0, torch.zeros(0)) for p in paths], times_of(cut))
            sizes[hostile].append(cut[0].num_drafts)
            asked_late += k >= 200 and asked[1] > 0
        assert asked_late < 30
    assert sum(sizes[True][200:]) >= 0.95 * sum(sizes[False][200:]) > 0
