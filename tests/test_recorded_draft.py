"""DART's drafts from recorded forwards: the lattices of the plain path, for batches that change from round to round."""

from __future__ import annotations

import logging

import pytest
import torch

import tiny
from dartspec.device import Recording, Run, TapeRecorder
from dartspec.drafters import _recorded
from dartspec.drafters.dart import DartDrafter, DartNet
from dartspec.target.target import Target
from dartspec.types import Committed
from test_graphs import NoHost
from test_lossless import tiny_dart

WIDTH = 32


def drafter(recorder: object) -> DartDrafter:
    target = Target(tiny.model("llama"))
    target.recorder = recorder
    made = tiny_dart(target)
    assert isinstance(made, DartDrafter)
    return made


class Texts:
    """Sequences that grow: what two drafters are told in turn."""

    def __init__(self, *drafters: DartDrafter) -> None:
        self.drafters = drafters
        self._ids: dict[int, list[int]] = {}
        self._rows: dict[int, torch.Tensor] = {}

    def grow(self, **lengths: int) -> None:
        """`s3=5`: slot 3 learns five more tokens; all named ones in one call."""
        new = []
        for name, n in lengths.items():
            slot = int(name[1:])
            ids = self._ids.setdefault(slot, [7])
            ids += [(11 * len(ids) + slot + i) % 90 for i in range(n)]
            self._rows[slot] = torch.randn(n, 3, WIDTH)
            new.append(Committed(slot, torch.tensor(ids), n, self._rows[slot]))
        (probs, tokens), (want_probs, want_tokens) = (d.lattice(new) for d in self.drafters)
        assert torch.allclose(probs, want_probs, atol=2e-5)
        assert torch.equal(tokens, want_tokens)

    def fork(self, source: int, target: int, length: int) -> None:
        for d in self.drafters:
            d.fork(source, target, length)
        self._ids[target] = self._ids[source][: length + 1]

    def reset(self, slot: int) -> None:
        for d in self.drafters:
            d.reset([slot])
        del self._ids[slot]


def test_lattices_are_those_of_the_plain_path() -> None:
    """Ragged rounds, prompts longer than one product, sequences that leave, come, and begin as others did."""
    ours = drafter(TapeRecorder())
    texts = Texts(ours, drafter(None))
    texts.grow(s0=5)
    texts.grow(s0=1)
    texts.grow(s0=3, s1=70, s2=2)
    texts.grow(s0=2, s1=3, s2=4)
    texts.grow(s2=1, s0=4)  # another order, and one left out
    texts.reset(0)
    texts.fork(1, 5, 40)
    texts.grow(s5=3, s1=4)
    texts.grow(s0=9, s2=3, s5=1)
    assert ours._recorded is not None
    assert len(ours._recorded.buckets) == len(set(ours._recorded.buckets)) > 3


def test_more_sequences_and_longer_ones_than_there_was_room_for() -> None:
    ours = drafter(TapeRecorder())
    texts = Texts(ours, drafter(None))
    texts.grow(s0=3)
    assert ours._recorded is not None
    room = ours._recorded.room
    assert room.keys.shape[0] == 4
    texts.grow(**{f"s{i}": 2 + i % 3 for i in range(6)})  # more rows
    texts.grow(s1=400, s3=2)  # more positions
    assert room.keys.shape[::2] == (8, 512)
    texts.grow(**{f"s{i}": 1 for i in range(6)})
    for i in range(6):
        texts.reset(i)
    texts.grow(**{f"s{i}": 1 for i in range(8)})
    assert room.keys.shape[0] == 8  # rows come back


def test_recordings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recorded, "MOST_RECORDINGS", 2)
    ours = drafter(TapeRecorder())
    texts = Texts(ours, drafter(None))
    for n in (3, 1, 7, 2, 3):
        texts.grow(s0=n)
    assert ours._recorded is not None
    assert [b.rows for b in ours._recorded.buckets] == [2, 4]


class Failing:
    def record(self, run: Run) -> Recording:
        raise RuntimeError("cannot be captured\nand more")


def test_where_recording_fails_the_plain_path_serves(caplog: pytest.LogCaptureFixture) -> None:
    texts = Texts(drafter(Failing()), drafter(None))
    with caplog.at_level(logging.WARNING):
        texts.grow(s0=5, s1=40)
        texts.grow(s0=1, s1=2)
        texts.fork(1, 2, 20)
        texts.grow(s2=3)
    assert len(caplog.records) == 1
    assert "cannot be captured" in caplog.text
    assert "more" not in caplog.text


class Meta:
    """A target without memory, on a device that is not the CPU."""

    vocab_size = num_tokens = 97
    hidden_size, num_layers = WIDTH, 4
    eos_token_ids: frozenset[int] = frozenset()
    dtype, device = torch.bfloat16, torch.device("meta")
    recorder = TapeRecorder()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        assert ids.device == self.device
        return torch.empty(*ids.shape, WIDTH, dtype=self.dtype, device=self.device)


def test_a_recorded_draft_never_touches_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = drafter(None)
    monkeypatch.setattr(DartNet, "target_ids", lambda _: torch.arange(45))  # values, asked for when a drafter is made
    made = DartDrafter(DartNet(here.config), Meta())
    recorded = made._recorded
    assert recorded is not None
    inputs, features = recorded._inputs(_recorded.Bucket(2, 4, 256))
    with NoHost() as watch:
        log_probs, index = recorded._run(_recorded.Bucket(2, 4, 256), inputs.device, features)
    assert log_probs.device.type == index.device.type == "meta"
    assert log_probs.shape == index.shape == (2 * here.config.d, 25)
    assert watch.num_operations > 60
