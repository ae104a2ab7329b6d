"""`--dry-run`: three real updates, and what they say of the whole run: memory, rate, hours, disk. Writes nothing.

The first update is one of the longest sequences, for the memory; the other two, as the run would draw them, are timed.
How the memory changes with a setting is arithmetic (`Shape.activations`), scaled to what the update really took.
"""

from __future__ import annotations

import math
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dartspec.target.load import free_memory
from dartspec.train.config import TrainConfig
from dartspec.train.evaluate import prepare_held_out
from dartspec.train.features import States
from dartspec.train.loop import Trainer
from dartspec.train.watch import duration

if TYPE_CHECKING:
    from dartspec.train.run import Prepared, TargetStates

LEAST_LENGTH, LEAST_VOCABULARY = 64, 256  # below them nothing worth having is trained
FIRST_USE = 64_000_000  # bytes, at most, that torch's kernels take when they first run, whatever the sizes
MARGIN = 1.1  # what is named as fitting is on the safe side by this much


@dataclass(frozen=True)
class Shape:
    """What decides the memory of an update, apart from the target's weights and the program.

    length: tokens of the longest sequence. first, anchors: rows of it that predict offset 1, and that masks follow.
    vocabulary: draft ids. batch: sequences a forward. weights: those of the drafter that have no row an id; head_rows:
    numbers an id has. bytes: of a number of the target's states.
    """

    length: int
    first: int
    anchors: int
    vocabulary: int
    batch: int
    d: int
    hidden: int
    taps: int
    intermediate: int
    heads: int
    weights: int
    head_rows: int
    chunk_rows: int
    chunk_vocabulary: int
    target_vocabulary: int
    target_intermediate: int
    cache_position: int
    bytes: int
    ema: bool
    recompute: bool = False

    @property
    def num_weights(self) -> int:
        return self.weights + self.head_rows * self.vocabulary

    @property
    def lasting(self) -> int:
        """Bytes between two updates: float32 weights, AdamW's two moments, a running mean; the teacher's head; a copy
        in bfloat16, and one packed, while M is measured."""
        return self.num_weights * (4 + 8 + 4 * self.ema + 4) + self.vocabulary * self.hidden * 4

    @property
    def activations(self) -> int:
        """Bytes that an update takes for a while, roughly; what a measurement scales."""
        rows = self.batch * (self.first + self.anchors * (self.d - 1))
        tokens = self.batch * self.length
        states = tokens * (self.taps + 1) * self.hidden * (self.bytes + 4)
        inputs = tokens * (self.taps + 4) * self.hidden * 4
        layer = rows * (6 * self.hidden + 4 * self.intermediate) * 4
        # blocks of rows see half of the keys on average; their weights are kept twice, or of one block at a time
        scores = self.heads * (min(rows, 128) if self.recompute else rows) * self.length * 4
        ids = min(self.vocabulary, self.chunk_vocabulary or self.vocabulary)
        loss = 5 * min(rows, self.chunk_rows) * ids * 4 + self.vocabulary * self.hidden * 8
        gradients = self.num_weights * 4
        forward = self.length * (self.cache_position + (8 * self.hidden + 3 * self.target_intermediate) * self.bytes)
        forward += self.length**2 * 5 + 64 * self.target_vocabulary * (self.bytes + 4)
        return states + max(forward, inputs + layer + scores + loss + gradients)


@dataclass(frozen=True)
class Forecast:
    """Bytes: `base` of the program and the target, `lasting` between updates, `activations` within one (measured),
    `held` of held-out states. `limit` is what all of it may come to. seconds: of a token's target forward, and of the
    rest; disk: bytes that the run leaves, cache apart."""

    base: int
    lasting: int
    activations: int
    held: int
    limit: int | None
    forward_s: float
    rest_s: float
    disk: int

    @property
    def peak(self) -> int:
        return self.base + self.lasting + self.activations + self.held

    @property
    def fits(self) -> bool:
        return self.limit is None or self.peak <= self.limit


