"""What training computes is what serving computes; recomputing, devices and quantised targets change nothing of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tiny
from dartspec import drafters
from dartspec.drafters._train import Predicted
from dartspec.drafters.dart import DartDrafter, DartNet
from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.train.batch import Drawn, Sequences
from dartspec.train.config import TrainConfig
from dartspec.train.data import Example
from dartspec.train.evaluate import evaluate
from dartspec.train.loop import Trainer
from dartspec.train.run import TargetStates, train
from dartspec.train.watch import read_log
from dartspec.types import Committed
from tiny_train import config_in, quiet, target

METHODS: dict[str, dict[str, Any]] = {
    "dart": {},
    "eagle3": {},
    "dflash": {"options": {"num_layers": 2}},
    "medusa": {"options": {"num_blocks": 2}},
    "hydra": {"options": {"prefix": True}},
}


def trainer_of(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, of: Target | None = None) -> Trainer:
    """What `train` builds, before its first update."""
    caught: list[Trainer] = []
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda self, _=None: caught.append(self))
        train(config, of or target(), report=quiet)
    return caught[0]


class Captured(Sequences):
    """A batch whose loss is the rows themselves."""

    def loss(self, predicted: Sequence[Predicted]) -> Any:
        return predicted


@pytest.mark.parametrize("recompute", [False, True])
def test_hidden_states_of_a_training_batch_are_those_that_propose_makes(
    recompute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # case 25
    """Every row of an update, two sequences of other lengths: the trainer's pass over all of them at once, against the
    drafter told of both prompts in one `propose` (its own layer, cache and masks). And then the rounds after it."""
    config = replace(config_in(tmp_path), checkpointing=recompute, num_anchors=6)
    trainer = trainer_of(config, monkeypatch)
    for _ in range(3):  # weights that are nobody's start
        trainer.update()
    net, t = trainer.net, trainer.view
    assert isinstance(net, DartNet)
    ids = [tuple(range(5, 34)), tuple(3 + (7 * i) % 80 for i in range(18))]
    states = TargetStates(t, config.taps).many([Example.answered(one, 4) for one in ids])  # type: ignore[arg-type]
    anchors = [torch.tensor([3, 9, 20]), torch.tensor([3, 9, 15])]
    drawn = [Drawn(Example.answered(one, 4), s, rows, rows) for one, s, rows in zip(ids, states, anchors, strict=True)]
    batch = Captured(drawn, t, config.taps, net.config.taps, torch.float32)
    (rows,) = drafters.get("dart").loss(net, batch)
    d = net.config.d
    trained = {(int(r), int(o)): h for r, o, h in zip(rows.row, rows.offset, rows.hidden.detach(), strict=True)}
    assert len(trained) == 6 * d
    drafter = DartDrafter(net, t)
    seen: list[Tensor] = []
    inner = DartDrafter._forward

    def watched(self: DartDrafter, rest: Any) -> Tensor:
        out = inner(self, rest)
        seen.append(out.clone())
        return out

    monkeypatch.setattr(DartDrafter, "_forward", watched)
    read = [0, 0]
    for turn in range(3):  # anchors rise: the drafter reads on from what it has
        told = []
        for slot in range(2):
            j = int(anchors[slot][turn])
            history = torch.tensor(ids[slot][: j + 2])  # row j knows the token at j + 1
            told.append(Committed(slot, history, j + 1 - read[slot], states[slot].features[read[slot] : j + 1]))
            read[slot] = j + 1
        drafter.propose(told, [4, 4])
        served = seen[-1].view(2, d, -1)
        for slot, start in ((0, 0), (1, len(ids[0]))):
            for offset in range(1, d + 1):
                mine = trained[(start + int(anchors[slot][turn]), offset)]
                torch.testing.assert_close(served[slot, offset - 1], mine, rtol=1e-4, atol=2e-5)
    assert len(seen) == 3


def test_recomputing_keeps_less_and_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[bool, int] = {}
    nets = []
    for recompute in (False, True):
        trainer = trainer_of(replace(config_in(tmp_path), checkpointing=recompute), monkeypatch)
        sizes: list[int] = []

        def pack(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            trainer.update()
        kept[recompute] = sum(sizes)
        trainer.update()
        nets.append(trainer.net)
    assert kept[True] < 0.9 * kept[False]
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(DartspecError, match="checkpointing: Medusa keeps all of its activations"):
        trainer_of(replace(config_in(tmp_path), method="medusa", taps=(), checkpointing=True), monkeypatch)


# looked at on the CPU, then moved or only read: where sequences start, which tokens are answers, sums of figures
_MOVED = (" shared_forward", " num_valid", " loss_mask", " is_answer", " __init__", " <listcomp>", " evaluate")


class Homeless(TorchFunctionMode):
    """Notes where our code makes a tensor without saying on which device: on a GPU it would lie beside the others."""

    made = (torch.arange, torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.eye)

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.made and "device" not in (kwargs or {}):
            frame = sys._getframe(1)
            while frame.f_back is not None and "dartspec" not in frame.f_code.co_filename:
                frame = frame.f_back
            self.places.add(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_makes_its_tensors_where_the_sequence_is(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CPU can say of a GPU: between the batch and the gradients nothing is made on a default device."""
    taps = () if method in ("medusa", "hydra") else (1, 2, 3)
    c = replace(config_in(tmp_path), method=method, taps=taps, checkpointing=method == "dart")
    trainer = trainer_of(replace(c, **METHODS[method]), monkeypatch)
    batch = trainer.batch(trainer.draw(0, [0, 1]), None)
    with Homeless() as mode:
        step = trainer.module(batch)
        torch.autograd.backward(step.loss)
        evaluate(
            trainer.loss, trainer.net, trainer.held_out, trainer.view, trainer.kept, trainer.teacher_head, trainer.dtype
        )
    assert {p for p in mode.places if not p.endswith(_MOVED)} == set()


