"""The server without HTTP: one model, its lanes, requests as jobs, and what is counted. Lives in an event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dartspec import _core, drafters
from dartspec.engine import Chunk, Request
from dartspec.errors import DartspecError
from dartspec.scheduler import Handle, Limits, QueueFullError, Scheduler
from dartspec.serve.answers import Choice
from dartspec.serve.errors import ApiError, away, bad, busy, failed, timed_out
from dartspec.serve.lanes import Lanes
from dartspec.serve.metrics import Board
from dartspec.types import RoundRecord, SamplingParams

if TYPE_CHECKING:
    from dartspec.api import LM

PLAIN = "plain"  # what users call the drafter `none`
PLAIN_TOKENS, PLAIN_S = 32, 3.0  # of the measurement at start
READERS = 4  # prompts that are made into tokens at once
SIDE_SLOTS = 2  # of a lane that was asked for by name
HIDDEN = frozenset(
    {"none", "oracle", "mix", "small_model"}
)  # not offered by name: need an argument, or have another name

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What the server may do. Checked when made.

    limits:       of the lane of the server's own drafter; other lanes get SIDE_SLOTS.
    name:         the model's name to clients; None: its own.
    api_key:      asked of every request to /v1 and /dartspec; None: of none.
    timeout_s:    seconds that an answer may take, waiting included.
    grace_s:      seconds that answers in progress get when the server is told to stop.
    body_bytes:   of a request, at most.
    hosts:        names by which this server may be called; empty: any.
    origins:      web pages of other origins that may call it (CORS); empty: none.
    log_prompts:  whether logs may hold prompts and answers.
    most_lanes:   drafters at work at once.
    """

    limits: Limits = field(default_factory=Limits)
    name: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0
    grace_s: float = 30.0
    body_bytes: int = 1 << 20
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    log_prompts: bool = False
    most_lanes: int = 4

    def __post_init__(self) -> None:
        for name, least in (("timeout_s", 0.001), ("grace_s", 0.0), ("body_bytes", 1), ("most_lanes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < float("inf"):
                raise DartspecError(f"{name} is {value!r}; it must be a number of {least:g} or more")
        if self.api_key is not None and not self.api_key.strip():
            raise DartspecError("the API key is empty: give one, or leave it out")


class News(NamedTuple):
    """A chunk of one of a job's answers. record, number: its round, where it was one; chances: of its tree's nodes."""

    choice: Choice
    chunk: Chunk
    record: RoundRecord | None
    number: int
    chances: list[float] | None


class Job:
    """The sequences of one HTTP request: their chunks as they come, and their end, whatever it is."""

    def __init__(self, service: Service, drafter: str, params: SamplingParams, rounds: bool, arrived: float) -> None:
        self.drafter, self.params = drafter, params
        self.choices: list[Choice] = []
        self.num_prompt = 0
        self.first_s: float | None = None
        self.queue_s: float | None = None
        self.why: str | None = None  # it was cut short: gone, timeout, shutdown
        self._service, self._rounds, self._arrived = service, rounds, arrived
        self.deadline = arrived + service.settings.timeout_s
        self._handles: list[Handle] = []
        self._queue: asyncio.Queue[tuple[int, Chunk, RoundRecord | None, int, list[float] | None]] = asyncio.Queue()
        self._last: list[float] = []

    def listen(self, handles: Sequence[Handle], chances: Callable[[Any], list[float]] | None) -> None:
        loop = asyncio.get_running_loop()
        self._handles = list(handles)
        self.choices = [Choice(i) for i in range(len(handles))]
        self._last = [0.0] * len(handles)
        for i, handle in enumerate(handles):

            def pass_on(chunk: Chunk, i: int = i) -> None:
                # now, in the scheduler's thread: by the time the loop reads it the next round may have come
                rounds = chunk.metrics.rounds
                record = rounds[-1] if chunk.tree is not None and rounds else None
                wanted = self._rounds and chances is not None and chunk.tree is not None
                probs = chances(chunk.tree) if wanted and chances else None
                loop.call_soon_threadsafe(self._queue.put_nowait, (i, chunk, record, len(rounds) - 1, probs))

            handle.listen(pass_on)

    def cancel(self, why: str) -> None:
        """Ends what has not ended; slots are free before the next round."""
        for handle, choice in zip(self._handles, self.choices, strict=True):
            if choice.finish is None:
                self.why = self.why or why
                handle.cancel()

    async def news(self) -> AsyncIterator[News]:
        """Every chunk of every answer until all have ended. Raises `ApiError` where one could not be finished."""
        left = len(self._handles)
        while left:
            try:
                async with asyncio.timeout(max(0.0, self.deadline - time.perf_counter())):
                    i, chunk, record, index, probs = await self._queue.get()
            except TimeoutError:
                self.cancel("timeout")
                raise timed_out(self._service.settings.timeout_s) from None
            choice = self.choices[i]
            self._count(choice, chunk, i)
            if chunk.finish == "cancelled":
                self.cancel("shutdown")
                raise away("the server is shutting down and could not finish this answer", "shutting_down")
            if chunk.finish == "error":
                self.cancel("error")
                raise self._fault(self._handles[i].error)
            yield News(choice, chunk, record, index, probs)
            left -= chunk.finish is not None

    def _fault(self, error: Exception | None) -> ApiError:
        if isinstance(error, DartspecError):
            return bad(str(error))
        _log.error("an answer failed", extra={"error": repr(error)})
        return failed(f"the answer failed on the server's side ({type(error).__name__}); the log says more")

    def _count(self, choice: Choice, chunk: Chunk, i: int) -> None:
        now, board = time.perf_counter(), self._service.board
        if chunk.ids:
            if choice.num_tokens == 0:
                self.first_s = self.first_s or now - self._arrived
                board.first.observe(now - self._arrived)
            else:
                gap = (now - self._last[i]) / len(chunk.ids)
                for _ in chunk.ids:
                    board.gap.observe(gap)
                    board.gap_old.observe(gap)
            self._last[i] = now
        choice.pieces.append(chunk.text)
        choice.num_tokens += len(chunk.ids)
        choice.metrics, choice.finish = chunk.metrics, chunk.finish
        choice.num_reused = self._handles[i].num_reused
        board.new_tokens.add(len(chunk.ids))

    def close(self) -> None:
        """It is over, finished or not: whatever goes on is cancelled, and all of it is counted. Called once."""
        self.cancel("gone")
        board, now = self._service.board, time.perf_counter()
        if self.why in ("gone", "timeout", "shutdown"):
            board.cancelled.add(reason=self.why)
        for choice, handle in zip(self.choices, self._handles, strict=True):
            reason = choice.finish or "abort"
            board.success.add(finished_reason={"cancelled": "abort"}.get(reason, reason))
            board.speculation(self.drafter, choice.metrics)
            board.answer_size.observe(choice.num_tokens)
            if handle.admitted is not None:
                board.queued.observe(handle.admitted - self._arrived)
                self.queue_s = max(self.queue_s or 0.0, handle.admitted - self._arrived)
                board.prefix_queries.add(self.num_prompt)
                board.prefix_hits.add(choice.num_reused)
                if self.first_s is not None:
                    board.prefill.observe(max(0.0, self._arrived + self.first_s - handle.admitted))
                    board.inference.observe(now - handle.admitted)
                    board.decode.observe(now - self._arrived - self.first_s)
                    if choice.num_tokens > 1:
                        board.mean_gap.observe((now - self._arrived - self.first_s) / (choice.num_tokens - 1))
        board.longest.observe(max(c.num_tokens for c in self.choices))
        board.whole.observe(now - self._arrived)
        self._service.jobs.discard(self)
        self._service.watch_index()


class Service:
    """One model for any number of clients. `begin` gives it the model; before that it says how far the start is."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.board = Board()
        self.jobs: set[Job] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # that nobody waits for
        self.state, self.stage = "starting", "starting"
        self.started = int(time.time())
        self.plain_tokens_per_s: float | None = None
        self._index_lost, self._index_warned = _core.num_lost_pages(), False
        self.max_length = 0  # tokens that a text may have, prompt and answer
        self._lm: LM | None = None
        self._lanes: Lanes | None = None
        self._controllers: dict[str, Any] = {}
        # several, so that a prompt of a million characters, which takes seconds, does not hold up the others
        self._reader = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="dartspec-read")
        self._maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dartspec-make")

    # -- start and end -----------------------------------------------------------------------------------------------

    def begin(self, lm: LM, again: Callable[[], LM] | None = None) -> None:
        """Takes the model: makes the lane of its drafter and measures plain decoding. From any thread.

        again: the same target with its drafter and index read anew.
        """
        self._lm, self._again = lm, again
        self.stage = "making room for texts"
        lm.text.encode_prompt("a")  # a truncation that the tokenizer came with is taken off now, by one thread
        self._lanes = Lanes(self._make, self.settings.most_lanes, keep=self.default)
        self.max_length = self._lanes.scheduler(self.default).max_length
        self.stage = "measuring plain decoding"
        self.plain_tokens_per_s = measure_plain(lm)
        self._lanes.start()
        self.state = self.stage = "ready"

    def stop_taking(self) -> None:
        """New requests are refused from here on; those in progress go on."""
        self.state = "stopping"

    def cut(self) -> None:
        """Ends all requests in progress, each with a reason."""
        for job in list(self.jobs):
            job.cancel("shutdown")

    def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._maker.shutdown(wait=False, cancel_futures=True)

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def lm(self) -> LM:
        """The model. Raises `ApiError` while it cannot be used."""
        if self.state == "starting" or self._lm is None:
            raise away(f"the server is starting: {self.stage}", "starting", retry_after=5)
        if self.state == "stopping":
            raise away("the server is shutting down", "shutting_down")
        return self._lm

    @property
    def lanes(self) -> Lanes:
        assert self._lanes is not None
        return self._lanes

    @property
    def is_healthy(self) -> bool:
        """Whether it works, or may yet: its thread has not died."""
        return self.state == "starting" or (self._lanes is not None and self._lanes.is_alive)

    @property
    def model_name(self) -> str:
        return self.settings.name or (self._lm.target.name if self._lm else "")

    @property
    def default(self) -> str:
        """The drafter of requests that name none."""
        assert self._lm is not None
        # of a trained drafter's folder only the last part is anybody's business
        name = "+".join(Path(part).name for part in self._lm.drafter_name.split("+"))
        return PLAIN if name == "none" else name

    @property
    def drafters(self) -> list[str]:
        """Names that a request may ask for: plain decoding, the server's own and its parts, and methods that need no
        training."""
        parts = [p for p in self.default.split("+") if p in drafters.names()]
        return list(dict.fromkeys([PLAIN, self.default, *parts, *_offered()]))

    def info(self) -> dict[str, Any]:
        from dartspec import __version__

        lm = self.lm
        return {
            "model": self.model_name,
            "drafters": self.drafters,
            "default_drafter": self.default,
            "max_nodes": self._controllers[self.default].most_nodes,
            "context_length": self.max_length,
            "dtype": str(lm.target.dtype).removeprefix("torch."),
            "device": str(lm.target.device),
            "threads": lm.target.num_threads,
            "version": __version__,
            "plain_tokens_per_s": self.plain_tokens_per_s,
        }

    def look(self) -> None:
        """Brings the gauges up to date."""
        if self._lanes is None:
            return
        lanes, board = self._lanes.all, self.board
        running, slots = sum(s.num_running for s in lanes), sum(s.num_slots for s in lanes)
        board.running.set(running)
        board.waiting.set(sum(s.num_waiting for s in lanes))
        board.cache.set(running / slots if slots else 0.0)
        board.cache_old.set(running / slots if slots else 0.0)
        board.lanes.set(len(lanes))
        board.downgraded.set(self._lanes.num_downgraded)
        board.plain.set(self.plain_tokens_per_s or 0.0)

    def watch_index(self) -> None:
        """Says, once until the next reload, where an index was cut off while it was open."""
        lost = _core.num_lost_pages()
        self.board.lost.set(lost)
        if lost > self._index_lost and not self._index_warned:
            self._index_warned = True
            _log.warning(
                "an index file was cut off while it was open: drafts are worse, the text is the same; replace files by "
                "renaming, and reload"
            )

    # -- requests ----------------------------------------------------------------------------------------------------

    async def read(self, work: Callable[[], list[int]]) -> list[int]:
        """Token ids, made where they hold nobody up."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        n: int,
        drafter: str,
        rounds: bool,
        arrived: float,
    ) -> Job:
        """n answers to each prompt, prompt by prompt; all or none. Raises `ApiError`."""
        requests = [Request(prompt, params, sample) for prompt in prompts for sample in range(n)]
        self.check_count(len(requests))
        name, lanes = drafter, self.lanes
        try:
            if name not in lanes.schedulers:
                await asyncio.get_running_loop().run_in_executor(self._maker, lanes.scheduler, name)
            _ = self.lm  # it may have been told to stop meanwhile
            handles = lanes.submit(name, requests)
        except QueueFullError as error:
            raise busy(str(error), self._retry_after()) from None
        except ApiError:
            raise
        except DartspecError as error:
            raise bad(str(error), code=_code(str(error))) from None
        job = Job(self, name, params, rounds, arrived)
        job.num_prompt = sum(map(len, prompts))
        controller = self._controllers.get(name)
        job.listen(handles, getattr(controller, "chances", None))
        self.jobs.add(job)
        board = self.board
        board.prompt_tokens.add(job.num_prompt)
        board.prompt_size.observe(job.num_prompt)
        board.asked_size.observe(params.max_tokens)
        board.asked_n.observe(n)
        return job

    def check_count(self, num_answers: int) -> None:
        """Refuses more answers at once than could ever wait."""
        if num_answers > (most := self.settings.limits.num_waiting):
            raise bad(f"{num_answers} answers were asked for at once; {most} may be: ask for fewer", "n")

    def drafter(self, wanted: str | None) -> str:
        """The drafter meant. Raises `ApiError` where it is not offered."""
        name = self.default if wanted in (None, "auto") else "plain" if wanted == "none" else wanted
        assert name is not None
        if name not in self.drafters:
            raise bad(
                f"drafter {name[:60]!r} is not offered; there are: {', '.join(self.drafters)}", "dartspec.drafter"
            )
        return name

    def _retry_after(self) -> int:
        """Seconds until a place in the queue is likely free, roughly: a mean answer's time by the slots."""
        cells = self.board.whole.values.get((), [0.0, 0.0])
        mean = cells[-2] / cells[-1] if cells[-1] else 1.0
        return max(1, min(60, round(mean / max(1, self.settings.limits.num_slots))))

    # -- drafters ----------------------------------------------------------------------------------------------------

    async def reload(self) -> dict[str, Any]:
        """Reads the drafter and its index anew. Answers in progress end with the old ones; the text is the same
        either way. Raises `ApiError` where that fails, and then the old ones stay."""
        _ = self.lm
        try:
            await asyncio.get_running_loop().run_in_executor(self._maker, self._reload)
        except Exception as error:
            self.board.reloads.add(result="failed")
            if isinstance(error, DartspecError):
                raise bad(f"nothing was reloaded: {error}", code="reload_failed") from error
            raise
        self.board.reloads.add(result="done")
        self._index_lost, self._index_warned = _core.num_lost_pages(), False
        _log.info("reloaded", extra={"drafter": self.default})
        return {"reloaded": self.default}

    def _reload(self) -> None:
        if self._again is None:
            raise DartspecError("this server was started without a way to load its drafter again")
        old = self._lm
        self._lm = self._again()
        try:
            self.lanes.replace(self.default)
        except BaseException:
            self._lm = old
            raise
        self.lanes.drop([name for name in self.lanes.schedulers if name != self.default])

    def _make(self, name: str) -> Scheduler:
        """A lane: the server's own drafter with all slots, or another with a few."""
        assert self._lm is not None
        lm, limits = self._lm, self.settings.limits
        if name != self.default:
            lm = lm.with_drafter("none" if name == PLAIN else name)
            limits = replace(
                limits, num_slots=min(SIDE_SLOTS, limits.num_slots), num_prefixes=min(1, limits.num_prefixes)
            )
        controller = lm.controller
        made = Scheduler(lm.target, lm.drafter, text=lm.text, num_nodes=controller, limits=limits)
        self._controllers[name] = controller
        return made


def measure_plain(lm: LM) -> float:
    """Tokens a second of plain decoding alone; a few seconds at most."""
    plain, began = lm.with_drafter("none", index=None), time.perf_counter()
    stream = plain.stream("Once upon a time", max_tokens=PLAIN_TOKENS, ignore_eos=True)
    metrics = None
    for chunk in stream:
        metrics = chunk.metrics
        if time.perf_counter() - began > PLAIN_S:
            stream.close()
            break
    assert metrics is not None
    # the first rounds warm up
    warm = metrics.rounds[2:] or metrics.rounds
    took = sum(r.round_ms for r in warm)
    return round(1e3 * sum(r.num_committed for r in warm) / took, 3) if took else 0.0


def _offered() -> list[str]:
    """Methods that can be made without training."""
    found = []
    for name in drafters.names():
        if name in HIDDEN:
            continue
        try:
            drafters.get(name).Config()
        except (TypeError, DartspecError):
            continue
        found.append(name)
    return found


def _code(message: str) -> str | None:
    return "context_length_exceeded" if "shorten the prompt" in message else None
