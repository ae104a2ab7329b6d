"""What a request may say: OpenAI's published fields, a few of vLLM's, and ours. Checked before anything is done.

A field that is neither known nor without effect is refused: nothing is silently ignored. Types are strict, so that
"5" is no number.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dartspec.errors import DartspecError
from dartspec.serve.errors import bad
from dartspec.types import SamplingParams

SEED_BITS = 53  # of a seed that is drawn here: a browser's numbers hold so many
MOST_CHOICES, MOST_STOPS, MOST_STOP_CHARACTERS = 16, 16, 1000
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

REFUSED = {
    "functions": "functions are written as tools today: use tools",
    "function_call": "functions are written as tools today: use tools and tool_choice",
    "audio": "the model reads and writes text only",
    "modalities": "the model reads and writes text only",
    "prediction": "drafts come from the server's own drafter: use speculate to limit them",
    "web_search_options": "this server reaches nothing outside itself",
    "reasoning_effort": "give the chat template's own arguments in chat_template_kwargs",
    "verbosity": "ask for the length in the prompt, or set max_tokens",
    "guided_json": "constrained decoding does not exist here yet",
    "guided_regex": "constrained decoding does not exist here yet",
    "guided_choice": "constrained decoding does not exist here yet",
    "guided_grammar": "constrained decoding does not exist here yet",
    "structured_outputs": "constrained decoding does not exist here yet",
    "suffix": "the model continues text and does not fill gaps",
    "best_of": "give n: every answer is returned",
}

Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = Field(default=None, description="without effect: pieces are sent as they are")


class Extension(_Strict):
    """What is ours."""

    drafter: str | None = Field(default=None, description="one of /dartspec/info's drafters; default: the server's own")
    rounds: bool = Field(default=False, description="send each round's tree with the stream")


class Sampling(_Strict):
    """Fields that both endpoints share."""

    model: str | None = Field(default=None, description="the one model that is served, or none")
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculate: Literal["auto", "off"] | Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="auto, off, or the most nodes of a tree: changes the speed alone"
    )
    dartspec: Extension | None = None
    user: str | None = Field(default=None, description="without effect")
    metadata: dict[str, str] | None = Field(default=None, description="without effect")
    store: bool | None = Field(default=None, description="without effect: nothing is stored")
    service_tier: str | None = Field(default=None, description="without effect")
    safety_identifier: str | None = Field(default=None, description="without effect")
    prompt_cache_key: str | None = Field(default=None, description="without effect: shared beginnings are found")

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def rounds(self) -> bool:
        return self.dartspec is not None and self.dartspec.rounds

    @property
    def wanted_drafter(self) -> str | None:
        return self.dartspec.drafter if self.dartspec else None

    @property
    def top(self) -> int | None:
        """Alternatives to report beside each token's log-probability, or None for neither."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self, room: int) -> SamplingParams:
        """The engine's parameters. room: tokens that a text may have. Raises `ApiError` naming the field."""
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options was given without stream: set stream to true or leave it out", "stream_options")
        if self.rounds and not self.stream:
            raise bad("rounds are sent with a stream: set stream to true, or dartspec.rounds to false", "dartspec")
        most = self.most_tokens
        if most is not None and most > room:
            raise bad(f"max_tokens is {most}; a text may have {room} tokens here: ask for fewer", "max_tokens")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if long := next((s for s in stops if len(s) > MOST_STOP_CHARACTERS), None):
            raise bad(f"a stop string has {len(long)} characters; it may have {MOST_STOP_CHARACTERS}", "stop")
        if any(_is_broken(s) for s in stops):
            raise bad("a stop string is not valid Unicode: it holds half a surrogate pair", "stop")
        # a seed is 64 bits: a negative one is read as the number with the same bits
        seed = secrets.randbits(SEED_BITS) if self.seed is None else self.seed % 2**64
        given: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": {_token(k): v for k, v in (self.logit_bias or {}).items()},
            "seed": seed,
            "max_tokens": room if most is None else most,
            "stop": tuple(stops),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
            "logprobs": self.top,
            "speculate": self.speculate,
        }
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except DartspecError as error:
            name = str(error).split(" ", 1)[0]
            raise bad(str(error), name if name in given else None) from None


def _is_broken(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise bad(f"logit_bias names {key[:40]!r}; its keys must be token ids, such as '42'", "logit_bias")
    return int(key)


class Part(BaseModel):
    """A piece of a message's content; only text can be read."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: str | None = None
    refusal: str | None = None


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = Field(default=None, description="without effect")
    audio: None = None
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        """As the chat template sees it."""
        content = self.content
        if isinstance(content, list):
            wrong = next((p for p in content if p.type not in ("text", "input_text", "output_text", "refusal")), None)
            if wrong is not None:
                raise bad(f"a message holds a part of type {wrong.type[:40]!r}; the model reads text only", "messages")
            wrong = next((p for p in content if p.text is None and p.refusal is None), None)
            if wrong is not None:
                raise bad(f"a message holds a part of type {wrong.type[:40]!r} without text: give it one", "messages")
            content = "".join(p.text or p.refusal or "" for p in content)
        if content is None and self.role == "assistant" and (self.tool_calls or self.refusal):
            content = self.refusal or ""
        made: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            made["name"] = self.name
        if self.tool_call_id is not None:
            made["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            made["tool_calls"] = [_tool_call(call) for call in self.tool_calls]
        return made


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments come as JSON text; templates want what it says."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad("a tool call has no function with a name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": arguments}}


# what `encode_chat` and `apply_chat_template` themselves take: a request may not reach it
_TEMPLATE_OWN = frozenset(
    {
        "self",
        "conversations",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "messages",
    }
)


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="without effect: the model decides")
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None

    @property
    def most_tokens(self) -> int | None:
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given) if given else None

    @property
    def top(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs was given without logprobs: set logprobs to true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_format(self) -> None:
        """Only free text can be written."""
        if self.response_format is not None and self.response_format != {"type": "text"}:
            raise bad(
                "response_format is not served: constrained decoding does not exist here yet; leave it out",
                "response_format",
            )
        if self.tool_choice not in (None, "auto", "none"):
            raise bad("tool_choice may be auto or none here: a call cannot be enforced", "tool_choice")

    def template_arguments(self, template: str | None) -> dict[str, Any]:
        """Tools, and the template's own arguments."""
        made: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if wrong := sorted(_TEMPLATE_OWN & made.keys()):
            raise bad(f"chat_template_kwargs may not hold {wrong[0]!r}", "chat_template_kwargs")
        if self.tools and self.tool_choice != "none":
            if "tools" not in (template or ""):
                raise bad("the model's chat template has no place for tools: leave them out", "tools")
            made["tools"] = self.tools
        return made


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad("the prompt is empty: give at least one", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
