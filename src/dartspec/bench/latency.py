"""`bench latency`: what users wait when they come by themselves, and not when the server is ready for them.

Requests are sent at times drawn before (`arrivals`), in this process to a `Scheduler` or over HTTP to a server, and
every time counts from when the request was *due*: a queue is part of the wait. Plain decoding and the others get the
same requests at the same times, one after the other.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dartspec.bench.endpoint import Server, Timing, ask
from dartspec.bench.stats import Floats, quantiles_in_order
from dartspec.bench.suites import Prompt
from dartspec.engine import Chunk, Request
from dartspec.errors import DartspecError
from dartspec.scheduler import Limits, QueueFullError, Scheduler
from dartspec.types import SamplingParams

if TYPE_CHECKING:
    from dartspec.api import LM
    from dartspec.bench.run import Journal

Record = dict[str, Any]
WAITS = {"first_ms": "first token", "per_token_ms": "a token", "end_ms": "whole answer"}
PERCENTILES = (50, 90, 99)
WARM_TOKENS = 4


class Service(Protocol):
    """Something that answers requests. name: what rows call it."""

    name: str

    def start(self, most: int) -> None:
        """Gets ready for `most` requests at once at most."""
        ...

    def submit(self, number: int, prompt: Prompt, due: float) -> Future[Record]:
        """Sends a request and returns at once; its record's times count from `due` (`time.perf_counter()`)."""
        ...

    def stop(self) -> None: ...


@dataclass
class InProcess:
    """A method on a loaded target, behind a scheduler of its own. Prompts are not reused: where a prompt comes twice,
    the second would else be read for nothing. ids: the prompts that it may be asked, encoded, by id."""

    name: str
    lm: LM
    params: SamplingParams
    ids: Mapping[str, Sequence[int]]
    num_slots: int = 16

    def start(self, most: int) -> None:
        room = min(self.lm.target.max_positions, max(map(len, self.ids.values())) + self.params.max_tokens + 1)
        limits = Limits(self.num_slots, room, num_waiting=max(most, 1), num_prefixes=0, least_reuse=room)
        self._scheduler = Scheduler(
            self.lm.target, self.lm.drafter, text=self.lm.text, num_nodes=self.lm.controller, limits=limits
        ).start()

    def stop(self) -> None:
        self._scheduler.close()

    def submit(self, number: int, prompt: Prompt, due: float) -> Future[Record]:
        done: Future[Record] = Future()
        pieces: list[float] = []
        ids: list[int] = []

        def listen(chunk: Chunk) -> None:
            if chunk.ids:
                pieces.append(1e3 * (time.perf_counter() - due))
                ids.extend(chunk.ids)
            if chunk.finish in ("stop", "length"):
                digest = hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
                timing = Timing(tuple(pieces), len(ids), pieces[-1])
                done.set_result({**timing.record(), "finish": chunk.finish, "digest": digest})
            elif chunk.finish:
                done.set_exception(DartspecError(f"prompt {prompt.id} ended as {chunk.finish}: {handle.error}"))

        # a prompt that comes twice is answered by two samples
        request = Request(self.ids[prompt.id], self.params, number)
        handle = self._scheduler.submit(request)
        handle.listen(listen)
        return done


