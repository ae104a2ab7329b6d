"""Training text as token ids: read, check, cut where it loops, split, and say which positions carry loss.

Knows ids only: no tokenizer, no model. One JSON object a line, in one of two forms; other keys are ignored:

- `{"ids": [ids], "answers": [[start, end], ...]}`: a conversation of any number of turns, and which of its tokens the
  assistant wrote (`end` is the first token after the answer);
- `{"prompt": [ids], "response": [ids]}`: one answered prompt. `prompt` ends with the generation prompt of the chat
  template, `response` with the end-of-text id where it was reached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dartspec.accounting import loop_start
from dartspec.errors import DartspecError
from dartspec.files import write_json


@dataclass(frozen=True)
class Example:
    """One conversation. answers: [start, end) of each stretch of ids that carries loss; ascending, apart, not empty."""

    ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]

    @classmethod
    def answered(cls, ids: Sequence[int], num_prompt: int) -> Example:
        """One prompt with its answer: all that follows the first `num_prompt` ids."""
        return cls(tuple(ids), ((num_prompt, len(ids)),))

    @property
    def num_prompt(self) -> int:
        """Tokens before the first answer: up to the last of them no teacher is read."""
        return self.answers[0][0]

    @property
    def num_response(self) -> int:
        return sum(end - start for start, end in self.answers)

    def is_answer(self) -> Tensor:
        """(T,) bool"""
        mask = torch.zeros(len(self.ids), dtype=torch.bool)
        for start, end in self.answers:
            mask[start:end] = True
        return mask

    def answer_ids(self) -> Iterator[int]:
        for start, end in self.answers:
            yield from self.ids[start:end]

    def cut(self, length: int) -> Example | None:
        """The first `length` tokens. None where nothing is left to learn: fewer than two answer tokens, or none that
        has two tokens before it (one row knows the first two)."""
        spans = tuple((start, min(end, length)) for start, end in self.answers if start < length)
        if sum(end - start for start, end in spans) < 2 or spans[-1][1] < 3:
            return None
        return self if length >= len(self.ids) else Example(self.ids[:length], spans)

    def first_loop(self) -> int | None:
        """Where the first answer that loops does so: what follows, later turns too, was written after it."""
        for start, end in self.answers:
            if (at := loop_start(self.ids[start:end])) is not None:
                return start + at
        return None


_FORMS = 'each line is {"ids": [ids], "answers": [[start, end], ...]} or {"prompt": [ids], "response": [ids]}'


def _ids_of(record: object, key: str, where: str) -> list[int]:
    ids = record.get(key) if isinstance(record, dict) else None
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise DartspecError(
            f'{where}: "{key}" must be a list of token ids (non-negative integers), found {type(ids).__name__}; '
            f"{_FORMS}; conversations become such by dartspec data prepare"
        )
    return ids


def _spans_of(value: object, length: int, where: str) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for span in value if isinstance(value, list) else [None]:
        match span:
            case [int(start), int(end)] if (spans[-1][1] if spans else 0) <= start < end <= length:
                spans.append((start, end))
            case _:
                raise DartspecError(
                    f'{where}: "answers" must be [start, end] pairs, ascending, apart, within the {length} ids and not '
                    f"empty, found {span if isinstance(value, list) else type(value).__name__}; {_FORMS}"
                )
    if not spans:
        raise DartspecError(f'{where}: "answers" is empty, so no token would carry loss; {_FORMS}')
    return tuple(spans)


def parse_example(line: str, where: str, vocab_size: int) -> Example | None:
    """One line of a data file, whole. None for a response of no tokens. Raises DartspecError, saying `where`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DartspecError(f"{where}: not a JSON object ({error})") from None
    if isinstance(record, dict) and "ids" in record:
        ids = _ids_of(record, "ids", where)
        example = Example(tuple(ids), _spans_of(record.get("answers"), len(ids), where))
    else:
        prompt, response = _ids_of(record, "prompt", where), _ids_of(record, "response", where)
        if not prompt:
            raise DartspecError(f"{where}: the prompt is empty; a chat template always writes a token")
        example = Example.answered((*prompt, *response), len(prompt))
    highest = max(example.ids)
    if highest >= vocab_size:
        raise DartspecError(
            f"{where}: token id {highest}, but the target has {vocab_size} ids; "
            "tokenize the text with the target's own tokenizer"
        )
    return example if example.num_response else None


