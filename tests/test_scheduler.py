"""Many requests at once: each gets the text that it gets alone, whoever comes, goes, fails or shares its beginning."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from dartspec import _core, drafters
from dartspec.drafters.mix import Mix
from dartspec.engine import Chunk, Request, Rounds
from dartspec.errors import DartspecError
from dartspec.scheduler import Handle, Limits, QueueFullError, Scheduler
from dartspec.target.fast import accelerate
from dartspec.target.target import Session, Target
from dartspec.types import Committed, Drafter, Forks, SamplingParams, TokenTree
from test_controller import Adversary, Roots
from test_lossless import Text, make, plain, target, whole

SYSTEM = [9, 8, 7, 6, 5, 4, 3, 9, 9, 8]  # what prompts share
PROMPTS: list[list[int]] = [
    [5, 6, 7, 8, 5, 6, 7],
    [*SYSTEM, 11],
    [*SYSTEM, 12, 13, 14],
    list(range(20, 57)),
    [60],
    [*SYSTEM, 12, 13, 15, 16],
    SYSTEM,
]
KINDS = [
    SamplingParams(max_tokens=16),
    SamplingParams(max_tokens=11, temperature=1.0, seed=4),
    SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, frequency_penalty=0.4, seed=9, speculate=3),
    SamplingParams(max_tokens=7, temperature=1.2, seed=2, speculate="off"),
]
REQUESTS = [Request(p, KINDS[(i + j) % 4], j) for i, p in enumerate(PROMPTS) for j in range(2)]
SMALL = Limits(num_slots=3, prefill_rows=5, num_prefixes=2, least_reuse=3)


@cache
def llama() -> Target:
    return target("llama")


@cache
def answers() -> list[Text]:
    return plain(llama(), REQUESTS)


def drafter(name: str) -> Drafter:
    return make(name, llama(), whole(REQUESTS, answers()), 0.6)


def scheduler(name: str | Drafter = "none", limits: Limits = SMALL, **options: Any) -> Scheduler:
    return Scheduler(llama(), drafter(name) if isinstance(name, str) else name, limits=limits, **options)


def drain(s: Scheduler) -> None:
    while s.step():
        pass


def ids(handle: Handle) -> Text:
    return tuple(i for chunk in handle for i in chunk.ids)


# -- the same text -----------------------------------------------------------------------------------------------------


@settings(max_examples=16, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["dart", "oracle", "prompt_lookup", "none"]),
    slots=st.integers(1, 5),
    rows=st.sampled_from([1, 4, 64]),
    prefixes=st.integers(0, 3),
)
def test_random_arrivals_and_cancels_change_no_text(seed: int, name: str, slots: int, rows: int, prefixes: int) -> None:
    """Greedy and sampled, with and without speculation, sharing beginnings, under a controller that asks by chance."""
    chance = random.Random(seed)
    s = scheduler(name, Limits(slots, None, 1 << 30, 99, rows, prefixes, 3), num_nodes=Adversary(seed))
    order = [chance.randrange(len(REQUESTS)) for _ in range(12)]
    handles: list[tuple[int, Handle]] = []
    cancelled = set()
    while len(handles) < len(order) or s.step():
        for _ in range(chance.choice((0, 0, 1, 1, 3))):
            if len(handles) < len(order):
                which = order[len(handles)]
                handles.append((which, s.submit(REQUESTS[which])))
        if handles and chance.random() < 0.06:
            _, handle = chance.choice(handles)
            if not handle.finish:
                cancelled.add(handle.index)
                handle.cancel()
        if len(handles) < len(order):
            s.step()
    for which, handle in handles:
        got, want = ids(handle), answers()[which]
        if handle.index in cancelled:
            assert handle.finish == "cancelled"
            assert got == want[: len(got)]
        else:
            assert handle.finish == "length"
            assert got == want
    c = s.counts
    assert (c.num_submitted, c.num_cancelled, c.num_finished) == (12, len(cancelled), 12 - len(cancelled))
    assert (s.num_running, s.num_waiting, c.num_failed, s.num_downgraded) == (0, 0, 0, 0)


@pytest.mark.skipif(not _core.kernels_supported(), reason="the kernels that make rows independent need AVX512_BF16")
def test_in_bfloat16_our_kernels_give_the_same_bits_in_any_company() -> None:
    from dartspec.target.attention import register

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny.model.__wrapped__("llama", torch.bfloat16, **sizes)
    model.set_attn_implementation(register())
    assert accelerate(model, torch.arange(8)[None], 1).row_invariant
    t = Target(model)
    want = plain(t, REQUESTS)
    s = Scheduler(t, make("dart", t), limits=SMALL, num_nodes=Adversary(3))
    handles = [s.submit(r) for r in REQUESTS]
    drain(s)
    assert [ids(h) for h in handles] == want
    assert s.counts.num_reused_tokens


def test_sequences_stop_where_they_stop_alone() -> None:
    eos = frozenset({answers()[0][4]})
    t = Target(tiny.model("llama"), eos_token_ids=eos)
    want = plain(t, REQUESTS)
    assert len({len(w) for w in want}) > 3
    s = Scheduler(t, make("oracle", t, whole(REQUESTS, want), 0.8), limits=SMALL)
    handles = [s.submit(r) for r in REQUESTS]
    drain(s)
    assert [ids(h) for h in handles] == want
    assert {h.finish for h in handles} == {"stop", "length"}


# -- shared beginnings -------------------------------------------------------------------------------------------------


class Noted:
    """Drafts as another drafter does and notes its trees by the history they hang at."""

    def __init__(self, inner: Drafter) -> None:
        self.taps, self.inner = inner.taps, inner
        self.trees: dict[Text, list[TokenTree]] = {}

    def reset(self, slots: Sequence[int]) -> None:
        self.inner.reset(slots)

    def fork(self, source: int, target: int, length: int) -> None:
        assert isinstance(self.inner, Forks)
        self.inner.fork(source, target, length)

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        made = self.inner.propose(new, budget)
        for c, tree, b in zip(new, made, budget, strict=True):
            if b:
                self.trees.setdefault(tuple(c.history.tolist()), []).append(tree)
        return made


def chat(t: Target, d: Drafter, num_nodes: Any, limits: Limits = SMALL) -> tuple[Scheduler, list[Handle]]:
    """Two turns of one chat, two more prompts that begin as the first did, one of them while it is being answered."""
    s = Scheduler(t, d, limits=limits, num_nodes=num_nodes)
    params = SamplingParams(max_tokens=9)
    first = s.submit(Request([*SYSTEM, 11], params))
    while first.finish is None:
        s.step()
        if s.counts.num_new_tokens == 3:
            beside = s.submit(Request([*SYSTEM, 12, 13, 14], params))
    drain(s)
    turn = s.submit(Request([*SYSTEM, 11, *ids(first), 30, 31, 32], params))
    drain(s)
    later = s.submit(Request([*SYSTEM, 11, 40], params))
    drain(s)
    return s, [first, beside, turn, later]


@pytest.mark.parametrize("name", drafters.names())
def test_drafts_are_equal_cold_and_reused(name: str) -> None:
    """The drafter's row at the boundary pairs a shared token with one that is not: it must not be copied."""
    if not isinstance(drafter(name), Forks):
        pytest.skip("it keeps no state that could be reused")
    warm, fresh = drafter(name), drafter(name)
    for one in (warm, fresh):
        if isinstance(one, Mix):  # its ranking learns from all rounds, whose order differs: let it stay as it begins
            one.config = replace(one.config, prior=1e12)
    noted, cold = Noted(warm), Noted(fresh)
    _, handles = chat(llama(), noted, Roots(8))
    _, alone = chat(llama(), cold, Roots(8), Limits(num_slots=3, num_prefixes=0, least_reuse=99))
    assert [ids(h) for h in handles] == [ids(h) for h in alone]
    assert [h.num_reused for h in alone] == [0, 0, 0, 0]
    assert [h.num_reused for h in handles] == [0, len(SYSTEM) - 1, len(SYSTEM) + 1 + 8, len(SYSTEM)]
    assert noted.trees.keys() == cold.trees.keys()
    for history, trees in noted.trees.items():
        for a, b in zip(trees, cold.trees[history], strict=True):
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.parents, b.parents)