@dataclass
class Remote:
    """A server that speaks OpenAI's API. settings: sent with every request."""

    server: Server
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.name = self.server.url
        self._model = self.server.model_name()

    def start(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(max(most, 1))

    def stop(self) -> None:
        self._pool.shutdown()

    def submit(self, number: int, prompt: Prompt, due: float) -> Future[Record]:
        def one() -> Record:
            record = ask(self.server, self._model, prompt, self.settings, due)
            digest = hashlib.sha256(record.pop("text").encode()).hexdigest()[:16]
            return {k: v for k, v in record.items() if k not in ("id", "suite", "server")} | {"digest": digest}

        return self._pool.submit(one)


def play(service: Service, times: Sequence[float], prompts: Sequence[Prompt]) -> list[Record]:
    """Sends request i (prompt i, modulo their number) at `times[i]`, in seconds from now; a record each, in that order.

    `late_ms` is how much later than due a request was sent: our own fault, and part of its wait. A request that was
    refused or broken off has `refused`, the reason, and no times.
    """
    service.start(len(times))
    try:
        sent: list[tuple[float, Future[Record]]] = []
        began = time.perf_counter()
        for number, at in enumerate(times):
            due = began + at
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            late = 1e3 * (time.perf_counter() - due)
            sent.append((late, _submitted(service, number, prompts[number % len(prompts)], due)))
        records = []
        for number, (late, future) in enumerate(sent):
            prompt = prompts[number % len(prompts)]
            where = {"id": prompt.id, "suite": prompt.suite, "at_s": round(times[number], 4), "late_ms": round(late, 3)}
            try:
                records.append(where | future.result())
            except DartspecError as error:
                records.append(where | {"refused": str(error)})
        return records
    finally:
        service.stop()


def _submitted(service: Service, number: int, prompt: Prompt, due: float) -> Future[Record]:
    try:
        return service.submit(number, prompt, due)
    except QueueFullError as error:
        refused: Future[Record] = Future()
        refused.set_exception(error)
        return refused


def measure(
    services: Sequence[Service],
    prompts: Sequence[Prompt],
    schedule: Sequence[tuple[int, float, Sequence[float]]],
    *,
    journal: Journal | None = None,
    advance: Callable[[str], None] = lambda _what: None,
) -> list[Record]:
    """Every service in turn at each (repeat, rate, times) of the schedule, after a warm-up; all records.

    Raises DartspecError where a service answers nothing at all.
    """
    records: list[Record] = []
    warm = False
    for repeat, rate, times in schedule:
        for service in services:
            what = f"{service.name}, {rate:g} a second"
            key = f"{repeat} {rate:g} {service.name}"
            if journal is not None and key in journal.done:
                records += journal.done[key]
                advance(what)
                continue
            if not warm:
                for one in services:
                    play(one, [0.0, 0.0], prompts)
                warm = True
            where = {"service": service.name, "repeat": repeat, "rate": rate}
            made = [where | {"number": n} | r for n, r in enumerate(play(service, times, prompts))]
            if all("refused" in r for r in made):
                raise DartspecError(f"{service.name} answered none of {len(made)} requests: {made[0]['refused']}")
            if journal is not None:
                journal.append(key, made)
            records += made
            advance(what)
    return records


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each rate and service; the first service is what the others are compared with.

    Percentiles have intervals by the bootstrap over blocks of neighbours. `against_first` are ratios of percentiles
    over the requests that both answered, above 1 where this one is faster. `in_progress`: requests waiting or being
    answered, on average from the first request to the last answer.
    """
    groups: dict[tuple[float, str], list[Record]] = defaultdict(list)
    for r in records:
        groups[r["rate"], r["service"]].append(r)
    found = []
    for (rate, name), own in groups.items():
        answered = [r for r in own if "refused" not in r]
        timed = [r for r in answered if r["per_token_ms"] is not None]
        spans: dict[int, float] = defaultdict(float)  # of each repeat, up to its last answer
        for r in answered:
            spans[r["repeat"]] = max(spans[r["repeat"]], r["at_s"] + r["end_ms"] / 1e3)
        span = sum(spans.values())
        row: dict[str, Any] = {
            "rate": rate,
            "service": name,
            "num_requests": len(own),
            "num_refused": len(own) - len(answered),
            "num_tokens": sum(r["num_tokens"] for r in answered),
            "tokens_per_s": round(sum(r["num_tokens"] for r in answered) / span, 2),
            "in_progress": round(sum(r["end_ms"] for r in answered) / 1e3 / span, 3),
            "most_late_ms": max(r["late_ms"] for r in own),
        }
        for wait in WAITS:
            row[wait] = {
                f"p{p}": quantile([[r[wait]] for r in (timed if wait == "per_token_ms" else answered)], p)
                for p in PERCENTILES
            }
        first = groups[rate, records[0]["service"]]
        if own is not first:
            row["against_first"] = against(first, own)
        found.append(row)
    return found


def quantile(columns: Sequence[Sequence[float]], percent: int) -> list[float] | None:
    """[value, low, high] of one column, or of the first over the second."""
    if not columns:
        return None

    def figure(s: Floats) -> Floats:
        return s[..., 0] / s[..., 1] if s.shape[-1] == 2 else s[..., 0]

    return quantiles_in_order(columns, percent / 100, figure).rounded()


def against(first: Sequence[Record], other: Sequence[Record]) -> dict[str, Any]:
    """Ratios of percentiles, first over other, and how many of the texts are the same."""
    by = {(r["repeat"], r["number"]): r for r in first if "refused" not in r}
    pairs = [(by[k], r) for r in other if "refused" not in r and (k := (r["repeat"], r["number"])) in by]
    found: dict[str, Any] = {
        "num_pairs": len(pairs),
        "num_equal": sum(a["digest"] == b["digest"] for a, b in pairs),
    }
    for wait in WAITS:
        both = [[a[wait], b[wait]] for a, b in pairs if a[wait] and b[wait]]
        found[wait] = {f"p{p}": quantile(both, p) for p in PERCENTILES}
    return found
