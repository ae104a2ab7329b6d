"""What every HTTP request passes first: a number for the logs, whose host and key are right, how large it is; and one
line in the log when it has ended. Plain ASGI."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dartspec.serve.answers import safe_json
from dartspec.serve.errors import ApiError
from dartspec.serve.service import Service

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_S = 60.0  # for a client to send its request
_NUMBER = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_log = logging.getLogger(__name__)


class _GoneError(Exception):
    """The client left before its request was whole."""


class Gate:
    """Wraps the application. Facts that belong in a request's line go to `scope["facts"]`."""

    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
                return
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        given = headers.get("x-request-id", "")
        number = given if _NUMBER.fullmatch(given) else secrets.token_hex(8)
        facts: dict[str, Any] = {"request_id": number, "method": scope["method"], "path": scope["path"]}
        scope["facts"], scope["arrived"] = facts, time.perf_counter()
        origin = headers.get("origin")
        allowed = origin if origin in self._service.settings.origins else None
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                have = {k.lower() for k, _ in message.get("headers", [])}
                more = {"x-request-id": number, **_HEADERS}
                if allowed:
                    more |= {"access-control-allow-origin": allowed, "vary": "Origin"}
                    more["access-control-expose-headers"] = "x-request-id, retry-after"
                    more.pop("cross-origin-resource-policy")
                added = [(k.encode(), v.encode("latin-1")) for k, v in more.items() if k.encode() not in have]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        try:
            self._check(scope, headers, allowed)
            if scope["method"] == "OPTIONS" and allowed:
                await _send(
                    answer,
                    204,
                    b"",
                    {
                        "access-control-allow-methods": "GET, POST",
                        "access-control-allow-headers": "authorization, content-type, x-request-id",
                        "access-control-max-age": "600",
                    },
                )
                return
            inner = receive
            if scope["method"] in ("POST", "PUT", "PATCH"):
                inner = _replay(await self._body(headers, receive), receive)
            await self._app(scope, inner, answer)
        except _GoneError:
            facts["finish"] = "gone"
        except ApiError as error:
            facts["error"] = error.message
            self._service.board.refused.add(code=str(error.code))
            await _send(
                answer, error.status, safe_json(error.body), {"content-type": "application/json", **error.headers}
            )
        finally:
            facts["status"] = status
            facts["ms"] = round(1e3 * (time.perf_counter() - scope["arrived"]), 1)
            self._service.board.requests.add(status=str(status))
            quiet = scope["path"] in ("/health", "/ready", "/metrics")
            _log.log(logging.DEBUG if quiet else logging.INFO, "request", extra=facts)

    def _check(self, scope: Scope, headers: dict[str, str], allowed: str | None) -> None:
        """Host and key."""
        settings = self._service.settings
        host = headers.get("host", "").rsplit("@", 1)[-1]
        name = re.sub(r":\d+$", "", host).strip("[]").lower()
        if settings.hosts and name not in settings.hosts:
            # a page elsewhere may have made its own name point at this machine
            raise ApiError(
                403,
                f"the host {name[:80]!r} is not this server's: start it with --allow-host, or an API key",
                kind="permission_error",
                code="unknown_host",
            )
        guarded = scope["path"].startswith(("/v1", "/dartspec"))
        if settings.api_key is None or not guarded or (scope["method"] == "OPTIONS" and allowed):
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), settings.api_key.encode()):
            raise ApiError(
                401,
                "this server asks for an API key: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes:
        most = self._service.settings.body_bytes
        length = headers.get("content-length", "")
        too_large = ApiError(
            413,
            f"the request is larger than {most} bytes, the most that it may have: send less",
            code="request_too_large",
            headers={"connection": "close"},
        )
        if length.isdigit() and (len(length) > 18 or int(length) > most):
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the request did not arrive within {BODY_S:g} seconds",
                code="request_timeout",
                headers={"connection": "close"},
            ) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body, once, then whatever comes: only the client's leaving."""
    waiting = [body]

    async def inner() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return inner


async def _send(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    made = [(k.lower().encode(), v.encode("latin-1")) for k, v in headers.items()]
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*made, (b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})
