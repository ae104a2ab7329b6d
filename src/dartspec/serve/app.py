"""The HTTP application: routes, OpenAI's error shape, streams. What is served is in docs/serving.md."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from dartspec import __version__
from dartspec.errors import DartspecError
from dartspec.serve.answers import DONE, Shapes, as_json, event, safe_json
from dartspec.serve.errors import ApiError, bad
from dartspec.serve.gate import Gate
from dartspec.serve.protocol import REFUSED, ChatRequest, CompletionRequest, Sampling
from dartspec.serve.service import Job, Service

PAGE = Path(__file__).parent / "page"
_JSON = re.compile(r"\s*application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)  # what the framework reads as JSON
LINGER_S = 5.0  # for a reader who is slow to take the end

_ERROR: dict[str, Any] = {
    "description": "refused, in one sentence",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}
_ANSWER = {
    "description": "OpenAI's object, or with stream=true its pieces as server-sent events",
    "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
}
_GENERATION: dict[int | str, dict[str, Any]] = {
    200: _ANSWER,
    **{status: _ERROR for status in (400, 401, 403, 404, 408, 413, 422, 429, 503, 504)},
}
_SIMPLE: dict[int | str, dict[str, Any]] = {status: _ERROR for status in (401, 403, 503)}


def create(service: Service) -> Gate:
    """The application of a service, behind its gate."""
    app = FastAPI(
        title="dartspec",
        version=__version__,
        docs_url=None,  # these pages fetch from elsewhere
        redoc_url=None,
        description="OpenAI-compatible server with lossless speculative decoding",
    )

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return _refusal(service, request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        kind = request.headers.get("content-type", "")
        if not _JSON.match(kind) and request.method == "POST":
            named = f"the content type is {kind[:80]!r}" if kind else "the request has no content type"
            return _refusal(service, request, bad(f"{named}: send JSON with `Content-Type: application/json`"))
        return _refusal(service, request, _sentence(error))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        message = {
            400: "the request cannot be read as JSON in UTF-8: it has other bytes, or nests or counts too far",
            404: f"there is nothing at {request.url.path[:200]!r}",
            405: f"{request.method} is not served at {request.url.path[:200]!r}",
        }.get(error.status_code, str(error.detail))
        made = ApiError(error.status_code, message, headers=dict(error.headers or {}))
        return _refusal(service, request, made)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        # the log has the traceback; the client gets a number to quote
        number = request.scope["facts"]["request_id"]
        made = ApiError(500, f"the server made a mistake on request {number}; its log says more", kind="server_error")
        return _refusal(service, request, made)

    @app.post("/v1/chat/completions", responses=_GENERATION, tags=["openai"])
    async def chat(body: ChatRequest, request: Request) -> Response:
        """One or more answers to a conversation."""
        lm = service.lm
        _check_model(service, body)
        body.check_format()
        params = body.sampling(service.max_length)
        messages = [m.for_template() for m in body.messages]
        arguments = body.template_arguments(lm.text.chat_template)
        _log_prompt(service, request, messages)
        ids = await _read(service, lambda: lm.text.encode_chat(messages, **arguments), "messages")
        return await _generate(service, request, body, [ids], params, chat=True)

    @app.post("/v1/completions", responses=_GENERATION, tags=["openai"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """One or more continuations of a text, or of several."""
        lm = service.lm
        _check_model(service, body)
        params = body.sampling(service.max_length)
        _log_prompt(service, request, body.prompt)
        service.check_count(len(body.prompts) * body.num_choices)
        prompts = []
        for prompt in body.prompts:
            prompts.append(await _read(service, lambda prompt=prompt: lm.encode(prompt), "prompt"))  # type: ignore[misc]
        return await _generate(service, request, body, prompts, params, chat=False)

    @app.get("/v1/models", responses=_SIMPLE, tags=["openai"])
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}", responses={404: _ERROR, **_SIMPLE}, tags=["openai"])
    async def model(name: str) -> dict[str, Any]:
        """The one model, by its name."""
        _ = service.lm
        if name != service.model_name:
            raise _no_model(service, name)
        return _model(service)

    @app.post("/v1/embeddings", responses={501: _ERROR, **_SIMPLE}, tags=["openai"])
    async def embeddings() -> Response:
        """Refused."""
        raise ApiError(
            501, "embeddings are not served: this server writes text; use /v1/chat/completions", code="not_supported"
        )

    @app.get("/dartspec/info", responses=_SIMPLE, tags=["dartspec"])
    async def info() -> dict[str, Any]:
        """What is served and how."""
        return service.info()

    @app.post("/dartspec/reload", responses={400: _ERROR, **_SIMPLE}, tags=["dartspec"])
    async def reload() -> dict[str, Any]:
        """Reads the drafter and its index again. Only where the server has an API key; or send the process SIGHUP."""
        if service.settings.api_key is None:
            raise ApiError(
                403,
                "reload needs a server that was started with an API key; or send its process SIGHUP",
                kind="permission_error",
                code="no_api_key",
            )
        return await service.reload()

    @app.get("/health", responses={503: _ERROR}, tags=["operation"])
    async def health() -> Response:
        """Whether the process works; 503 means that it should be started anew."""
        status = 200 if service.is_healthy else 503
        return Response(as_json({"status": "ok" if status == 200 else "failed"}), status, media_type="application/json")

    @app.get("/ready", responses={503: _ERROR}, tags=["operation"])
    async def ready() -> Response:
        """Whether requests are taken now; until then, what is being done."""
        good = service.state == "ready" and service.is_healthy
        stage = service.stage if service.state == "starting" else service.state
        return Response(as_json({"status": stage}), 200 if good else 503, media_type="application/json")

    @app.get("/metrics", tags=["operation"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text form."""
        page = service.board.page(service.model_name, service.look)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return _page("index.html", request)

    @app.get("/page/{name:path}", include_in_schema=False)
    async def page(name: str, request: Request) -> Response:
        return _page(name, request)

    return Gate(app, service)


