"""Everything that a training run depends on, in one frozen record that is saved beside its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dartspec.errors import DartspecError


@dataclass(frozen=True)
class TrainConfig:
    """target: folder or hub id of the model to train a drafter for.

    method: the drafter's, by its module's name. options: that method's own settings.

    data:   JSONL files of token ids, answers of that very target (train/data.py).
    out:    folder of the run: `latest/` (a loadable drafter), `state.pt` (resume), `log.jsonl`, `train.json`.
    cache:  folder for the target's states, written once; empty = one forward of the target whenever it is needed.
    init:   folder of a drafter to start from (more data, another draft vocabulary); empty = the target's own weights.
    taps:   hidden states wanted; empty = the method's own choice.
    cache_taps: states that are kept besides the last; empty = the method's taps. More let methods share one cache.
    d:      positions that are predicted.
    steps:  updates in the whole run; the cosine ends there. May be raised when a run is resumed.
    sequences_per_step: answers an update.
    num_first, num_anchors: rows a sequence whose offset 1 is trained, and rows that a group of masks follows.
    """

    target: str
    data: tuple[str, ...]
    out: str
    method: str = "dart"
    options: dict[str, Any] = field(default_factory=dict)
    target_name: str = ""
    cache: str = ""
    init: str = ""
    taps: tuple[int, ...] = ()
    cache_taps: tuple[int, ...] = ()
    d: int = 8
    draft_vocab_size: int = 12288
    intermediate_size: int = 0
    gamma: float = 0.6
    max_tokens: int = 2048
    held_out: float = 0.02
    steps: int = 20000
    sequences_per_step: int = 2
    num_first: int = 96
    num_anchors: int = 16
    learning_rate: float = 1e-3
    final_learning_rate: float = 2e-5
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 0.5
    bf16: bool = True
    seed: int = 0
    threads: int = 1
    chunk_rows: int = 256
    save_every_s: float = 180.0
    log_every: int = 50
    eval_every: int = 1000
    eval_stride: int = 4

    def __post_init__(self) -> None:
        for name in ("data", "taps", "cache_taps", "betas"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "method", str(self.method).replace("-", "_"))
        if not self.target or not self.data or not self.out:
            raise DartspecError("training needs a target, at least one data file and an output folder")
        checks = {
            "options": isinstance(self.options, dict),
            "d": self.d >= 2,
            "draft_vocab_size": self.draft_vocab_size >= 2,
            "gamma": 0 < self.gamma <= 1,
            "max_tokens": self.max_tokens >= 4,
            "held_out": 0 < self.held_out < 1,
            "steps": self.steps >= 1,
            "sequences_per_step": self.sequences_per_step >= 1,
            "num_first": self.num_first >= 1,
            "num_anchors": self.num_anchors >= 1,
            "learning_rate": self.learning_rate > 0,
            "final_learning_rate": 0 <= self.final_learning_rate <= self.learning_rate,
            "warmup_steps": self.warmup_steps >= 0,
            "clip": self.clip > 0,
            "threads": self.threads >= 1,
            "chunk_rows": self.chunk_rows >= 1,
            "log_every": self.log_every >= 1,
            "eval_every": self.eval_every >= 1,
            "eval_stride": self.eval_stride >= 1,
        }
        for name, good in checks.items():
            if not good:
                raise DartspecError(f"training config: {name} = {getattr(self, name)!r} is out of range")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise DartspecError(f"training config: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
        try:
            return cls(**values)
        except TypeError as error:
            raise DartspecError(f"training config: {error}") from None

    @classmethod
    def from_json(cls, path: Path) -> TrainConfig:
        if not path.is_file():
            raise DartspecError(f"{path}: no such training config")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise DartspecError(f"{path}: not JSON ({error})") from None
        if not isinstance(values, dict):
            raise DartspecError(f"{path}: a JSON object was expected, found {type(values).__name__}")
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Keys that may differ when a run is resumed: none of them changes what an update computes, but for `steps`, which
# stretches what is left of the cosine.
RESUMABLE = frozenset(
    {
        "steps",
        "out",
        "cache",
        "cache_taps",
        "threads",
        "save_every_s",
        "log_every",
        "eval_every",
        "target",
        "target_name",
        "data",
    }
)
