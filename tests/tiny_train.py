"""A training run that takes a second: a tiny target, twenty answers that can be learned, and how to tell runs apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import tiny
from dartspec.target.target import Target
from dartspec.train.config import TrainConfig
from dartspec.train.loop import Trainer


def target(**changes: Any) -> Target:
    return Target(tiny.model("llama", **changes), tiny.VOCAB, frozenset({2}), "tiny", "tok1", "weights1")


def config_in(folder: Path) -> TrainConfig:
    generator = torch.Generator().manual_seed(5)
    lines = []
    for _ in range(20):
        start = torch.randint(3, 40, (1,), generator=generator).item()
        ids = [3 + (start + 5 * i) % 60 for i in range(24)]
        lines.append(json.dumps({"prompt": ids[:6], "response": ids[6:]}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return TrainConfig(
        target="tiny",
        data=(str(folder / "data.jsonl"),),
        out=str(folder / "run"),
        taps=(1, 2, 3),
        d=4,
        draft_vocab_size=64,
        max_tokens=64,
        held_out=0.1,
        steps=12,
        num_first=8,
        num_anchors=4,
        warmup_steps=2,
        learning_rate=3e-3,
        final_learning_rate=1e-4,
        bf16=False,
        log_every=4,
        eval_every=6,
        eval_stride=2,
        m_every=6,
        m_prompts=2,
        m_tokens=12,
        m_nodes=6,
        save_every_s=1e9,
    )


def quiet(_: str) -> None:
    return None


def same(a: Trainer, b: Trainer) -> bool:
    """Weights, optimiser and position, bit for bit."""
    nets = zip(a.net.state_dict().values(), b.net.state_dict().values(), strict=True)
    states = zip(a.optimizer.state_dict()["state"].values(), b.optimizer.state_dict()["state"].values(), strict=True)
    return (
        (a.step, a.num_tokens) == (b.step, b.num_tokens)
        and all(torch.equal(x, y) for x, y in nets)
        and all(torch.equal(x[k], y[k]) for x, y in states for k in ("step", "exp_avg", "exp_avg_sq"))
    )