@pytest.mark.parametrize(("name", "nodes"), [("dart", 0), ("dart", 8), ("prompt_lookup", 8), ("oracle", 8)])
def test_a_drafter_costs_no_hits(name: str, nodes: int) -> None:
    """As many tokens are reused as in plain decoding; also when the drafter was off while the text was written."""
    want = [h.num_reused for h in chat(llama(), drafter("none"), 0)[1]]
    assert sum(want) > 20
    assert [h.num_reused for h in chat(llama(), drafter(name), nodes)[1]] == want


def test_a_drafter_that_cannot_fork_has_its_texts_read_anew() -> None:
    class NoFork:
        def __init__(self) -> None:
            self._inner = drafter("dart")
            self.taps, self.reset, self.propose = self._inner.taps, self._inner.reset, self._inner.propose

    _, handles = chat(llama(), NoFork(), 8)
    assert [h.num_reused for h in handles] == [0, 0, 0, 0]
    assert [ids(h) for h in handles] == [ids(h) for h in chat(llama(), drafter("none"), 0)[1]]
    off = SamplingParams(max_tokens=4, speculate="off")  # needs nothing of the drafter's
    s = Scheduler(llama(), NoFork(), limits=SMALL)
    for prompt in ([*SYSTEM, 11], [*SYSTEM, 12]):
        last = s.submit(Request(prompt, off))
        drain(s)
    assert last.num_reused == len(SYSTEM) - 1


