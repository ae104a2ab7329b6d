"""Whole training runs on a tiny target: they learn, resume bit for bit, stop when asked, and say what they will do."""

from __future__ import annotations

import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from dartspec import drafters
from dartspec.drafters import dart
from dartspec.drafters._train import default_taps
from dartspec.drafters.dart import DartNet
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.train.batch import select_taps
from dartspec.train.config import TrainConfig
from dartspec.train.data import Example, read_examples
from dartspec.train.evaluate import evaluate, prepare_held_out
from dartspec.train.features import StateCache, cache_info
from dartspec.train.loop import Trainer, learning_rate, sequence_at
from dartspec.train.run import TargetStates, train
from dartspec.types import Committed, Drafter, SamplingParams


def target(**changes: Any) -> Target:
    return Target(tiny.model("llama", **changes), tiny.VOCAB, frozenset({2}), "tiny", "tok1", "weights1")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    generator = torch.Generator().manual_seed(5)
    lines = []
    for _ in range(20):
        start = torch.randint(3, 40, (1,), generator=generator).item()
        ids = [3 + (start + 5 * i) % 60 for i in range(24)]
        lines.append(json.dumps({"prompt": ids[:6], "response": ids[6:]}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    return TrainConfig(
        target="tiny",
        data=(str(tmp_path / "data.jsonl"),),
        out=str(tmp_path / "run"),
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
        save_every_s=1e9,
    )


def quiet(_: str) -> None:
    return None


def trainer_of(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, until: int | None = None) -> Trainer:
    """The trainer that `train` builds, after it ran to `until`."""
    caught: list[Trainer] = []
    run = Trainer.run

    def catch(self: Trainer, _: int | None = None) -> None:
        caught.append(self)
        run(self, until)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", catch)
        train(config, target(), report=quiet)
    return caught[0]


def same(a: Trainer, b: Trainer) -> bool:
    """Weights, optimiser and position, bit for bit."""
    nets = zip(a.net.state_dict().values(), b.net.state_dict().values(), strict=True)
    states = zip(a.optimizer.state_dict()["state"].values(), b.optimizer.state_dict()["state"].values(), strict=True)
    return (
        (a.step, a.num_tokens) == (b.step, b.num_tokens)
        and all(torch.equal(x, y) for x, y in nets)
        and all(torch.equal(x[k], y[k]) for x, y in states for k in ("step", "exp_avg", "exp_avg_sq"))
    )


def log(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()]


def test_a_run_learns_logs_and_leaves_a_drafter_that_loads(config: TrainConfig) -> None:
    longer = replace(config, steps=120, eval_every=40, log_every=20)
    folder = train(longer, target(), report=quiet, template_hash="abc")
    records = log(longer)
    steps, evals = [r for r in records if "eval" not in r], [r["eval"] for r in records if "eval" in r]
    assert [r["step"] for r in steps] == [20, 40, 60, 80, 100, 120]
    assert [r["step"] for r in evals] == [40, 80, 120]
    assert steps[-1]["loss"][0] < 0.8 * steps[0]["loss"][0]
    assert steps[-1]["loss"][1] < steps[0]["loss"][1]
    for name in ("hit1", "hit10", "loss", "mass"):
        assert len(evals[-1][name]) == 4
    assert all(one <= ten <= 1 for one, ten in zip(evals[-1]["hit1"], evals[-1]["hit10"], strict=True))
    drafter = dart.load(folder, target())
    c = drafter.config
    assert (c.tokenizer_fingerprint, c.weights_fingerprint, c.template_hash) == ("tok1", "weights1", "abc")
    assert (c.taps, c.d, c.num_target_layers, c.draft_vocab_size) == ((1, 2, 3), 4, 4, 64)
    assert c.provenance["step"] == 120
    assert c.provenance["curve"][-1]["step"] == 120
    assert c.provenance["train_config"]["steps"] == 120
    assert not any("/" in str(v) for v in c.provenance["data"])  # names, not the paths of a machine
    assert sorted(p.name for p in Path(longer.out).iterdir()) == ["latest", "log.jsonl", "state.pt", "train.json"]


# methods with weights, and what each of them may be told
METHODS: dict[str, dict[str, Any]] = {
    "dart": {},
    "eagle3": {"options": {"top_k": 4}},
    "dflash": {"options": {"num_layers": 2}},
    "medusa": {"options": {"num_blocks": 2}},
    "hydra": {"options": {"prefix": True, "num_blocks": 2}},
}


def test_every_method_with_a_loss_is_trained_here() -> None:
    assert {n for n in drafters.names() if hasattr(drafters.get(n), "loss")} == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_resumes_and_drafts(
    method: str, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same loop for all: the loss falls, a run in two parts is the run in one, and the drafter is accepted."""
    taps = () if method in ("medusa", "hydra") else (1, 2, 3)
    c = replace(config, method=method, taps=taps, steps=60, eval_every=60, log_every=20, **METHODS[method])
    whole = trainer_of(replace(c, cache=str(tmp_path / "cache"), cache_taps=(1, 2, 3)), monkeypatch)
    losses = [r["loss"] for r in log(c) if "eval" not in r]
    assert losses[-1][0] < 0.95 * losses[0][0]
    assert losses[-1][3] < losses[0][3]
    parts = replace(c, out=str(tmp_path / "parts"), cache=str(tmp_path / "cache"), cache_taps=(1, 2, 3))
    trainer_of(parts, monkeypatch, until=23)
    assert same(trainer_of(parts, monkeypatch), whole)  # case 27, and one cache for every method
    t = target()
    made: Drafter = drafters.get(method).load(Path(c.out) / "latest", t)
    prompt = read_examples([Path(c.data[0])], max_tokens=64, vocab_size=tiny.VOCAB)[0].ids[:12]
    answers: list[list[int]] = []
    for drafter in (drafters.get("none").load(drafters.get("none").Config(), t), made):
        chunks = list(generate(t, drafter, [Request(prompt, SamplingParams(max_tokens=40))], num_nodes=8))
        answers.append([i for chunk in chunks for i in chunk.ids])
    assert answers[0] == answers[1]


def test_options_that_a_method_does_not_have_are_refused(config: TrainConfig) -> None:
    with pytest.raises(DartspecError, match="Medusa has no option 'prefix'; its own are num_blocks, top_k"):
        train(replace(config, method="medusa", options={"prefix": True}), target(), report=quiet)
    with pytest.raises(DartspecError, match="DART has no option 'top_k'; its own are shifted"):
        train(replace(config, options={"top_k": 3}), target(), report=quiet)
    with pytest.raises(
        DartspecError, match="the drafter prompt_lookup has no weights to train; there are: dart, dflash"
    ):
        train(replace(config, method="prompt-lookup"), target(), report=quiet)
    with pytest.raises(DartspecError, match="unknown drafter 'eagle9'"):
        train(replace(config, method="eagle9"), target(), report=quiet)
    with pytest.raises(DartspecError, match=r"the drafter reads tap 2, the states hold taps \[1, 3\]"):
        train(replace(config, cache_taps=(1, 3)), target(), report=quiet)


@pytest.mark.parametrize("method", ["eagle3", "dflash", "medusa", "hydra"])
def test_training_and_serving_of_every_method_agree(method: str, config: TrainConfig) -> None:  # case 25
    """Offset 1 of the held-out evaluation is the first level that the drafter draws at the same place."""
    t = target()
    taps = () if method in ("medusa", "hydra") else (1, 2, 3)
    c = replace(config, method=method, taps=taps, steps=20, eval_every=20, eval_stride=1, **METHODS[method])
    folder = train(c, t, report=quiet)
    module = drafters.get(method)
    net, drafter = module.read(folder).float(), module.load(folder, t)
    example = read_examples([Path(c.data[0])], max_tokens=64, vocab_size=tiny.VOCAB)[-1]
    states = TargetStates(t, (1, 2, 3)).states(example)
    held = prepare_held_out([example], [states], t, 1)
    head = tiny.model("llama").get_output_embeddings().weight.detach()[net.target_ids()]
    report = evaluate(module.loss, net, held, t, (1, 2, 3), head, torch.float32)
    features = select_taps(states, (1, 2, 3), drafter.taps)
    ids, hits = torch.tensor(example.ids), []
    for root in range(example.num_prompt - 1, len(ids) - 1):
        drafter.reset([0])
        (tree,) = drafter.propose([Committed(0, ids[: root + 1], root, features[:root])], [1])
        hits.append(int(tree.tokens[1]) == int(held.choices[0][root]))
    assert report["hit1"][0] == pytest.approx(sum(hits) / len(hits), abs=1e-4)


@pytest.mark.parametrize("cut", [1, 7, 11])
def test_resume_is_bit_equal(config: TrainConfig, tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trainer_of(config, monkeypatch)  # case 27
    parts = replace(config, out=str(tmp_path / "parts"))
    first = trainer_of(parts, monkeypatch, until=cut)
    assert first.step == cut
    assert not same(first, whole)
    again = trainer_of(parts, monkeypatch)
    assert again.step == 12
    assert same(again, whole)
    assert [e["step"] for e in again.curve][-1] == 12


def test_a_cache_changes_nothing_but_the_time(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Target(tiny.model("llama", dtype=torch.bfloat16), tiny.VOCAB, frozenset({2}), "tiny", "tok1", "w")
    caught: list[Trainer] = []
    monkeypatch.setattr(Trainer, "run", lambda self, _=None: caught.append(self) or [self.update() for _ in range(5)])
    train(config, half, report=quiet)
    train(replace(config, out=str(tmp_path / "b"), cache=str(tmp_path / "cache")), half, report=quiet)
    assert same(*caught)


def test_sigterm_saves_and_the_run_goes_on(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer_of(config, monkeypatch)
    stopped = replace(config, out=str(tmp_path / "stopped"))
    update = Trainer.update

    def kill_at_five(self: Trainer) -> Any:
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", kill_at_five)
        first = trainer_of(stopped, monkeypatch)
    assert first.step == 5
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert DartNet.from_folder(Path(stopped.out) / "latest").config.provenance["step"] == 5
    assert same(trainer_of(stopped, monkeypatch), whole)


def test_a_kill_without_warning_costs_what_was_not_saved_only(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer_of(config, monkeypatch)
    often = replace(config, out=str(tmp_path / "often"), save_every_s=0.0)
    update = Trainer.update

    def die_at_nine(self: Trainer) -> Any:
        if self.step == 9:
            raise KeyboardInterrupt
        return update(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", die_at_nine)
        with pytest.raises(KeyboardInterrupt):
            trainer_of(often, monkeypatch)
    assert same(trainer_of(often, monkeypatch), whole)


def test_steps_may_be_raised_but_not_what_an_update_computes(config: TrainConfig, monkeypatch: Any) -> None:
    trainer_of(config, monkeypatch)
    longer = trainer_of(replace(config, steps=16), monkeypatch)
    assert longer.step == 16
    for change in ({"learning_rate": 1e-2}, {"num_anchors": 5}, {"seed": 1}, {"gamma": 0.5}):
        name = next(iter(change))
        with pytest.raises(DartspecError, match=f"{name} was .*, this run says"):
            train(replace(config, **change), target(), report=quiet)


def test_other_data_is_not_resumed(config: TrainConfig, tmp_path: Path) -> None:
    train(replace(config, steps=2), target(), report=quiet)
    lines = Path(config.data[0]).read_text().splitlines()
    Path(config.data[0]).write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(DartspecError, match="trained on other data"):
        train(config, target(), report=quiet)


def test_a_dry_run_says_what_it_takes_and_writes_nothing(config: TrainConfig, tmp_path: Path) -> None:  # case 26
    lines: list[str] = []
    train(replace(config, cache=str(tmp_path / "cache")), target(), dry_run=True, report=lines.append)
    text = "\n".join(lines)
    for part in (
        "18 answers to train on, 2 held out",
        "324 answer tokens",
        "covers 100.00%",
        "12 updates are 1.3 passes",
    ):
        assert part in text
    for part in ("tokens/s", "ms an update", "hours online", "hours with a cache", "GB"):
        assert part in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl"]


def test_starting_weights_are_the_targets(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DartNet] = []
    monkeypatch.setattr(Trainer, "run", lambda self, _=None: seen.append(self.net))
    t = target()
    train(config, t, report=quiet)
    net, model = seen[0], tiny.model("llama")
    head = model.get_output_embeddings().weight
    torch.testing.assert_close(net.lm_head.weight, head[net.target_ids()], rtol=1e-6, atol=1e-6)
    hidden = torch.randn(3, 3 * 32)
    torch.testing.assert_close(net.fc(hidden), hidden[:, 64:])
    last = model.model.layers[3]
    torch.testing.assert_close(net.layer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    torch.testing.assert_close(net.layer.self_attn.k_proj.weight[:, 32:], last.self_attn.k_proj.weight)


def test_a_target_with_other_names_starts_at_random(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DartNet] = []
    monkeypatch.setattr(Trainer, "run", lambda self, _=None: seen.append(self.net))
    t = Target(tiny.model("gpt_neox"), tiny.VOCAB, frozenset({2}), "neox")
    train(config, t, report=quiet)
    assert 0.01 < seen[0].layer.mlp.up_proj.weight.std().item() < 0.03


def test_a_run_may_start_from_a_drafter_with_another_vocabulary(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(config, target(), report=quiet)
    old = DartNet.from_folder(folder)
    seen: list[DartNet] = []
    monkeypatch.setattr(Trainer, "run", lambda self, _=None: seen.append(self.net))
    larger = replace(config, out=str(tmp_path / "larger"), init=str(folder), draft_vocab_size=80)
    train(larger, target(), report=quiet)
    net = seen[0]
    torch.testing.assert_close(net.fc.weight, old.fc.weight.float())
    before = dict(zip(old.target_ids().tolist(), old.lm_head.weight.float(), strict=True))
    head = tiny.model("llama").get_output_embeddings().weight
    new = 0
    for i, row in zip(net.target_ids().tolist(), net.lm_head.weight, strict=True):
        torch.testing.assert_close(row, before.get(i, head[i]), rtol=1e-6, atol=1e-6)
        new += i not in before
    assert new == 16
    assert net.config.provenance["init"] == old.config.provenance
    with pytest.raises(DartspecError, match=r"init: mask_features is \[96\] there, this run needs \[64\]"):
        train(replace(larger, taps=(1, 3)), target(), report=quiet)


def test_the_schedule_warms_up_and_ends_low(config: TrainConfig) -> None:
    rates = [learning_rate(config, s) for s in range(12)]
    assert rates[0] == pytest.approx(1.5e-3)
    assert rates[1] == pytest.approx(3e-3)
    assert all(a >= b for a, b in itertools.pairwise(rates[1:]))
    assert learning_rate(config, 12) == pytest.approx(1e-4)
    assert learning_rate(config, 99) == pytest.approx(1e-4)


def test_every_epoch_visits_every_answer_once_in_its_own_order(config: TrainConfig) -> None:
    epochs = [[sequence_at(config, 7, e * 7 + i) for i in range(7)] for e in range(3)]
    assert all(sorted(e) == list(range(7)) for e in epochs)
    assert epochs[0] != epochs[1]
    assert [sequence_at(config, 7, i) for i in range(7)] == epochs[0]  # also when asked again, later


def test_default_taps_are_low_middle_high_or_refused() -> None:  # case 19
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(28) == (2, 14, 25)
    assert default_taps(7) == (2, 3, 4)
    for layers in (4, 5, 6):
        with pytest.raises(DartspecError, match=r"do not rise: set taps"):
            default_taps(layers)


def test_a_target_on_an_accelerator_is_refused_before_any_work(config: TrainConfig) -> None:
    elsewhere = target()
    elsewhere.device = torch.device("cuda", 0)
    with pytest.raises(DartspecError, match="training runs on the CPU only so far"):
        train(config, elsewhere, report=lambda line: None)
    assert not Path(config.out).exists()


def test_a_target_that_changes_its_logits_is_refused() -> None:
    t = Target(tiny.model("gemma2"), tiny.VOCAB, frozenset({2}), "capped")
    with pytest.raises(DartspecError, match="final_logit_softcapping"):
        TargetStates(t, (1, 2))


def test_states_are_what_a_plain_forward_gives(config: TrainConfig) -> None:
    t = target()
    example = Example.answered(tuple(range(5, 25)), 8)
    got = TargetStates(t, (0, 2, 3)).states(example)
    out = tiny.model("llama")(torch.tensor([example.ids]), output_hidden_states=True)
    for i, tap in enumerate((0, 2, 3)):
        torch.testing.assert_close(got.features[:, i], out.hidden_states[tap][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(t.lm_head(got.final), out.logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.log_norm[7:], torch.logsumexp(out.logits[0], -1)[7:], rtol=1e-5, atol=1e-5)
    assert not got.log_norm[:7].any()


def test_a_cache_resumes_and_refuses_other_data(config: TrainConfig, tmp_path: Path) -> None:
    t = target()
    examples = read_examples([Path(config.data[0])], max_tokens=64, vocab_size=tiny.VOCAB)[:6]
    source = TargetStates(t, (1, 2, 3))
    info = cache_info(examples, "weights1", (1, 2, 3), 32)
    asked: list[Example] = []

    class Counting:
        def states(self, example: Example) -> Any:
            if len(asked) == 4:
                raise KeyboardInterrupt
            asked.append(example)
            return source.states(example)

    cache = StateCache(tmp_path / "c", info, examples)
    with pytest.raises(KeyboardInterrupt):
        cache.fill(Counting(), report_every_s=0)
    assert cache.num_ready == 4
    asked.clear()
    again = StateCache(tmp_path / "c", info, examples)
    again.fill(Counting(), report_every_s=0)
    assert asked == examples[4:]
    for i, e in enumerate(examples):
        wanted, got = source.states(e), again.read(i)
        assert torch.equal(got.features, wanted.features.to(torch.bfloat16))
        assert torch.equal(got.final, wanted.final.to(torch.bfloat16))
        assert torch.equal(got.log_norm, wanted.log_norm)
    with pytest.raises(DartspecError, match=r"taps is \[1, 2, 3\], this run needs \[1, 2\]"):
        StateCache(tmp_path / "c", cache_info(examples, "weights1", (1, 2), 32), examples)
    with pytest.raises(DartspecError, match="data_digest"):
        StateCache(tmp_path / "c", cache_info(examples[::-1], "weights1", (1, 2, 3), 32), examples)
    assert info.num_bytes == sum((tmp_path / "c" / f).stat().st_size for f in ("states.bin", "log_norm.bin"))


def test_a_cache_that_cannot_fit_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    import shutil

    examples = [Example.answered((1, 2, 3), 1)]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(DartspecError, match=r"needs 0\.0 GB, 0\.0 GB are free"):
        StateCache(tmp_path / "c", cache_info(examples, "t", (1,), 32), examples)
    assert list((tmp_path / "c").iterdir()) == []


def test_a_gradient_that_is_not_finite_ends_the_run(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    states = TargetStates.states

    def broken(self: TargetStates, example: Example) -> Any:
        got = states(self, example)
        return got._replace(features=got.features * float("inf"))

    monkeypatch.setattr(TargetStates, "states", broken)
    with pytest.raises(DartspecError, match="the gradient is not finite"):
        train(config, target(), report=quiet)


def test_training_and_serving_agree_on_one_sequence(config: TrainConfig) -> None:  # case 25
    """The held-out evaluation of training and the drafter in the engine's place see the same hits."""
    t = target()
    folder = train(replace(config, steps=40, eval_every=40), t, report=quiet)
    drafter = dart.load(folder, t)
    net = DartNet.from_folder(folder).float()
    example = read_examples([Path(config.data[0])], max_tokens=64, vocab_size=tiny.VOCAB)[-1]
    states = TargetStates(t, config.taps).states(example)
    held = prepare_held_out([example], [states], t, 1)
    head = tiny.model("llama").get_output_embeddings().weight.detach()[net.target_ids()]
    report = evaluate(dart.loss, net, held, t, config.taps, head, torch.float32)
    d, length = net.config.d, len(example.ids)
    ids = torch.tensor(example.ids)
    hits, counts = [0] * d, [0] * d
    for root in range(example.num_prompt - 1, length - 1):
        drafter.reset([0])
        log_probs, tokens = drafter.lattice([Committed(0, ids[: root + 1], root, states.features[:root])])
        assert torch.isfinite(log_probs).all()
        for i in range(d):
            if root + i + 1 < length:
                hits[i] += int(tokens[0, i, 0]) == int(held.choices[0][root + i])
                counts[i] += 1
    wanted = [round(h / c, 4) for h, c in zip(hits, counts, strict=True)]
    assert report["hit1"] == pytest.approx(wanted, abs=1e-4)
    assert max(wanted) > 0
