"""generate(): the loop. Propose, score, verify, keep, commit; nothing else loops.

Knows sequences of ids and, through `text`, what a token adds to the text. Every drafter runs in the same loop with the
same cache, sampler and stopping rule; plain decoding is the drafter `none`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dartspec.accounting import Metrics
from dartspec.budget import Fixed
from dartspec.device import take_rows
from dartspec.errors import DartspecError
from dartspec.sampling import Sampler
from dartspec.target.target import Session, Target
from dartspec.text import StopStrings, Text
from dartspec.tree import check, depths, root_only, subtree
from dartspec.types import (
    Committed,
    Controller,
    Drafter,
    RoundRecord,
    RoundTimes,
    SamplingParams,
    Scores,
    TokenTree,
    Verdict,
)
from dartspec.verify import Together, verify, verify_typical

MOST_UNREAD = 8 << 20  # bytes of features that wait for a drafter that is not called; then it reads without drafting
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """prompt: token ids, at least one. sample: index among several answers to one prompt; part of the noise."""

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    sample: int = 0


@dataclass
class Chunk:
    """What one round committed to one sequence.

    index: the request's. ids: new tokens. num_accepted: draft tokens among them, the first ones (`metrics` counts those
    that a stop cut off as well).
    text: the characters that became certain; a half character or a possible stop string is held back.
    log_probs: per token (log-probability, likeliest alternatives), when asked for.
    finish: None, or why the sequence ended with this chunk: "stop" or "length"; where many are served also "error" and
    "cancelled". `metrics` is then complete.
    tree, path: the tree that was verified, and its accepted nodes from the root on; None behind the prefill.
    """

    index: int
    ids: list[int]
    num_accepted: int
    text: str
    finish: str | None
    metrics: Metrics
    seed: int
    log_probs: list[tuple[float, list[tuple[int, float]]]] | None = None
    tree: TokenTree | None = None
    path: list[int] | None = None


def generate(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    text: Text | None = None,
    num_nodes: int | Controller = 16,
    batch: int = 8,
) -> Iterator[Chunk]:
    """Decodes every request, up to `batch` at a time; chunks come round by round, and end with `finish` set.

    num_nodes: draft tokens a tree may have, or the controller that says so round by round.
    Raises DartspecError before any work when a prompt is empty or does not fit the model's context, and later when the
    drafter breaks its contract: another root, a malformed tree, too many nodes, ids that the model does not have.
    """
    if batch < 1:
        raise DartspecError(f"batch is {batch}; it must be 1 or more")
    sequences = [Running(i, r, target, text) for i, r in enumerate(requests)]
    controller = Fixed(num_nodes) if isinstance(num_nodes, int) else num_nodes
    if controller.most_nodes < 0:
        raise DartspecError(f"num_nodes is {controller.most_nodes}; it must be 0 (plain decoding) or more")
    capacity = max((s.limit for s in sequences), default=0) + controller.most_nodes + 1
    rounds = Rounds(target, drafter, controller, target.session(min(batch, len(sequences)), capacity, drafter.taps))
    waiting, alive = sequences[::-1], list[Running]()
    try:
        while waiting or alive:
            while waiting and len(alive) < batch:
                s = waiting.pop()
                rounds.join(s)
                if not drafter.taps and target.straight is not None:
                    _begin_alike(rounds.session, s, alive)
                alive.append(s)
                first = s.prefill(rounds.session)
                if s.finish:
                    rounds.leave(alive.pop())
                assert first is not None
                yield first
            if not alive:
                return
            chunks = rounds.step(alive)
            for s in alive:
                if s.finish:
                    rounds.leave(s)
            alive = [s for s in alive if not s.finish]
            yield from chunks
    finally:
        for s in alive:  # also when the caller stops listening half-way
            rounds.leave(s)
        rounds.session.close()


LEAST_ALIKE = 8  # tokens of a prompt's beginning that are worth copying


def _begin_alike(session: Session, s: Running, alive: Sequence[Running]) -> None:
    """Copies the keys and values of the longest beginning that the prompt shares with a sequence in progress: the chat
    template's, as a rule. With our kernels these are the bits that reading it anew would give (a row's result does not
    depend on the rows beside it); a drafter that reads hidden states would miss them."""
    most, source = LEAST_ALIKE - 1, -1
    prompt = s.ids[:-1]  # the last token has to be run
    for other in alive:
        if other.ids[: most + 1] == prompt[: most + 1] and len(prompt) > most:
            pairs = enumerate(zip(prompt, other.ids[: other.num_prompt], strict=False))
            end = min(len(prompt), other.num_prompt)
            most, source = next((i for i, (a, b) in pairs if a != b), end), other.slot
    if source >= 0:
        session.copy(source, s.slot, most)
        s.begin_at(most, was_read=False)


class Rounds:
    """One round over sequences of one session: propose, score, verify, keep, commit. `generate` and the scheduler drive
    it, and nothing else decodes.

    strict: whether an error of the drafter, or of one sequence's picks, is raised. Otherwise the sequence goes on
    without drafts (`num_downgraded` counts these), or ends alone with `Running.error` set.
    """

    def __init__(
        self, target: Target, drafter: Drafter, controller: Controller, session: Session, *, strict: bool = True
    ) -> None:
        self.session, self.drafter, self.controller = session, drafter, controller
        self.strict = strict
        self.num_downgraded = 0
        self._every = bool(getattr(drafter, "needs_picks", False))  # the picks at all nodes, not only on the walk
        self._device = target.device
        # on an accelerator all sequences are verified at once, with one transfer back
        on_device = target.device.type != "cpu" or target.recorder is not None
        self._typical: float | None = getattr(drafter, "typical", None)  # lossy, and only where it was asked for
        on_device = on_device and self._typical is None
        self._together = Together(target.num_tokens, target.device, target.recorder) if on_device else None

    def join(self, s: Running) -> None:
        """A sequence begins: it takes a row of the session."""
        self.forget(s.slot)  # whatever a stream that nobody closed has left there
        s.metrics.lossy = self._typical is not None
        self.session.open(s.slot)
        self.controller.join(s.slot, s.sampler.params, s.num_prompt)

    def leave(self, s: Running, last_stays: bool = False) -> None:
        """It is over, finished or not; its slot is free at once. last_stays: see `Session.free`."""
        self.session.free(s.slot, last_stays)
        s.was_read()  # nobody will; its features may be large
        self.forget(s.slot)
        self.controller.leave(s.slot)

    def forget(self, slot: int) -> None:
        """The drafter forgets a slot."""
        try:
            self.drafter.reset([slot])
        except Exception as error:
            if self.strict:
                raise
            _log.warning("a drafter failed to forget a sequence (%s: %s)", type(error).__name__, error)

    def catch_up(self, s: Running) -> None:
        """Tells the drafter what it does not know yet of a sequence, drafting nothing: all of one that has finished. Of
        one that goes on, the last row waits: its next draft begins there."""
        if s.speculates and s.num_unread > (s.finish is None):
            self._propose([s], [0], but_last=s.finish is None)

    def step(self, alive: Sequence[Running]) -> list[Chunk]:
        """One round of sequences whose prompts have been read; one chunk each, in their order."""
        slots = [s.slot for s in alive]
        clock = _Clock(self._device, self.drafter)
        context = max(len(s.ids) for s in alive)
        trees, num_read = self._draft(alive, clock)
        clock.mark()
        scores = self.session.score(slots, trees, features=any(s.speculates for s in alive))
        clock.mark()
        verdicts = self._verdicts(alive, scores, trees)
        clock.mark()
        good = [i for i, verdict in enumerate(verdicts) if verdict is not None]
        walked = [v for v in verdicts if v is not None]
        self.session.keep([slots[i] for i in good], [v.path for v in walked])
        chunks = [
            s.ended("error") if v is None else s.commit(r, t, v)
            for s, r, t, v in zip(alive, scores, trees, verdicts, strict=True)
        ]
        times = clock.times(
            num_rows=sum(len(t.tokens) for t in trees),
            num_padded_rows=len(trees) * max(len(t.tokens) for t in trees),
            context=context,
            num_read=num_read,
        )
        self.controller.observe([slots[i] for i in good], [trees[i] for i in good], walked, times)
        after_ms = clock.since_times()  # what the controller took is part of the round
        for i, v in zip(good, walked, strict=True):
            alive[i].metrics.rounds.append(
                RoundRecord(
                    num_drafted=trees[i].num_drafts,
                    num_accepted=v.num_accepted,
                    num_committed=len(chunks[i].ids),
                    draft_ms=times.draft_ms,
                    search_ms=times.search_ms,
                    verify_ms=times.verify_ms,
                    other_ms=times.other_ms + after_ms,
                    batch=len(alive),
                    pick_ms=clock.pick_ms,
                )
            )
        return chunks

    def _draft(self, alive: Sequence[Running], clock: _Clock) -> tuple[list[TokenTree], int]:
        """The trees to verify, and how many rows the drafter was told of."""
        slots = [s.slot for s in alive]
        room = [s.room(self.controller.most_nodes) for s in alive]
        asked = self.controller.ask(slots, room)
        for budget, most in zip(asked, room, strict=True):
            if not 0 <= budget <= most:
                raise DartspecError(f"the controller asked for {budget} nodes; it must be 0 to {most}")
        read = [i for i, s in enumerate(alive) if asked[i] or s.must_be_read]
        trees = [root_only(s.ids[-1]) for s in alive]
        num_read = sum(alive[i].num_unread for i in read)
        clock.mark()
        if read:
            drafts = self._propose([alive[i] for i in read], [asked[i] for i in read])
            clock.mark()
            for i, tree in zip(read, drafts, strict=True):
                trees[i] = tree
        else:
            clock.mark()
        cut = self.controller.cut(slots, trees)
        # what it left as it is was looked at already
        whole = zip(alive, trees, cut, strict=True)
        return [new if new is old else s.fit(new, old.num_drafts) for s, old, new in whole], num_read

    def _propose(self, sequences: Sequence[Running], budget: Sequence[int], but_last: bool = False) -> list[TokenTree]:
        """The drafter's trees, each looked at and fitted to its sequence."""
        try:
            drafts = self.drafter.propose([s.news(but_last) for s in sequences], budget)
            if len(drafts) != len(sequences):
                raise DartspecError(f"the drafter proposed {len(drafts)} trees for {len(sequences)} sequences")
        except Exception as error:
            if self.strict:
                raise
            if len(sequences) == 1:
                return [self._downgrade(sequences[0], error)]
            # whose fault it was shows when each is asked alone; one that was read before the error stays behind too
            return [self._propose([s], [b])[0] for s, b in zip(sequences, budget, strict=True)]
        trees = []
        for s, tree, most in zip(sequences, drafts, budget, strict=True):
            s.was_read(but_last)
            if but_last:
                continue
            try:
                trees.append(s.fit(tree, most))
            except Exception as error:
                if self.strict:
                    raise
                trees.append(self._downgrade(s, error))
        return trees

    def _downgrade(self, s: Running, error: Exception) -> TokenTree:
        """Plain decoding from here on: the drafter cannot serve this sequence."""
        if not self.num_downgraded:
            _log.warning("a drafter failed (%s: %s); its sequence goes on without drafts", type(error).__name__, error)
        self.num_downgraded += 1
        s.stop_speculating()
        self.forget(s.slot)
        return root_only(s.ids[-1])

    def _verdicts(
        self, alive: Sequence[Running], scores: Sequence[Scores], trees: Sequence[TokenTree]
    ) -> list[Verdict | None]:
        known: list[Verdict | None] = [None] * len(alive)
        if self._together is not None:
            known = self._together.verify(scores, trees, [s.sampler for s in alive], [len(s.ids) for s in alive])
        return [v or self._verdict(s, r, t) for v, s, r, t in zip(known, alive, scores, trees, strict=True)]

    def _verdict(self, s: Running, scores: Scores, tree: TokenTree) -> Verdict | None:
        """None where no token can be picked, or the request's own processor failed: that ends this sequence alone."""
        try:
            if self._typical is not None:
                return verify_typical(scores, tree, s.sampler, s.ids, self._typical)
            return verify(scores, tree, s.sampler, s.ids, self._every)
        except Exception as error:
            if self.strict:
                raise
            s.error = error
            return None