def test_kept_texts_are_few_and_the_one_used_longest_ago_goes() -> None:
    s = scheduler("dart", Limits(num_slots=1, num_prefixes=2, least_reuse=3))

    def reused(*prompt: int) -> int:
        handle = s.submit(Request(prompt, SamplingParams(max_tokens=2)))
        drain(s)
        return handle.num_reused

    a, b, c = [[k, k + 1, k + 2, k + 3, k + 4] for k in (20, 40, 60)]
    assert [reused(*a), reused(*b), reused(*a, 3)] == [0, 0, 4]  # b is now the older one
    assert reused(*c) == 0
    assert reused(*a, 4) == 4
    assert reused(*b) == 0
    assert len(s._prefixes._stored) == 2
    assert len(s._rounds.session._parked) == 2
    assert len(s._rounds.drafter._prefixes) == 2  # type: ignore[attr-defined]  # of the drafter too
    s.close()
    assert not s._rounds.drafter._prefixes  # type: ignore[attr-defined]


# -- memory and queue --------------------------------------------------------------------------------------------------


def test_the_cache_is_as_large_as_it_says_and_never_above_the_budget() -> None:
    per_position = llama().bytes_per_position
    assert per_position == 4 * 2 * (8 + 8) * 4  # layers, heads, key and value, float32
    row = (60 + 16 + 1) * per_position
    s = scheduler(limits=Limits(num_slots=8, max_length=60, memory_bytes=10 * row, num_prefixes=4))
    assert (s.num_slots, s.num_prefixes, s.cache_bytes) == (8, 2, 10 * row)
    groups = s._rounds.session._cache._groups
    assert sum(x.nbytes for group in groups for x in group) == s.cache_bytes
    assert "8 sequences of up to 60 tokens and 2 kept texts" in str(s)
    s = scheduler(limits=Limits(num_slots=8, max_length=60, memory_bytes=3 * row + 1))
    assert (s.num_slots, s.num_prefixes, s.cache_bytes) == (3, 0, 3 * row)
    with pytest.raises(DartspecError, match=r"60 tokens take .* memory_bytes allows .*: raise it, or lower max_length"):
        scheduler(limits=Limits(max_length=60, memory_bytes=row - 1))


def test_a_text_ends_where_its_room_does() -> None:
    s = scheduler("oracle", Limits(max_length=15))
    handle = s.submit(Request(PROMPTS[0], SamplingParams(max_tokens=500)))
    assert ids(handle) == answers()[0][:8]
    assert handle.finish == "length"
    with pytest.raises(DartspecError, match="has 15 tokens; llama has room for texts of 15"):
        s.submit(Request(list(range(15)), KINDS[0]))


def test_a_full_queue_says_so() -> None:
    s = scheduler(limits=Limits(num_slots=1, num_waiting=2))
    handles = [s.submit(REQUESTS[0]) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        s.submit(REQUESTS[0])
    s.step()  # one gets the slot
    handles.append(s.submit(REQUESTS[0]))
    drain(s)
    assert [ids(h) for h in handles] == [answers()[0]] * 3
    assert (s.counts.num_refused, s.counts.num_submitted) == (1, 3)


@pytest.mark.parametrize(
    "wrong", [{"num_slots": 0}, {"num_waiting": 0}, {"prefill_rows": 0}, {"max_length": 1}, {"memory_bytes": 2.5}]
)
def test_limits_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DartspecError, match=next(iter(wrong))):
        Limits(**wrong)


