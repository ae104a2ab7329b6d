"""Two processes (gloo, on the CPU) train what one trains: losses, weights, files, resume, SIGTERM."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dartspec.drafters.dart import DartNet
from dartspec.errors import DartspecError
from dartspec.train.config import TrainConfig
from dartspec.train.loop import Trainer
from dartspec.train.parallel import own_index
from dartspec.train.run import train
from dartspec.train.watch import read_log
from tiny_train import config_in, quiet, target

pytest.importorskip("accelerate")


def together(config: TrainConfig, arm: Callable[[], None] | None = None) -> None:
    """Trains in two processes, as `torchrun` or `accelerate launch` would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def child(rank: int) -> None:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({k: str(v) for k, v in names.items()}, MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true")
        torch.set_num_threads(1)
        if arm is not None:
            arm()
        train(config, target(), report=print)
        torch.distributed.destroy_process_group()

    several = [multiprocessing.get_context("fork").Process(target=child, args=(rank,)) for rank in range(2)]
    for one in several:
        one.start()
    for one in several:
        one.join(120)
    assert [one.exitcode for one in several] == [0, 0]


def records(config: TrainConfig, kind: str) -> list[dict[str, Any]]:
    return [r for k, r in read_log(Path(config.out) / "log.jsonl") if k == kind]


def saved(config: TrainConfig) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(Path(config.out) / "state.pt", weights_only=True)
    return state


def assert_alike(a: TrainConfig, b: TrainConfig) -> None:
    for mine, theirs in zip(records(a, "train"), records(b, "train"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-4)  # the log has four places
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4, abs=1e-3)
        assert (mine["step"], mine["tokens"]) == (theirs["step"], theirs["tokens"])
    for name, weight in saved(a)["net"].items():
        torch.testing.assert_close(weight, saved(b)["net"][name], rtol=1e-4, atol=2e-5)
    for mine, theirs in zip(records(a, "eval"), records(b, "eval"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    assert [r["step"] for r in records(a, "m")] == [r["step"] for r in records(b, "m")]
    moments = [saved(c)["optimizer"]["state"] for c in (a, b)]
    for number in moments[0]:
        for name, value in moments[0][number].items():
            torch.testing.assert_close(value, moments[1][number][name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_are_one(parallel: str, tmp_path: Path) -> None:
    """Two sequences a process and one a forward: gradients are accumulated, then summed. The second run goes on with
    what one process saved, the third the other way round."""
    base = replace(config_in(tmp_path), sequences_per_step=4, sequences_per_batch=1, ema=0.5, log_every=2, clip=0.2)
    alone = replace(base, out=str(tmp_path / "alone"), cache=str(tmp_path / "cache-alone"))
    train(alone, target(), report=quiet)
    shared = replace(base, out=str(tmp_path / "shared"), parallel=parallel, cache=str(tmp_path / "cache"))
    together(shared)
    assert_alike(shared, alone)
    drafter = DartNet.from_folder(Path(shared.out) / "best")
    wanted = DartNet.from_folder(Path(alone.out) / "best")
    assert drafter.config.provenance["step"] == wanted.config.provenance["step"]
    # resumed by the other number of processes
    longer = replace(shared, steps=16)
    train(longer, target(), report=quiet)
    again = replace(alone, steps=16, parallel=parallel)
    together(again)
    assert_alike(longer, again)


def test_the_loss_is_the_same_to_1e_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By update, not rounded as in the log."""
    base = replace(config_in(tmp_path), sequences_per_step=2, m_every=0, steps=6, eval_every=6)
    update = Trainer.update
    path = tmp_path / "losses"

    def noted(self: Trainer) -> Any:
        step, norm = update(self)
        total = self.processes.sum(step.loss.detach()[None])
        if self.processes.is_first:
            with path.open("a") as file:
                file.write(f"{self.config.parallel} {self.processes.count} {total.item()!r}\n")
        return step, norm

    monkeypatch.setattr(Trainer, "update", noted)
    train(replace(base, out=str(tmp_path / "one")), target(), report=quiet)
    for parallel in ("ddp", "fsdp2"):
        together(replace(base, out=str(tmp_path / parallel), parallel=parallel))
    found: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        parallel, count, loss = line.split()
        found.setdefault(f"{parallel} {count}", []).append(float(loss))
    assert {name: len(losses) for name, losses in found.items()} == {"ddp 1": 6, "ddp 2": 6, "fsdp2 2": 6}
    for name in ("ddp 2", "fsdp2 2"):
        assert found[name] == pytest.approx(found["ddp 1"], rel=1e-5)


def test_a_signal_to_one_of_them_stops_all_at_one_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config_in(tmp_path), m_every=0)
    update = Trainer.update

    def arm() -> None:
        def kill_at_five(self: Trainer) -> Any:
            if self.step == 4 and own_index() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(self)

        Trainer.update = kill_at_five  # type: ignore[method-assign]

    together(config, arm)
    assert saved(config)["step"] == 5
    whole = replace(config, out=str(tmp_path / "whole"))
    train(whole, target(), report=quiet)
    together(config)
    assert saved(config)["step"] == 12
    for name, weight in saved(config)["net"].items():
        torch.testing.assert_close(weight, saved(whole)["net"][name], rtol=1e-4, atol=2e-5)


def test_what_cannot_be_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "said"

    def arm() -> None:
        inner = Trainer.__init__

        def init(self: Trainer, *args: Any, **options: Any) -> None:
            try:
                inner(self, *args, **options)
            except DartspecError as error:
                said.write_text(str(error))
                os._exit(0)

        Trainer.__init__ = init  # type: ignore[method-assign]

    together(replace(config_in(tmp_path), sequences_per_step=3), arm)
    assert "sequences_per_step = 3 cannot be shared by 2 processes" in said.read_text()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(__import__("sys").modules, "accelerate", None)
    with pytest.raises(DartspecError, match=r"needs the package accelerate: pip install 'dartspec\[train\]'"):
        train(config_in(tmp_path), target(), report=quiet)
