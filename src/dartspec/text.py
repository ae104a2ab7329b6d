"""Text in, ids out, and back: the tokenizer, the chat template, incremental decoding and stop strings.

Knows tokenizers and nothing of models. The only file that loads or touches a tokenizer; it reads a caller's tokenizer
and never changes it (the one exception mends tokenizers that this package itself read from a GGUF file).
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dartspec.errors import DartspecError

FINGERPRINT_DIGITS = 16

# Tokens that close an assistant's turn. One counts as a stop only where the chat template writes it.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
)

# GGUF files name their pre-tokenizer in `tokenizer.ggml.pre`. These are the ones that split every digit off and are
# GPT-2's rule otherwise; transformers leaves the digits together.
_DIGIT_SPLITTING_PRE = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_PLAIN_PRE = frozenset({"", "default", "gpt-2", "gpt2"})

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

# Decoders whose output only ever grows at its end when ids are appended (apart from the byte cases handled in
# `StreamDecoder`). With any other the text is held back until `flush`: late, never wrong.
_GROWING_DECODERS = frozenset(
    {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip", "WordPiece", "BPEDecoder"}
)


def _byte_letters() -> dict[str, int]:
    """The letter by which byte-level tokenizers write each byte: printable ones as themselves, the others from U+0100
    on in order (Radford et al. 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_letters()


class Text:
    """A Hugging Face fast tokenizer with the few operations that generation needs.

    The tokenizer may be shared with the caller; it is read, never changed. Raises `DartspecError` for a tokenizer
    without a `tokenizers` backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise DartspecError(
                f"the tokenizer is a {type(tokenizer).__name__} without a `tokenizers` backend, which streaming and "
                "fingerprints need: load it with AutoTokenizer, or save it as tokenizer.json"
            )
        self.tokenizer = tokenizer
        self._backend = backend
        self._tokens: dict[int, tuple[str, bytes]] = {}  # what `token` has looked up

    # -- sizes and names -------------------------------------------------------------------------------------------

    @cached_property
    def num_tokens(self) -> int:
        """Ids the tokenizer knows are [0, num_tokens); ids at or beyond are padding rows and never emitted.

        This is `len(tokenizer)` unless the vocabulary has holes; then it is the highest id + 1.
        """
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens: what `decode` leaves out."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def fingerprint(self) -> str:
        """See the function `fingerprint`."""
        return fingerprint(self.tokenizer)

    @cached_property
    def chat_template(self) -> str | None:
        """The template text, or None where the tokenizer has none; of several, the one named "default"."""
        template = getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, Mapping):
            template = template.get("default")
        return str(template) if template else None

    @cached_property
    def template_hash(self) -> str | None:
        """First 16 hex digits of the chat template's SHA-256, or None without a template (case 24)."""
        return None if self.chat_template is None else _digest(self.chat_template.encode())

    def eos_token_ids(self, generation_config: Any = None) -> frozenset[int]:
        """Every id that ends an answer: the tokenizer's own, those of `generation_config.eos_token_id` (an int or a
        list; the config may be an object, a mapping or None), and the end-of-turn tokens the chat template writes."""
        if isinstance(generation_config, Mapping):
            configured = generation_config.get("eos_token_id")
        else:
            configured = getattr(generation_config, "eos_token_id", None)
        ids = set(configured) if isinstance(configured, (list, tuple)) else {configured}
        ids.add(getattr(self.tokenizer, "eos_token_id", None))
        template = self.chat_template or ""
        for name in _END_OF_TURN:
            # In templates with channels (gpt-oss) <|end|> closes the thinking, not the answer.
            if name in template and not (name == "<|end|>" and "<|channel|>" in template):
                token_id = self._backend.token_to_id(name)
                if token_id in self._backend.get_added_tokens_decoder():
                    ids.add(token_id)
        return frozenset(int(i) for i in ids if i is not None)

    # -- text to ids -----------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of `text` with no special token added; special tokens written out in the text are recognised."""
        return self._ids(text, add_special_tokens=False)

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Many texts at once, on all of the tokenizer's threads; no special tokens, nothing cut or padded."""
        if self._backend.truncation is None and self._backend.padding is None:  # without offsets: a third quicker
            return [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        encoded = self.tokenizer(texts, add_special_tokens=False, truncation=False, padding=False, verbose=False)
        return list(encoded["input_ids"])

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of `text` as the beginning of a document: led by the beginning-of-text token where the tokenizer adds
        one, never closed by an end token."""
        ids = self._ids(text, add_special_tokens=True)
        closing = {getattr(self.tokenizer, name, None) for name in ("eos_token_id", "sep_token_id")}
        plain = self.encode(text)
        while ids and ids[-1] in closing and ids[-len(plain) :] != plain:
            ids.pop()
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> list[int]:
        """Ids of a conversation, ending where the assistant is to speak.

        messages: mappings with "role" and "content", oldest first. `template_kwargs` go to the chat template (such as
        `enable_thinking=False`); `add_generation_prompt` is True unless given. Without a chat template the rule is:
        the contents joined by a blank line, roles left out, as `encode_prompt` reads them. Raises `DartspecError` for
        no messages, and where the template itself refuses them.
        """
        if not messages:
            raise DartspecError("the conversation is empty: give at least one message")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not message.get("role"):
                raise DartspecError(f"message {i} is {message!r}; it must be a mapping with a role and a content")
            if message.get("content") is None and not message.get("tool_calls"):
                raise DartspecError(f"message {i} ({message['role']}) has no content")
        if self.chat_template is None:
            if template_kwargs:
                raise DartspecError(
                    f"the tokenizer has no chat template, so {', '.join(sorted(template_kwargs))} would be ignored: "
                    "leave the template's arguments out or give the tokenizer a template"
                )
            return self.encode_prompt("\n\n".join(str(m["content"]) for m in messages))
        template_kwargs.setdefault("add_generation_prompt", True)
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, **template_kwargs)
        except Exception as error:  # jinja errors and whatever a template raises; its message is the answer
            raise DartspecError(f"the chat template refused the messages: {error}") from error
        return self.encode(text)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of a command line that are not UTF-8 come as these, too
            raise DartspecError(
                f"the text is not valid Unicode: half a surrogate pair, U+{ord(text[error.start]):04X}, at character "
                f"{error.start}; give UTF-8 text"
            ) from None
        # Through transformers, not the backend: a truncation left set on the backend must not cut a prompt.
        encoding = self.tokenizer(text, add_special_tokens=add_special_tokens, truncation=False, verbose=False)
        return list(encoding["input_ids"])

    # -- ids to text -----------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`, without special tokens unless asked. Never "cleaned up": spaces stay as the model wrote them.
        Bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special))

    def token(self, token_id: int) -> tuple[str, bytes]:
        """One token by itself, special ones too: its text to show, and its bytes. A token that is part of a character
        is shown as OpenAI does it, `bytes:\\xe2\\x80`; an id without a token is empty."""
        known = self._tokens.get(token_id)
        if known is None:
            raw = self._token_bytes(token_id)
            try:
                shown = raw.decode()
            except UnicodeDecodeError:
                shown = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            known = self._tokens[token_id] = shown, raw
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        kinds = {part["type"] for part in self._decoder_parts}
        if token_id not in self._backend.get_added_tokens_decoder():
            if "ByteLevel" in kinds and all(c in _BYTE_OF for c in piece):
                return bytes(_BYTE_OF[c] for c in piece)
            if token_id in self._byte_ids:
                return bytes([int(piece[1:-1], 16)])
            if kinds & {"Metaspace", "Replace"}:
                piece = piece.replace("\u2581", " ")
        return str(piece).encode("utf-8", "replace")

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A fresh incremental decoder over this tokenizer."""
        return StreamDecoder(self, skip_special=skip_special)

    @cached_property
    def _decoder_parts(self) -> list[dict[str, Any]]:
        """The decoder's steps as tokenizer.json spells them; empty without a decoder (tokens joined by spaces)."""
        if self._backend.decoder is None:
            return []
        state = json.loads(self._backend.decoder.__getstate__())
        return list(state["decoders"]) if state.get("type") == "Sequence" else [state]

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        """Ids of byte-fallback tokens such as <0xE2>, where the decoder joins them to characters."""
        if not any(part["type"] == "ByteFallback" for part in self._decoder_parts):
            return frozenset()
        vocab = self._backend.get_vocab(with_added_tokens=True)
        return frozenset(i for token, i in vocab.items() if _BYTE_TOKEN.fullmatch(token))

    @cached_property
    def _text_only_grows(self) -> bool:
        fused = False
        for part in self._decoder_parts:
            if part["type"] not in _GROWING_DECODERS:
                return False
            if part["type"] == "Replace" and fused:  # may match across two tokens
                return False
            fused = fused or part["type"] == "Fuse"
        return True


class StreamDecoder:
    """Turns ids into text as they come, whole characters only.

    The pieces returned by `push`, then `flush`, joined together are `text.decode` of all the ids, however the ids were
    split over calls. A character spread over several tokens appears with its last token. A run of byte-fallback tokens
    appears with the token after it: one more bad byte would turn the whole run into U+FFFD.
    """

    _KEEP = 4  # ids of context that survive a trim
    _TRIM_AT = 32

    def __init__(self, text: Text, *, skip_special: bool = True) -> None:
        self._text = text
        self._skip_special = skip_special
        self._window: list[int] = []  # recent ids: enough context that their text continues the text before them
        self._num_shown = 0  # characters of the window's text that were returned already

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; often empty."""
        self._window += [int(i) for i in ids]
        if not self._text._text_only_grows:
            return ""
        num_ready = len(self._window)
        if byte_ids := self._text._byte_ids:
            while num_ready and self._is_open(self._window[num_ready - 1], byte_ids):
                num_ready -= 1
        decoded = self._decode(self._window[:num_ready])
        # With byte-level tokens only the last U+FFFD may still be the beginning of a character.
        unfinished = decoded.endswith("\ufffd")
        num_stable = max(self._num_shown, len(decoded) - unfinished)
        piece, self._num_shown = decoded[self._num_shown : num_stable], num_stable
        if num_ready == len(self._window) >= self._TRIM_AT and not unfinished:
            self._trim()
        return piece

    def flush(self) -> str:
        """What was still held back; the decoder is empty afterwards."""
        piece = self._decode(self._window)[self._num_shown :]
        self._window, self._num_shown = [], 0
        return piece

    def _is_open(self, token_id: int, byte_ids: frozenset[int]) -> bool:
        """Whether a byte run could still go on at this id; skipped special tokens do not end a run."""
        return token_id in byte_ids or (self._skip_special and token_id in self._text.special_ids)

    def _trim(self) -> None:
        context = self._window[-self._KEEP :]
        decoded = self._decode(context)
        # Empty context would make what follows the beginning of a text, where decoders drop a leading space.
        if decoded:
            self._window, self._num_shown = context, len(decoded)

    def _decode(self, ids: list[int]) -> str:
        return self._text.decode(ids, skip_special=self._skip_special)


class StopStrings:
    """Finds the first stop string in text that comes in pieces, and holds back what might become one.

    Push one token's piece at a time and the token at which `stopped` turns true is the one to cut after. Of several
    stop strings the one that is complete first counts; of two complete at the same character, the longer. The result
    does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """stops: strings to stop at, possibly none. include: whether the stop string itself belongs to the text."""
        if isinstance(stops, str):
            raise DartspecError(f"stop strings must be a list, found the string {stops!r}: write [{stops!r}]")
        if not all(stops):
            raise DartspecError("a stop string is empty and would stop at once: remove it")
        self._stops = tuple(stops)
        self._include = include
        self._pending = ""
        self.stopped = False

    def push(self, piece: str) -> tuple[str, bool]:
        """`(released, stopped)`: the text that may be shown now, and whether a stop string is complete. Text behind it
        is dropped; after a stop nothing is released any more."""
        if self.stopped:
            return "", True
        text = self._pending + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._pending, self.stopped = "", True
            return text[: end if self._include else start], True
        num_held = self._num_held(text)
        released, self._pending = text[: len(text) - num_held], text[len(text) - num_held :]
        return released, False

    def flush(self) -> str:
        """The text still held back, for when generation ended otherwise."""
        released, self._pending = self._pending, ""
        return released

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def fingerprint(tokenizer: Any) -> str:
    """Identity of the map from text to ids: 16 hex digits of a SHA-256 over the vocabulary, merges, added tokens,
    normaliser and pre-tokenizer. Equal after save and load; special tokens put around a text, padding, truncation and
    the chat template do not enter."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = {key: value or None for key, value in state["model"].items() if key != "dropout"}
    model["merges"] = [m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges") or []]
    parts = {
        "model": model,
        "added": sorted((token["id"], token["content"]) for token in state["added_tokens"]),
        "normalizer": state["normalizer"],
        "pre_tokenizer": _without_offsets(state["pre_tokenizer"]),
    }
    return _digest(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode())


def _without_offsets(part: Any) -> Any:
    """A pre-tokenizer's JSON without `trim_offsets`, which moves character offsets only and differs between loaders."""
    if isinstance(part, dict):
        return {key: _without_offsets(value) for key, value in part.items() if key != "trim_offsets"}
    return [_without_offsets(value) for value in part] if isinstance(part, list) else part


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:FINGERPRINT_DIGITS]


def load_tokenizer(
    source: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    gguf_file: str | None = None,
    gguf_pre: str | None = None,
) -> Any:
    """The fast tokenizer of a folder or hub id, or of the GGUF file `gguf_file` inside the folder `source`.

    gguf_pre: the file's `tokenizer.ggml.pre`; a digit-splitting one is mended (`mend_gguf_pre_tokenizer`). Raises
    `DartspecError` where nothing usable is found.
    """
    from transformers import AutoTokenizer

    options: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": local_files_only,
    }
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), **options)
    except Exception as error:  # transformers raises a dozen kinds here; all mean the same to a user
        where = f"{source}/{gguf_file}" if gguf_file else str(source)
        reason = str(error).strip().split("\n")[0]
        raise DartspecError(f"no tokenizer could be loaded from {where}: {reason}") from error
    if gguf_file is not None and gguf_pre is not None:
        mend_gguf_pre_tokenizer(tokenizer, gguf_pre)
    return tokenizer


def mend_gguf_pre_tokenizer(tokenizer: Any, pre: str) -> None:
    """Give a tokenizer read from a GGUF file the digit splitting that its `tokenizer.ggml.pre` asks for, in place.

    transformers takes GPT-2's rule for every name it does not know. For `smollm` that keeps digits together, and
    "\\n\\n1." becomes three tokens where the model writes two. A name that neither it nor this function knows gets a
    warning: its ids may be wrong.
    """
    from tokenizers import pre_tokenizers

    if pre in _DIGIT_SPLITTING_PRE:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        return
    current = tokenizer.backend_tokenizer.pre_tokenizer
    looks_like_gpt2 = isinstance(current, pre_tokenizers.ByteLevel)
    if looks_like_gpt2 and pre not in _PLAIN_PRE:
        warnings.warn(
            f"the GGUF file's pre-tokenizer {pre!r} is not known here, so text is split as GPT-2 does it and some "
            "token ids may differ from the model's own: prefer the model's tokenizer.json",
            stacklevel=2,
        )
