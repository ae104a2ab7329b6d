"""Who decides how many nodes a round drafts and verifies: whatever it says, the text stays, and drafters catch up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dartspec import drafters, engine
from dartspec.budget import Fixed
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.tree import root_only
from dartspec.types import Committed, Controller, Drafter, RoundTimes, SamplingParams, TokenTree, Verdict
from test_lossless import PROMPTS, Text, make, plain, run, target, whole

PARAMS = [
    SamplingParams(max_tokens=18),
    SamplingParams(max_tokens=18, temperature=1.0, seed=4),
    SamplingParams(max_tokens=18, temperature=0.8, repetition_penalty=1.2, seed=9),
]
REQUESTS = [Request(p, PARAMS[i % 3], i) for i, p in enumerate(PROMPTS)]


@cache
def llama() -> Target:
    return target("llama")


@cache
def answers() -> list[Text]:
    return plain(llama(), REQUESTS)


def drafter(name: str) -> Drafter:
    return make(name, llama(), whole(REQUESTS, answers()), 0.6)


def pruned(tree: TokenTree, kept: Sequence[bool]) -> TokenTree:
    """The nodes that are kept and whose ancestors are too."""
    place = {0: 0}
    for i, parent in enumerate(tree.parents.tolist()):
        if i and kept[i] and parent in place:
            place[i] = len(place)
    nodes = list(place)
    parents = [-1, *(place[int(tree.parents[i])] for i in nodes[1:])]
    return TokenTree(tree.tokens[nodes], torch.tensor(parents, dtype=torch.int32), tree.scores[nodes])


class Adversary:
    """Asks and cuts by chance, in runs of rounds, and checks what it is told."""

    most_nodes = 9

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.alive: dict[int, SamplingParams] = {}
        self.quiet = self.rounds = 0

    def join(self, slot: int, params: SamplingParams, length: int) -> None:
        assert slot not in self.alive
        assert length > 0
        self.alive[slot] = params

    def leave(self, slot: int) -> None:
        del self.alive[slot]

    def ask(self, slots: Sequence[int], room: Sequence[int]) -> list[int]:
        assert set(slots) <= set(self.alive)
        if not self.quiet and self.chance.random() < 0.3:
            self.quiet = self.chance.randrange(1, 7)
        if self.quiet:
            self.quiet -= 1
            return [0] * len(slots)
        return [self.chance.choice((0, r, self.chance.randint(0, r))) for r in room]

    def cut(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> list[TokenTree]:
        rate = self.chance.choice((0.0, 0.5, 0.9, 1.0))
        return [t if rate == 1 else pruned(t, [self.chance.random() < rate for _ in t.tokens]) for t in trees]

    def observe(
        self, slots: Sequence[int], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: RoundTimes
    ) -> None:
        self.rounds += 1
        assert times.num_rows == sum(len(t.tokens) for t in trees) <= times.num_padded_rows
        assert min(times) >= 0
        for tree, verdict in zip(trees, verdicts, strict=True):
            assert max(verdict.path) < len(tree.tokens)


@settings(max_examples=14, deadline=None)
@example(seed=0, name="small_model", batch=1)  # the bonus token was a node that the controller had cut
@given(seed=st.integers(0, 10**6), name=st.sampled_from(drafters.names()), batch=st.integers(1, 4))
def test_no_controller_changes_the_text(seed: int, name: str, batch: int) -> None:
    """Every drafter: those that keep state are left out of rounds and catch up later."""
    controller = Adversary(seed)
    got, _ = run(llama(), drafter(name), REQUESTS, batch=batch, num_nodes=controller)
    assert got == answers()
    assert not controller.alive
    assert controller.rounds


class Noted:
    """Drafts as another drafter does, and notes its trees by (slot, length) and how it was asked."""

    def __init__(self, inner: Drafter) -> None:
        self.taps, self._inner = inner.taps, inner
        self.trees: dict[tuple[int, int], TokenTree] = {}
        self.asked: list[tuple[int, int, int]] = []  # slot, new rows, budget

    def reset(self, slots: Sequence[int]) -> None:
        self._inner.reset(slots)

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        self.asked += [(c.slot, c.n_new, b) for c, b in zip(new, budget, strict=True)]
        made = self._inner.propose(new, budget)
        self.trees |= {(c.slot, len(c.history)): t for c, t, b in zip(new, made, budget, strict=True) if b}
        return made


class Roots(Fixed):
    """Asks always, verifies nothing: a round a token."""

    def cut(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> list[TokenTree]:
        return [root_only(int(t.tokens[0])) for t in trees]


class Sometimes(Roots):
    """Asks for a sequence in one round of three, by chance."""

    chance = random.Random(5)

    def ask(self, slots: Sequence[int], room: Sequence[int]) -> list[int]:
        return [min(r, self.num_nodes) if self.chance.random() < 0.3 else 0 for r in room]


@pytest.mark.parametrize("name", ["dart", "prompt_lookup"])
def test_drafts_after_catching_up_are_those_without_the_pause(name: str) -> None:
    steady, pausing = Noted(drafter(name)), Noted(drafter(name))
    assert run(llama(), steady, REQUESTS, batch=3, num_nodes=Roots(8))[0] == answers()
    assert run(llama(), pausing, REQUESTS, batch=3, num_nodes=Sometimes(8))[0] == answers()
    assert max(new for _, new, _ in pausing.asked if new < 12) > 3  # some pauses were long
    assert len(pausing.trees) > 10
    for key, tree in pausing.trees.items():
        assert torch.equal(tree.tokens, steady.trees[key].tokens), key
        assert torch.equal(tree.parents, steady.trees[key].parents), key


def test_a_drafter_that_is_never_asked_is_told_now_and_then_so_that_features_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = Noted(drafter("dart"))
    row = len(noted.taps) * llama().hidden_size * 4  # bytes of float32
    monkeypatch.setattr(engine, "MOST_UNREAD", 6 * row)
    assert run(llama(), noted, REQUESTS, batch=2, num_nodes=0)[0] == answers()
    assert noted.asked
    assert all(budget == 0 for _, _, budget in noted.asked)
    assert {new for _, new, _ in noted.asked} >= {6, 7}  # 6 rows one by one, or a prompt of 7 at once
    noted = Noted(drafter("prompt_lookup"))  # reads no features: nothing to pile up
    assert run(llama(), noted, REQUESTS, batch=2, num_nodes=0)[0] == answers()
    assert not noted.asked


@pytest.mark.parametrize("speculate", ["off", 0, 3, "auto"])
def test_a_request_says_how_it_speculates_and_gets_the_same_text(speculate: str | int) -> None:
    requests = [
        Request(r.prompt, SamplingParams(**{**vars(r.params), "speculate": speculate if i % 2 else "auto"}), r.sample)
        for i, r in enumerate(REQUESTS)
    ]
    noted = Noted(drafter("dart"))
    assert run(llama(), noted, requests, batch=3, num_nodes=8)[0] == answers()
    most = {"off": None, 0: None, 3: 3, "auto": 8}[speculate]
    budgets = [b for slot, _, b in noted.asked if slot % 2]
    assert max(budgets, default=None) == most
    assert {b for slot, _, b in noted.asked if slot % 2 == 0} == {8}


@pytest.mark.parametrize("wrong", [-1, True, "on", 2.5, None])
def test_other_ways_to_speculate_are_refused(wrong: object) -> None:
    with pytest.raises(DartspecError, match="speculate"):
        SamplingParams(speculate=wrong)  # type: ignore[arg-type]


def test_where_nobody_speculates_no_hidden_states_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Sequence[int]] = []
    recording = Target.recording
    monkeypatch.setattr(Target, "recording", lambda self, taps: read.append(taps) or recording(self, taps))
    off = SamplingParams(max_tokens=6, speculate="off")
    run(llama(), drafter("dart"), [Request(PROMPTS[0], off), Request(PROMPTS[2], off)], batch=2)
    assert not read
    run(llama(), drafter("dart"), [Request(PROMPTS[0], SamplingParams(max_tokens=6))])
    assert read


def test_a_controller_knows_whose_rounds_say_nothing_about_others() -> None:
    plainly = SamplingParams(temperature=0.7, top_p=0.9)
    assert not plainly.is_reshaped
    for change in ({"logit_bias": {3: 1.0}}, {"frequency_penalty": 0.5}, {"processors": (lambda i, x: x,)}):
        assert SamplingParams(**change).is_reshaped  # type: ignore[arg-type]
    controller = Adversary(1)
    stream = generate(llama(), drafter("none"), REQUESTS, batch=5, num_nodes=controller)
    for _ in range(6):
        next(stream)
    assert [controller.alive[slot].is_reshaped for slot in range(5)] == [False, False, True, False, False]
    stream.close()
    assert not controller.alive  # also when the caller leaves


@dataclass(frozen=True)
class Wrong(Fixed):
    asks: int = 4
    tree: TokenTree | None = None

    def ask(self, slots: Sequence[int], room: Sequence[int]) -> list[int]:
        return [self.asks] * len(slots)

    def cut(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> list[TokenTree]:
        return [self.tree or t for t in trees]


def tree(tokens: list[int], parents: list[int]) -> TokenTree:
    return TokenTree(
        torch.tensor(tokens, dtype=torch.int32), torch.tensor(parents, dtype=torch.int32), torch.zeros(len(tokens))
    )


@pytest.mark.parametrize(
    ("controller", "words"),
    [
        (Wrong(4, 5), "asked for 5 nodes; it must be 0 to 4"),
        (Wrong(4, -1), "asked for -1"),
        (Wrong(4, 4, tree([96, 3], [-1, 0])), "root 96"),
        (Wrong(4, 4, tree([96, 3, 4], [-1, 2, 0])), "parent"),
    ],
)
def test_a_controller_that_breaks_the_contract_is_told_so(controller: Controller, words: str) -> None:
    with pytest.raises(DartspecError, match=words):
        run(llama(), drafter("oracle"), REQUESTS[:1], num_nodes=controller)