def read_examples(paths: Sequence[Path], *, max_tokens: int, vocab_size: int, cut_loops: bool = True) -> list[Example]:
    """All conversations of the files, in file order, each cut to `max_tokens` and, where an answer loops, before its
    first loop.

    Those with nothing left to learn (`Example.cut`) are dropped. An id at or beyond `vocab_size` is refused: it was
    written by another tokenizer.
    """
    examples: list[Example] = []
    for path in paths:
        if not path.is_file():
            raise DartspecError(f"{path}: no such file; give a JSONL file of token ids")
        with path.open(encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                if not line.isascii() and any("\ud800" <= c <= "\udfff" for c in line):
                    raise DartspecError(f"{path}, line {number}: not UTF-8 text; give a JSONL file of token ids")
                example = parse_example(line, f"{path}, line {number}", vocab_size)
                if example is None:
                    continue
                loop = example.first_loop() if cut_loops else None
                if (kept := example.cut(max_tokens if loop is None else min(loop, max_tokens))) is not None:
                    examples.append(kept)
    if not examples:
        raise DartspecError(f"no usable answer in {', '.join(map(str, paths))}")
    return examples


INFO_FORMAT = 1


@dataclass(frozen=True)
class FileInfo:
    """What a file of token ids was made with and what was left out; kept beside it as FILE.info.json.

    made_by: prepare or regenerate. template_hash: of the chat template, None for plain text. template_arguments: what
    it was given (thinking or not). answering: temperatures and longest answer, of `regenerate`. mask: how answers were
    found. counts, dropped (by reason) and not_rendered (parts of conversations that the template did not write) are for
    people.
    """

    made_by: str
    tokenizer_fingerprint: str
    template_hash: str | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    answering: dict[str, Any] = field(default_factory=dict)
    target: str = ""
    sources: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    not_rendered: dict[str, int] = field(default_factory=dict)
    mask: str = ""
    made_at: str = ""
    format: int = INFO_FORMAT

    @staticmethod
    def path_of(data: Path) -> Path:
        return data.with_name(data.name + ".info.json")

    def write(self, data: Path) -> None:
        """Beside the data file, aside and renamed."""
        write_json(self.path_of(data), asdict(self))

    @classmethod
    def read(cls, data: Path) -> FileInfo | None:
        """None where the file has none: it was made elsewhere."""
        path = cls.path_of(data)
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict) or values.get("format") != INFO_FORMAT:
                raise DartspecError(f"{path}: format {INFO_FORMAT} was expected; prepare the data again")
            return cls(**{**values, "sources": tuple(values.get("sources", ()))})
        except (ValueError, TypeError) as error:
            raise DartspecError(f"{path} is not an info file ({error}); prepare the data again") from None


def check_infos(paths: Sequence[Path], fingerprint: str | None) -> dict[str, Any]:
    """What the files' info says of the template they were rendered with: `template_hash` and `template_arguments`, for
    a checkpoint's provenance; empty where no file has an info file.

    Raises DartspecError where a file was made for another tokenizer, or the files' templates differ (case 24).
    """
    known: dict[str, Any] = {}
    first = None
    for path in paths:
        info = FileInfo.read(path)
        if info is None:
            continue
        if fingerprint is not None and info.tokenizer_fingerprint != fingerprint:
            raise DartspecError(
                f"{path} was made for tokenizer {info.tokenizer_fingerprint}, the target uses {fingerprint}: make it "
                "again with `dartspec data prepare` for this target"
            )
        if info.template_hash is None:
            continue
        said = {"template_hash": info.template_hash, "template_arguments": info.template_arguments}
        if first is not None and said != known:
            raise DartspecError(
                f"{path} was rendered with template {said['template_hash']} and {said['template_arguments']}, {first} "
                f"with {known['template_hash']} and {known['template_arguments']}: train on one of them"
            )
        known, first = said, path
    return known


