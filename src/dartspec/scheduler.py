"""Many requests at once: continuous batching over the engine's round. Sequences join and leave between rounds.

Knows queues, slots, memory and threads; the round itself is `engine.Rounds`. Each answer is the one its request gets
alone, whatever its neighbours do: they share forwards, never numbers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dartspec.budget import Fixed
from dartspec.engine import Chunk, Request, Rounds, Running
from dartspec.errors import DartspecError
from dartspec.target.target import PREFILL_CHUNK, Target
from dartspec.text import Text
from dartspec.types import Controller, Drafter, Forks

_log = logging.getLogger(__name__)


class QueueFullError(DartspecError):
    """No room for another request now; it may be sent again later."""


@dataclass(frozen=True)
class Limits:
    """What a scheduler may use. Checked when made.

    num_slots:    sequences decoded at once, at most.
    max_length:   tokens of one sequence, prompt and answer; None: the model's context.
    memory_bytes: of the target's keys and values. It is never exceeded: where it is short there are fewer slots.
    num_waiting:  requests that may wait for a slot; one more is refused with `QueueFullError`.
    prefill_rows: prompt positions that are read between two rounds while others are decoded; see docs/serving-many.md.
    num_prefixes: finished texts that are kept, last used first, for requests that begin alike.
    least_reuse:  shared tokens that are worth a copy.
    """

    num_slots: int = 16
    max_length: int | None = None
    memory_bytes: int = 2 << 30
    num_waiting: int = 128
    prefill_rows: int = 64
    num_prefixes: int = 4
    least_reuse: int = 16

    def __post_init__(self) -> None:
        for name, least in (
            ("num_slots", 1),
            ("max_length", 2),
            ("memory_bytes", 1),
            ("num_waiting", 1),
            ("prefill_rows", 1),
            ("num_prefixes", 0),
            ("least_reuse", 1),
        ):
            value = getattr(self, name)
            if name == "max_length" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise DartspecError(f"{name} is {value!r}; it must be a whole number of {least} or more")


@dataclass
class Counts:
    """What has happened since the scheduler was made."""

    num_submitted: int = 0
    num_refused: int = 0  # the queue was full
    num_finished: int = 0  # stop or length
    num_cancelled: int = 0
    num_failed: int = 0
    num_rounds: int = 0
    num_prompt_tokens: int = 0  # of prompts that got a slot
    num_reused_tokens: int = 0  # of these, copied and not computed
    num_new_tokens: int = 0


class Handle:
    """One request as its caller sees it; usable from any thread.

    Iterate over it for chunks, with `for` or `async for`. The last one has `finish` set: "stop", "length", "cancelled",
    or "error", and then `error` is why.
    """

    def __init__(self, scheduler: Scheduler, running: Running) -> None:
        self.index = running.index
        self.error: Exception | None = None
        self.num_reused = 0  # prompt tokens that were copied from another text
        self.admitted: float | None = None  # when it got its slot, by time.perf_counter
        self._scheduler, self._running = scheduler, running
        self._cancelled = False
        self._chunks: list[Chunk] = []
        self._listeners: list[Callable[[Chunk], None]] = []
        self._news = threading.Condition()

    @property
    def finish(self) -> str | None:
        """Why it ended, or None while it goes on."""
        return self._chunks[-1].finish if self._chunks else None

    def cancel(self) -> None:
        """Ends the request. It leaves the queue at once, or its slot before the next round; what was written stays."""
        self._scheduler._cancel(self)

    def listen(self, on_chunk: Callable[[Chunk], None]) -> None:
        """Calls `on_chunk` with every chunk, past ones first, later ones from the thread that drives the scheduler: it
        must return soon. An exception in it cancels the request."""
        with self._news:
            for chunk in self._chunks:
                on_chunk(chunk)
            self._listeners.append(on_chunk)

    def __iter__(self) -> Iterator[Chunk]:
        """Waits for chunks. Where nobody runs the scheduler in the background, this drives it."""
        at = 0
        while True:
            while at == len(self._chunks):
                if not self._scheduler.is_running:
                    self._scheduler.step()
                    continue
                with self._news:
                    if at == len(self._chunks):
                        self._news.wait(timeout=0.5)  # the thread may have ended meanwhile
            yield self._chunks[at]
            if self._chunks[at].finish:
                return
            at += 1

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The same in an event loop, which it does not block; the scheduler must run in the background."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Chunk]()

        def pass_on(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, chunk)

        self.listen(pass_on)
        while True:
            chunk = await queue.get()
            yield chunk
            if chunk.finish:
                return

    def _deliver(self, chunk: Chunk) -> None:
        with self._news:
            self._chunks.append(chunk)
            self._news.notify_all()
            for on_chunk in self._listeners:
                try:
                    on_chunk(chunk)
                except Exception as error:  # an event loop that is closed, above all
                    self._cancelled = True
                    _log.warning("a listener failed (%s: %s); its request is cancelled", type(error).__name__, error)


class Scheduler:
    """Decodes requests as they come. Drive it with `step()`, or `start()` a thread that does; `with` does that too.

    num_nodes: draft tokens a tree may have, or a controller. One drafter serves all; where it fails on a sequence, that
    one goes on without drafts. An error in a request ends that request alone.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        text: Text | None = None,
        num_nodes: int | Controller = 16,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits = limits or Limits()
        controller = Fixed(num_nodes) if isinstance(num_nodes, int) else num_nodes
        self.target, self._text = target, text
        self.max_length = min(target.max_positions, limits.max_length or target.max_positions)
        capacity = self.max_length + controller.most_nodes + 1  # a tree lies behind the text
        self._row_bytes = capacity * target.bytes_per_position
        num_rows = limits.memory_bytes // self._row_bytes
        if num_rows < 1:
            raise DartspecError(
                f"keys and values of one sequence of {self.max_length} tokens take {_mib(self._row_bytes)}, "
                f"memory_bytes allows {_mib(limits.memory_bytes)}: raise it, or lower max_length"
            )
        self.num_slots = min(limits.num_slots, num_rows)
        self.num_prefixes = min(limits.num_prefixes, num_rows - self.num_slots)
        session = target.session(self.num_slots, capacity, drafter.taps, self.num_prefixes)
        self._rounds = Rounds(target, drafter, controller, session, strict=False)
        self.counts = Counts()
        self._numbers = itertools.count()  # of slots; none comes twice
        self._waiting: deque[Handle] = deque()
        self._reading: Handle | None = None  # the one whose prompt is being read
        self._decoding: list[Handle] = []
        self._prefixes = _Prefixes(self._rounds, self.num_prefixes, limits.least_reuse, self._numbers)
        self._wake = threading.Condition()  # guards the queue and what follows
        self._closed: str | None = None  # why nothing is accepted any more
        self._thread: threading.Thread | None = None
        self._turn = threading.RLock()  # one step at a time

    @property
    def cache_bytes(self) -> int:
        """Size of all keys and values, slots and kept texts: the whole that this scheduler will ever use."""
        return (self.num_slots + self.num_prefixes) * self._row_bytes

    @property
    def num_downgraded(self) -> int:
        """Sequences that went on without drafts because the drafter failed on them."""
        return self._rounds.num_downgraded

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._decoding) + (self._reading is not None)

    @property
    def is_running(self) -> bool:
        """Whether a background thread drives it."""
        return self._thread is not None and self._thread.is_alive()

    def __str__(self) -> str:
        return (
            f"{self.num_slots} sequences of up to {self.max_length} tokens and {self.num_prefixes} kept texts: "
            f"{_mib(self.cache_bytes)} of keys and values (of {_mib(self.limits.memory_bytes)})"
        )

    # -- what any thread may call --------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """Takes a request. Raises DartspecError where it can never be served, `QueueFullError` where it must wait."""
        number = next(self._numbers)
        running = Running(number, request, self.target, self._text, room=self.max_length)
        handle = Handle(self, running)
        with self._wake:
            if self._closed:
                raise DartspecError(f"the scheduler takes no more requests: {self._closed}")
            if len(self._waiting) >= self.limits.num_waiting:
                self.counts.num_refused += 1
                raise QueueFullError(
                    f"{len(self._waiting)} requests are waiting, the most that may: send this one again later"
                )
            self.counts.num_submitted += 1
            self._waiting.append(handle)
            self._wake.notify_all()
        return handle

    def start(self) -> Scheduler:
        """Drives the scheduler in a thread of its own until `close`."""
        with self._wake:
            if self._closed or self.is_running:
                raise DartspecError(f"the scheduler cannot start: {self._closed or 'it is running'}")
            self._thread = threading.Thread(target=self._run, name="dartspec-scheduler", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Ends every request as cancelled and takes no more."""
        with self._wake:
            self._closed = self._closed or "it was closed"
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._turn:
            self._drop_all("cancelled", None)

    def fail(self, error: Exception) -> None:
        """Ends every request with this error and takes no more: for who drives it, when a step raised."""
        with self._wake:
            self._closed = f"it failed ({type(error).__name__}: {error})"
        with self._turn:
            self._drop_all("error", error)

    def __enter__(self) -> Scheduler:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cancel(self, handle: Handle) -> None:
        with self._wake:
            handle._cancelled = True
            if handle not in self._waiting:
                return  # it leaves its slot before the next round
            self._waiting.remove(handle)
        self._ended(handle, "cancelled", None)

    # -- what the driving thread does ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Drops what was cancelled, reads some prompt, decodes one round. Returns whether there is more to do."""
        with self._turn:
            for handle in [h for h in (*self._decoding, self._reading) if h is not None and h._cancelled]:
                self._leave(handle)
                self._ended(handle, "cancelled", None)
            self._read_prompts()
            self._decode()
            return bool(self._waiting or self._decoding or self._reading)

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._waiting or self._decoding or self._reading)
                    if self._closed:
                        return
                self.step()
        except Exception as error:  # ours, or the machine's: nobody may be left waiting
            _log.exception("the scheduler failed")
            self.fail(error)

    def _read_prompts(self) -> None:
        """Some rows of prompts, so that a long one does not hold up the others; all in order of arrival."""
        left = self.limits.prefill_rows if self._decoding else PREFILL_CHUNK
        while left > 0 and (self._reading or self._admit()):
            handle = self._reading
            assert handle is not None
            running = handle._running
            before = running.num_run
            try:
                chunk = running.prefill(self._rounds.session, left)
            except Exception as error:
                self._fail(handle, error)
                continue
            left -= running.num_run - before
            if chunk is not None:
                self._reading = None
                self._decoding.append(handle)
                self._deliver(handle, chunk)

    def _admit(self) -> bool:
        """Gives the oldest waiting request a slot, and what it shares with a text that is there already."""
        with self._wake:
            if not self._waiting or self.num_running == self.num_slots:
                return False
            self._reading = handle = self._waiting.popleft()
        running = handle._running
        handle.admitted = time.perf_counter()
        try:
            self._rounds.join(running)
        except Exception as error:
            self._reading = None
            self._ended(handle, "error", error)
            return self._admit()
        handle.num_reused = self._prefixes.reuse(running, [h._running for h in self._decoding])
        self.counts.num_prompt_tokens += running.num_prompt
        self.counts.num_reused_tokens += handle.num_reused
        return True

    def _decode(self) -> None:
        """One round of all whose prompts are read."""
        if not self._decoding:
            return
        handles = list(self._decoding)
        try:
            chunks = self._rounds.step([h._running for h in handles])
        except Exception as error:  # the forward itself: nobody can tell whose fault it was
            _log.warning("a round of %d sequences failed: %s: %s", len(handles), type(error).__name__, error)
            for handle in handles:
                self._fail(handle, error)
            return
        self.counts.num_rounds += 1
        for handle, chunk in zip(handles, chunks, strict=True):
            self._deliver(handle, chunk)

    def _deliver(self, handle: Handle, chunk: Chunk) -> None:
        self.counts.num_new_tokens += len(chunk.ids)
        if chunk.finish is None:
            handle._deliver(chunk)
            return
        if chunk.finish != "error":
            self._prefixes.store(handle._running)
        self._leave(handle)
        self._ended(handle, chunk.finish, handle._running.error, chunk)

    def _fail(self, handle: Handle, error: Exception) -> None:
        self._leave(handle)
        self._ended(handle, "error", error)

    def _leave(self, handle: Handle) -> None:
        """Frees its slot."""
        if handle is self._reading:
            self._reading = None
        else:
            self._decoding.remove(handle)
        self._rounds.leave(handle._running, last_stays=self._reading is not None)

    def _ended(self, handle: Handle, finish: str, error: Exception | None, last: Chunk | None = None) -> None:
        """Tells the caller, with the last chunk where there is one."""
        name = {"cancelled": "num_cancelled", "error": "num_failed"}.get(finish, "num_finished")
        with self._wake:
            setattr(self.counts, name, getattr(self.counts, name) + 1)
        handle.error = error
        handle._deliver(last or handle._running.ended(finish))

    def _drop_all(self, finish: str, error: Exception | None) -> None:
        running = [h for h in (*self._decoding, self._reading) if h is not None]
        with self._wake:
            waiting = list(self._waiting)
            self._waiting.clear()
        for handle in running:
            self._leave(handle)
        for handle in (*running, *waiting):
            self._ended(handle, finish, error)
        self._prefixes.clear()
        self._rounds.session.close()


