"""`--dry-run`: what it says, that it writes nothing, and that what it names as fitting does."""

from __future__ import annotations

import json
import multiprocessing
import re
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from dartspec.train import dryrun
from dartspec.train.config import TrainConfig
from dartspec.train.dryrun import Forecast, Shape, dry_run, shape_of, smaller
from dartspec.train.run import TargetStates, prepare, train
from tiny_train import config_in, target

SHAPE = Shape(
    length=2048,
    first=96,
    anchors=64,
    vocabulary=16384,
    batch=1,
    d=8,
    hidden=576,
    taps=3,
    intermediate=1536,
    heads=9,
    weights=5_000_000,
    head_rows=576,
    chunk_rows=256,
    chunk_vocabulary=0,
    target_vocabulary=49152,
    target_intermediate=1536,
    cache_position=23040,
    bytes=2,
    ema=False,
)


def forecast(limit: int, shape: Shape = SHAPE, times: float = 1.0) -> Forecast:
    return Forecast(10**9, shape.lasting, int(times * shape.activations), 10**7, limit, 0.0, 0.0, 0)


def config(tmp_path: Path, **changes: object) -> TrainConfig:
    return replace(config_in(tmp_path), max_tokens=2048, draft_vocab_size=16384, num_anchors=64, **changes)


def named(text: str) -> dict[str, float]:
    return {k: float(v) for k, v in re.findall(r"(\w+) = ([\d.]+)", text)}


def test_it_says_what_a_run_takes_and_writes_nothing(tmp_path: Path) -> None:  # case 26
    lines: list[str] = []
    c = replace(config_in(tmp_path), cache=str(tmp_path / "cache"))
    train(c, target(), dry_run=True, report=lines.append)
    text = "\n".join(lines)
    for part in (
        "18 answers to train on, 2 held out",
        "324 answer tokens",
        "covers 100.00%",
        "12 updates are 1.3 passes",
        "GB at its peak",
        "it fits",
        "tokens/s",
        "ms an update",
        "hours online",
        "hours with a cache",
        "of states where they are cached",
    ):
        assert part in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl"]


def test_three_updates_the_first_of_the_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = config_in(tmp_path)
    lines = Path(c.data[0]).read_text().splitlines()
    longer = {**json.loads(lines[3]), "response": list(range(3, 45))}
    Path(c.data[0]).write_text("\n".join([*lines, json.dumps(longer), *lines[:3]]) + "\n")
    seen: list[list[int]] = []
    update = dryrun.Trainer.update

    def noted(self: dryrun.Trainer) -> object:
        seen.append([len(self.train_set[i].ids) for i in self.sequences(self.step)])
        return update(self)

    monkeypatch.setattr(dryrun.Trainer, "update", noted)
    t = target()
    ready = prepare(c, t)
    dry_run(c, ready, TargetStates(t, ready.kept), None, lambda _: None)
    assert len(seen) == 3
    assert seen[0][0] == max(len(e.ids) for e in ready.training) == 48


def test_what_is_named_fits_and_a_little_more_does_not(tmp_path: Path) -> None:
    c = config(tmp_path)
    whole = forecast(0).peak
    (line,) = smaller(c, SHAPE, forecast(whole - 30_000_000))
    assert line.startswith("any one of these would fit: ")
    found = named(line)
    assert set(found) == {"max_tokens", "num_anchors", "draft_vocab_size"}
    room = whole - 30_000_000 - 10**9

    def taken(s: Shape) -> float:
        scale = dryrun.MARGIN * (SHAPE.activations - dryrun.FIRST_USE) / SHAPE.activations
        return s.lasting + dryrun.FIRST_USE + scale * s.activations + 10**7 * s.length // SHAPE.length

    for more in (0, 1):
        for s in (
            replace(SHAPE, length=int(found["max_tokens"]) + more),
            replace(SHAPE, anchors=int(found["num_anchors"]) + more),
            replace(SHAPE, vocabulary=int(found["draft_vocab_size"]) + more),
        ):
            assert (taken(s) <= room) == (more == 0)
    batched = replace(SHAPE, batch=4)
    (line,) = smaller(c, batched, forecast(forecast(0, batched).peak - 30_000_000, batched))
    assert "sequences_per_batch = 1 (the same updates, in parts)" in line
    (line,) = smaller(replace(c, prefix_share=0.25), SHAPE, forecast(whole - 30_000_000))
    assert 0 < named(line)["prefix_share"] < 0.25


