"""What a client is told when a request cannot be served: OpenAI's error shape, one sentence, an HTTP status."""

from __future__ import annotations

from typing import Any

from dartspec.errors import DartspecError


class ApiError(DartspecError):
    """Ends a request with an HTTP status and OpenAI's error object.

    kind: OpenAI's `type`. param: the field at fault. retry: whether sending the same again may help, which the `openai`
    client is told in a header; retry_after: in so many seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = {"x-should-retry": "true" if retry else "false", **(headers or {})}
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself is at fault."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, retry_after: int) -> ApiError:
    """There is no room now."""
    return ApiError(
        429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry=True, retry_after=retry_after
    )


def away(message: str, code: str, retry_after: int = 2) -> ApiError:
    """The server cannot take requests yet, or any more."""
    return ApiError(503, message, kind="server_error", code=code, retry=True, retry_after=retry_after)


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the answer took longer than the {seconds:g} seconds that a request may: ask for fewer tokens",
        kind="server_error",
        code="timeout",
    )


def failed(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error", code="generation_failed")