def split_examples(examples: Sequence[Example], held_out: float) -> tuple[list[Example], list[Example]]:
    """(training, held-out): the last `held_out` share of the answers is never trained on; at least one is held out."""
    n = min(len(examples) - 1, max(1, round(len(examples) * held_out)))
    if n < 1:
        raise DartspecError(f"{len(examples)} answers are too few: one must be held out and one trained on")
    return list(examples[:-n]), list(examples[-n:])


def loss_mask(example: Example, d: int) -> Tensor:
    """(T - 1, d) bool: may row j at offset t (column t - 1) carry loss?

    Row j holds the features of token j and the embedding of token j + 1; offset t predicts token j + 1 + t, and the
    teacher is the target's own logits at j + t (method, section 3). Loss is on answers only: token j + 1 + t must lie
    in one. The first token of an answer at `start` is predicted by row `start - 2`, whose known token is the last
    before it: the mask shifts with the inputs, so that this row is trained (case 23).
    """
    num_rows = len(example.ids) - 1
    beyond = torch.cat([example.is_answer(), torch.zeros(d, dtype=torch.bool)])
    return beyond.unfold(0, d, 1)[2 : 2 + num_rows] if num_rows > 0 else torch.zeros(0, d, dtype=torch.bool)


@dataclass(frozen=True)
class DraftVocabulary:
    """The target ids that the drafter may propose, ascending. coverage: their share of the counted tokens."""

    ids: Tensor  # (n,) int64
    coverage: float

    @property
    def d2t(self) -> Tensor:
        """(n,) int64: target id = draft id + d2t[draft id], as the official checkpoints store it."""
        return self.ids - torch.arange(len(self.ids))


def choose_vocabulary(
    examples: Iterable[Example], size: int, vocab_size: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """The `size` most frequent response tokens, `always` (the end-of-text ids) among them.

    When the answers use fewer than `size` different tokens, the most frequent ids of the prompts fill up, then the
    lowest unused ids (most byte-pair vocabularies list frequent pieces first; Gemma's begins with 6,000 that no text
    has). Ties go to the lower id, so the choice is a function of the data.
    """
    if not 0 < size <= vocab_size:
        raise DartspecError(f"draft vocabulary of {size} ids: must be between 1 and the target's {vocab_size}")
    rank, around = np.zeros(vocab_size, dtype=np.int64), np.zeros(vocab_size, dtype=np.int64)
    for e in examples:
        np.add.at(rank, list(e.answer_ids()), 1)
        np.add.at(around, list(e.ids), 1)
    total = int(rank.sum())
    forced = [i for i in always if 0 <= i < vocab_size]
    weight = rank.copy()
    weight[forced] += total + 1
    order = np.lexsort((np.arange(vocab_size), -around, -weight))[:size]
    ids = np.sort(order)
    return DraftVocabulary(torch.from_numpy(ids), float(rank[ids].sum()) / max(1, total))


def digest(examples: Sequence[Example]) -> str:
    """Short fingerprint of the examples in their order: what a cache of their states was made from."""
    h = hashlib.sha256()
    for e in examples:
        spans = [e.num_prompt]
        if len(e.answers) > 1 or e.answers[0][1] < len(e.ids):  # other than one answer at the end
            spans = [-len(e.answers), *(i for span in e.answers for i in span)]
        h.update(np.asarray([*spans, len(e.ids), *e.ids], dtype="<i8").tobytes())
    return h.hexdigest()[:16]
