"""A drafter adapted to a target that was fine-tuned since: M before and after, when it is enough, low rank."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from dartspec.drafters import dart, none
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.train.adapt import Adaptation, gain, make_low_rank, plain_state
from dartspec.train.config import TrainConfig
from dartspec.train.run import is_adapted, train
from dartspec.types import SamplingParams


def record(step: int, *by_prompt: tuple[int, int]) -> dict[str, Any]:
    committed, rounds = (sum(column) for column in zip(*by_prompt, strict=True))
    return {
        "step": step,
        "M": committed / rounds,
        "rounds": rounds,
        "nodes": 8,
        "by_prompt": [list(p) for p in by_prompt],
    }


# -- the rule --------------------------------------------------------------------------------------------------------


def test_a_gain_is_paired_by_prompt() -> None:
    before = record(0, (10, 10), (40, 10), (20, 20), (90, 30))
    assert gain(before, before) == (0.0, 0.0, 0.0)
    # every prompt a tenth better: certain, though prompts differ far more from each other
    after = record(0, (11, 10), (44, 10), (22, 20), (99, 30))
    found = gain(before, after)
    assert found.value == pytest.approx(176 / 70 - 160 / 70)
    assert 0 < found.low < found.value < found.high
    assert not found.is_noise
    mixed = gain(before, record(0, (14, 10), (36, 10), (26, 20), (88, 30)))  # as much better as worse
    assert mixed.is_noise
    with pytest.raises(DartspecError, match="4 prompts before and on 1 after"):
        gain(before, record(0, (1, 1)))


def adaptation(folder: Path, before: dict[str, Any], said: list[str] | None = None) -> Adaptation:
    return Adaptation(folder, folder / "old", lambda: before, (said if said is not None else []).append)


BEFORE = record(0, (12, 10), (20, 10), (33, 30))


def better(step: int, tenths: int) -> dict[str, Any]:
    """Each prompt better by so many tenths of a token a round."""
    return record(step, *((c + tenths * r // 10, r) for c, r in BEFORE["by_prompt"]))


def test_it_is_enough_when_m_is_flat(tmp_path: Path) -> None:
    said: list[str] = []
    a = adaptation(tmp_path, BEFORE, said)
    told = [a(better(10 * i, tenths)) for i, tenths in enumerate((3, 5, 9, 9, 9), 1)]
    assert told == [False, False, False, False, True]  # twice in a row nothing above noise
    assert a.end(tmp_path / "new") == tmp_path / "new"
    kept = json.loads((tmp_path / "adapt.json").read_text())
    assert (kept["kept"], kept["after"]["step"]) == ("adapted", 30)
    assert kept["gain"][0] == pytest.approx(0.9)
    assert said[0] == "M of the drafter as it is: 1.30 over 50 rounds, 8 nodes"
    assert said[-1].startswith("M 1.30 before, 2.20 after 30 updates: +0.90 [+0.90, +0.90], ")
    assert said[-1].endswith(" minutes")


def test_a_drafter_that_is_good_enough_is_kept_at_the_second_measurement(tmp_path: Path) -> None:
    said: list[str] = []
    a = adaptation(tmp_path, BEFORE, said)
    worse = record(10, (13, 10), (19, 10), (33, 30))
    assert not a(worse)
    assert a({**BEFORE, "step": 20})
    assert a.end(tmp_path / "new") == tmp_path / "old"
    assert said[-1].startswith("the old drafter is within noise: use it as it is")


def test_a_resumed_run_goes_on_with_what_was_measured(tmp_path: Path) -> None:
    a = adaptation(tmp_path, BEFORE)
    a(better(10, 5))
    a(better(20, 9))

    def never() -> dict[str, Any]:
        raise AssertionError("it was measured already")

    b = Adaptation(tmp_path, tmp_path / "old", never, lambda _: None)
    assert not b(better(20, 9))  # measured once more after a kill: it takes the other's place
    assert [r["step"] for r in b.measured] == [10, 20]
    assert not b(better(30, 9))
    assert b(better(40, 9))


# -- a run -----------------------------------------------------------------------------------------------------------


def answers(target: Target, path: Path) -> None:
    """The target's own greedy and sampled answers."""
    prompts = [[1, 3 + i % 40, 5 + 2 * i % 60] for i in range(36)]
    requests = [Request(p, SamplingParams(temperature=0.3, seed=i, max_tokens=30)) for i, p in enumerate(prompts)]
    ids: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    for chunk in generate(target, none.Plain(), requests, batch=12, num_nodes=0):
        ids[chunk.index] += chunk.ids
    lines = [json.dumps({"prompt": p, "response": ids[i]}) for i, p in enumerate(prompts) if len(ids[i]) > 6]
    path.write_text("\n".join(lines) + "\n")


