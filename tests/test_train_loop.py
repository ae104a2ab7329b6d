"""Whole training runs on a tiny target: they learn, resume bit for bit, stop when asked, and say what they will do."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from dartspec import drafters
from dartspec.accounting import Metrics
from dartspec.drafters import dart
from dartspec.drafters._train import default_taps
from dartspec.drafters.dart import DartNet
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.train import run as run_module
from dartspec.train.batch import select_taps
from dartspec.train.config import TrainConfig
from dartspec.train.data import Example, read_examples, split_examples
from dartspec.train.evaluate import evaluate, prepare_held_out
from dartspec.train.loop import Trainer, learning_rate, sequence_at
from dartspec.train.run import TargetStates, read_done, train
from dartspec.train.watch import read_log
from dartspec.types import Committed, Drafter, SamplingParams
from tiny_train import config_in, quiet, same, target


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return config_in(tmp_path)


def trainer_of(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, until: int | None = None) -> Trainer:
    """The trainer that `train` builds, after it ran to `until`."""
    caught: list[Trainer] = []
    run = Trainer.run

    def catch(self: Trainer, _: int | None = None) -> bool:
        caught.append(self)
        return run(self, until)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", catch)
        train(config, target(), report=quiet)
    return caught[0]


def log(config: TrainConfig) -> list[dict[str, Any]]:
    return [r for kind, r in read_log(Path(config.out) / "log.jsonl") if kind == "train"]


def test_a_run_learns_logs_and_leaves_a_drafter_that_loads(config: TrainConfig) -> None:
    longer = replace(config, steps=120, eval_every=40, log_every=20, m_every=50)
    folder = train(longer, target(), report=quiet, template_hash="abc")
    records = read_log(Path(longer.out) / "log.jsonl")
    steps, evals, ms, (final,) = ([r for k, r in records if k == kind] for kind in ("train", "eval", "m", "final"))
    assert [r["step"] for r in steps] == [20, 40, 60, 80, 100, 120]
    assert [r["step"] for r in evals] == [40, 80, 120]
    assert [r["step"] for r in ms] == [50, 100, 120]
    assert steps[-1]["loss"][0] < 0.8 * steps[0]["loss"][0]
    assert steps[-1]["loss"][1] < steps[0]["loss"][1]
    for name in ("hit1", "hit10", "loss", "mass"):
        assert len(evals[-1][name]) == 4
    assert all(one <= ten <= 1 for one, ten in zip(evals[-1]["hit1"], evals[-1]["hit10"], strict=True))
    drafter = dart.load(folder, target())
    c = drafter.config
    assert (c.tokenizer_fingerprint, c.weights_fingerprint, c.template_hash) == ("tok1", "weights1", "abc")
    assert (c.taps, c.d, c.num_target_layers, c.draft_vocab_size) == ((1, 2, 3), 4, 4, 64)
    assert c.provenance["step"] == final["step"]
    assert c.acceptance == {"6": final["M"]}
    latest = dart.load(Path(longer.out) / "latest", target()).config.provenance
    assert latest["step"] == latest["curve"][-1]["step"] == latest["train_config"]["steps"] == 120
    assert not any("/" in str(v) for v in c.provenance["data"])  # names, not the paths of a machine
    left = ["best", "done.json", "latest", "log.jsonl", "state.pt", "train.json"]
    assert sorted(p.name for p in Path(longer.out).iterdir()) == left
    assert TrainConfig.from_file(Path(longer.out) / "train.json") == longer


def test_the_best_weights_by_the_engine_are_the_ones_that_are_left_and_judged(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M rises, then falls: the weights of the second measurement stay, and the last figures are theirs."""
    given = iter((1.5, 2.5, 2.0))
    seen: list[bytes] = []

    def measured(target: Any, drafter: Any, prompts: Any, **_: Any) -> dict[str, Any]:
        seen.append((Path(config.out) / "latest" / "model.safetensors").read_bytes())
        assert [len(p) for p in prompts] == [6, 6]
        return {"M": next(given), "rounds": 9, "nodes": 6}

    monkeypatch.setattr(run_module, "committed_a_round", measured)
    t = target()
    folder = train(replace(config, m_every=4), t, report=quiet)
    assert folder == Path(config.out) / "best"
    assert (folder / "model.safetensors").read_bytes() == seen[1]
    assert len(set(seen)) == 3
    net = DartNet.from_folder(folder)
    assert net.config.acceptance == {"6": 2.5}
    assert net.config.provenance["step"] == 8
    kinds = read_log(Path(config.out) / "log.jsonl")
    assert [(r["step"], r["M"], r["best"]) for k, r in kinds if k == "m"] == [
        (4, 1.5, True),
        (8, 2.5, True),
        (12, 2.0, False),
    ]
    kind, final = kinds[-1]
    assert (kind, final["step"], final["M"], final["drafter"]) == ("final", 8, 2.5, "best")
    held = split_examples(read_examples([Path(config.data[0])], max_tokens=64, vocab_size=tiny.VOCAB), 0.1)[1]
    ready = prepare_held_out(held, [TargetStates(t, config.taps).states(e) for e in held], t, config.eval_stride)
    head = tiny.model("llama").get_output_embeddings().weight.detach()[net.target_ids()]
    again = evaluate(dart.loss, net.float(), ready, t, config.taps, head, torch.float32)
    assert {name: final[name] for name in again} == again


