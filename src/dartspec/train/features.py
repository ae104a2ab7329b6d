"""What training needs of the frozen target, per token: taps, final normed state, log-normaliser of its logits.

Online (one forward whenever a sequence is drawn) or from a cache file that is written once and mapped: with several
epochs the target's forward is most of the cost of training. The cache resumes where it stopped, may be read while it
is still being written, and says its size before anything is written (case 26).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dartspec.errors import DartspecError
from dartspec.train.data import Example, digest


class States(NamedTuple):
    """The target's view of one sequence of T tokens.

    features: (T, n_taps, H) hidden states at the taps.
    final:    (T, H) last hidden state, final norm applied: `lm_head(final)` are the logits.
    log_norm: (T,) float32, log-sum-exp of the logits over the whole vocabulary; 0 where no teacher is read
              (before the last prompt position).
    """

    features: Tensor
    final: Tensor
    log_norm: Tensor


class StateSource(Protocol):
    """A frozen target, as training sees it."""

    def states(self, example: Example) -> States:
        """One forward over the example, no gradient."""
        ...


@dataclass(frozen=True)
class CacheInfo:
    """Identity of a cache: what it was computed from. Compared field by field when it is opened."""

    format: int
    target: str
    taps: tuple[int, ...]
    hidden_size: int
    num_examples: int
    num_tokens: int
    data_digest: str

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * ((len(self.taps) + 1) * self.hidden_size * 2 + 4)


def cache_info(examples: Sequence[Example], target: str, taps: Sequence[int], hidden_size: int) -> CacheInfo:
    return CacheInfo(
        1, target, tuple(taps), hidden_size, len(examples), sum(len(e.ids) for e in examples), digest(examples)
    )


class StateCache:
    """Target states in bfloat16 on disk, in the order of the examples.

    Files: `cache.json` (identity), `states.bin` (num_tokens, n_taps + 1, H) bfloat16, `log_norm.bin` (num_tokens,)
    float32, `progress.json` (examples finished).
    """

    def __init__(self, folder: Path, info: CacheInfo, examples: Sequence[Example]) -> None:
        self.folder, self.info, self.examples = folder, info, examples
        self.offsets = [0]
        for e in examples:
            self.offsets.append(self.offsets[-1] + len(e.ids))
        width = (len(info.taps) + 1) * info.hidden_size
        folder.mkdir(parents=True, exist_ok=True)
        self._check_or_write_info()
        self._states = torch.from_file(
            str(folder / "states.bin"), shared=True, size=info.num_tokens * width, dtype=torch.bfloat16
        ).view(info.num_tokens, len(info.taps) + 1, info.hidden_size)
        self._log_norm = torch.from_file(
            str(folder / "log_norm.bin"), shared=True, size=info.num_tokens, dtype=torch.float32
        )

    def _check_or_write_info(self) -> None:
        path = self.folder / "cache.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            for key, want in json.loads(json.dumps(asdict(self.info))).items():
                if found.get(key) != want:
                    raise DartspecError(
                        f"state cache {self.folder}: {key} is {found.get(key)!r}, this run needs {want!r}; "
                        "give another folder or delete it"
                    )
            return
        free = shutil.disk_usage(self.folder).free
        if self.info.num_bytes > free:
            raise DartspecError(
                f"state cache {self.folder} needs {self.info.num_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
                "train online (no cache) or on fewer answers"
            )
        write_json(path, asdict(self.info))

    @property
    def num_ready(self) -> int:
        """Examples whose states are on disk: always a prefix of the list."""
        path = self.folder / "progress.json"
        return int(json.loads(path.read_text(encoding="utf-8"))["num_ready"]) if path.exists() else 0

    def read(self, index: int) -> States:
        """States of `examples[index]`, which must be below `num_ready`; views of the mapped file."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return States(self._states[span, :-1], self._states[span, -1], self._log_norm[span])

    def fill(self, source: StateSource, report: Callable[[str], None] = print, *, report_every_s: float = 30.0) -> None:
        """Compute what is missing. Progress is recorded every few seconds, so a killed run loses little."""
        start = begin = self.num_ready
        clock = last = time.monotonic()
        for index in range(begin, len(self.examples)):
            states = source.states(self.examples[index])
            span = slice(self.offsets[index], self.offsets[index + 1])
            self._states[span, :-1] = states.features
            self._states[span, -1] = states.final
            self._log_norm[span] = states.log_norm
            now = time.monotonic()
            if now - last > report_every_s / 6 or index + 1 == len(self.examples):
                write_json(self.folder / "progress.json", {"num_ready": index + 1})
                last = now
                if now - clock > report_every_s or index + 1 == len(self.examples):
                    tokens = self.offsets[index + 1] - self.offsets[start]
                    done = f"{index + 1}/{len(self.examples)} answers"
                    report(f"states: {done}, {tokens / (now - clock):.0f} tokens/s")
                    clock, start = now, index + 1


def write_json(path: Path, value: object) -> None:
    """Written aside and renamed."""
    aside = path.with_suffix(path.suffix + ".tmp")
    aside.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(aside, path)


def log_normaliser(logits: Tensor) -> Tensor:
    """(n, V) logits -> (n,) float32 log-sum-exp."""
    return torch.logsumexp(logits.float(), dim=-1)
