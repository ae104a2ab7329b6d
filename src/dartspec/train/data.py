"""Training text as token ids: read, check, cut where it loops, split, and say which positions carry loss.

Knows ids only: no tokenizer, no model. One JSON object a line: `{"prompt": [ids], "response": [ids]}`; other keys are
ignored. `prompt` ends with the generation prompt of the chat template, `response` with the end-of-text id where it was
reached.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dartspec.accounting import loop_start
from dartspec.errors import DartspecError


@dataclass(frozen=True)
class Example:
    """One answered prompt. ids: prompt then response; `num_prompt` of them are prompt."""

    ids: tuple[int, ...]
    num_prompt: int

    @property
    def num_response(self) -> int:
        return len(self.ids) - self.num_prompt


def _ids_of(record: object, key: str, where: str) -> list[int]:
    ids = record.get(key) if isinstance(record, dict) else None
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise DartspecError(
            f'{where}: "{key}" must be a list of token ids (non-negative integers), found {type(ids).__name__}; '
            'each line is {"prompt": [ids], "response": [ids]}'
        )
    return ids


def read_examples(paths: Sequence[Path], *, max_tokens: int, vocab_size: int, cut_loops: bool = True) -> list[Example]:
    """All answers of the files, in file order, each cut to `max_tokens` and, where it loops, before its first loop.

    Answers with nothing left (fewer than two response tokens, so that no position has both a known token and a
    teacher) are dropped. An id at or beyond `vocab_size` is refused: it was written by another tokenizer.
    """
    examples: list[Example] = []
    for path in paths:
        if not path.is_file():
            raise DartspecError(f"{path}: no such file; give a JSONL file of token ids")
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}, line {number}"
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DartspecError(f"{where}: not a JSON object ({error})") from None
                prompt, response = _ids_of(record, "prompt", where), _ids_of(record, "response", where)
                if not prompt:
                    raise DartspecError(f"{where}: the prompt is empty; a chat template always writes a token")
                highest = max(max(prompt), max(response, default=0))
                if highest >= vocab_size:
                    raise DartspecError(
                        f"{where}: token id {highest}, but the target has {vocab_size} ids; "
                        "tokenize the text with the target's own tokenizer"
                    )
                if cut_loops and (start := loop_start(response)) is not None:
                    response = response[:start]
                ids = (prompt + response)[:max_tokens]
                if len(ids) - len(prompt) >= 2:
                    examples.append(Example(tuple(ids), len(prompt)))
    if not examples:
        raise DartspecError(f"no usable answer in {', '.join(map(str, paths))}")
    return examples


def split_examples(examples: Sequence[Example], held_out: float) -> tuple[list[Example], list[Example]]:
    """(training, held-out): the last `held_out` share of the answers is never trained on; at least one is held out."""
    n = min(len(examples) - 1, max(1, round(len(examples) * held_out)))
    if n < 1:
        raise DartspecError(f"{len(examples)} answers are too few: one must be held out and one trained on")
    return list(examples[:-n]), list(examples[-n:])


def loss_mask(num_tokens: int, num_prompt: int, d: int) -> Tensor:
    """(num_tokens - 1, d) bool: may row j at offset t (column t - 1) carry loss?

    Row j holds the features of token j and the embedding of token j + 1; offset t predicts token j + 1 + t, and the
    teacher is the target's own logits at j + t (method, section 3). Loss is on answers only: token j + 1 + t must lie
    in the response. The first response token itself is predicted by row `num_prompt - 2`, whose known token is the
    last of the prompt: the mask shifts with the inputs, so that this row is trained (case 23).
    """
    predicted = torch.arange(num_tokens - 1)[:, None] + 1 + torch.arange(1, d + 1)[None, :]
    return (predicted >= num_prompt) & (predicted < num_tokens)


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

    When the answers use fewer than `size` different tokens, the lowest unused ids fill up (a byte-pair vocabulary
    lists frequent pieces first). Ties go to the lower id, so the choice is a function of the data.
    """
    if not 0 < size <= vocab_size:
        raise DartspecError(f"draft vocabulary of {size} ids: must be between 1 and the target's {vocab_size}")
    counts = Counter(i for e in examples for i in e.ids[e.num_prompt :])
    rank = np.zeros(vocab_size, dtype=np.int64)
    for token, count in counts.items():
        rank[token] = count
    total = int(rank.sum())
    forced = [i for i in always if 0 <= i < vocab_size]
    weight = rank.copy()
    weight[forced] += total + 1
    order = np.lexsort((np.arange(vocab_size), -weight))[:size]
    ids = np.sort(order)
    return DraftVocabulary(torch.from_numpy(ids), float(rank[ids].sum()) / max(1, total))


def digest(examples: Sequence[Example]) -> str:
    """Short fingerprint of the examples in their order: what a cache of their states was made from."""
    h = hashlib.sha256()
    for e in examples:
        h.update(np.asarray([e.num_prompt, len(e.ids), *e.ids], dtype="<i8").tobytes())
    return h.hexdigest()[:16]