def test_m_is_that_of_the_engine_and_a_run_may_do_without(config: TrainConfig) -> None:
    t = target()
    folder = train(replace(config, m_every=12), t, report=quiet)
    (m,) = (r for kind, r in read_log(Path(config.out) / "log.jsonl") if kind == "m")
    held = split_examples(read_examples([Path(config.data[0])], max_tokens=64, vocab_size=tiny.VOCAB), 0.1)[1]
    requests = [Request(e.ids[: e.num_prompt], SamplingParams(max_tokens=12)) for e in held]
    chunks = list(generate(t, dart.load(folder, t), requests, num_nodes=6, batch=1))
    whole = Metrics.merged(c.metrics for c in chunks if c.finish)
    assert (m["M"], m["rounds"], m["nodes"]) == (pytest.approx(whole.M, abs=1e-4), whole.num_rounds, 6)
    without = replace(config, m_every=0, out=config.out + "-without")
    assert train(without, t, report=quiet) == Path(without.out) / "latest"
    kinds = read_log(Path(without.out) / "log.jsonl")
    assert [k for k, _ in kinds if k in ("m", "final")] == ["final"]
    assert not (Path(without.out) / "best").exists()


def test_a_finished_run_does_nothing_until_an_input_changes(config: TrainConfig, tmp_path: Path) -> None:
    said: list[str] = []
    folder = train(config, target(), report=quiet)
    before = {p: p.stat().st_mtime_ns for p in Path(config.out).rglob("*")}
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(Path(config.data[0]).read_bytes())
    same_inputs = replace(config, data=(str(moved),), log_every=3)
    assert train(same_inputs, target(), report=said.append) == folder
    assert len(said) == 1
    assert "its inputs have not changed: nothing to do" in said[0]
    assert {p: p.stat().st_mtime_ns for p in Path(config.out).rglob("*")} == before
    said.clear()
    train(replace(config, steps=14), target(), report=said.append)  # more of it: goes on
    assert any("resuming at step 12 of 14" in line for line in said)
    assert read_log(Path(config.out) / "log.jsonl")[-1][0] == "final"
    other = Target(tiny.model("llama", seed=1), tiny.VOCAB, frozenset({2}), "tiny", "tok1", "weights2")
    with pytest.raises(DartspecError, match=r"trained for other weights of the target \(weights1, now weights2\)"):
        train(replace(config, steps=14), other, report=quiet)
    shutil.rmtree(folder)  # what was left is gone: it is not done
    assert not read_done(Path(config.out))


