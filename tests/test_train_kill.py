"""A run that is killed in the middle of a write goes on as if it had not been: weights, optimiser, M, figures."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dartspec.drafters.dart import DartNet
from dartspec.train import loop, watch
from dartspec.train.config import TrainConfig
from dartspec.train.loop import Trainer
from dartspec.train.run import train
from dartspec.train.watch import read_log
from tiny_train import config_in, quiet, target


def half(path: Any, content: bytes) -> None:
    """Writes the first half, and is gone."""
    with Path(path).open("ab") as file:
        file.write(content[: len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, real: Callable[..., Any], deadly: Callable[..., None]) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            deadly(*args, **options)
        return real(*args, **options)

    return call


def in_state(_: TrainConfig) -> None:
    def deadly(state: Any, path: Path) -> None:
        buffer = io.BytesIO()
        save(state, buffer)
        half(path, buffer.getvalue())

    save = torch.save
    torch.save = at_call(6, save, deadly)


def in_weights(_: TrainConfig) -> None:
    def deadly(tensors: Any, path: Path, **options: Any) -> None:
        half(path, safetensors.torch.save(tensors, **options))

    safetensors.torch.save_file = at_call(9, safetensors.torch.save_file, deadly)


def in_best(_: TrainConfig) -> None:
    def deadly(source: Path, path: Path) -> None:
        half(path, source.read_bytes())

    loop.shutil.copyfile = at_call(1, loop.shutil.copyfile, deadly)  # type: ignore[attr-defined]


def in_log(config: TrainConfig) -> None:
    def deadly(kind: str, record: Any) -> None:
        half(Path(config.out) / "log.jsonl", line(kind, record).encode())

    line = watch._line
    watch._line = at_call(5, line, deadly)


def in_cache(_: TrainConfig) -> None:
    def deadly(tensors: Any, path: Path, **options: Any) -> None:
        half(path, safetensors.torch.save(tensors, **options))

    safetensors.torch.save_file = at_call(1, safetensors.torch.save_file, deadly)


def killed(config: TrainConfig, arm: Callable[[TrainConfig], None]) -> int:
    """Trains in a process of its own that dies; its exit code."""

    def child() -> None:
        arm(config)
        train(config, target(), report=quiet)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def figures(config: TrainConfig) -> list[Any]:
    """What was evaluated and measured, but for the clock."""
    found = read_log(Path(config.out) / "log.jsonl")
    return [(k, {n: v for n, v in r.items() if n != "time"}) for k, r in found if k != "train"]


def saved(config: TrainConfig) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(Path(config.out) / "state.pt", weights_only=True)
    return state


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("arm", [in_state, in_weights, in_best, in_log, in_cache])
def test_a_kill_in_the_middle_of_a_write_changes_nothing(
    arm: Callable[[TrainConfig], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = replace(config_in(tmp_path), save_every_s=0.0, m_every=4, eval_every=4, log_every=3)
    whole = replace(plain, out=str(tmp_path / "whole"), cache=str(tmp_path / "whole-cache"))
    train(whole, target(), report=quiet)
    cut = replace(plain, out=str(tmp_path / "cut"), cache=str(tmp_path / "cut-cache"))
    assert killed(cut, arm) == -signal.SIGKILL
    latest = Path(cut.out) / "latest"
    if (latest / "config.json").exists():
        DartNet.from_folder(latest)  # what is there is whole
    steps: list[int] = []
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self, _=None: steps.append(self.step) or run(self))
    train(cut, target(), report=quiet)
    assert 0 < steps[0] < 12 or (arm is in_cache and steps == [0])
    a, b = saved(cut), saved(whole)
    assert all(equal(a[name], b[name]) for name in ("net", "optimizer", "step", "num_tokens", "measured_at"))
    mine, theirs = (Path(c.out) / "best" / "model.safetensors" for c in (cut, whole))
    assert mine.read_bytes() == theirs.read_bytes()
    assert figures(cut) == figures(whole)
    assert not list(Path(cut.out).rglob("*.tmp"))
