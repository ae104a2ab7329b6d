"""`train(config)`: everything from a target's name to a drafter folder. The one function the command line calls."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from dartspec import drafters
from dartspec.drafters._checkpoint import DraftNet, read_json
from dartspec.drafters._nn import head_rows
from dartspec.drafters._train import Start
from dartspec.errors import DartspecError
from dartspec.files import write_json
from dartspec.target.target import FINAL, Target
from dartspec.train.adapt import Adaptation, make_low_rank
from dartspec.train.config import TrainConfig
from dartspec.train.data import (
    DraftVocabulary,
    Example,
    check_infos,
    choose_vocabulary,
    digest,
    read_examples,
    split_examples,
)
from dartspec.train.evaluate import prepare_held_out
from dartspec.train.features import CacheInfo, StateCache, States, cache_info, log_normaliser
from dartspec.train.layer import llama_layer, rope_theta
from dartspec.train.loop import Trainer, drafter_folder, warm_start
from dartspec.train.measure import committed_a_round, held_prompts
from dartspec.train.parallel import processes
from dartspec.train.watch import Record, Watch

LAYER_IDS = 512  # ids of the draft vocabulary that the layer to start from is looked at with
ROWS_A_HEAD = 64  # positions whose whole-vocabulary logits live at once


class TargetStates:
    """A frozen `Target` as a `StateSource`: one prefill an example, through the same code that decoding uses.

    One at a time: on a CPU core several answers packed into one forward under a block-diagonal mask were no faster, and
    padded to one length they were slower.
    """

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.target, self.taps = target, tuple(taps)
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            value = getattr(target.config, key, None)
            if value not in (None, 1, 1.0):
                raise DartspecError(
                    f"{target.name} changes its logits after the head ({key} = {value}), which training cannot do"
                )

    def many(self, examples: Sequence[Example]) -> list[States]:
        return [self.states(e) for e in examples]

    @torch.no_grad()
    def states(self, example: Example) -> States:
        """On the target's device."""
        session = self.target.session(1, len(example.ids), (*self.taps, FINAL))
        got = session.prefill(0, example.ids).features
        assert got is not None
        session.close()
        final = got[:, -1]
        log_norm = torch.zeros(len(example.ids), device=final.device)
        for at in range(max(0, example.num_prompt - 1), len(example.ids), ROWS_A_HEAD):
            logits = self.target.lm_head(final[at : at + ROWS_A_HEAD])[:, : self.target.num_tokens]
            log_norm[at : at + ROWS_A_HEAD] = log_normaliser(logits)
        return States(got[:, :-1], final, log_norm)


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
    common = {
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size or int(getattr(c, "intermediate_size", 4 * target.hidden_size)),
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(c, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(c, "head_dim", None) or target.hidden_size // heads),
        "rms_norm_eps": float(getattr(c, "rms_norm_eps", 1e-5)),
        "rope_theta": rope_theta(c),
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
        lambda number: llama_layer(target.model, number, vocabulary.ids[:LAYER_IDS]),
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
            f"the draft vocabulary covers {self.coverage:.2%} of the tokens of the answers that it was counted in",
            f"{self.steps} updates are {self.epochs:.1f} passes over the data",
            f"cached states would take {self.cache.num_bytes / 1e9:.2f} GB",
        ]


class Prepared(NamedTuple):
    """What a run needs before its first update."""

    training: list[Example]
    held: list[Example]
    net: DraftNet
    kept: tuple[int, ...]
    plan: Plan

    @property
    def ordered(self) -> list[Example]:
        """As a cache of their states holds them: the held-out ones first."""
        return [*self.held, *self.training]


def prepare(config: TrainConfig, target: Target, template_hash: str | None = None) -> Prepared:
    """Read the data, choose the draft vocabulary, start the network. No forward of the target."""
    paths = [Path(p) for p in config.data]
    rendered = check_infos(paths, target.tokenizer_fingerprint)
    template_hash = rendered.get("template_hash", template_hash)
    examples = read_examples(paths, max_tokens=config.max_tokens, vocab_size=target.num_tokens)
    training, held = split_examples(examples, config.held_out)
    random.Random(0).shuffle(training)  # any part of a cache that is still being written is then a fair sample
    more = [Path(p) for p in config.vocabulary_data]
    check_infos(more, target.tokenizer_fingerprint)
    counted = training
    if more:
        counted = training + read_examples(more, max_tokens=config.max_tokens, vocab_size=target.num_tokens)
    vocabulary = choose_vocabulary(counted, config.draft_vocab_size, target.num_tokens, target.eos_token_ids)
    provenance = {
        "data": [p.name for p in paths],
        **({"vocabulary_data": [p.name for p in more]} if more else {}),
        "data_digest": digest(training),
        "train_config": {
            k: v
            for k, v in config.to_dict().items()
            if k not in ("out", "cache", "init", "target", "data", "vocabulary_data", "device")
        },
        "coverage": round(vocabulary.coverage, 5),
        "torch": torch.__version__,
        **{key: value for key, value in rendered.items() if key == "template_arguments"},
    }
    module = method(config.method)
    trained: DraftNet | None = module.read(Path(config.init)) if config.init else None
    if trained is not None:
        provenance["init"] = trained.config.provenance
    net = fresh_net(config, target, vocabulary, provenance, template_hash)
    if trained is not None:
        warm_start(net, trained)
    if config.low_rank:
        make_low_rank(net, config.low_rank, config.seed)
    kept = config.cache_taps or tuple(t for t in net.config.taps if t != FINAL)
    ordered = [*held, *training]
    plan = Plan(
        len(training),
        len(held),
        sum(e.num_response for e in training),
        sum(len(e.ids) for e in training),
        vocabulary.coverage,
        cache_info(ordered, target.weights_fingerprint or target.name, kept, target.hidden_size),
        config.steps,
        config.steps * config.sequences_per_step / len(training),
    )
    return Prepared(training, held, net, kept, plan)


def train(
    config: TrainConfig,
    target: Target,
    *,
    dry_run: bool = False,
    memory_limit: int | None = None,
    report: Callable[[str], None] = print,
    watch: Watch | None = None,
    template_hash: str | None = None,
) -> Path:
    """Train a drafter for `target`, resuming where `config.out` has a run. Returns the drafter's folder: `out/best`,
    the weights with the best M, or `out/latest` where M is never measured; where it adapted a drafter that is as good
    without (`train.adapt`), that one's. A finished run whose inputs are the same does nothing.

    dry_run: say what it takes, after three real updates (`train.dryrun`); writes nothing. memory_limit: bytes that the
    run may take there, instead of what is free. watch: told of every record (`train.watch`); default: lines.
    """
    torch.set_num_threads(config.threads)
    shared = processes(target.device, config.parallel)
    say = report if shared.is_first else _silent
    out = Path(config.out)
    ready = prepare(config, target, template_hash)
    identity = inputs(config, ready, target)
    if not dry_run and (done := read_done(out)).get("inputs") == identity:
        say(f"{out}: finished at update {config.steps}, and its inputs have not changed: nothing to do")
        return out / str(done["drafter"])
    for line in ready.plan.lines():
        say(line)
    source = TargetStates(target, ready.kept)
    if dry_run:
        from dartspec.train.dryrun import dry_run as try_out

        try_out(config, ready, source, memory_limit, say)
        return drafter_folder(out, config)

    num_held = len(ready.held)
    if config.cache:
        with shared.first_before_others():
            cache = StateCache(Path(config.cache), ready.plan.cache, ready.ordered)
        cache.fill(source, say, part=(shared.index, shared.count))
        shared.wait()

        def states(indices: Sequence[int]) -> list[States]:
            return [cache.read(num_held + i) for i in indices]

        held_states = [cache.read(i) for i in range(num_held)] if shared.is_first else []
    else:

        def states(indices: Sequence[int]) -> list[States]:
            return source.many([ready.training[i] for i in indices])

        held_states = [s.to(torch.device("cpu")) for s in source.many(ready.held)] if shared.is_first else []

    measure = _measure(config, target, ready.held)
    adaptation: Adaptation | None = None
    if shared.is_first and is_adapted(config, target):
        old = Path(config.init)
        adaptation = Adaptation(out, old, lambda: measure(old, lambda: False), say)
    trainer = Trainer(
        config,
        ready.net,
        method(config.method).loss,
        target,
        ready.training,
        states,
        ready.kept,
        prepare_held_out(ready.held[: len(held_states)], held_states, target, config.eval_stride),
        say,
        processes=shared,
        measure=measure,
        watch=watch,
        enough=adaptation,
    )
    if trainer.resume(out):
        say(f"resuming at step {trainer.step} of {config.steps}")
    if not trainer.run():
        return out / "latest"
    folder = drafter_folder(out, config)
    if adaptation is not None:
        folder = adaptation.end(folder)
    if shared.is_first:
        name = folder.name if folder.parent == out else str(folder.resolve())
        write_json(out / "done.json", {"inputs": identity, "drafter": name, "steps": config.steps})
    shared.wait()
    return folder


def is_adapted(config: TrainConfig, target: Target) -> bool:
    """Whether a run adapts a drafter: it starts from one whose target had other weights, and M is measured."""
    if not config.init or not config.m_every:
        return False
    before = read_json(Path(config.init) / "config.json").get("weights_fingerprint")
    return bool(before and target.weights_fingerprint and before != target.weights_fingerprint)


def _silent(_: str) -> None:
    """A report of processes but the first."""


def _measure(
    config: TrainConfig, target: Target, held: Sequence[Example]
) -> Callable[[Path, Callable[[], bool]], Record | None]:
    """M of a drafter folder on prompts of the held-out data."""
    prompts = held_prompts(held, config.m_prompts)

    def measure(folder: Path, give_up: Callable[[], bool]) -> Record | None:
        drafter = method(config.method).load(folder, target)
        return committed_a_round(
            target, drafter, prompts, num_nodes=config.m_nodes, num_tokens=config.m_tokens, give_up=give_up
        )

    return measure


# keys that change neither what is learned nor which weights are kept
_NOT_INPUTS = frozenset(
    ["out", "cache", "threads", "save_every_s", "log_every", "eval_every", "tensorboard", "device", "parallel"]
)
_SEEN_BY_CONTENT = frozenset(("target", "revision", "data", "vocabulary_data", "init"))  # where it lies does not matter


def inputs(config: TrainConfig, ready: Prepared, target: Target) -> str:
    """Fingerprint of all that decides what a run leaves."""
    weights = hashlib.sha256()
    for tensor in ready.net.state_dict().values():  # what it starts from, `init` and the target's layers among it
        weights.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    seen = {
        "config": {k: v for k, v in config.to_dict().items() if k not in _NOT_INPUTS | _SEEN_BY_CONTENT},
        "data": [digest(ready.training), digest(ready.held)],
        "start": weights.hexdigest(),
        "target": [target.weights_fingerprint, target.tokenizer_fingerprint, ready.net.config.template_hash],
    }
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]


def read_done(out: Path) -> dict[str, Any]:
    """What a finished run says of itself, or nothing: then it is none, or its drafter is gone."""
    path = out / "done.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found if (out / str(found.get("drafter")) / "model.safetensors").exists() else {}