def test_an_update_in_parts_is_the_update_in_one(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row has its weight over the whole update, so accumulation is exact."""
    caught: list[Trainer] = []
    monkeypatch.setattr(Trainer, "run", lambda self, _=None: caught.append(self))
    for method, size in itertools.product(METHODS, (0, 1, 3)):
        taps = () if method in ("medusa", "hydra") else (1, 2, 3)
        c = replace(config, method=method, taps=taps, sequences_per_step=4, sequences_per_batch=size, clip=1e9)
        train(replace(c, **METHODS[method]), target(), report=quiet)
        whole = caught[-1] if size == 0 else whole  # noqa: F821
        trainer = caught[-1]
        for _ in range(3):
            step, norm = trainer.update()
        if size == 0:
            wanted = (step, norm)
            continue
        torch.testing.assert_close(step.loss, wanted[0].loss, rtol=1e-5, atol=1e-6)
        assert torch.equal(step.counts, wanted[0].counts)
        assert norm == pytest.approx(wanted[1], rel=1e-4)
        for a, b in zip(trainer.net.parameters(), whole.net.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_a_running_mean_of_the_weights_is_saved_judged_and_resumed(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = replace(config, ema=0.8, m_every=0)
    whole = trainer_of(c, monkeypatch)
    saved = DartNet.from_folder(Path(c.out) / "latest")
    for name, p in whole.net.named_parameters():
        assert torch.equal(saved.get_parameter(name), whole.ema[name].bfloat16())
        assert not torch.equal(p, whole.ema[name]) or not p.any()
    judged = read_log(Path(c.out) / "log.jsonl")[-1][1]
    assert judged["loss"] == pytest.approx(whole.evaluate()["loss"], abs=0.02)
    parts = replace(c, out=str(tmp_path / "parts"))
    first = trainer_of(parts, monkeypatch, until=1)
    mean = {n: p.clone() for n, p in first.ema.items()}
    first.update()
    for name, p in first.net.named_parameters():
        torch.testing.assert_close(first.ema[name], 0.8 * mean[name] + 0.2 * p)
    again = trainer_of(parts, monkeypatch)
    assert same(again, whole)
    assert all(torch.equal(again.ema[n], whole.ema[n]) for n in whole.ema)


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
    losses = [r["loss"] for r in log(c)]
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
    with pytest.raises(
        DartspecError,
        match="DART has no option 'top_k'; its own are shifted, head, head_rank, continuity_rank, attention",
    ):
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
    monkeypatch.setattr(
        Trainer, "run", lambda self, _=None: caught.append(self) or not [self.update() for _ in range(5)]
    )
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
    with pytest.raises(DartspecError, match="is at update 16, beyond steps = 10: raise steps"):
        train(replace(config, steps=10), target(), report=quiet)
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


def test_the_vocabulary_may_be_counted_in_more_answers(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later stage keeps the ids that earlier ones needed, and trains on its own answers alone."""
    seen: list[Trainer] = []
    monkeypatch.setattr(Trainer, "run", lambda self, _=None: seen.append(self))
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text(json.dumps({"prompt": [3, 4], "response": random.Random(1).choices(range(70, 79), k=58)}) + "\n")
    for changes in ({}, {"vocabulary_data": (str(earlier),)}):
        train(replace(config, out=str(tmp_path / f"run{len(seen)}"), **changes), target(), report=quiet)
    own, both = seen
    assert len(own.train_set) == len(both.train_set)
    assert not {70, 78} & set(own.net.target_ids().tolist())
    assert set(range(70, 79)) <= set(both.net.target_ids().tolist())
    assert both.net.config.provenance["vocabulary_data"] == ["earlier.jsonl"]
    assert "vocabulary_data" not in own.net.config.provenance
    own.save(tmp_path / "run0")
    with pytest.raises(DartspecError, match="trained with another draft vocabulary"):
        train(replace(config, out=str(tmp_path / "run0"), vocabulary_data=(str(earlier),)), target(), report=quiet)


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
