"""The training loop: draw, forward, loss, update, log, evaluate, measure M, save; resumes bit for bit.

Every random choice is a pure function of (seed, epoch) or (seed, step), so a position in the run is one number and
nothing of a generator's state has to be saved. Checked by `tests/test_train_loop.py`.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dartspec.drafters._checkpoint import DraftNet
from dartspec.drafters._nn import head_rows
from dartspec.errors import DartspecError
from dartspec.files import write_json, written_aside
from dartspec.train.adapt import is_low_rank, plain_state
from dartspec.train.batch import Drawn, Step, TrainBatch, draw_rows, num_valid
from dartspec.train.config import RESUMABLE, TrainConfig
from dartspec.train.data import Example, digest
from dartspec.train.evaluate import Held, evaluate
from dartspec.train.features import States
from dartspec.train.parallel import Processes
from dartspec.train.watch import Log, Record, Watch, lines
from dartspec.types import TargetView


def warm_start(net: DraftNet, trained: DraftNet) -> None:
    """Continue from a trained drafter in `net`, whose draft vocabulary may be another one.

    Head rows move with their target id; rows that the trained drafter lacks keep what `net` was started with. Refused
    where any other matrix differs in shape.
    """
    source, own, moved = trained.state_dict(), net.state_dict(), net.by_vocabulary
    for name, weight in own.items():
        same = slice(1 if name in moved else 0, None)  # a row for each draft token: others may be drafted there
        if name != "d2t" and (name not in source or source[name].shape[same] != weight.shape[same]):
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


class Objective(nn.Module):
    """The method's loss as a module's forward: what DDP and FSDP2 wrap."""

    def __init__(self, net: DraftNet, loss: Callable[[Any, Any], Step], count: int) -> None:
        super().__init__()
        self.net, self.method_loss, self.count = net, loss, count

    def forward(self, batch: TrainBatch) -> Step:
        out = self.method_loss(self.net, batch)
        if self.count > 1:  # every process has a gradient for every weight, whatever its rows asked of it
            unused = torch.stack([p.sum() for p in self.net.parameters() if p.requires_grad]).sum()
            out = out._replace(loss=out.loss + 0.0 * unused)
        return out


class Trainer:
    """One run in memory.

    loss: the method's (`drafters._train`). states(indices): the target's states of these training examples, cached or
    computed, at the taps `kept`. processes: those that the run is shared with. measure: M of a drafter's folder, or
    None when the second argument said that the run was told to stop. watch: told of every record (`train.watch`).
    enough: asked after every measurement of M; when it says so, the run ends as at its last update.
    """

    def __init__(
        self,
        config: TrainConfig,
        net: DraftNet,
        loss: Callable[[Any, Any], Any],
        view: TargetView,
        train: Sequence[Example],
        states: Callable[[Sequence[int]], list[States]],
        kept: Sequence[int],
        held_out: Held,
        report: Callable[[str], None] = print,
        *,
        processes: Processes | None = None,
        measure: Callable[[Path, Callable[[], bool]], Record | None] | None = None,
        watch: Watch | None = None,
        enough: Callable[[Record], bool] | None = None,
    ) -> None:
        self.config, self.view, self.train_set, self.states = config, view, train, states
        self.loss, self.kept, self.held_out, self.report = loss, tuple(kept), held_out, report
        self.processes = processes or Processes()
        self.measure, self.watch = measure, watch or lines(report)
        self.enough, self.ended = enough, False
        self.device = torch.device(view.device)
        if config.sequences_per_step % self.processes.count:
            raise DartspecError(
                f"sequences_per_step = {config.sequences_per_step} cannot be shared by {self.processes.count} "
                "processes: it must be a multiple of them"
            )
        if config.checkpointing:
            if not hasattr(net, "recompute"):
                raise DartspecError(f"checkpointing: {net.config.title} keeps all of its activations; leave it out")
            net.recompute = True  # type: ignore[assignment]
        self.teacher_head = head_rows(view, net.target_ids()).to(self.device)
        self.net = net.to(self.device)
        if (head := getattr(net, "target_head", None)) is not None:  # no parameter, so it does not move by itself
            net.target_head = head.to(self.device)
        self.module = self.processes.wrap(Objective(self.net, loss, self.processes.count))
        self.dtype = torch.bfloat16 if config.bf16 else torch.float32
        trained = [p for p in net.parameters() if p.requires_grad]
        decay = [p for p in trained if p.dim() == 2]
        plain = [p for p in trained if p.dim() != 2]  # norms and masks
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.betas,
            fused=True,
        )
        self.ema = {n: p.detach().clone() for n, p in net.named_parameters()} if config.ema else {}
        self._shown: DraftNet | None = None
        self.step = 0
        self.num_tokens = 0  # trained tokens so far, prompts included, repeats counted
        self.best: Record = {}  # the measurement of M whose weights `best/` holds
        self.measured_at = -1  # step of the last one
        self.curve: list[Record] = []

    # -- one update --------------------------------------------------------------------------------------------------

    def sequences(self, step: int) -> list[int]:
        """The training examples of an update, of all processes."""
        n = self.config.sequences_per_step
        return [sequence_at(self.config, len(self.train_set), step * n + k) for k in range(n)]

    def draw(self, step: int, places: Sequence[int]) -> list[Drawn]:
        """The sequences at these places of an update, with their rows."""
        c, at = self.config, self.sequences(step)
        batch = []
        for k, states in zip(places, self.states([at[k] for k in places]), strict=True):
            generator = torch.Generator().manual_seed((c.seed * 7_919 + step) * 64 + k)
            example = self.train_set[at[k]]
            first, anchors = draw_rows(
                example,
                num_first=c.num_first,
                num_anchors=c.num_anchors,
                generator=generator,
                share=c.prefix_share,
            )
            batch.append(Drawn(example, states, first, anchors))
        return batch

    def batch(self, drawn: Sequence[Drawn], counts: Tensor | None) -> TrainBatch:
        """What the method's loss is called with. counts: valid positions of the whole update, where it has more."""
        c, own = self.config, self.net.config
        return TrainBatch(
            drawn,
            self.view,
            self.kept,
            own.taps,
            self.dtype,
            self.teacher_head,
            own.d,
            c.gamma,
            chunk=c.chunk_rows,
            vocabulary_chunk=c.chunk_vocabulary,
            counts=counts,
            objective=c.objective,
            draft_ids=self.net.target_ids(),
        )

    def update(self) -> tuple[Step, float]:
        """One optimiser step. Returns the per-offset sums of this process and the gradient norm before clipping."""
        c = self.config
        mine = range(self.processes.index, c.sequences_per_step, self.processes.count)
        size = c.sequences_per_batch or len(mine)
        parts = [mine[at : at + size] for at in range(0, len(mine), size)]
        examples = [self.train_set[i] for i in self.sequences(self.step)]
        whole = len(parts) == 1 and self.processes.count == 1
        counts = None if whole else num_valid(examples, self.net.config.d).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(c, self.step)
        done: list[Step] = []
        for part in parts:
            batch = self.batch(self.draw(self.step, part), counts)
            last = part is parts[-1]
            with nullcontext() if last else self.processes.accumulating(self.module):
                with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=c.bf16):
                    out: Step = self.module(batch)
                torch.autograd.backward(out.loss * self.processes.loss_scale)
            done.append(Step(*(t.detach() for t in out)))
        norm = self.processes.whole(torch.nn.utils.clip_grad_norm_(self.net.parameters(), c.clip))
        if not bool(torch.isfinite(norm)):
            raise DartspecError(f"step {self.step}: the gradient is not finite; resume with a lower learning_rate")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, p in self.net.named_parameters() if self.ema else ():
                self.ema[name].lerp_(p, 1 - c.ema)
        self.step += 1
        self.num_tokens += sum(len(e.ids) for e in examples)
        return Step(*(sum(ts[1:], ts[0]) for ts in zip(*done, strict=True))), float(norm)

    # -- files ---------------------------------------------------------------------------------------------------------

    def shown(self) -> DraftNet:
        """The network whose weights are saved and judged: the running mean's where there is one. All processes call."""
        if not self.ema and not self.processes.is_sharded and not is_low_rank(self.net):
            return self.net
        own = plain_state(self.net) | self.ema
        whole = {name: self.processes.whole(t) for name, t in own.items()}
        if self._shown is None:
            self._shown = self._with_head(type(self.net)(self.net.config).to(self.device))
        self._shown.load_state_dict(whole)
        return self._shown

    def _with_head(self, net: DraftNet) -> DraftNet:
        """A drafter that uses the target's own head never saves it: it is given."""
        if (head := getattr(self.net, "target_head", None)) is not None:
            net.target_head = head
        return net

    def save(self, folder: Path) -> None:
        """`state.pt` for resuming, and `latest/`, the drafter in bfloat16. Each file is written aside and renamed.

        All processes call; the first one writes.
        """
        whole = self.processes.whole
        state = {
            "config": json.dumps(self.config.to_dict()),
            "data": digest(self.train_set),
            "weights": self.net.config.weights_fingerprint,
            "net": {name: whole(t) for name, t in self.net.state_dict().items()},
            "optimizer": tree_map_only(Tensor, whole, self.optimizer.state_dict()),
            "ema": {name: whole(t) for name, t in self.ema.items()},
            "step": self.step,
            "num_tokens": self.num_tokens,
            "measured_at": self.measured_at,
            "best": json.dumps(self.best),
            "curve": json.dumps(self.curve),
        }
        self.save_drafter(folder / "latest")
        if self.processes.is_first:
            with written_aside(folder / "state.pt") as aside:
                torch.save(state, aside)

    def save_drafter(self, folder: Path) -> None:
        """The drafter as it is now. All processes call; the first one writes."""
        net = self.shown()
        if self.processes.is_first:
            at = {"step": self.step, "trained_tokens": self.num_tokens, "curve": self.curve[-1:]}
            net.save(folder, {**net.config.provenance, **at})

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
            if key not in RESUMABLE and json.loads(json.dumps(before.get(key))) != now[key]:
                raise DartspecError(
                    f"{path}: {key} was {before.get(key)!r}, this run says {now[key]!r}; "
                    "give another output folder or the same value"
                )
        for what, found, here in (
            ("on other data", state["data"], digest(self.train_set)),
            ("for other weights of the target", state.get("weights"), self.net.config.weights_fingerprint),
        ):
            if found and here and found != here:
                raise DartspecError(
                    f"{path}: trained {what} ({found}, now {here}); give another output folder, and --init-from to "
                    "start from what this one learned"
                )
        if not torch.equal(state["net"]["d2t"].cpu(), self.net.d2t.cpu()):
            raise DartspecError(
                f"{path}: trained with another draft vocabulary; give another output folder, and --init-from to start "
                "from what this one learned"
            )
        if state["step"] > self.config.steps:
            raise DartspecError(f"{path} is at update {state['step']}, beyond steps = {self.config.steps}: raise steps")
        place = self.processes.place
        with torch.no_grad():
            for name, t in self.net.state_dict().items():
                t.copy_(place(state["net"][name], t))
            for name, t in self.ema.items():
                t.copy_(place(state["ema"][name], t))
        optimizer, like = state["optimizer"], [p for g in self.optimizer.param_groups for p in g["params"]]
        for number, entry in optimizer["state"].items():
            p = like[number]
            optimizer["state"][number] = {k: place(v, p) if v.shape == p.shape else v for k, v in entry.items()}
        self.optimizer.load_state_dict(optimizer)
        self.step, self.num_tokens = int(state["step"]), int(state["num_tokens"])
        self.measured_at = int(state.get("measured_at", -1))
        self.best, self.curve = json.loads(state.get("best", "{}")), json.loads(state["curve"])
        return True

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self, until: int | None = None) -> bool:
        """Train to `until` (default: the config's steps), log to `log.jsonl`; SIGTERM and Ctrl-C save and return.

        True where the run is finished, and what it leaves was judged.
        """
        c, out, first = self.config, Path(self.config.out), self.processes.is_first
        log: Watch = nothing
        if first:
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / "train.json", c.to_dict())
            log = Log(out, self.step, tensorboard=c.tensorboard)

        def tell(kind: str, record: Record) -> None:
            if first:
                log(kind, record)
                self.watch(kind, record)

        stop = _StopSignal()
        end = c.steps if until is None else min(until, c.steps)
        pace = _Pace(self)
        last_save = time.monotonic()
        with stop:
            while True:
                asked = False
                if self._m_is_due(end):
                    with pace.paused():
                        asked = not self.measure_m(out, tell, stop)
                wanted = torch.tensor(
                    [float(stop.asked or asked), float(time.monotonic() - last_save > c.save_every_s)]
                )
                asked, save = (self.processes.sum(wanted) > 0).tolist()  # all do the same
                if asked or self.step >= end or self.ended:
                    break
                if save:
                    self.save(out)
                    last_save = time.monotonic()
                pace.add(*self.update())
                if self.step % c.log_every == 0 or self.step == end:
                    tell("train", pace.record(end))
                if self.step % c.eval_every == 0 or self.step == end:
                    with pace.paused():
                        record = self.evaluate()
                    self.curve.append(record)
                    tell("eval", record)
        self.save(out)
        self.processes.wait()
        finished = (self.step == c.steps or self.ended) and not asked
        if finished:
            self._finish(out, tell)
        if isinstance(log, Log):
            log.close()
        return finished

    def evaluate(self, net: DraftNet | None = None) -> Record:
        """Held-out figures of the weights that are saved, or of another network."""
        net = net or self.shown()
        at = {"step": self.step, "tokens": self.num_tokens, "time": round(time.time())}
        if not self.processes.is_first:
            return at
        found = evaluate(self.loss, net, self.held_out, self.view, self.kept, self.teacher_head, self.dtype)
        return {**at, **found}

    def _m_is_due(self, end: int) -> bool:
        c = self.config
        if self.measure is None or not c.m_every or not self.step or self.measured_at == self.step:
            return False
        return self.step % c.m_every == 0 or self.step == end == c.steps

    def measure_m(self, out: Path, tell: Watch, stop: _StopSignal) -> bool:
        """M of the weights that are saved; where it is the best so far, those very files become `best/`. False when
        the run was told to stop meanwhile: it is measured again when the run goes on."""
        self.save_drafter(out / "latest")
        told = torch.zeros(2)  # to stop, and that it is enough
        if self.processes.is_first:
            assert self.measure is not None
            found = self.measure(out / "latest", lambda: stop.asked)
            if found is None:
                told[0] = 1
            else:
                best = not self.best or found["M"] > self.best["M"]
                record = {"step": self.step, "tokens": self.num_tokens, "time": round(time.time()), **found}
                if best:
                    self.best = record
                    keep_drafter(out / "latest", out / "best", record)
                tell("m", {**record, "best": best})
                told[1] = float(self.enough is not None and self.enough(record))
        gave_up, self.ended = (self.processes.sum(told) > 0).tolist()
        if gave_up:
            return False
        self.measured_at = self.step
        self.save(out)  # what is best and `best/` belong together
        return True

    def _finish(self, out: Path, tell: Watch) -> None:
        """Judges exactly the weights that are left: those of `best/`, read back."""
        if not self.processes.is_first:
            return
        folder = drafter_folder(out, self.config)
        net = self._with_head(type(self.net).from_folder(folder).float().to(self.device))
        at = net.config.provenance
        record = {**self.evaluate(net), "step": at["step"], "tokens": at["trained_tokens"], "drafter": folder.name}
        if self.best:
            record |= {name: self.best[name] for name in ("M", "rounds", "nodes")}
        tell("final", record)