@dataclass(frozen=True)
class _Stored:
    """A finished text that is kept: its ids, the positions held, the rows that the drafter's copy has read."""

    ids: NDArray[np.int64]
    num_held: int
    num_read: int


class _Prefixes:
    """What a new prompt shares with the texts in progress, and with finished ones that are kept, last used first.

    Keys and values of the shared positions are copied, and the drafter's state with them where it can `fork`. The
    drafter's row at position p holds the token at p + 1 as well, so the row of the last shared token belongs to that
    text alone: it is computed anew, and so is its position (one row; plain decoding could have saved it).
    """

    def __init__(self, rounds: Rounds, num_rows: int, least: int, numbers: Iterator[int]) -> None:
        self._rounds, self._num_rows, self._least, self._numbers = rounds, num_rows, least, numbers
        self._stored: dict[int, _Stored] = {}  # by the number it is parked under; the last one was used last
        self._forks = isinstance(rounds.drafter, Forks)

    def reuse(self, running: Running, others: Sequence[Running]) -> int:
        """Lets a sequence that has just joined begin with what the best other text shares. Returns how many tokens."""
        drafter, session = self._rounds.drafter, self._rounds.session
        if running.speculates and drafter.taps and not self._forks:
            return 0  # the features of shared positions are gone, and so is what it makes of them
        carries = running.speculates and self._forks
        ids = np.asarray(running.ids, dtype=np.int64)
        best: tuple[int, int, Running | None] = (0, -1, None)
        for other in others:
            if other.speculates or not carries:
                held = session.length(other.slot) - 1  # the drafter can be told of all rows but the last
                best = max(best, (min(_shared(ids, other.tokens) - 1, held), other.slot, other), key=lambda b: b[0])
        for number, text in self._stored.items():
            most = text.num_read if carries else text.num_held
            best = max(best, (min(_shared(ids, text.ids) - 1, most), number, None), key=lambda b: b[0])
        length, source, live = best
        if length < self._least:
            return 0
        if source in self._stored:
            self._stored[source] = self._stored.pop(source)
        if carries:
            if live is not None:
                self._rounds.catch_up(live)
            if not self._fork(source, running.slot, length):
                return 0
        session.copy(source, running.slot, length)
        running.begin_at(length, was_read=carries)
        return length

    def store(self, running: Running) -> None:
        """Keeps a text that has just finished, in place of those that it contains or of the one used longest ago."""
        ids = running.tokens.copy()
        num_held = min(len(ids) - 1, self._rounds.session.length(running.slot))
        if not self._num_rows or num_held < self._least:
            return
        for number, text in list(self._stored.items()):
            shared = _shared(ids, text.ids)
            if shared == len(text.ids) and (text.num_read == 0 or running.speculates):
                self._drop(number)
            elif shared == len(ids) and (text.num_read or not running.speculates):
                self._stored[number] = self._stored.pop(number)
                return
        while len(self._stored) >= self._num_rows:
            self._drop(next(iter(self._stored)))
        number = next(self._numbers)
        num_read = 0
        if self._forks and running.speculates:
            self._rounds.catch_up(running)
            num_read = num_held if self._fork(running.slot, number, num_held) else 0
        self._rounds.session.park(running.slot, number)
        self._stored[number] = _Stored(ids, num_held, num_read)

    def clear(self) -> None:
        for number in list(self._stored):
            self._drop(number)

    def _drop(self, number: int) -> None:
        del self._stored[number]
        self._rounds.session.unpark(number)
        self._rounds.forget(number)

    def _fork(self, source: int, target: int, length: int) -> bool:
        drafter = self._rounds.drafter
        assert isinstance(drafter, Forks)
        try:
            drafter.fork(source, target, length)
        except Exception as error:
            _log.warning("a drafter could not fork (%s: %s); its text is read anew", type(error).__name__, error)
            self._rounds.forget(target)
            return False
        return True


def _shared(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Tokens that both begin with."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    at = int(different.argmax()) if n else 0
    return at if n and different[at] else n


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
