"""`dartspec eval`: its M is the engine's, its hits are training's own figures, and what it writes is read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dartspec
import tiny_cli
from dartspec.accounting import Metrics, loop_start
from dartspec.cli.eval import whole
from dartspec.cli.main import app
from dartspec.drafters._nn import head_rows
from dartspec.interop import registry
from dartspec.train.data import Example
from dartspec.train.evaluate import evaluate, prepare_held_out
from dartspec.train.run import TargetStates, method
from test_registry import save

TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, a random drafter for it, and two sets of prompts."""
    place = tmp_path_factory.mktemp("eval")
    tiny_cli.save(place / "model")
    lm = dartspec.load(str(place / "model"), drafter="none", dtype="float32")
    save(place / "drafter", lm, acceptance={"2": 1.0})
    for name, words in (("first", ("the on the", "in the thing")), ("second", ("a b c d",))):
        lines = [json.dumps({"id": f"{name}/{i}", "turns": [w]}) for i, w in enumerate(words)]
        (place / f"{name}.jsonl").write_text("\n".join(lines))
    return place


def run(folder: Path, *more: str) -> dict[str, Any]:
    sets = [f"--set={folder / name}.jsonl" for name in ("first", "second")]
    args = ["eval", str(folder / "drafter"), "--model", str(folder / "model"), *sets, "-n", str(TOKENS)]
    result = CliRunner().invoke(app, [*args, "--dtype", "float32", "--json", *more])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_m_is_the_engines_over_all_rounds(folder: Path) -> None:
    got = run(folder, "--nodes", "6,3", "--temperatures", "0,1", "--batch", "2")
    assert [s["set"] for s in got["sets"]] == ["first", "second", "all"]
    lm = dartspec.load(str(folder / "model"), drafter=str(folder / "drafter"), dtype="float32")
    for nodes in (3, 6):
        own = lm.with_drafter(lm.drafter, nodes=nodes)
        for temperature in (0.0, 1.0):
            parts = []
            for words in ("the on the", "in the thing", "a b c d"):
                r = own.generate(
                    [{"role": "user", "content": words}], temperature=temperature, seed=0, max_tokens=TOKENS
                )
                loop = loop_start(r.ids)
                parts.append(r.metrics if loop is None else r.metrics.before(loop))
            low, value, high = (got["sets"][2]["M"][f"{temperature:g}"][str(nodes)][i] for i in (1, 0, 2))
            assert value == pytest.approx(Metrics.merged(parts).M, abs=1e-3)
            assert low <= value <= high


def test_hits_are_those_of_training_on_the_greedy_answers(folder: Path) -> None:
    got = run(folder, "--nodes", "4", "--temperatures", "0")
    lm = dartspec.load(str(folder / "model"), drafter=str(folder / "drafter"), dtype="float32")
    net = method("dart").read(folder / "drafter").float()
    source = TargetStates(lm.target, net.config.taps)
    examples = []
    for words in ("the on the", "in the thing"):
        prompt = lm.encode([{"role": "user", "content": words}])
        ids = lm.generate(prompt, max_tokens=TOKENS).ids
        examples.append(Example.answered([*prompt, *ids[: loop_start(ids)]], len(prompt)))
    held = prepare_held_out(examples, source.many(examples), lm.target, 1)
    head = head_rows(lm.target, net.target_ids())
    want = evaluate(method("dart").loss, net, held, lm.target, net.config.taps, head, lm.target.dtype)
    first = got["sets"][0]
    # answers are weighted by their tokens here and by their positions there: the last few offsets differ a little
    assert first["hit1"] == pytest.approx(want["hit1"], abs=0.02)
    assert first["hit10"] == pytest.approx(want["hit10"], abs=0.05)
    assert first["chain"] == pytest.approx(want["chain"], abs=0.02)


def test_what_it_saves_is_the_drafters_record(folder: Path) -> None:
    got = run(folder, "--nodes", "6", "--temperatures", "0", "--save")
    written = json.loads((folder / "drafter" / "eval.json").read_text())
    assert written["sets"] == got["sets"]
    assert {"commit", "cpu", "date", "command"} <= set(written["provenance"])
    (entry,) = registry.entries([folder / "drafter"])
    assert entry.values["acceptance"] == {"2": 1.0, "6": got["sets"][2]["M"]["0"]["6"][0]}
    assert dartspec.load(str(folder / "model"), drafter=str(folder / "drafter")).trained.acceptance["6"] == entry.M


def test_figures_over_all_sets_are_sums_first() -> None:
    def row(committed: int, rounds: int, tokens: int, hit: float) -> dict[str, Any]:
        return {
            "set": "x",
            "answers": 1,
            "sums": {"0": {"4": [(committed, rounds)]}},
            "hits": [{"tokens": tokens, "hit1": [hit, 0.0], "hit10": [1.0, 0.5], "chain": hit}],
        }

    both = whole([row(30, 10, 30, 0.9), row(100, 90, 10, 0.1)])
    assert both["M"]["0"]["4"][0] == pytest.approx(130 / 100)
    assert both["hit1"] == pytest.approx([0.7, 0.0])
    assert both["chain"] == pytest.approx(0.7)
    assert both["answers"] == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes", "0"], "--nodes is '0'"),
        (["--temperatures", "warm"], "--temperatures is 'warm'"),
        (["--set", "nowhere"], "no prompt set 'nowhere'"),
        (["--max-tokens", "99999999999"], "--max-tokens is 99999999999; model has a context of"),
    ],
)
def test_bad_flags_are_one_sentence(folder: Path, flags: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["eval", str(folder / "drafter"), "--model", str(folder / "model"), *flags])
    assert result.exit_code == 2
    assert said in result.stderr