# -- the page ----------------------------------------------------------------------------------------------------------


def _page(name: str, request: Request) -> Response:
    """A file of the page: looked up among those that there are, so no request names a path."""
    files = {p.relative_to(PAGE).as_posix(): p for p in PAGE.rglob("*") if p.is_file()} if PAGE.is_dir() else {}
    if name not in files:
        raise HTTPException(404)
    content = files[name].read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"cache-control": "no-cache", "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(content, media_type=kind, headers=headers)


# -- requests ----------------------------------------------------------------------------------------------------------


def _model(service: Service) -> dict[str, Any]:
    _ = service.lm
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "dartspec",
        "max_model_len": service.max_length,
    }


def _no_model(service: Service, name: str) -> ApiError:
    return ApiError(
        404,
        f"the model {name[:200]!r} is not served; this server has one, {service.model_name!r}",
        param="model",
        code="model_not_found",
    )


def _check_model(service: Service, body: Sampling) -> None:
    if body.model is not None and body.model != service.model_name:
        raise _no_model(service, body.model)


def _log_prompt(service: Service, request: Request, prompt: Any) -> None:
    if service.settings.log_prompts:
        request.scope["facts"]["prompt"] = prompt


async def _read(service: Service, work: Callable[[], list[int]], param: str) -> list[int]:
    try:
        return await service.read(work)
    except ApiError:
        raise
    except DartspecError as error:
        raise bad(str(error), param) from None


async def _generate(
    service: Service, request: Request, body: Sampling, prompts: list[list[int]], params: Any, *, chat: bool
) -> Response:
    facts, lm = request.scope["facts"], service.lm
    shapes = Shapes(
        lm.text,
        chat=chat,
        number=facts["request_id"],
        model=service.model_name,
        fingerprint=f"fp_{lm.target.weights_fingerprint}",
        drafter=service.drafter(body.wanted_drafter),
        seed=params.seed,
        include_usage=body.include_usage,
    )
    job = await service.submit(
        prompts,
        params,
        n=body.num_choices,
        drafter=shapes.drafter,
        rounds=body.rounds,
        arrived=request.scope["arrived"],
    )
    return Reply(service, job, shapes, facts, stream=bool(body.stream), rounds=body.rounds)