def tuned(model: Any) -> Any:
    """The model with its last layers changed: another text, the same form."""
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, p in changed.named_parameters():
            if "layers.3." in name and p.dim() == 2:
                p.add_(torch.randn(p.shape, generator=generator) * 0.3)
    return changed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path, Target]:
    """A config for the tuned target, the drafter of its base, and the tuned target."""
    folder = tmp_path_factory.mktemp("adapt")
    base = Target(tiny.model(), tiny.VOCAB, frozenset({2}), "base", "tok1", "weights1")
    fine = Target(tuned(tiny.model()), tiny.VOCAB, frozenset({2}), "fine", "tok1", "weights2")
    answers(base, folder / "base.jsonl")
    answers(fine, folder / "fine.jsonl")
    config = TrainConfig(
        target="base",
        data=(str(folder / "base.jsonl"),),
        out=str(folder / "first"),
        taps=(1, 2, 3),
        d=4,
        draft_vocab_size=90,
        held_out=0.2,
        steps=80,
        num_first=16,
        num_anchors=8,
        warmup_steps=4,
        learning_rate=3e-3,
        final_learning_rate=1e-3,
        bf16=False,
        log_every=40,
        eval_every=200,
        m_every=0,
        m_prompts=6,
        m_tokens=24,
        m_nodes=8,
        save_every_s=1e9,
    )
    old = train(config, base, report=lambda _: None)
    return replace(config, target="fine", data=(str(folder / "fine.jsonl"),), init=str(old), m_every=40), old, fine


@pytest.mark.filterwarnings("ignore:drafter trained for weights")
def test_a_run_adapts_and_says_what_it_gained(trained: tuple[TrainConfig, Path, Target], tmp_path: Path) -> None:
    config, old, fine = trained
    said: list[str] = []
    whole = replace(config, out=str(tmp_path / "run"), steps=400)
    assert is_adapted(whole, fine)
    folder = train(whole, fine, report=said.append)
    kept = json.loads((tmp_path / "run" / "adapt.json").read_text())
    assert kept["before"]["M"] < kept["after"]["M"]
    assert folder == (tmp_path / "run" / "best" if kept["kept"] == "adapted" else old)
    assert kept["measured"][-1]["step"] <= 400
    assert any(s.startswith("M of the drafter as it is: ") for s in said)
    config_json = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    assert config_json["weights_fingerprint"] == "weights2"
    assert config_json["acceptance"] == {"8": kept["after"]["M"]}
    again: list[str] = []
    assert train(whole, fine, report=again.append) == folder
    assert "nothing to do" in again[-1]


def test_only_another_targets_drafter_is_adapted(trained: tuple[TrainConfig, Path, Target]) -> None:
    config, _, fine = trained
    base = Target(tiny.model(), tiny.VOCAB, frozenset({2}), "base", "tok1", "weights1")
    assert is_adapted(config, fine)
    assert not is_adapted(config, base)  # more data for the same target
    assert not is_adapted(replace(config, init=""), fine)
    assert not is_adapted(replace(config, m_every=0), fine)  # nothing would tell when M is flat


# -- low rank --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:drafter trained for weights")
def test_low_rank_trains_a_change_of_that_rank(trained: tuple[TrainConfig, Path, Target], tmp_path: Path) -> None:
    config, old, fine = trained
    folder = train(
        replace(config, out=str(tmp_path / "run"), steps=6, m_every=0, low_rank=2), fine, report=lambda _: None
    )
    before, after = (dart.read(f).state_dict() for f in (old, folder))
    assert before.keys() == after.keys()  # an ordinary drafter
    ids = dart.read(old).target_ids().tolist()
    place = {token: row for row, token in enumerate(dart.read(folder).target_ids().tolist())}
    changed = 0
    for name, weight in after.items():
        if weight.dim() != 2:
            continue
        was = before[name].float()
        if name == "lm_head.weight":  # other answers, other draft vocabulary: rows that both have
            both = [(row, place[t]) for row, t in enumerate(ids) if t in place]
            rows, own = (list(x) for x in zip(*both, strict=True))
            was, weight = was[rows], weight[own]
        s = torch.linalg.svdvals(weight.float() - was)
        changed += bool(s[0] > 1e-4)
        assert s[2] < 0.05 * s[0] + 0.02 * float(was.abs().max()), name  # bfloat16 rounds what is saved
    assert changed >= 6


def test_low_rank_begins_with_the_same_network_and_is_plain_when_asked() -> None:
    fields = {"d": 3, "taps": (1, 2, 3), "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    sizes = {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "draft_vocab_size": 20,
        "vocab_size": 20,
        "target_hidden_size": 16,
    }
    net = dart.DartNet(dart.Config(**fields, **sizes, num_target_layers=4, rms_norm_eps=1e-5, rope_theta=1e4))
    before = {name: t.clone() for name, t in net.state_dict().items()}
    make_low_rank(net, 4, 0)
    state = plain_state(net)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in before)
    learned = {name.rsplit(".", 1)[1] for name, p in net.named_parameters() if p.requires_grad and p.dim() == 2}
    assert learned == {"A", "B"}
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith(".B"):
                p.fill_(1.0)
    assert not torch.equal(plain_state(net)["fc.weight"], before["fc.weight"])
    assert torch.allclose(plain_state(net)["fc.weight"], net.fc.weight)


@pytest.mark.parametrize("changes", [{"init": ""}, {"ema": 0.9}, {"parallel": "fsdp2"}])
def test_low_rank_refuses_what_it_cannot_be_with(changes: dict[str, Any]) -> None:
    with pytest.raises(DartspecError, match="low_rank = 4 needs init"):
        TrainConfig(**{"target": "t", "data": ("d",), "out": "o", "init": "i", "low_rank": 4, **changes})
