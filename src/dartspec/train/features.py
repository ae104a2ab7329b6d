"""What training needs of the frozen target, per token: taps, final normed state, log-normaliser of its logits.

Online (a forward whenever sequences are drawn) or from shards on disk that are written once: with several epochs the
target's forward is most of the cost of training. A shard holds the token ids too, and they are compared whenever it is
read. Its size is said before anything is written (case 26); what was half written is gone, what is whole is used.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dartspec.errors import DartspecError
from dartspec.files import write_json, written_aside
from dartspec.train.data import Example, digest

SHARD_BYTES = 64 << 20  # of a shard, at least: what a kill may cost
MOST_SHARDS = 512  # beyond them shards are larger, for each stays open
FORWARD_TOKENS = 2048  # of sequences that a shard's states are computed for at once


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

    def to(self, device: torch.device) -> States:
        return States(*(t.to(device) for t in self))


class StateSource(Protocol):
    """A frozen target, as training sees it."""

    def many(self, examples: Sequence[Example]) -> list[States]:
        """No gradient; on the target's device."""
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
    def bytes_a_token(self) -> int:
        """States in bfloat16, log-normaliser in float32, id in int32."""
        return (len(self.taps) + 1) * self.hidden_size * 2 + 8

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.bytes_a_token


def cache_info(examples: Sequence[Example], target: str, taps: Sequence[int], hidden_size: int) -> CacheInfo:
    return CacheInfo(
        2, target, tuple(taps), hidden_size, len(examples), sum(len(e.ids) for e in examples), digest(examples)
    )


class StateCache:
    """Target states on disk, in the order of the examples.

    Files: `cache.json` (identity), `states-00000.safetensors` and so on: `ids` (n,) int32, `states` (n, n_taps + 1, H)
    bfloat16, the final state last, and `log_norm` (n,) float32, of the n tokens of some examples end to end. Which
    examples a shard holds follows from their lengths.
    """

    def __init__(
        self, folder: Path, info: CacheInfo, examples: Sequence[Example], *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder, self.info, self.examples = folder, info, examples
        self._spans: list[tuple[int, int]] = []  # examples [begin, end) of each shard
        self._place: list[tuple[int, int]] = []  # shard of each example, and its first token there
        most = max(shard_bytes, info.num_bytes // MOST_SHARDS) // info.bytes_a_token
        begin = tokens = 0
        for i, e in enumerate(examples):
            if tokens and tokens + len(e.ids) > most:
                self._spans.append((begin, i))
                begin, tokens = i, 0
            self._place.append((len(self._spans), tokens))
            tokens += len(e.ids)
        self._spans.append((begin, len(examples)))
        self._open: dict[int, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._check_or_write_info()

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
        free = shutil.disk_usage(self.folder).free
        missing = self.info.num_bytes - sum(p.stat().st_size for p in self.folder.glob("states-*.safetensors"))
        if missing > free:
            raise DartspecError(
                f"state cache {self.folder} needs {missing / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
                "train online (no cache) or on fewer answers"
            )
        if not path.exists():
            write_json(path, asdict(self.info))

    def _path(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05}.safetensors"

    def read(self, index: int) -> States:
        """States of `examples[index]`, on the CPU. Refused where its shard holds other tokens."""
        shard, start = self._place[index]
        ids = torch.tensor(self.examples[index].ids, dtype=torch.int32)
        opened = self._open.get(shard) or self._opened(shard)
        span = slice(start, start + len(ids))
        if not torch.equal(opened.get_slice("ids")[span], ids):
            raise DartspecError(
                f"{self._path(shard)} holds other tokens than answer {index} of the data: delete it, it is made again"
            )
        states = opened.get_slice("states")[span]
        return States(states[:, :-1], states[:, -1], opened.get_slice("log_norm")[span])

    def _opened(self, shard: int) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self._path(shard)
        try:
            opened: Any = safe_open(path, "pt")
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DartspecError(
                f"{path} is not a whole shard of states ({error}): delete it, it is made again"
            ) from None
        begin, end = self._spans[shard]
        n = sum(len(e.ids) for e in self.examples[begin:end])
        wanted = {"ids": [n], "states": [n, len(self.info.taps) + 1, self.info.hidden_size], "log_norm": [n]}
        if shapes != wanted:
            raise DartspecError(f"{path} holds {shapes}, expected {wanted}: delete it, it is made again")
        self._open[shard] = opened
        return opened

    def fill(
        self,
        source: StateSource,
        report: Callable[[str], None] = print,
        *,
        part: tuple[int, int] = (0, 1),
        report_every_s: float = 30.0,
    ) -> None:
        """Compute what is missing, shard by shard; a killed run loses the one it was at.

        part: (i, n), every n-th shard from the i-th on: n processes fill it together.
        """
        from safetensors.torch import save_file

        clock, tokens, done = time.monotonic(), 0, 0
        missing = [s for s in range(part[0], len(self._spans), part[1]) if not self._path(s).exists()]
        total = sum(len(e.ids) for s in missing for e in self.examples[slice(*self._spans[s])])
        for shard in missing:
            examples = self.examples[slice(*self._spans[shard])]
            found: list[States] = []
            for group in grouped([len(e.ids) for e in examples], FORWARD_TOKENS):
                found += [s.to(torch.device("cpu")) for s in source.many(examples[group])]
                tokens += sum(len(e.ids) for e in examples[group])
                done += sum(len(e.ids) for e in examples[group])
                now = time.monotonic()
                if now - clock > report_every_s or done == total:
                    rate = tokens / max(1e-9, now - clock)
                    left = (total - done) / rate
                    report(f"states: {done:,} of {total:,} tokens, {rate:.0f} tokens/s, {left / 60:.0f} minutes left")
                    clock, tokens = now, 0
            states = torch.cat([torch.cat((s.features, s.final[:, None]), dim=1) for s in found])
            tensors = {
                "ids": torch.tensor([i for e in examples for i in e.ids], dtype=torch.int32),
                "states": states.to(torch.bfloat16),
                "log_norm": torch.cat([s.log_norm for s in found]),
            }
            with written_aside(self._path(shard)) as aside:
                save_file(tensors, aside)


def grouped(lengths: Sequence[int], most: int) -> list[slice]:
    """Neighbours together as long as their lengths sum to at most `most`; longer ones alone."""
    groups, begin, total = [], 0, 0
    for i, n in enumerate(lengths):
        if total and total + n > most:
            groups.append(slice(begin, i))
            begin, total = i, 0
        total += n
    return [*groups, slice(begin, len(lengths))] if lengths else []


def log_normaliser(logits: Tensor) -> Tensor:
    """(n, V) logits -> (n,) float32 log-sum-exp."""
    return torch.logsumexp(logits.float(), dim=-1)