def test_a_long_prompt_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others are decoded, between two rounds at most `prefill_rows` positions of prompts are read."""
    log: list[int] = []
    extend, step = Session.extend, Rounds.step

    def noted(self: Session, slot: int, ids: Sequence[int], features: bool = True) -> Any:
        log.append(len(ids))
        return extend(self, slot, ids, features)

    def round_(self: Rounds, alive: Any) -> list[Chunk]:
        log.append(0)
        return step(self, alive)

    monkeypatch.setattr(Session, "extend", noted)
    monkeypatch.setattr(Rounds, "step", round_)
    s = scheduler(limits=Limits(num_slots=3, prefill_rows=8, num_prefixes=0))
    first = s.submit(Request([60], SamplingParams(max_tokens=30)))
    s.step()
    long = s.submit(REQUESTS[6])  # 37 tokens
    short = s.submit(REQUESTS[8])  # 1 token
    drain(s)
    assert log[:2] == [1, 0]
    between = [[n for n in part.split(",") if n] for part in ",".join(map(str, log[1:])).split("0,")]
    read = [sum(map(int, part)) for part in between]
    assert [n for n in read if n][:5] == [8, 8, 8, 8, 6]  # 37 = 4 * 8 + 5, and the short one rides along
    assert ids(long) == answers()[6]
    assert ids(short) == answers()[8]
    assert first.finish == "length"


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_frees_its_slot_before_the_next_round() -> None:
    noted = Noted(drafter("dart"))
    s = scheduler(noted, Limits(num_slots=1, num_prefixes=0))
    a, b, c = (s.submit(REQUESTS[0]) for _ in range(3))
    s.step()
    s.step()
    b.cancel()  # it waits: gone at once
    assert b.finish == "cancelled"
    assert s.num_waiting == 1
    a.cancel()
    s.step()
    assert a.finish == "cancelled"
    assert list(noted.inner._prefixes) == [c.index]  # type: ignore[attr-defined]
    assert s.num_waiting == 0  # the next one has the slot in the same step
    assert ids(a) == answers()[0][: len(ids(a))]
    assert ids(c) == answers()[0]
    c.cancel()  # too late: nothing happens
    assert c.finish == "length"
    assert s.counts.num_cancelled == 2


# -- errors ------------------------------------------------------------------------------------------------------------


def failing(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] > 10:
        raise KeyError("no such thing")
    return logits


def not_numbers(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits * (torch.nan if ids.shape[1] > 9 else 1.0)


@pytest.mark.parametrize(
    ("params", "error"),
    [
        (SamplingParams(max_tokens=9, processors=(failing,)), KeyError),
        (SamplingParams(max_tokens=9, processors=(not_numbers,)), DartspecError),
        (SamplingParams(max_tokens=9, processors=(lambda i, x: x[:, :4],)), DartspecError),
        (SamplingParams(max_tokens=9, logit_bias={i: -torch.inf for i in range(tiny.VOCAB)}), DartspecError),
    ],
)
def test_an_error_in_one_request_ends_that_one_alone(params: SamplingParams, error: type[Exception]) -> None:
    s = scheduler("oracle")
    handles = [s.submit(r) for r in REQUESTS[:2]]
    bad = s.submit(Request(PROMPTS[0], params))
    handles += [s.submit(r) for r in REQUESTS[2:4]]
    drain(s)
    assert bad.finish == "error"
    assert isinstance(bad.error, error)
    assert [ids(h) for h in handles] == answers()[:4]
    assert (s.counts.num_failed, s.num_running, s.num_downgraded) == (1, 0, 0)


def test_what_can_never_be_served_is_refused_at_once() -> None:
    s = scheduler()
    for request, words in (
        (Request([], KINDS[0]), "empty"),
        (Request([5, 97], KINDS[0]), "97"),
        (Request([5], SamplingParams(logit_bias={999: 1.0})), "999"),
        (Request([5], SamplingParams(stop=("x",))), "tokenizer"),
    ):
        with pytest.raises(DartspecError, match=words):
            s.submit(request)
    assert s.counts.num_submitted == 0


class Faulty:
    """A drafter that fails where `when` says, by the sequence's first token."""

    def __init__(self, how: Callable[[TokenTree], TokenTree], when: int | None) -> None:
        self._inner, self._how, self._when = drafter("dart"), how, when
        self.taps = self._inner.taps
        self.reset = self._inner.reset
        self.served = 0

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        faults = [self._when is None or int(c.history[0]) == self._when for c in new]
        if any(faults) and self._how is raising:
            raising(None)
        trees = self._inner.propose(new, budget)
        self.served += sum(t.num_drafts > 0 for t in trees)
        return [self._how(t) if f else t for t, f in zip(trees, faults, strict=True)]