class Int8(nn.Module):
    """A weight-only quantised linear layer, as quantisers put into a model."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def test_a_quantised_target_is_trained_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    model = copy.deepcopy(tiny.model("llama"))
    for layer in model.model.layers:
        for part in (layer.mlp, layer.self_attn):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Int8(child))
    t = Target(model, tiny.VOCAB, frozenset({2}), "int8", "tok1", "weights8")
    config = replace(config_in(tmp_path), steps=40, eval_every=40, log_every=20, m_every=40)
    trainer = trainer_of(config, monkeypatch, t)
    assert (
        max(float(p.detach().abs().max()) for p in trainer.net.parameters()) < 5
    )  # nothing of an int8 weight as it stands
    example = Example.answered(tuple(range(5, 25)), 8)
    out = model(torch.tensor([example.ids]), output_hidden_states=True)
    states = TargetStates(t, (1, 2, 3)).states(example)
    for i, tap in enumerate((1, 2, 3)):
        torch.testing.assert_close(states.features[:, i], out.hidden_states[tap][0], rtol=1e-4, atol=1e-4)
    folder = train(config, t, report=quiet)
    assert DartNet.from_folder(folder).config.weights_fingerprint == "weights8"
    assert not any(p.grad is not None for p in model.parameters())  # frozen


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", ["block", "flex"])
def test_a_gpu_trains_what_a_cpu_does(attention: str, tmp_path: Path) -> None:
    import copy

    base = replace(config_in(tmp_path), options={"attention": "block"}, m_every=0, log_every=1)
    on_gpu = replace(base, out=str(tmp_path / "gpu"), options={"attention": attention}, cache=str(tmp_path / "cache"))
    model = copy.deepcopy(tiny.model("llama")).to("cuda")
    train(base, target(), report=quiet)
    train(on_gpu, Target(model, tiny.VOCAB, frozenset({2}), "tiny", "tok1", "weights1"), report=quiet)
    losses = [[r["loss"] for kind, r in read_log(Path(c.out) / "log.jsonl") if kind == "train"] for c in (base, on_gpu)]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-2, atol=2e-2)


def test_a_drafter_with_the_targets_own_head_is_judged_as_it_is_served(tmp_path: Path) -> None:
    """Its folder holds no head: the mean of the weights and the last figures are given the target's."""
    c = replace(config_in(tmp_path), options={"head": "target"}, ema=0.5)
    folder = train(c, target(), report=quiet)
    records = read_log(Path(c.out) / "log.jsonl")
    assert records[-1][0] == "final"
    assert "lm_head.weight" not in DartNet.from_folder(folder).state_dict()
    kept = next(r for kind, r in records if kind == "m" and r["step"] == records[-1][1]["step"])
    assert records[-1][1]["M"] == kept["M"]
