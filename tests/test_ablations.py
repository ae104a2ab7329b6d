"""The ablation script: variants side by side learn what each would learn alone, and a run goes on where it stopped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dartspec.drafters import dart
from dartspec.train.batch import TrainBatch
from dartspec.train.config import TrainConfig
from test_dart_net import config, random_net
from test_train_loss import example
from tiny_net import View

PATH = Path(__file__).parent.parent / "benchmarks" / "ablations.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("ablations", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ablations", module)
    spec.loader.exec_module(module)
    V = module.Variant
    monkeypatch.setattr(module, "VARIANTS", [V(True, 0.6), V(False, 0.6), V(True, 1.0), V(True, 0.6, "one_hot")])
    monkeypatch.setattr(module, "D", 5)
    return module


def material() -> Any:
    view = View()
    drawn = [example(14, 6, s, view, [], []) for s in range(3)]
    net = random_net(config())

    def fresh(variant: Any, seed: int) -> dart.DartNet:
        made = random_net(config(shifted=variant.shifted), seed)
        made.d2t.copy_(net.d2t)
        return made

    return SimpleNamespace(
        train=[d.example for d in drawn[1:]],
        held=[drawn[0].example],
        states=lambda number: drawn[number].states,
        target=view,
        taps=net.config.taps,
        teacher_head=view.table[net.target_ids()],
        config=TrainConfig(target="t", data=("d",), out="o", d=5, num_first=3, num_anchors=2, warmup_steps=1, steps=9),
        net=fresh,
    )


def weights(seed: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for net in seed.nets for p in net.parameters()]


def test_variants_share_a_teacher_and_learn_as_alone(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = material()
    together = script.Seed(m, 0, tmp_path)
    before = weights(together)
    for _ in range(2):
        together.update()
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(together), strict=True)]
    assert sum(moved) >= len(moved) - len(script.VARIANTS)  # what bfloat16 rounds away may stay
    assert together.tokens == 28
    monkeypatch.setattr(script.SharedBatch, "teacher", TrainBatch.teacher)
    apart = script.Seed(m, 0, tmp_path)
    for _ in range(2):
        apart.update()
    assert all(torch.equal(a, b) for a, b in zip(weights(together), weights(apart), strict=True))
    losses = [n.fc.weight for n in together.nets]
    assert not torch.equal(losses[0], losses[2])  # gamma matters
    assert not torch.equal(losses[0], losses[3])  # so do labels


def test_a_run_goes_on_bit_for_bit(script: Any, tmp_path: Path) -> None:
    m = material()
    whole = script.Seed(m, 1, tmp_path)
    for _ in range(3):
        whole.update()
    first = script.Seed(m, 1, tmp_path)
    first.update()
    first.save()
    again = script.Seed(m, 1, tmp_path)
    assert again.step == 1
    for _ in range(2):
        again.update()
    assert again.tokens == whole.tokens
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True))


def test_hits_are_counted_by_answer_and_rounds_by_text(script: Any, tmp_path: Path) -> None:
    m = material()
    (one, *_), *others = script.Seed(m, 0, tmp_path).evaluate(1)
    assert len(others) == 3
    assert one[6:] == [2.0, 2.0, 2.0]  # rows 4 and 8 of eight, at three offsets
    assert all(0 <= hits <= rows for hits, rows in zip(one[:6], one[6:] * 2, strict=True))
    tokens = torch.tensor([[[3, 4], [5, 6]], [[5, 8], [9, 7]], [[1, 2], [1, 2]]], dtype=torch.int32)
    guess = script.Guesses([1], [2, 3, 5, 9], torch.full((3, 2, 2), 0.5).log(), tokens)
    # at 2 both guesses come true, and the target adds the last token
    assert script.committed([guess], None, {}, frozenset(), script.Search("none", 9)) == [(3, 1)]
    assert script.committed([guess], None, {}, frozenset(), script.Search("none", 0)) == [(3, 3)]
