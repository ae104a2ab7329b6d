"""The training loop: draw, forward, loss, update, log, evaluate, save; resumes bit for bit.

Every random choice is a pure function of (seed, epoch) or (seed, step), so a position in the run is one number and
nothing of a generator's state has to be saved. Checked by `tests/test_train_loop.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dartspec.drafters._checkpoint import DraftNet
from dartspec.errors import DartspecError
from dartspec.train.batch import Drawn, Step, TrainBatch, draw_rows
from dartspec.train.config import RESUMABLE, TrainConfig
from dartspec.train.data import Example, digest
from dartspec.train.evaluate import Held, evaluate
from dartspec.train.features import States, write_json
from dartspec.types import TargetView


def head_rows(view: TargetView, ids: Tensor) -> Tensor:
    """(V, H) float32 rows of the target's head, read through its public function: the images of the unit vectors."""
    with torch.no_grad():
        unit = torch.eye(view.hidden_size, dtype=view.dtype, device=view.device)
        return view.lm_head(unit)[:, ids.to(view.device)].T.float().cpu().contiguous()


def target_layer(model: nn.Module, number: int) -> dict[str, Tensor]:
    """Weights of the target's decoder layer of that number, from 0, by the names of a Llama layer
    (`self_attn.q_proj.weight`, ...).

    Empty for a target whose layers are named or numbered otherwise; what does not fit is not used.
    """
    found: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if (match := re.search(rf"(?:^|\.)layers\.{number}\.(.+)$", name)) is not None:
            found[match[1]] = weight
    return found


