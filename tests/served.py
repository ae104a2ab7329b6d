"""A real server around a tiny float32 model: a socket, a thread with an event loop, and what clients need."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

import tiny_cli
from dartspec.api import LM, load
from dartspec.scheduler import Limits
from dartspec.serve.run import Server, listen, make_server
from dartspec.serve.service import Service, Settings
from dartspec.types import SamplingParams

SMALL = Limits(num_slots=4, num_waiting=64, max_length=128)
PATIENCE_S = 240.0  # until a test gives up


def tiny_lm(folder: Path, drafter: Any = "prompt_lookup", **options: Any) -> LM:
    """A model with a drafter that is often right on it: tiny greedy models repeat themselves."""
    if not (folder / "config.json").exists():
        tiny_cli.save(folder)
    return load(folder, drafter=drafter, nodes=6, dtype="float32", fast=False, threads=1, **options)


class Served:
    """Use it in `with`. `url` is the root of the server."""

    def __init__(self, lm: LM, again: Any = None, **settings: Any) -> None:
        settings.setdefault("limits", SMALL)
        self.lm = lm
        self.service = Service(Settings(**settings))
        self.service.begin(lm, again)
        self._bound = listen("127.0.0.1", 0)
        self.port = self._bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server: Server = make_server(self.service)
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=256))
        self._thread = threading.Thread(target=lambda: self.server.run(sockets=[self._bound]), daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop()
        self.service.close()

    def stop(self) -> None:
        """As SIGTERM would."""
        if self._thread.is_alive() and not self.server.should_exit:
            self.server.handle_exit(15, None)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    # -- asking ------------------------------------------------------------------------------------------------------

    def post(self, path: str = "/v1/chat/completions", body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def stream(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        """The pieces of a stream, which must end as it should."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        return pieces(answer.text)

    def half_open(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
        """A connection on which a request was sent and nothing is read."""
        data = json.dumps(body).encode()
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # little is on its way: a writer soon waits
        made.settimeout(PATIENCE_S)
        made.connect(("127.0.0.1", self.port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        made.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return made

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> int:
        """Sequences in slots and in queues."""
        return sum(s.num_running + s.num_waiting for s in self.service.lanes.all)

    def metrics(self) -> dict[str, float]:
        """The page of /metrics: name and labels, without those that every line has."""
        found = {}
        for line in self.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name.replace(f'model_name="{self.service.model_name}",engine="0"', "").replace("{}", "")] = float(
                    value
                )
        return found


def pieces(text: str) -> list[dict[str, Any]]:
    """The objects of a whole stream: one event each, and [DONE] at the end."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-3:]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def said(parts: list[dict[str, Any]], index: int = 0) -> str:
    """One choice's text, put together."""
    choices = [c for p in parts for c in p["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


def plainly(lm: LM, prompt: Any, n: int = 1, **params: Any) -> list[str]:
    """What plain decoding answers."""
    none = lm.with_drafter("none", index=None)
    return [r.text for r in none.generate_batch([prompt], n=n, params=SamplingParams(**params))]


def wait_until(true: Any, patience_s: float = PATIENCE_S) -> None:
    """Returns as soon as it holds; fails where it never does."""
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Pieces of a stream as they come."""
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