def shape_of(config: TrainConfig, ready: Prepared, source: TargetStates) -> Shape:
    net, target = ready.net, source.target
    longest = max(len(e.ids) for e in (*ready.training, *ready.held))
    by_row = sum(p[0].numel() for n, p in net.named_parameters() if n in net.by_vocabulary)
    size = net.config.draft_vocab_size
    share = config.prefix_share
    return Shape(
        length=longest,
        first=math.ceil(share * longest) if share else min(config.num_first, longest),
        anchors=math.ceil(share * longest) if share else min(config.num_anchors, longest),
        vocabulary=size,
        batch=config.sequences_per_batch or config.sequences_per_step,
        d=net.config.d,
        hidden=target.hidden_size,
        taps=len(net.config.taps),
        intermediate=int(getattr(net.config, "intermediate_size", target.hidden_size)),
        heads=int(getattr(net.config, "num_attention_heads", 1)),
        weights=sum(p.numel() for p in net.parameters()) - by_row * size,
        head_rows=by_row,
        chunk_rows=config.chunk_rows,
        chunk_vocabulary=config.chunk_vocabulary,
        target_vocabulary=target.vocab_size,
        target_intermediate=int(getattr(target.config, "intermediate_size", 4 * target.hidden_size)),
        cache_position=target.bytes_per_position,
        bytes=target.dtype.itemsize,
        ema=config.ema > 0,
        recompute=config.checkpointing,
    )


class _LongestFirst(Trainer):
    """Its first update is one of the longest sequences."""

    def sequences(self, step: int) -> list[int]:
        if step:
            return super().sequences(step)
        order = sorted(range(len(self.train_set)), key=lambda i: -len(self.train_set[i].ids))
        return [order[k % len(order)] for k in range(self.config.sequences_per_step)]


def dry_run(
    config: TrainConfig, ready: Prepared, source: TargetStates, memory_limit: int | None, report: Callable[[str], None]
) -> Forecast:
    """Says all lines to `report`, and returns the figures. memory_limit: bytes for all of this process; None: what it
    has and what is free."""
    from dartspec.train.run import method

    device = source.target.device
    shape = shape_of(config, ready, source)
    memory = _Memory(device)
    base = memory.used() - shape.num_weights * 4  # the network is there already, and counted in `lasting`
    free = free_memory(device)
    limit = memory_limit if memory_limit is not None else None if free is None else base + free
    bytes_a_token = (len(ready.kept) + 1) * shape.hidden * shape.bytes
    # on an accelerator the states of held-out data wait in the computer's memory
    held = sum(len(e.ids) for e in ready.held) * bytes_a_token if device.type == "cpu" else 0
    weights = shape.num_weights
    disk = 2 * weights * (12 + 4 * shape.ema) + 3 * weights * 2  # one more of each while it is written aside
    forecast = Forecast(base, shape.lasting, shape.activations, held, limit, 0.0, 0.0, disk)
    if free is not None and shape.lasting + shape.activations > free:
        report("no update was tried: it would not fit; the memory is arithmetic")
    else:
        forecast = _tried(config, ready, source, method(config.method).loss, shape, forecast, memory, report)
    for line in _lines(config, ready, shape, forecast):
        report(line)
    return forecast


def _tried(
    config: TrainConfig,
    ready: Prepared,
    source: TargetStates,
    loss: Callable[..., object],
    shape: Shape,
    forecast: Forecast,
    memory: _Memory,
    report: Callable[[str], None],
) -> Forecast:
    """Three updates."""
    forward_s = 0.0

    def states(indices: Sequence[int]) -> list[States]:
        nonlocal forward_s
        began = time.monotonic()
        result = source.many([ready.training[i] for i in indices])
        if source.target.device.type == "cuda":
            torch.cuda.synchronize(source.target.device)
        forward_s += time.monotonic() - began
        return result

    nothing_held = prepare_held_out([], [], source.target, config.eval_stride)
    trainer = _LongestFirst(
        config, ready.net, loss, source.target, ready.training, states, ready.kept, nothing_held, report
    )
    memory.forget()
    trainer.update()
    # the two moments and the teacher's head are there now; the copies for M are not
    took = memory.most() - forecast.base - (forecast.lasting - 4 * shape.num_weights)
    forward_s, tokens, began = 0.0, trainer.num_tokens, time.monotonic()
    trainer.update()
    trainer.update()
    seconds, tokens = time.monotonic() - began, trainer.num_tokens - tokens
    return replace(
        forecast,
        activations=max(took, 0),
        forward_s=forward_s / tokens,
        rest_s=max(0.0, seconds - forward_s) / tokens,
    )


