"""The process: a socket, a loop, signals, logs, and the model loaded while /ready already answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from dartspec.errors import DartspecError
from dartspec.serve.app import create
from dartspec.serve.service import Service, Settings

if TYPE_CHECKING:
    from dartspec.api import LM

UNREAD_S = 120  # a client that takes nothing for so long loses its connection
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message", "taskName"}
_log = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, what happened, and its facts."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        made: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        made |= {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
        if record.exc_info:
            made["traceback"] = self.formatException(record.exc_info)
        return json.dumps(made, ensure_ascii=True, default=str)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Structured logs of the server, the scheduler and uvicorn."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("dartspec", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [] if name == "uvicorn.error" else [handler]
        logger.setLevel(level if name == "dartspec" else max(level, logging.WARNING))
        logger.propagate = name == "uvicorn.error"


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, before anything large is loaded. Raises DartspecError where the address is not to be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(family[0], socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_S)
        made.bind(family[4])
        made.listen(2048)
    except (OSError, OverflowError) as error:
        raise DartspecError(f"cannot listen on {host}:{port}: {error}; choose another --port or --host") from None
    made.set_inheritable(True)
    return made


class Server(uvicorn.Server):
    """uvicorn with our signals: SIGTERM and SIGINT finish what goes on or cut it with a reason, SIGHUP reloads."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(AttributeError, NotImplementedError):
                self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:  # it has hardly begun
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Takes nothing new, and after a while cuts what goes on; told a second time, at once."""
        service = self._service
        if self.should_exit:
            service.cut()
            return
        service.stop_taking()
        _log.info("stopping", extra={"in_progress": len(service.jobs), "grace_s": service.settings.grace_s})
        assert self._loop is not None
        self._loop.call_later(service.settings.grace_s, service.cut)
        self.should_exit = True

    def _reload(self) -> None:
        async def reload() -> None:
            try:
                await self._service.reload()
            except DartspecError as error:
                _log.error("reload failed", extra={"error": str(error)})

        assert self._loop is not None
        task = self._loop.create_task(reload())
        self._service.tasks.add(task)
        task.add_done_callback(self._service.tasks.discard)


def make_server(service: Service) -> Server:
    config = uvicorn.Config(
        create(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        http="h11",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(service.settings.grace_s) + 10,
        h11_max_incomplete_event_size=64 << 10,
    )
    return Server(config, service)


def serve(
    settings: Settings,
    bound: socket.socket,
    load: Callable[[Callable[[str], None]], LM],
    again: Callable[[LM], LM],
    on_ready: Callable[[Service], None],
) -> None:
    """Serves until told to stop. load: makes the model, saying what it is at; again: reads its drafter anew.

    Raises what `load` raises.
    """
    service = Service(settings)
    server = make_server(service)
    fault: list[BaseException] = []

    def begin() -> None:
        def say(stage: str) -> None:
            service.stage = stage

        try:
            lm = load(say)
            service.begin(lm, lambda: again(lm))
            on_ready(service)
        except BaseException as error:
            fault.append(error)
            server.should_exit = True

    threading.Thread(target=begin, name="dartspec-load", daemon=True).start()
    try:
        server.run(sockets=[bound])
    finally:
        service.close()
    if fault:
        raise fault[0]
