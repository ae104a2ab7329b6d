"""`train(config)`: everything from a target's name to a drafter folder. The one function the command line calls."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from dartspec import drafters
from dartspec.drafters._checkpoint import DraftNet
from dartspec.drafters._train import Start
from dartspec.errors import DartspecError
from dartspec.target.target import FINAL, Target
from dartspec.train.config import TrainConfig
from dartspec.train.data import (
    DraftVocabulary,
    Example,
    choose_vocabulary,
    digest,
    read_examples,
    split_examples,
)
from dartspec.train.evaluate import prepare_held_out
from dartspec.train.features import CacheInfo, StateCache, States, cache_info, log_normaliser
from dartspec.train.loop import Trainer, head_rows, target_layer, warm_start

ROWS_A_HEAD = 64  # positions whose whole-vocabulary logits live at once


class TargetStates:
    """A frozen `Target` as a `StateSource`: one prefill an example, through the same code that decoding uses."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.target, self.taps = target, tuple(taps)
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            value = getattr(target.config, key, None)
            if value not in (None, 1, 1.0):
                raise DartspecError(
                    f"{target.name} changes its logits after the head ({key} = {value}), which training cannot do"
                )

    @torch.no_grad()
    def states(self, example: Example) -> States:
        session = self.target.session(1, len(example.ids), (*self.taps, FINAL))
        got = session.prefill(0, example.ids).features
        assert got is not None
        final = got[:, -1]
        log_norm = torch.zeros(len(example.ids))
        for at in range(max(0, example.num_prompt - 1), len(example.ids), ROWS_A_HEAD):
            logits = self.target.lm_head(final[at : at + ROWS_A_HEAD])[:, : self.target.num_tokens]
            log_norm[at : at + ROWS_A_HEAD] = log_normaliser(logits).cpu()
        return States(got[:, :-1].cpu(), final.cpu(), log_norm)


def method(name: str) -> ModuleType:
    """The module of a method that can be trained."""
    module = drafters.get(name)
    if not hasattr(module, "loss"):
        can = ", ".join(n for n in drafters.names() if hasattr(drafters.get(n), "loss"))
        raise DartspecError(f"the drafter {name} has no weights to train; there are: {can}")
    return module