class Running:
    """One request in progress: its ids, its picks, its text, and where it stops. The only place that stops.

    slot: its number in the session, the drafter and the controller. index: its number for the caller, or `slot`.
    room: positions that may be used at most, where that is less than the model's context.
    """

    def __init__(
        self,
        slot: int,
        request: Request,
        target: Target,
        text: Text | None,
        *,
        index: int | None = None,
        room: int | None = None,
    ) -> None:
        prompt, params = list(request.prompt), request.params
        most = target.max_positions if room is None else min(room, target.max_positions)
        if not prompt:
            raise DartspecError("the prompt is empty: give at least one token of text")
        if len(prompt) >= most:
            has = "a context" if most == target.max_positions else "room for texts"
            raise DartspecError(
                f"the prompt has {len(prompt)} tokens; {target.name} has {has} of {most}: shorten the prompt"
            )
        bad = next((i for i in prompt if not 0 <= i < target.vocab_size), None)
        if bad is not None:
            raise DartspecError(f"the prompt has token id {bad}; {target.name} has ids 0 to {target.vocab_size - 1}")
        if params.stop and text is None:
            raise DartspecError("stop strings need a tokenizer: give one, or use stop_token_ids")
        self.slot, self.index = slot, slot if index is None else index
        self.num_prompt = len(prompt)
        self.limit = min(len(prompt) + params.max_tokens, most)
        self.ids = prompt  # every committed token
        self._vocab_size = target.vocab_size
        self.sampler = Sampler(params, target.num_tokens, len(prompt), request.sample)
        self.metrics = Metrics(num_prompt_tokens=len(prompt))
        self.finish: str | None = None
        self.error: Exception | None = None
        self.speculates = params.most_nodes != 0
        self.num_run = 0  # prompt positions that are in the target's cache
        self.num_unread = 0  # rows that the drafter has not been told of
        self._unread: list[Tensor] = []  # their features, (n, n_taps, H) each
        self._tree: TokenTree | None = None  # the last round's
        self._picks: Tensor | None = None
        self._history = torch.empty(self.limit, dtype=torch.int64)
        self._history[: len(prompt)] = torch.tensor(prompt)
        self._stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.eos_token_ids))
        self._decoder = text.stream() if text else None
        self._stops = StopStrings(params.stop)

    def room(self, num_nodes: int) -> int:
        """Nodes worth drafting, `num_nodes` at most: none when only one token is left to write."""
        if not self.speculates or self.limit - len(self.ids) <= 1:
            return 0
        most = self.sampler.params.most_nodes
        return num_nodes if most is None else min(most, num_nodes)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """(L,) every committed token; a view."""
        history: NDArray[np.int64] = self._history[: len(self.ids)].numpy()
        return history

    def begin_at(self, length: int, was_read: bool) -> None:
        """The first `length` positions are in the session's cache. was_read: the drafter knows their rows too."""
        self.num_run = length
        if not was_read:
            self.num_unread = length

    @property
    def must_be_read(self) -> bool:
        """Whether so many features wait for the drafter that it should take them now, drafts or none."""
        if not self.speculates or not self._unread:
            return False
        one = self._unread[-1]
        return self.num_unread * one[0].numel() * one.element_size() >= MOST_UNREAD

    def news(self, but_last: bool = False) -> Committed:
        """All that the drafter has not been told of, or all but the last row and the last token."""
        if len(self._unread) > 1:
            self._unread = [torch.cat(self._unread)]
        features = self._unread[0] if self._unread else None
        history, n = self._history[: len(self.ids)], self.num_unread
        if but_last:
            history, n, features = history[:-1], n - 1, None if features is None else features[:-1]
        return Committed(self.slot, history, n, features, self._tree, self._picks, self.sampler.perturbed)

    def was_read(self, but_last: bool = False) -> None:
        """The drafter has been told that."""
        self.num_unread = int(but_last)
        self._unread = [self._unread[0][-1:].clone()] if but_last and self._unread else []

    def stop_speculating(self) -> None:
        """No drafts from here on, and no features kept."""
        self.speculates = False
        self.was_read()

    def _learn(self, num_rows: int, features: Tensor | None) -> None:
        self.num_unread += num_rows
        if features is not None:
            self._unread.append(features)

    def fit(self, tree: TokenTree, budget: int) -> TokenTree:
        """The tree without nodes that could never be kept: so deep that the length limit or the context cuts them.

        The text is right for every tree that hangs at the last committed token, so just that is made sure of.
        """
        check(tree)
        if tree.num_drafts > budget:
            raise DartspecError(f"the drafter proposed {tree.num_drafts} nodes; at most {budget} were asked for")
        root, last = int(tree.tokens[0]), self.ids[-1]
        if root != last:
            raise DartspecError(f"the drafter's tree has root {root}; it must be {last}, the last committed token")
        highest = int(tree.tokens.max())
        if highest >= self._vocab_size:
            raise DartspecError(f"the drafter proposed token {highest}; the target has ids 0 to {self._vocab_size - 1}")
        left = self.limit - len(self.ids)
        if len(tree.tokens) <= left:
            return tree  # no path is longer than the tree
        depth = depths(tree)
        return subtree(tree, [i for i in range(len(tree.tokens)) if depth[i] < left])  # a child is deeper: closed

    def prefill(self, session: Session, most_rows: int | None = None) -> Chunk | None:
        """Runs the prompt, or its next `most_rows` positions. At its end, picks the first token, which belongs to no
        round, and returns its chunk."""
        began = time.perf_counter()
        end = self.num_prompt if most_rows is None else min(self.num_prompt, self.num_run + most_rows)
        scores = session.extend(self.slot, self.ids[self.num_run : end], features=self.speculates)
        self._learn(end - self.num_run, scores.features)
        self.num_run = end
        token = self.sampler.pick(scores.logits[-1], self.ids) if end == self.num_prompt else None
        self.metrics.prefill_ms += 1e3 * (time.perf_counter() - began)
        return None if token is None else self._append([token], scores.logits[-1:], 0, None)

    def commit(self, scores: Scores, tree: TokenTree, verdict: Verdict) -> Chunk:
        """Appends the accepted tokens and the bonus, up to the first stop."""
        tokens = [*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus]
        self._tree, self._picks = tree, verdict.picks
        wanted = self.sampler.params.logprobs is not None
        logits = scores.logits[verdict.path] if wanted else scores.logits
        chunk = self._append(tokens, logits, verdict.num_accepted, tree)
        chunk.path = verdict.path
        rows = verdict.path[: len(chunk.ids)]  # a stop may have cut the rest
        features = scores.features if self.speculates else None
        self._learn(len(rows), None if features is None else take_rows(features, rows))
        return chunk

    def ended(self, finish: str) -> Chunk:
        """The last chunk of a sequence that was ended from outside, with the text that was held back."""
        self.finish = finish
        return Chunk(self.index, [], 0, self._rest(), finish, self.metrics, self.sampler.seed)

    def _append(self, tokens: list[int], logits: Tensor, num_accepted: int, tree: TokenTree | None) -> Chunk:
        """The one stopping rule: stop ids, then stop strings, then the length. Row i of `logits` is token i's."""
        began, pieces = len(self.ids), []
        for token in tokens:
            self._history[len(self.ids)] = token
            self.ids.append(token)
            if token in self._stop_ids:
                self.finish = "stop"
            if self._decoder is not None:
                released, stopped = self._stops.push(self._decoder.push([token]))
                pieces.append(released)
                if stopped:
                    self.finish = "stop"
            if self.finish is None and len(self.ids) == self.limit:
                self.finish = "length"
            if self.finish:
                break
        if self.finish:
            pieces.append(self._rest())
        new = self.ids[began:]
        top = self.sampler.params.logprobs
        log_probs = None if top is None else [self.sampler.log_probs(logits[i], t, top) for i, t in enumerate(new)]
        self.metrics.num_new_tokens += len(new)
        return Chunk(
            self.index,
            new,
            min(num_accepted, len(new)),
            "".join(pieces),
            self.finish,
            self.metrics,
            self.sampler.seed,
            log_probs,
            tree,
        )

    def _rest(self) -> str:
        """The text that was held back, for the end."""
        if self._decoder is None:
            return ""
        rest, _ = self._stops.push(self._decoder.flush())
        return rest + self._stops.flush()