class Reply(Response):
    """The answer to a request in progress, whole or in pieces. Where the client goes away the job is cancelled."""

    def __init__(
        self, service: Service, job: Job, shapes: Shapes, facts: dict[str, Any], *, stream: bool, rounds: bool
    ) -> None:
        super().__init__()
        self._service, self._job, self._shapes, self._facts = service, job, shapes, facts
        self._stream, self._rounds = stream, rounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._send_stream(send) if self._stream else self._send_whole(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        left = self._job.deadline + LINGER_S - time.perf_counter()
        try:
            await asyncio.wait({work, gone}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not gone.done():
                self._job.cancel("timeout")  # who does not read holds a connection, and nothing else
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._job.close()
            self._note()

    async def _send_whole(self, send: Send) -> None:
        job, shapes = self._job, self._shapes
        try:
            async for choice, chunk, _, _, _ in job.news():
                choice.log_probs += shapes.token_log_probs(chunk) or []
        except ApiError as error:
            self._facts["error"] = error.message
            await _send_json(send, error.status, safe_json(error.body), error.headers)
            return
        whole = shapes.whole(job.choices, job.num_prompt, job.params.logprobs is not None)
        await _send_json(send, 200, as_json(whole), {})

    async def _send_stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self) -> AsyncIterator[bytes]:
        job, shapes = self._job, self._shapes
        if shapes.chat:
            yield b"".join(event(shapes.opening(c.index)) for c in job.choices)
        try:
            async for choice, chunk, record, index, probs in job.news():
                log_probs = shapes.token_log_probs(chunk)
                shown = self._rounds and record is not None and chunk.tree is not None
                round_ = shapes.round(index, chunk, record, probs) if shown and record else None
                piece = shapes.piece(choice, chunk, log_probs, round_)
                if piece is not None:
                    yield event(piece)
        except ApiError as error:
            self._facts["error"] = error.message
            yield b"data: " + safe_json(error.body) + b"\n\n"
            return
        if shapes.include_usage:
            yield event(shapes.closing(job.choices, job.num_prompt))
        yield DONE

    def _note(self) -> None:
        """Facts for the log: numbers, no text unless asked."""
        job = self._job
        rounds = [r for c in job.choices for r in c.metrics.rounds]
        self._facts |= {
            "model": self._service.model_name,
            "drafter": job.drafter,
            "stream": self._stream,
            "prompt_tokens": job.num_prompt,
            "completion_tokens": sum(c.num_tokens for c in job.choices),
            "finish": job.why or ",".join(c.finish or "none" for c in job.choices),
            "queue_ms": None if job.queue_s is None else round(1e3 * job.queue_s, 1),
            "first_token_ms": None if job.first_s is None else round(1e3 * job.first_s, 1),
            "rounds": len(rounds),
            "drafted": sum(r.num_drafted for r in rounds),
            "accepted": sum(r.num_accepted for r in rounds),
            "seed": job.params.seed,
        }
        if self._service.settings.log_prompts:
            self._facts["answer"] = [c.text for c in job.choices]


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    made = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
    made += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": made})
    await send({"type": "http.response.body", "body": body})


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refusal(service: Service, request: Request, error: ApiError) -> Response:
    facts = request.scope.get("facts")
    if facts is not None:
        facts["error"] = error.message
    service.board.refused.add(code=error.code or str(error.status))
    return Response(safe_json(error.body), error.status, media_type="application/json", headers=error.headers)


def _sentence(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, in one sentence."""
    found = error.errors()
    first = found[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return bad(f"the request is not JSON: {first.get('ctx', {}).get('error', 'it cannot be read')}")
    if first["type"] == "extra_forbidden":
        name = where[-1][:80]
        why = REFUSED.get(name) if len(where) == 1 else None
        text = f"{name} is not served: {why}" if why else f"{name!r} is not a field of this request: leave it out"
        return bad(text, ".".join(where)[:200], "unknown_parameter")
    field_ = where[0] if where else None
    # of a field that may have several forms, what is said of the form that came nearest
    near = [e for e in found if e["loc"][:2] == first["loc"][:2]]
    deepest = max(near, key=lambda e: (len(e["loc"]), not e["type"].endswith(("_type", "literal_error"))))
    path = ".".join(str(p) for p in deepest["loc"] if p != "body" and not _is_form(p))[:200] or "the request"
    message = deepest["msg"][:1].lower() + deepest["msg"][1:]
    return bad(f"{path}: {message[:300]}", field_)


def _is_form(part: Any) -> bool:
    """Whether pydantic, not the client, named this part: which form of a union it tried."""
    return isinstance(part, str) and (
        "[" in part or part.startswith("constrained-") or part in ("str", "int", "StreamOptions", "Extension")
    )
