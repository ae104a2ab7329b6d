"""Lanes: schedulers on one target, one for each drafter that is asked for, which take turns round by round.

Knows schedulers and one thread; nothing of HTTP. A lane whose drafter is replaced finishes what it has begun, beside
the new one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from dartspec.engine import Request
from dartspec.errors import DartspecError
from dartspec.scheduler import Handle, QueueFullError, Scheduler

_log = logging.getLogger(__name__)


class Lanes:
    """Requests in, handles out; one thread drives all schedulers fairly: a step of each in turn.

    make: a scheduler for a drafter's name. most: lanes at once; one that is idle makes room for another, but `keep`'s.
    """

    def __init__(self, make: Callable[[str], Scheduler], most: int, keep: str | None = None) -> None:
        self._make, self._most, self._keep = make, most, keep
        self._lanes: dict[str, Scheduler] = {}  # the one used last stands last
        self._leaving: list[Scheduler] = []  # replaced, with requests still in progress
        self._downgraded = 0  # by lanes that are gone
        self._wake = threading.Condition()  # guards all of it
        self._making = threading.Lock()  # one at a time
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dartspec-lanes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def schedulers(self) -> dict[str, Scheduler]:
        """Those that take requests, by drafter."""
        with self._wake:
            return dict(self._lanes)

    @property
    def all(self) -> list[Scheduler]:
        """Those that take requests, and those that only finish theirs."""
        with self._wake:
            return [*self._lanes.values(), *self._leaving]

    @property
    def num_downgraded(self) -> int:
        """Sequences that went on without drafts because a drafter failed on them."""
        with self._wake:
            return self._downgraded + sum(s.num_downgraded for s in (*self._lanes.values(), *self._leaving))

    def scheduler(self, name: str) -> Scheduler:
        """The lane of a drafter, made where there is none; that may take seconds."""
        with self._wake:
            if name in self._lanes:
                self._lanes[name] = self._lanes.pop(name)
                return self._lanes[name]
        with self._making:
            with self._wake:
                if name in self._lanes:
                    return self._lanes[name]
                self._make_room()
            made = self._make(name)
            with self._wake:
                if self._closed:
                    raise DartspecError("the server is closing")
                self._lanes[name] = made
            return made

    def _make_room(self) -> None:
        """Closes the idle lane that was used longest ago, where there are too many."""
        if len(self._lanes) < self._most:
            return
        idle = next((n for n, s in self._lanes.items() if n != self._keep and not _is_busy(s)), None)
        if idle is None:
            raise QueueFullError(f"{len(self._lanes)} drafters are at work, the most that may: send this again later")
        self._leaving.append(self._lanes.pop(idle))
        self._wake.notify_all()

    def replace(self, name: str) -> None:
        """The next request gets a fresh lane, with its drafter and index read again; the old one ends its own first."""
        with self._making:
            made = self._make(name)
            with self._wake:
                if name in self._lanes:
                    self._leaving.append(self._lanes.pop(name))
                self._lanes[name] = made
                self._wake.notify_all()

    def drop(self, names: Sequence[str]) -> None:
        """These lanes take nothing new; they are made again when asked for."""
        with self._wake:
            for name in names:
                if name in self._lanes:
                    self._leaving.append(self._lanes.pop(name))
            self._wake.notify_all()

    def submit(self, name: str, requests: Sequence[Request]) -> list[Handle]:
        """All of the requests or none. Raises `QueueFullError`, or DartspecError where they can never be served."""
        while True:
            scheduler = self.scheduler(name)
            with self._wake:
                if self._lanes.get(name) is not scheduler:
                    continue  # it was replaced meanwhile, and would be closed once it is idle
                handles: list[Handle] = []
                try:
                    for request in requests:
                        handles.append(scheduler.submit(request))
                except BaseException:
                    for handle in handles:
                        handle.cancel()
                    raise
                finally:
                    self._wake.notify_all()
                return handles

    def close(self) -> None:
        """Ends every request as cancelled, and the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        for scheduler in self.all:
            scheduler.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._leaving or any(map(_is_busy, self._lanes.values())))
                if self._closed:
                    return
                lanes = [*self._lanes.values(), *self._leaving]
            for scheduler in lanes:
                if _is_busy(scheduler):
                    self._step(scheduler)
            with self._wake:
                done = [s for s in self._leaving if not _is_busy(s)]
                self._leaving = [s for s in self._leaving if s not in done]
                self._downgraded += sum(s.num_downgraded for s in done)
            for scheduler in done:
                scheduler.close()

    def _step(self, scheduler: Scheduler) -> None:
        try:
            scheduler.step()
        except Exception as error:  # ours, or the machine's: nobody may be left waiting, and the next gets a new lane
            _log.exception("a lane failed")
            with self._wake:
                self._lanes = {n: s for n, s in self._lanes.items() if s is not scheduler}
                self._leaving = [s for s in self._leaving if s is not scheduler]
                self._downgraded += scheduler.num_downgraded
            scheduler.fail(error)


def _is_busy(scheduler: Scheduler) -> bool:
    return bool(scheduler.num_waiting or scheduler.num_running)
