"""`--dry-run`: real updates, and what they say of the whole run. Writes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dartspec.train.config import TrainConfig
from dartspec.train.evaluate import prepare_held_out
from dartspec.train.features import States
from dartspec.train.loop import Trainer

if TYPE_CHECKING:
    from dartspec.train.run import Prepared, TargetStates


def dry_run(
    config: TrainConfig, ready: Prepared, source: TargetStates, memory_limit: int | None, report: Callable[[str], None]
) -> None:
    """Seconds an update, split into the target's forward and the rest: with a cache the first is paid once."""
    from dartspec.train.run import method

    forward_s = 0.0

    def states(indices: Sequence[int]) -> list[States]:
        nonlocal forward_s
        began = time.monotonic()
        result = source.many([ready.training[i] for i in indices])
        forward_s += time.monotonic() - began
        return result

    nothing_held = prepare_held_out([], [], source.target, config.eval_stride)
    loss = method(config.method).loss
    trainer = Trainer(config, ready.net, loss, source.target, ready.training, states, ready.kept, nothing_held, report)
    seconds: list[float] = []
    for step in range(6):
        if step == 2:  # the first two warm up
            forward_s = 0.0
        began = time.monotonic()
        trainer.update()
        seconds.append(time.monotonic() - began)
    each = sum(seconds[2:]) / 4
    forward = forward_s / 4
    online = each * config.steps / 3600
    answers = config.steps * config.sequences_per_step
    once = forward / config.sequences_per_step * min(answers, len(trainer.train_set)) / 3600
    cached = (each - forward) * config.steps / 3600 + once
    tokens = trainer.num_tokens / 6
    report(
        f"{tokens / each:.0f} tokens/s: {each * 1e3:.0f} ms an update, of which {forward * 1e3:.0f} ms are the target's"
    )
    report(f"{online:.2f} hours online, {cached:.2f} hours with a cache ({math.ceil(once * 60)} minutes to fill it)")
