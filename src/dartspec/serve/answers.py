"""From the engine's chunks to OpenAI's shapes: pieces of a stream, whole answers, usage, the rounds as drawn."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from dartspec.accounting import Metrics
from dartspec.engine import Chunk
from dartspec.text import Text
from dartspec.types import RoundRecord, TokenTree

NO_PROBABILITY = -9999.0  # OpenAI's number for a token that cannot be, since JSON has no infinity


def as_json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="null")


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + as_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
_UTF8 = codecs.getincrementaldecoder("utf-8")


def safe_json(value: Any) -> bytes:
    """JSON of what may quote a client: half a surrogate pair is written as an escape."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False).encode()


@dataclass
class Choice:
    """One answer as it grows."""

    index: int
    pieces: list[str] = field(default_factory=list)
    log_probs: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    num_rounds: int = 0
    finish: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    num_reused: int = 0
    _characters: codecs.IncrementalDecoder = field(default_factory=lambda: _UTF8("replace"))
    _at: int = 0

    def place(self, token: bytes) -> int:
        """Where the next token begins in the text, in whole characters."""
        began = self._at
        self._at += len(self._characters.decode(token))
        return began

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Shapes:
    """OpenAI's objects for one request. chat: of which endpoint."""

    def __init__(
        self,
        text: Text,
        *,
        chat: bool,
        number: str,
        model: str,
        fingerprint: str,
        drafter: str,
        seed: int,
        include_usage: bool = False,
    ) -> None:
        self.text, self.chat, self.drafter, self.seed = text, chat, drafter, seed
        self.include_usage = include_usage
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    # -- a stream ----------------------------------------------------------------------------------------------------

    def opening(self, index: int) -> dict[str, Any]:
        """The first piece of a chat's answer: who speaks."""
        return self._piece(index, {"role": "assistant", "content": ""}, None, None)

    def piece(
        self, choice: Choice, chunk: Chunk, log_probs: list[dict[str, Any]] | None, round_: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """A chunk as it is sent, or None where it says nothing."""
        if not (chunk.text or log_probs or chunk.finish or round_):
            return None
        delta = {"content": chunk.text} if chunk.text or not chunk.finish else {}
        made = self._piece(choice.index, delta, self.log_probs(log_probs, choice), chunk.finish)
        if round_:
            made["dartspec"] = {"round": round_}
        return made

    def _piece(
        self, index: int, delta: dict[str, Any], log_probs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": index, **said, "logprobs": log_probs, "finish_reason": finish}
        usage = {"usage": None} if self.include_usage else {}
        return {**self._head, "object": kind, "choices": [choice], **usage}

    def closing(self, choices: Sequence[Choice], num_prompt: int) -> dict[str, Any]:
        """The last piece: usage, and no choice."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": [], "usage": self.usage(choices, num_prompt)}

    # -- a whole answer ----------------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Choice], num_prompt: int, with_log_probs: bool) -> dict[str, Any]:
        made = []
        for c in choices:
            log_probs = self.log_probs(c.log_probs, c) if with_log_probs else None
            said: dict[str, Any] = {"text": c.text}
            if self.chat:
                said = {"message": {"role": "assistant", "content": c.text, "refusal": None}}
            made.append({"index": c.index, **said, "logprobs": log_probs, "finish_reason": c.finish})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": made, "usage": self.usage(choices, num_prompt)}

    def usage(self, choices: Sequence[Choice], num_prompt: int) -> dict[str, Any]:
        """Tokens as OpenAI counts them, and what speculation did, as docs/metrics.md defines it."""
        m = Metrics.merged(c.metrics for c in choices)
        written = sum(c.num_tokens for c in choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": written,
            "total_tokens": num_prompt + written,
            "prompt_tokens_details": {"cached_tokens": min(num_prompt, sum(c.num_reused for c in choices))},
            "dartspec": {
                "drafter": self.drafter,
                "M": round(m.M, 4),
                "drafted": sum(r.num_drafted for r in m.rounds),
                "accepted": sum(r.num_accepted for r in m.rounds),
                "rounds": m.num_rounds,
                "seed": self.seed,
                "times_ms": {
                    "prefill": round(m.prefill_ms, 3),
                    "draft": round(m.draft_ms, 3),
                    "search": round(m.search_ms, 3),
                    "verify": round(m.verify_ms, 3),
                    "pick": round(m.pick_ms, 3),
                    "rest": round(m.other_ms - m.pick_ms, 3),
                },
                "tokens_per_s": round(m.tokens_per_s, 3),
                "accepted_by_position": m.accepted_by_position,
            },
        }

    # -- log-probabilities -------------------------------------------------------------------------------------------

    def token_log_probs(self, chunk: Chunk) -> list[dict[str, Any]] | None:
        if chunk.log_probs is None:
            return None
        return [
            {**self._likely(token, own), "top_logprobs": [self._likely(t, p) for t, p in top]}
            for token, (own, top) in zip(chunk.ids, chunk.log_probs, strict=True)
        ]

    def _likely(self, token: int, log_prob: float) -> dict[str, Any]:
        shown, raw = self.text.token(token)
        return {"token": shown, "logprob": max(log_prob, NO_PROBABILITY), "bytes": list(raw)}

    def log_probs(self, tokens: list[dict[str, Any]] | None, choice: Choice) -> dict[str, Any] | None:
        """In the endpoint's own shape. choice: whose next tokens they are."""
        if tokens is None:
            return None
        if self.chat:
            return {"content": tokens, "refusal": None}
        return {
            "tokens": [t["token"] for t in tokens],
            "token_logprobs": [t["logprob"] for t in tokens],
            "top_logprobs": [{a["token"]: a["logprob"] for a in t["top_logprobs"]} for t in tokens],
            "text_offset": [choice.place(bytes(t["bytes"])) for t in tokens],
        }

    # -- rounds ------------------------------------------------------------------------------------------------------

    def round(self, index: int, chunk: Chunk, record: RoundRecord, probs: list[float] | None) -> dict[str, Any]:
        """One round as the page draws it; the form is in docs/serving.md."""
        assert chunk.tree is not None
        assert chunk.path is not None
        tree: TokenTree = chunk.tree
        ids, share = tree.tokens.tolist(), 1 / record.batch
        return {
            "index": index,
            "num_drafted": record.num_drafted,
            "num_accepted": record.num_accepted,
            "tree": {
                "ids": ids,
                "texts": [self.text.token(i)[0] for i in ids],
                "parents": tree.parents.tolist(),
                "scores": [round(s, 4) for s in tree.scores.tolist()],
                "probs": None if probs is None else [round(p, 4) for p in probs],
            },
            "path": list(chunk.path),
            "new": [{"id": i, "text": self.text.token(i)[0]} for i in chunk.ids],
            "batch": record.batch,
            "times_ms": {
                "draft": round(record.draft_ms * share, 3),
                "search": round(record.search_ms * share, 3),
                "verify": round(record.verify_ms * share, 3),
                "pick": round(record.pick_ms * share, 3),
                "rest": round((record.other_ms - record.pick_ms) * share, 3),
            },
        }
