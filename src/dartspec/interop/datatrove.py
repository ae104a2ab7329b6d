"""A step for datatrove pipelines that counts n-grams; readers, filters and executors (local, Slurm, Ray) are its own.

Each task writes one shard, `00000.grams` and so on; `dartspec ngram merge FOLDER --tokenizer M --out FILE` joins them
to an index, the same one that a single build of all texts would have given. A task that is run again replaces its
shard. Needs the extra `dartspec[corpus]`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datatrove.pipeline.base import PipelineStep

from dartspec.ngram.build import SHARD_SUFFIX, Tokens, count_shard, parse_bytes

if TYPE_CHECKING:
    from dartspec.text import Text

_BATCH_CHARS = 1_000_000


class CountGrams(PipelineStep):  # type: ignore[misc]  # datatrove is untyped
    """Tokenises the documents of a task and counts their grams. The last step: it passes nothing on.

    out:       folder of the shards, on a disk that the joining machine sees.
    tokenizer: folder, hub id, of the target's tokenizer.
    order:     longest gram. memory: of sort buffers, beside the tokenizer's.
    """

    name = "n-grams for dartspec"
    type = "COUNT"

    def __init__(self, out: str, tokenizer: str, *, order: int = 3, memory: str = "512M") -> None:
        super().__init__()
        self.out, self.tokenizer, self.order, self.memory = out, tokenizer, order, memory

    def run(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> None:
        from dartspec.text import Text, load_tokenizer

        text = Text(load_tokenizer(self.tokenizer))
        Path(self.out).mkdir(parents=True, exist_ok=True)
        shard = Path(self.out) / f"{rank:05d}{SHARD_SUFFIX}"
        with self.track_time(unit="task"):
            num_tokens = count_shard(
                self._ids(data, text),
                shard,
                tokens=tokens_of(text),
                order=self.order,
                memory=parse_bytes(self.memory),
            )
        self.stat_update("tokens", value=num_tokens, unit="task")

    def _ids(self, data: Iterable[Any], text: Text) -> Iterator[Sequence[int]]:
        waiting: list[str] = []
        num_chars, encode_s = 0, 0.0
        for document in data:
            waiting.append(document.text)
            num_chars += len(document.text)
            if num_chars >= _BATCH_CHARS:
                began = time.perf_counter()
                encoded = text.encode_all(waiting)
                encode_s += time.perf_counter() - began
                yield from encoded
                waiting, num_chars = [], 0
        yield from text.encode_all(waiting)
        self.stat_update("encode_ms", value=int(1000 * encode_s), unit="task")


def tokens_of(text: Text, name: str = "") -> Tokens:
    """Whose ids a text's tokenizer makes, for joining shards."""
    return Tokens(text.num_tokens, text.fingerprint, name, text.special_ids)