def warm_start(net: DraftNet, trained: DraftNet) -> None:
    """Continue from a trained drafter in `net`, whose draft vocabulary may be another one.

    Head rows move with their target id; rows that the trained drafter lacks keep what `net` was started with. Refused
    where any other matrix differs in shape.
    """
    source, own, moved = trained.state_dict(), net.state_dict(), net.by_vocabulary
    for name, weight in own.items():
        if name not in (*moved, "d2t") and (name not in source or source[name].shape != weight.shape):
            found = list(source[name].shape) if name in source else "nothing"
            raise DartspecError(f"init: {name} is {found} there, this run needs {list(weight.shape)}; use its settings")
    place = {int(i): row for row, i in enumerate(trained.target_ids())}
    pairs = [(row, place[i]) for row, i in enumerate(net.target_ids().tolist()) if i in place]
    to, origin = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T
    with torch.no_grad():
        for name, weight in own.items():
            if name in moved:
                weight[to] = source[name][origin].to(weight.dtype)
            elif name != "d2t":
                weight.copy_(source[name])


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then cosine from `learning_rate` to `final_learning_rate` at `steps`. step counts from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    low = config.final_learning_rate
    return low + (config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def sequence_at(config: TrainConfig, num_examples: int, position: int) -> int:
    """Index of the `position`-th training example of the run: one permutation an epoch."""
    epoch, place = divmod(position, num_examples)
    return int(_permutation(config.seed, epoch, num_examples)[place])


@lru_cache(maxsize=1)
def _permutation(seed: int, epoch: int, n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


class Trainer:
    """One run in memory.

    loss: the method's (`drafters._train`). states(i): the target's states of training example i, cached or computed, at
    the taps `kept`.
    """

    def __init__(
        self,
        config: TrainConfig,
        net: DraftNet,
        loss: Callable[[Any, Any], Any],
        view: TargetView,
        train: Sequence[Example],
        states: Callable[[int], States],
        kept: Sequence[int],
        held_out: Held,
        report: Callable[[str], None] = print,
    ) -> None:
        self.config, self.net, self.view, self.train_set, self.states = config, net, view, train, states
        self.loss, self.kept, self.held_out, self.report = loss, tuple(kept), held_out, report
        self.teacher_head = head_rows(view, net.target_ids())
        self.dtype = torch.bfloat16 if config.bf16 else torch.float32
        decay = [p for p in net.parameters() if p.dim() == 2]
        plain = [p for p in net.parameters() if p.dim() != 2]  # norms and masks
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.betas,
            fused=True,
        )
        self.step = 0
        self.num_tokens = 0  # trained tokens so far, prompts included, repeats counted
        self.best: dict[str, Any] = {}
        self.curve: list[dict[str, Any]] = []

    # -- one update --------------------------------------------------------------------------------------------------

    def draw(self, step: int) -> list[Drawn]:
        c = self.config
        batch = []
        for k in range(c.sequences_per_step):
            index = sequence_at(c, len(self.train_set), step * c.sequences_per_step + k)
            generator = torch.Generator().manual_seed((c.seed * 7_919 + step) * 64 + k)
            example = self.train_set[index]
            first, anchors = draw_rows(example, num_first=c.num_first, num_anchors=c.num_anchors, generator=generator)
            batch.append(Drawn(example, self.states(index), first, anchors))
        return batch

    def update(self) -> tuple[Step, float]:
        """One optimiser step. Returns the per-offset sums and the gradient norm before clipping."""
        c, own = self.config, self.net.config
        drawn = self.draw(self.step)
        batch = TrainBatch(
            drawn,
            self.view,
            self.kept,
            own.taps,
            self.dtype,
            self.teacher_head,
            own.d,
            c.gamma,
            chunk=c.chunk_rows,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(c, self.step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=c.bf16):
            out: Step = self.loss(self.net, batch)
        torch.autograd.backward(out.loss)
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), c.clip)
        if not bool(torch.isfinite(norm)):
            raise DartspecError(f"step {self.step}: the gradient is not finite; resume with a lower learning_rate")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.num_tokens += sum(len(s.example.ids) for s in drawn)
        return out, float(norm)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """`state.pt` for resuming, and `latest/`, the drafter in bfloat16. Each file is written aside and renamed."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "config": json.dumps(self.config.to_dict()),
            "data": digest(self.train_set),
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "num_tokens": self.num_tokens,
            "curve": json.dumps(self.curve),
        }
        aside = folder / "state.pt.tmp"
        torch.save(state, aside)
        os.replace(aside, folder / "state.pt")
        provenance = {
            **self.net.config.provenance,
            "step": self.step,
            "trained_tokens": self.num_tokens,
            "curve": self.curve[-1:],
        }
        self.net.save(folder / "latest", provenance)

    def resume(self, folder: Path) -> bool:
        """Continue from `state.pt` if there is one. Refused when the run it belongs to computed something else."""
        path = folder / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, map_location="cpu", weights_only=True)
        # a run that is older than a setting did what its default says
        before = {f.name: f.default for f in fields(TrainConfig)} | {"options": {}} | json.loads(state["config"])
        now = json.loads(json.dumps(self.config.to_dict()))
        for key in now:
            if key not in RESUMABLE and before.get(key) != now[key]:
                raise DartspecError(
                    f"{path}: {key} was {before.get(key)!r}, this run says {now[key]!r}; "
                    "give another output folder or the same value"
                )
        if state["data"] != digest(self.train_set):
            raise DartspecError(f"{path}: trained on other data ({state['data']}, now {digest(self.train_set)})")
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.num_tokens = int(state["step"]), int(state["num_tokens"])
        self.curve = json.loads(state["curve"])
        return True

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self, until: int | None = None) -> None:
        """Train to `until` (default: the config's steps), log to `log.jsonl`; SIGTERM and Ctrl-C save and return."""
        c, out = self.config, Path(self.config.out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "train.json", c.to_dict())
        stop = _StopSignal()
        last_save = window_start = time.monotonic()
        d = self.net.config.d
        sums, counts, tokens_before = torch.zeros(d), torch.zeros(d), self.num_tokens
        end = c.steps if until is None else min(until, c.steps)
        with stop:
            while self.step < end and not stop.asked:
                got, norm = self.update()
                sums += got.sums
                counts += got.counts
                if self.step % c.log_every == 0 or self.step == end:
                    now = time.monotonic()
                    record = {
                        "step": self.step,
                        "epoch": round(self.step * c.sequences_per_step / len(self.train_set), 3),
                        "tokens": self.num_tokens,
                        "lr": round(learning_rate(c, self.step - 1), 8),
                        "loss": [round(x, 4) for x in (sums / counts.clamp(min=1)).tolist()],
                        "grad_norm": round(norm, 3),
                        "tokens_per_s": round((self.num_tokens - tokens_before) / max(1e-9, now - window_start)),
                        "time": round(time.time()),
                    }
                    _append(out / "log.jsonl", record)
                    sums.zero_(), counts.zero_()
                    window_start, tokens_before = now, self.num_tokens
                if self.step % c.eval_every == 0 or self.step == end:
                    began = time.monotonic()
                    report = evaluate(
                        self.loss, self.net, self.held_out, self.view, self.kept, self.teacher_head, self.dtype
                    )
                    record = {"step": self.step, "tokens": self.num_tokens, "time": round(time.time()), **report}
                    self.curve.append(record)
                    _append(out / "log.jsonl", {"eval": record})
                    self.report(_line(record))
                    window_start += time.monotonic() - began
                if time.monotonic() - last_save > c.save_every_s:
                    self.save(out)
                    last_save = time.monotonic()
        self.save(out)


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(record) + "\n")


def _line(record: dict[str, Any]) -> str:
    def shares(name: str) -> str:
        return " ".join(f"{x:.3f}" for x in record[name])

    return (
        f"step {record['step']}  {record['tokens'] / 1e6:.2f} M tokens  "
        f"hit@1 {shares('hit1')}  hit@10 {shares('hit10')}  loss {record['loss'][0]:.3f}"
    )


class _StopSignal:
    """Turns SIGTERM and SIGINT into a flag while the loop runs, so that it ends between two updates and saves."""

    def __init__(self) -> None:
        self.asked = False

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True

    def __enter__(self) -> _StopSignal:
        self._before: dict[int, Any] = {}
        for which in (signal.SIGTERM, signal.SIGINT):
            try:
                self._before[which] = signal.signal(which, self._ask)
            except ValueError:  # not in the main thread: the caller stops us
                break
        return self

    def __exit__(self, *_: object) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)