class _Clock:
    """The stage times of one round: marks before and after the drafter, before and after the target, and after the
    picks. Nobody waits for a GPU: it notes the time itself when it comes to a mark, and is asked once the tokens are
    known."""

    def __init__(self, device: torch.device, drafter: Drafter) -> None:
        self._device, self._is_cuda, self._drafter = device, device.type == "cuda", drafter
        self._searched = self._search_ms()
        self._marks: list[Any] = []
        self._ended = 0.0
        self.pick_ms = 0.0
        self.mark()

    def mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(1e3 * time.perf_counter())

    def _readings(self) -> list[float]:
        """Milliseconds of each mark, from a common beginning."""
        if not self._is_cuda:
            return self._marks
        self._marks[-1].synchronize()
        return [self._marks[0].elapsed_time(mark) for mark in self._marks]

    def _search_ms(self) -> float:
        return float(getattr(self._drafter, "search_ms", 0.0))

    def times(self, num_rows: int, num_padded_rows: int, context: int, num_read: int) -> RoundTimes:
        """`other` is what neither drafter nor target took, up to now."""
        self.mark()
        began, asked, drafted, cut, verified, picked, now = self._readings()
        self.pick_ms = picked - verified
        self._ended = time.perf_counter()
        search = self._search_ms() - self._searched
        other = (asked - began) + (cut - drafted) + (now - verified)
        return RoundTimes(
            drafted - asked - search, search, verified - cut, other, num_rows, num_padded_rows, context, num_read
        )

    def since_times(self) -> float:
        """Milliseconds since `times`."""
        return 1e3 * (time.perf_counter() - self._ended)