def raising(tree: TokenTree | None) -> TokenTree:
    raise RuntimeError("the drafter is broken")


@pytest.mark.parametrize(
    "how",
    [
        raising,
        lambda t: t._replace(scores=torch.full_like(t.scores, torch.nan)),
        lambda t: t._replace(tokens=t.tokens + 1),
        lambda t: None,
    ],
)
@pytest.mark.parametrize("when", [5, None])
def test_where_the_drafter_fails_the_request_goes_on_without(
    how: Any, when: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty(how, when)
    s = scheduler(faulty)
    with caplog.at_level(logging.WARNING, logger="dartspec"):
        handles = [s.submit(r) for r in REQUESTS]
        drain(s)
    assert [ids(h) for h in handles] == answers()
    hit = [r for r in REQUESTS if when in (None, r.prompt[0]) and r.params.speculate != "off"]
    assert s.num_downgraded == len(hit) > 0
    assert len([r for r in caplog.records if "goes on without drafts" in r.getMessage()]) == 1
    assert (faulty.served > 0) == (when is not None or how is not raising)


def test_a_forward_that_fails_ends_the_sequences_in_it_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler("dart")
    handles = [s.submit(r) for r in REQUESTS[:5]]
    s.step()
    s.step()
    lost = s.num_running
    with monkeypatch.context() as patch:
        patch.setattr(Session, "score", lambda *a, **k: raising(None))
        s.step()
    drain(s)
    assert [h.finish for h in handles] == ["error"] * lost + ["length"] * (5 - lost)
    assert [ids(h) for h in handles[lost:]] == answers()[lost:5]
    assert str(handles[0].error) == "the drafter is broken"


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_submit_and_read_while_another_decodes() -> None:
    got: dict[int, Text] = {}

    def client(s: Scheduler, which: int) -> None:
        got[which] = ids(s.submit(REQUESTS[which]))

    with scheduler("dart") as s:
        assert s.is_running
        threads = [threading.Thread(target=client, args=(s, i)) for i in range(len(REQUESTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert [got[i] for i in range(len(REQUESTS))] == answers()
    assert not s.is_running


def test_an_event_loop_reads_several_at_once_and_is_not_blocked() -> None:
    async def read(s: Scheduler, which: int) -> Text:
        return tuple([i async for chunk in s.submit(REQUESTS[which]) for i in chunk.ids])

    async def serve() -> list[Text]:
        with scheduler("oracle") as s:
            return await asyncio.gather(*(read(s, i) for i in range(6)))

    assert asyncio.run(serve()) == answers()[:6]


def test_closing_ends_all_and_takes_no_more() -> None:
    with scheduler(limits=Limits(num_slots=1)) as s:
        handles = [s.submit(Request(PROMPTS[0], SamplingParams(max_tokens=200))) for _ in range(3)]
        next(iter(handles[0]))
    assert all(h.finish == "cancelled" for h in handles)
    assert (s.num_running, s.num_waiting) == (0, 0)
    with pytest.raises(DartspecError, match="takes no more requests: it was closed"):
        s.submit(REQUESTS[0])
    with pytest.raises(DartspecError, match="cannot start"):
        s.start()


def test_where_the_scheduler_itself_fails_nobody_is_left_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Scheduler, "_decode", lambda self: raising(None))
    with scheduler() as s:
        handle = s.submit(REQUESTS[0])
        assert [c.finish for c in handle][-1] == "error"
        assert isinstance(handle.error, RuntimeError)
        with pytest.raises(DartspecError, match="it failed"):
            s.submit(REQUESTS[0])


def test_a_listener_that_fails_cancels_its_request() -> None:
    s = scheduler()
    bad, good = s.submit(REQUESTS[0]), s.submit(REQUESTS[1])
    heard: list[Chunk] = []
    bad.listen(lambda chunk: raising(None) and None)
    s.step()
    good.listen(heard.append)  # hears what came before, too
    drain(s)
    assert bad.finish == "cancelled"
    assert [i for c in heard for i in c.ids] == list(answers()[1])


def test_iterating_drives_the_scheduler_where_nobody_else_does() -> None:
    s = scheduler("oracle")
    handles = [s.submit(r) for r in REQUESTS[:4]]

    def finishes(chunks: Iterator[Chunk]) -> list[str | None]:
        return [c.finish for c in chunks]

    assert finishes(iter(handles[2]))[-1] == "length"
    assert ids(handles[0]) == answers()[0]
    assert ids(handles[0]) == answers()[0]  # again: chunks are kept