def fresh_net(
    config: TrainConfig,
    target: Target,
    vocabulary: DraftVocabulary,
    provenance: dict[str, Any],
    template_hash: str | None,
) -> DraftNet:
    """The method's network, shaped like the target's own layers, so a row costs what it costs in a target layer."""
    c = target.config
    heads = int(c.num_attention_heads)
    rope = getattr(c, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    common = {
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size or int(getattr(c, "intermediate_size", 4 * target.hidden_size)),
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(c, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(c, "head_dim", None) or target.hidden_size // heads),
        "rms_norm_eps": float(getattr(c, "rms_norm_eps", 1e-5)),
        "rope_theta": float(theta or getattr(c, "rope_theta", None) or 10000.0),
        "draft_vocab_size": len(vocabulary.ids),
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
        "target": config.target_name or target.name,
        "tokenizer_fingerprint": target.tokenizer_fingerprint,
        "weights_fingerprint": target.weights_fingerprint,
        "template_hash": template_hash,
        "provenance": provenance,
    }
    start = Start(
        common,
        config.d,
        config.taps,
        config.options,
        vocabulary.ids,
        head_rows(target, vocabulary.ids),
        config.seed,
        lambda number: target_layer(target.model, number),
    )
    net: DraftNet = method(config.method).start(start)
    return net


class Plan(NamedTuple):
    """What a run will do, said before it does it."""

    num_train: int
    num_held_out: int
    answer_tokens: int
    all_tokens: int
    coverage: float
    cache: CacheInfo
    steps: int
    epochs: float

    def lines(self) -> list[str]:
        return [
            f"{self.num_train} answers to train on, {self.num_held_out} held out; {self.answer_tokens:,} answer "
            f"tokens, {self.all_tokens:,} with prompts",
            f"the draft vocabulary covers {self.coverage:.2%} of the answers' tokens",
            f"{self.steps} updates are {self.epochs:.1f} passes over the data",
            f"cached states would take {self.cache.num_bytes / 1e9:.2f} GB",
        ]


def train(
    config: TrainConfig,
    target: Target,
    *,
    dry_run: bool = False,
    report: Callable[[str], None] = print,
    template_hash: str | None = None,
) -> Path:
    """Train a drafter for `target`, resuming where `config.out` has a run. Returns the drafter folder `out/latest`.

    dry_run: say tokens, coverage, cache size, then measure the rate on a few updates and say the hours; writes nothing.
    """
    if target.device.type != "cpu":
        raise DartspecError(
            f"{target.name} is on {target.device}, and training runs on the CPU only so far: load it with device cpu"
        )
    torch.set_num_threads(config.threads)
    paths = [Path(p) for p in config.data]
    examples = read_examples(paths, max_tokens=config.max_tokens, vocab_size=target.num_tokens)
    training, held = split_examples(examples, config.held_out)
    random.Random(0).shuffle(training)  # any part of a cache that is still being written is then a fair sample
    vocabulary = choose_vocabulary(training, config.draft_vocab_size, target.num_tokens, target.eos_token_ids)
    provenance = {
        "data": [p.name for p in paths],
        "data_digest": digest(training),
        "train_config": {
            k: v for k, v in config.to_dict().items() if k not in ("out", "cache", "init", "target", "data")
        },
        "coverage": round(vocabulary.coverage, 5),
        "torch": torch.__version__,
    }
    module = method(config.method)
    trained: DraftNet | None = module.read(Path(config.init)) if config.init else None
    if trained is not None:
        provenance["init"] = trained.config.provenance
    net = fresh_net(config, target, vocabulary, provenance, template_hash)
    if trained is not None:
        warm_start(net, trained)
    kept = config.cache_taps or tuple(t for t in net.config.taps if t != FINAL)
    ordered = [*held, *training]  # held-out first: a half-written cache can already be judged
    info = cache_info(ordered, target.weights_fingerprint or target.name, kept, target.hidden_size)
    plan = Plan(
        len(training),
        len(held),
        sum(e.num_response for e in training),
        sum(len(e.ids) for e in training),
        vocabulary.coverage,
        info,
        config.steps,
        config.steps * config.sequences_per_step / len(training),
    )
    for line in plan.lines():
        report(line)
    source = TargetStates(target, kept)

    if config.cache and not dry_run:
        cache = StateCache(Path(config.cache), info, ordered)
        cache.fill(source, report)

        def states(index: int) -> States:
            return cache.read(len(held) + index)

        held_states = [cache.read(i) for i in range(len(held))]
    else:

        def states(index: int) -> States:
            return source.states(training[index])

        held_states = [source.states(e) for e in (held[:4] if dry_run else held)]

    prepared = prepare_held_out(held[: len(held_states)], held_states, target, config.eval_stride)
    trainer = Trainer(config, net, module.loss, target, training, states, kept, prepared, report)
    if dry_run:
        _report_rate(trainer, config, report)
        return Path(config.out) / "latest"
    if trainer.resume(Path(config.out)):
        report(f"resuming at step {trainer.step} of {config.steps}")
    trainer.run()
    return Path(config.out) / "latest"


def _report_rate(trainer: Trainer, config: TrainConfig, report: Callable[[str], None]) -> None:
    """Seconds an update, split into the target's forward and the rest: with a cache the first is paid once."""
    seconds: list[float] = []
    forward_s = 0.0
    plain = trainer.states

    def timed(index: int) -> States:
        nonlocal forward_s
        began = time.monotonic()
        result = plain(index)
        forward_s += time.monotonic() - began
        return result

    trainer.states = timed
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