def _lines(config: TrainConfig, ready: Prepared, shape: Shape, f: Forecast) -> Iterable[str]:
    yield (
        f"memory: {_gb(f.peak)} at its peak: {_gb(f.base)} program and target, {_gb(f.lasting)} drafter and optimiser, "
        f"{_gb(f.activations)} an update of the longest sequences, {_gb(f.held)} held-out states"
    )
    if f.limit is not None:
        yield f"it {'fits' if f.fits else 'does not fit'}: {_gb(f.limit)} may be taken"
    if not f.fits:
        yield from smaller(config, shape, f)
    if f.rest_s:
        mean = ready.plan.all_tokens / ready.plan.num_train
        total = config.steps * config.sequences_per_step * mean
        once = f.forward_s * ready.plan.cache.num_tokens
        each = f.forward_s + f.rest_s
        yield (
            f"{1 / each:.0f} tokens/s: {1e3 * each * mean * config.sequences_per_step:.0f} ms an update, of which "
            f"{1e3 * f.forward_s * mean * config.sequences_per_step:.0f} ms are the target's"
        )
        yield (
            f"{each * total / 3600:.2f} hours online, {(f.rest_s * total + once) / 3600:.2f} hours with a cache "
            f"({duration(once)} to fill it); evaluations come on top"
        )
    folder = next(p for p in (Path(config.out).absolute(), *Path(config.out).absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    needed = f.disk + (ready.plan.cache.num_bytes if config.cache else 0)
    yield (
        f"disk: {_gb(f.disk)} of the run, {_gb(ready.plan.cache.num_bytes)} of states where they are cached; "
        f"{_gb(free)} are free{'' if needed <= free else ': too little'}"
    )


def smaller(config: TrainConfig, shape: Shape, f: Forecast) -> Iterable[str]:
    """What would fit: each setting alone, else all of them together."""
    assert f.limit is not None
    room = f.limit - f.base
    first_use = min(f.activations, FIRST_USE)
    scale = (f.activations - first_use) / max(1, shape.activations) * MARGIN

    def fits(s: Shape) -> bool:
        held = f.held * s.length // shape.length
        return s.lasting + first_use + scale * s.activations + held <= room

    alone = []
    if shape.batch > 1 and fits(replace(shape, batch=1)):
        alone.append("sequences_per_batch = 1 (the same updates, in parts)")
    if n := _largest(shape.length, LEAST_LENGTH, lambda n: fits(_cut(config, shape, n))):
        alone.append(f"max_tokens = {n}")
    if n := _largest(shape.anchors, 1, lambda n: fits(replace(shape, anchors=n))):
        share = config.prefix_share
        alone.append(f"prefix_share = {share * n / shape.anchors:.3g}" if share else f"num_anchors = {n}")
    if n := _largest(shape.vocabulary, LEAST_VOCABULARY, lambda n: fits(replace(shape, vocabulary=n))):
        alone.append(f"draft_vocab_size = {n}")
    if alone:
        yield f"any one of these would fit: {', '.join(alone)}"
        return
    for sixteenth in range(15, 0, -1):
        part = sixteenth / 16
        s = replace(
            _cut(config, shape, max(min(shape.length, LEAST_LENGTH), int(shape.length * part))),
            batch=1,
            vocabulary=max(min(shape.vocabulary, LEAST_VOCABULARY), int(shape.vocabulary * part)),
        )
        s = replace(s, anchors=max(1, int(s.anchors * part)))
        if fits(s):
            share = config.prefix_share
            anchors = f"prefix_share = {share * part:.3g}" if share else f"num_anchors = {s.anchors}"
            yield (
                f"only together would these fit: sequences_per_batch = 1, max_tokens = {s.length}, {anchors}, "
                f"draft_vocab_size = {s.vocabulary}"
            )
            return
    yield (
        f"no length, number of anchors or vocabulary fits: {_gb(f.base)} are the program and the target alone; take a "
        "smaller or a quantised target, or more memory"
    )


def _cut(config: TrainConfig, shape: Shape, length: int) -> Shape:
    part = length / shape.length if config.prefix_share else 1.0
    rows = (max(1, min(length, int(n * part))) for n in (shape.first, shape.anchors))
    first, anchors = rows
    return replace(shape, length=length, first=first, anchors=anchors)


def _largest(most: int, least: int, good: Callable[[int], bool]) -> int:
    """The largest number below `most` and not below `least` that is good, where less is never worse; 0: none."""
    if most <= least or not good(least):
        return 0
    low, high = least, most  # good, and not good
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


class _Memory:
    """What this process takes of a device, and the most it took since `forget`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def used(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.device))
        return _status("VmRSS") or _most_ever()

    def forget(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark begins anew
        except OSError:  # then it is that of the whole process, which is never too low
            return

    def most(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return _status("VmHWM") or _most_ever()


def _status(name: str) -> int:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _most_ever() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _gb(number: float) -> str:
    return f"{number / 1e9:.2f} GB"
