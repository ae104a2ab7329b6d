"""How many nodes are worth verifying: the controllers (`types.Controller`) that `engine.Rounds` asks.

`Adaptive` weighs what a node may gain (calibration.py) against what its row costs (cost.py), round by round. Whatever
it decides, the text stays the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dartspec import _core
from dartspec.budget.calibration import Calibration
from dartspec.budget.cost import CostModel
from dartspec.tree import subtree
from dartspec.types import RoundTimes, SamplingParams, TokenTree, Verdict

MOST_NODES = 24  # what a tree is drafted with at most; beyond, a CPU has long been busy with arithmetic
CURVE = 0.15  # weight of a sequence's last tree in what its next is expected to give
SHARED_CURVE = 0.05  # the same for all sequences of one temperature, from which new ones begin
OWN = 8.0  # variance of labels that holds a sequence's own log-odds back, each round
MOST_OWN = 8.0  # of a sequence's own log-odds against the shared ones
ON, OFF = 1.02, 1.0  # drafting begins where it promises this against plain decoding, and ends below
FIRST_PROBE, LAST_PROBE = 16, 256  # rounds until it is tried again, doubling
NUM_BINS = 20  # of the reliability record
SHARE = 0.01  # of a round's time that the controller may take; it looks at fewer rounds where looking takes more
LAST_PERIOD = 8  # rounds from one look to the next, at most


@dataclass(frozen=True)
class Fixed:
    """A controller (`types.Controller`) that always asks for the same number of nodes and verifies them all."""

    num_nodes: int

    @property
    def most_nodes(self) -> int:
        return self.num_nodes

    def join(self, slot: int, params: SamplingParams, length: int) -> None:
        """Nothing is remembered."""

    def leave(self, slot: int) -> None:
        """Nothing is remembered."""

    def ask(self, slots: Sequence[int], room: Sequence[int]) -> list[int]:
        return [min(self.num_nodes, r) for r in room]

    def cut(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> list[TokenTree]:
        return list(trees)

    def observe(
        self, slots: Sequence[int], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: RoundTimes
    ) -> None:
        """Nothing is learned."""


class _Weighed(NamedTuple):
    """One drafted tree as the controller sees it, and which of its nodes are verified."""

    tree: TokenTree
    parents: NDArray[np.int32]
    cells: NDArray[np.int32]  # of the calibration
    chance: NDArray[np.float32]  # of each node to be picked, its parent having been reached
    value: NDArray[np.float32]  # of each node to be accepted
    order: NDArray[np.int32]  # nodes but the root by falling value; so parents come first

    @classmethod
    def of(cls, tree: TokenTree, calibration: Calibration, own: float) -> _Weighed:
        parents, n = tree.parents.numpy(), len(tree.parents)
        cells, chance = np.empty(n, np.int32), np.empty(n, np.float32)
        value, order = np.empty(n, np.float32), np.empty(n - 1, np.int32)
        _core.weigh_tree(
            calibration.steps, calibration.log_odds, parents, tree.scores.numpy(), own, cells, chance, value, order
        )
        return cls(tree, parents, cells, chance, value, order)


class _Slot:
    """What is known of one sequence in progress."""

    def __init__(self, params: SamplingParams, length: int, curve: NDArray[np.float64]) -> None:
        self.length = length  # committed tokens
        self.kind = kind_of(params)
        self.reshaped = params.is_reshaped
        self.own = 0.0  # log-odds against the shared calibration
        self.curve = curve.copy()  # expected accepted tokens of its best n nodes, n = 0 .. most_nodes
        self.behind = 0  # rounds since the drafter read it
        self.given: tuple[TokenTree, _Weighed, list[int]] | None = None  # out to be verified: tree, whole tree, nodes


def kind_of(params: SamplingParams) -> int:
    """Requests whose acceptance is alike: greedy, cool, warm, hot."""
    t = params.temperature
    return 0 if t == 0 else 1 if t <= 0.5 else 2 if t <= 1.0 else 3


class Adaptive:
    """Per round and batch, the number of nodes with the most committed tokens a second; zero is plain decoding.

    costs:       what rounds take; corrected as they are seen.
    calibration: of this drafter; corrected as labels are seen, never by a request whose distribution was reshaped by
                 penalties, bias or processors.
    most_nodes:  drafted at most.

    All trees of a forward are padded to the largest, so one number n serves the batch: with G(n) the expected accepted
    tokens of everybody's best n nodes, a round of B sequences gives B + G(n). `ask` compares the rates with and without
    drafting, from what recent trees promised; `cut` then knows the tree and takes the n with the largest G(n) - rate x
    T(n): nodes that bring more than the same time brings on average. Sequences may differ in whether they draft at all.

    Looking costs time itself. Where it would take more than SHARE of a round, only every second, third, ... round is
    looked at; the rounds between have the size that the last look found best, and are not learned from.
    """

    def __init__(self, costs: CostModel, calibration: Calibration, most_nodes: int = MOST_NODES) -> None:
        self.costs, self.calibration = costs, calibration
        self.most_nodes = most_nodes
        self._slots: dict[int, _Slot] = {}
        self._curves: dict[int, NDArray[np.float64]] = {}  # by kind
        self._seen: dict[int, int] = {}  # trees that each of them was learned from
        self._on = True
        self._rate = 0.0  # expected tokens a millisecond, of the round that was asked for last
        self._quiet = 0  # rounds since the drafter was last asked
        self._probe = FIRST_PROBE
        self._context = 0.0  # mean length of the sequences of that round
        self._verify = np.zeros(most_nodes + 1)  # of that round: ms by nodes a sequence
        # by probability: nodes, accepted, sum of the probabilities
        self.bins = np.zeros((NUM_BINS, 3))
        self.num_rounds = self.num_plain_rounds = 0
        self._plan: dict[int, int] = {}  # nodes by slot, until the next look
        self._looks, self._since, self._period = True, 0, 1
        self._own_ms, self._round_ms = 0.0, 0.0  # what a look takes, and a round
        self._spent = 0.0  # ms of this look

    def join(self, slot: int, params: SamplingParams, length: int) -> None:
        kind = kind_of(params)
        curve = self._curves.get(kind)
        if curve is None:
            near = min(self._curves, key=lambda k: abs(k - kind), default=None)
            curve = self._guess() if near is None else self._curves[near]
        self._slots[slot] = _Slot(params, length, curve)

    def leave(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._plan.pop(slot, None)  # its number may come again: the plan was not made for that sequence

    def _guess(self) -> NDArray[np.float64]:
        """Before any tree was seen: good enough to begin with drafting."""
        return 2.0 * (1 - np.exp(-np.arange(self.most_nodes + 1) / 6.0))

    # -- before drafting ---------------------------------------------------------------------------------------------

    def ask(self, slots: Sequence[int], room: Sequence[int]) -> list[int]:
        self._since += 1
        self._looks = self._since >= self._period or self._plan.keys() != set(slots)
        if not self._looks:
            return [min(self._plan[s], r) for s, r in zip(slots, room, strict=True)]
        began = time.perf_counter()
        asked = self._ask(slots, room)
        self._spent = 1e3 * (time.perf_counter() - began)
        return asked

    def _ask(self, slots: Sequence[int], room: Sequence[int]) -> list[int]:
        """A look; leaves a plan for the rounds until the next."""
        rounds, self._since = self._since, 0
        self._plan = dict.fromkeys(slots, 0)
        B, most = len(slots), self.most_nodes
        self._context = sum(self._slots[s].length for s in slots) / B
        verify = self._verify = self.costs.verify_ms(B, most + 1, self._context)
        plain = self._rate = B / float(verify[0] + self.costs.other_ms(False, B))
        asked = [0] * B
        able = [i for i in range(B) if room[i]]
        if not able:
            return asked
        entries = [self._slots[slots[i]] for i in able]
        order, counts = [0], [1]
        if len(able) > 1:
            order = sorted(range(len(able)), key=lambda i: -entries[i].curve[-1])
            counts = _counts(len(able))
        best, drafting, nodes = 0.0, 0, 0
        gains, behind, taken = np.full(most + 1, float(B)), 0, 0
        other = self.costs.other_ms(True, B)
        for m in counts:  # the m most promising draft
            for i in order[taken:m]:
                gains = gains + entries[i].curve
                behind += max(0, entries[i].behind - 1)
            taken = m
            # what has to be read first is paid for by the rounds until the next look
            rates = gains / (verify + (self.costs.draft_ms(m, behind / FIRST_PROBE) + other))
            at = int(rates.argmax())
            if rates[at] > best:
                best, drafting, nodes = float(rates[at]), m, at
        self._on = nodes > 0 and best > plain * (OFF if self._on else ON)
        if self._on:
            self._rate = max(best, plain)
            self._probe, self._quiet = FIRST_PROBE, 0
            size = min(most, 2 * nodes + 4)  # a good round may use more than the mean one
            chosen = order[:drafting]
            for i in chosen:
                self._plan[slots[able[i]]] = nodes
        else:
            self._quiet += rounds
            if self._quiet < self._probe:
                return asked
            # what the text is like now shows only by drafting
            self._probe, self._quiet = min(2 * self._probe, LAST_PROBE), 0
            size = most
            chosen = [max(range(len(able)), key=lambda i: entries[i].behind)]  # one: each must read its text first
            entries[chosen[0]].own *= 0.7  # what was learned from the text is old by now
        for i in chosen:
            asked[able[i]] = min(room[able[i]], size)
        return asked

    # -- after drafting ----------------------------------------------------------------------------------------------

    def cut(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> list[TokenTree]:
        if not self._looks:
            for slot, tree in zip(slots, trees, strict=True):
                entry = self._slots[slot]
                entry.given = None
                entry.behind = 0 if tree.num_drafts else entry.behind + 1
            return list(trees)
        began = time.perf_counter()
        kept = self._cut(slots, trees)
        self._spent += 1e3 * (time.perf_counter() - began)
        return kept

    def _cut(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> list[TokenTree]:
        most = self.most_nodes
        gains = np.zeros(most + 1)
        looked: list[_Weighed | None] = []
        largest = 0
        for slot, tree in zip(slots, trees, strict=True):
            entry = self._slots[slot]
            entry.given = None
            if tree.num_drafts == 0:
                entry.behind += 1
                looked.append(None)
                continue
            entry.behind = 0
            weighed = _Weighed.of(tree, self.calibration, entry.own)
            looked.append(weighed)
            sums = weighed.value[weighed.order[:most]].cumsum()
            largest = max(largest, len(sums))
            curve = np.full(most + 1, sums[-1])
            curve[0], curve[1 : len(sums) + 1] = 0.0, sums
            entry.curve += CURVE * (curve - entry.curve)
            if not entry.reshaped:
                seen = self._seen[entry.kind] = self._seen.get(entry.kind, 0) + 1
                shared = self._curves.setdefault(entry.kind, entry.curve.copy())
                shared += max(SHARED_CURVE, 1 / seen) * (curve - shared)  # at first the mean of what was seen
            gains += curve
        if not largest:
            return list(trees)
        n = int((gains - self._rate * self._verify)[: largest + 1].argmax())
        kept = list(trees)
        for k, (slot, one) in enumerate(zip(slots, looked, strict=True)):
            if one is None:
                continue
            nodes = [0, *(sorted(one.order[:n].tolist()) if n < len(one.order) else range(1, len(one.parents)))]
            if len(nodes) < len(one.parents):
                kept[k] = subtree(one.tree, nodes)
            self._slots[slot].given = kept[k], one, nodes
        return kept

    # -- after the round ---------------------------------------------------------------------------------------------

    def observe(
        self, slots: Sequence[int], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: RoundTimes
    ) -> None:
        began = time.perf_counter()
        drafted = sum(t.num_drafts > 0 for t in trees)
        self.num_rounds += 1
        self.num_plain_rounds += drafted == 0
        for slot, verdict in zip(slots, verdicts, strict=True):
            self._slots[slot].length += len(verdict.path)
        if not self._looks or not trees:
            return
        self.costs.observe(times, len(trees), max(drafted, 1) if times.num_read else 0, self._context)
        for slot, tree, verdict in zip(slots, trees, verdicts, strict=True):
            if tree.num_drafts:
                self._learn(self._slots[slot], tree, verdict)
        spent = self._spent + 1e3 * (time.perf_counter() - began)
        took = times.draft_ms + times.search_ms + times.verify_ms + times.other_ms
        self._own_ms += (spent - self._own_ms) * (CURVE if self._own_ms else 1.0)
        self._round_ms += (took - self._round_ms) * (CURVE if self._round_ms else 1.0)
        self._period = self._next_look()

    def _next_look(self) -> int:
        """Rounds until then, so that looking takes its share."""
        return min(LAST_PERIOD, max(1, math.ceil(self._own_ms / (SHARE * self._round_ms)))) if self._round_ms else 1

    def _learn(self, entry: _Slot, tree: TokenTree, verdict: Verdict) -> None:
        """Every node whose parent was reached is a label."""
        if entry.given is not None and entry.given[0] is tree:
            _, whole, nodes = entry.given
        else:  # the engine took off what could never be kept
            whole, nodes = _Weighed.of(tree, self.calibration, entry.own), list(range(len(tree.tokens)))
        c = self.calibration
        surprise, spread = _core.learn_tree(
            whole.parents,
            whole.cells,
            whole.chance,
            whole.value,
            nodes,
            verdict.path,
            c.hits.reshape(-1),
            c.trials.reshape(-1),
            self.bins.reshape(-1),
            not entry.reshaped,
        )
        if not entry.reshaped:
            c.counted()
        if not self._on and surprise > 1:
            self._quiet = LAST_PROBE  # the trial brought more than it promised: another at once
        entry.own = max(-MOST_OWN, min(MOST_OWN, entry.own + surprise / (spread + OWN)))

    def chances(self, tree: TokenTree) -> list[float]:
        """How likely each node is picked, its parent having been reached; 1 for the root. For who shows a tree."""
        return [1.0, *_Weighed.of(tree, self.calibration, 0.0).chance[1:].tolist()]

    def reliability(self) -> list[tuple[float, float, int]]:
        """(mean predicted probability, share accepted, nodes) of each bin that has nodes."""
        return [(p / n, hit / n, int(n)) for n, hit, p in self.bins.tolist() if n]


def _counts(most: int) -> list[int]:
    """How many sequences may draft: all, or about every eighth part fewer."""
    return sorted({max(1, round(most * k / 8)) for k in range(1, 9)})