def test_where_nothing_alone_fits_all_are_named_and_where_nothing_does_it_says_so(tmp_path: Path) -> None:
    c = config(tmp_path)
    (line,) = smaller(c, SHAPE, forecast(10**9 + SHAPE.lasting + 20_000_000, times=3.0))
    assert line.startswith("only together would these fit: ")
    found = named(line)
    s = replace(
        SHAPE,
        length=int(found["max_tokens"]),
        anchors=int(found["num_anchors"]),
        vocabulary=int(found["draft_vocab_size"]),
    )
    assert s.lasting + 3 * s.activations < SHAPE.lasting + 20_000_000
    (line,) = smaller(c, SHAPE, forecast(10**9))
    assert "no length, number of anchors or vocabulary fits: 1.00 GB are the program and the target alone" in line


def _forecast(of: TrainConfig, there: Connection) -> None:
    ready = prepare(of, t := target(max_position_embeddings=2048))
    lines: list[str] = []
    there.send((dry_run(of, ready, TargetStates(t, ready.kept), None, lines.append), lines))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured anew on Linux alone")
def test_a_small_limit_is_met_by_what_it_names(tmp_path: Path) -> None:
    """Real memory: long sequences with a group of masks behind nearly every row."""
    t = target(max_position_embeddings=2048)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 97, (1600,), generator=generator).tolist() for _ in range(3)]
    data = "\n".join(json.dumps({"prompt": ids[:6], "response": ids[6:]}) for ids in rows)
    c = replace(config_in(tmp_path), d=8, num_anchors=1400, max_tokens=1600, sequences_per_step=1, draft_vocab_size=97)
    Path(c.data[0]).write_text(data + "\n")

    def tried(of: TrainConfig, said: list[str]) -> Forecast:
        """In a process that begins empty: an allocator keeps what was freed, and that would hide what is needed."""
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=_forecast, args=(of, there))
        process.start()
        assert here.poll(120)
        found, lines = here.recv()
        process.join()
        said += lines
        assert isinstance(found, Forecast)
        return found

    said: list[str] = []
    whole = tried(c, said)
    assert whole.fits
    assert whole.activations > 150e6  # 4 heads x 9,800 rows x up to 1,600 keys, several times
    tight = replace(whole, limit=int(whole.peak - 0.25 * whole.activations))
    assert not tight.fits
    ready = prepare(c, t)
    shape = shape_of(c, ready, TargetStates(t, ready.kept))
    suggestion = named(*smaller(c, shape, tight))
    for name in ("num_anchors", "max_tokens"):
        value = int(suggestion[name])
        less = tried(replace(c, **{name: value}), said)
        assert less.activations <= 0.75 * whole.activations, name
        assert value > 300
    (line,) = smaller(c, shape, replace(whole, limit=10_000_000))
    assert "are the program and the target alone" in line


def test_a_limit_is_what_it_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    train(config_in(tmp_path), target(), dry_run=True, memory_limit=10_000_000, report=said.append)
    assert "it does not fit: 0.01 GB may be taken" in said
    assert any("no length, number of anchors or vocabulary fits" in line for line in said)


def test_what_cannot_fit_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dryrun, "free_memory", lambda _: 1000)
    monkeypatch.setattr(dryrun.Trainer, "update", lambda _: pytest.fail("it was tried"))
    said: list[str] = []
    c, t = config_in(tmp_path), target()
    ready = prepare(c, t)
    found = dry_run(c, ready, TargetStates(t, ready.kept), None, said.append)
    assert not found.fits
    assert "no update was tried" in said[0]


def test_a_shape_is_what_the_network_is(tmp_path: Path) -> None:
    c, t = config_in(tmp_path), target()
    ready = prepare(c, t)
    s = shape_of(c, ready, TargetStates(t, ready.kept))
    assert s.num_weights == sum(p.numel() for p in ready.net.parameters())
    assert (s.length, s.first, s.anchors, s.vocabulary, s.batch) == (24, 8, 4, 64, 2)
    halves = shape_of(replace(c, prefix_share=0.5), ready, TargetStates(t, ready.kept))
    assert (halves.first, halves.anchors) == (12, 12)