def drafter_folder(out: Path, config: TrainConfig) -> Path:
    """Where a finished run's drafter lies."""
    return out / ("best" if config.m_every else "latest")


def keep_drafter(source: Path, folder: Path, record: Record) -> None:
    """Copies a drafter's folder, byte for byte but for the acceptance that was measured with it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.json").unlink(missing_ok=True)  # figures of the weights that were there
    with written_aside(folder / "model.safetensors") as aside:
        shutil.copyfile(source / "model.safetensors", aside)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["acceptance"] = {str(record["nodes"]): round(record["M"], 4)}
    write_json(folder / "config.json", config)


def nothing(_: str, __: Record) -> None:
    """A watch of processes but the first."""


class _Pace:
    """Sums between two lines of the log, and the rate."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.norm = 0.0
        self.began = self.window = time.monotonic()
        self.from_step, self.from_tokens = trainer.step, trainer.num_tokens
        self.total: Step | None = None

    def add(self, step: Step, norm: float) -> None:
        self.norm = norm
        self.total = step if self.total is None else Step(*(a + b for a, b in zip(self.total, step, strict=True)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count for the rate, but does for the time left."""
        began = time.monotonic()
        yield
        self.window += time.monotonic() - began

    def record(self, end: int) -> Record:
        """The line of the log; all processes call. The window begins anew."""
        t, now = self.trainer, time.monotonic()
        c, total = t.config, self.total
        assert total is not None
        sums, counts = (t.processes.sum(x.cpu()) for x in (total.sums, total.counts))
        each = (now - self.began) / max(1, t.step - self.from_step)
        record = {
            "step": t.step,
            "epoch": round(t.step * c.sequences_per_step / len(t.train_set), 3),
            "tokens": t.num_tokens,
            "lr": round(learning_rate(c, t.step - 1), 8),
            "loss": [round(x, 4) for x in (sums / counts.clamp(min=1)).tolist()],
            "grad_norm": round(self.norm, 3),
            "tokens_per_s": round((t.num_tokens - self.from_tokens) / max(1e-9, now - self.window)),
            "seconds_left": round(each * (end - t.step)),
            "time": round(time.time()),
        }
        self.total, self.window, self.from_tokens = None, now, t.num_tokens
        return record


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
