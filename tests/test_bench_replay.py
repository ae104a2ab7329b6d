"""Replay over recorded guesses counts what the engine counts, round for round, at every temperature (float32)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import dartspec
import tiny_cli
from dartspec.accounting import Metrics, loop_start
from dartspec.bench.lattices import Capture, Replay, best_chain, capture, chain_curve, recorded, replay
from dartspec.bench.suites import Prompt
from dartspec.cli.main import app
from dartspec.errors import DartspecError
from dartspec.lattice import MOST_CONTEXT, SearchConfig, build_tree
from dartspec.ngram import NgramIndex
from dartspec.ngram.live import LiveText
from dartspec.types import Committed, SamplingParams, TokenTree
from test_cli import save_drafter

PROMPTS = [
    Prompt("a", "s", ("the the the",)),
    Prompt("b", "s", (), (5, 6, 7, 5, 6, 7)),
    Prompt("c", "t", ("an on in the an",)),
]
EOS = tiny_cli.tokenizer().eos_token_id


class Guesser:
    """A lattice drafter that is often right: at offset t it has the true token among its guesses for 3 positions of 4,
    by a rule of the position alone. It knows the texts that it is to guess."""

    taps: tuple[int, ...] = ()
    d, k = 5, 6

    def __init__(self, texts: list[list[int]], index: NgramIndex | None = None) -> None:
        self.texts, self.index, self.search = texts, index, SearchConfig(top_k=self.k, beam=4)
        self.live: LiveText | None = None

    def reset(self, slots: Sequence[int]) -> None:
        """Nothing is remembered."""

    def lattice(self, new: Sequence[Committed]) -> tuple[Tensor, Tensor]:
        log_probs, tokens = zip(*(self._one(c.history.tolist()) for c in new), strict=True)
        return torch.stack(log_probs), torch.stack(tokens)

    def _one(self, history: list[int]) -> tuple[Tensor, Tensor]:
        at = len(history)
        text = next((t for t in self.texts if t[:at] == history), [])
        tokens = torch.tensor([[(7 * (at + t) + 11 * j) % 250 for j in range(self.k)] for t in range(self.d)])
        for t, token in enumerate(text[at : at + self.d]):
            if (at + t) % 4 and token not in tokens[t]:
                tokens[t, (at + t) % 3] = token
        rank = torch.linspace(-0.5, -4.0, self.k).expand(self.d, -1) - 0.01 * torch.arange(self.d)[:, None]
        return rank.float().contiguous(), tokens.int()

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        log_probs, tokens = self.lattice(new)
        return [
            build_tree(c[-1], p, t, c, b, self.index, self.search, frozenset({EOS}), self._counts(n))
            for n, c, p, t, b in zip(
                new, (n.history[-MOST_CONTEXT:].tolist() for n in new), log_probs, tokens, budget, strict=True
            )
        ]

    def _counts(self, one: Committed) -> Any:
        """As DART asks for them: in a slot's first round all but the last token are the prompt."""
        if self.live is None:
            return None
        return self.live.counts(one.slot, one.history.numpy(), len(one.history) - 1)


@pytest.fixture(scope="module")
def lm() -> dartspec.LM:
    return dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="none", nodes=0)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, lm: dartspec.LM) -> Path:
    """An index of the target's own answers."""
    folder = tmp_path_factory.mktemp("index")
    answers = [lm.generate([5 + k, 6, 7], max_tokens=60, ignore_eos=True).ids for k in range(12)]
    rows = "".join(json.dumps({"response": ids}) + "\n" for ids in answers)
    (folder / "own.jsonl").write_text(rows)
    tokenizer = str(tiny_cli.save(folder / "model"))
    out = folder / "own.ngram"
    done = CliRunner().invoke(
        app, ["ngram", "build", str(folder / "own.jsonl"), "--tokenizer", tokenizer, "--out", str(out)]
    )
    assert done.exit_code == 0, done.stderr
    return out


def answers_of(lm: dartspec.LM, params: SamplingParams) -> list[list[int]]:
    prompts = [lm.encode([{"role": "user", "content": p.turns[0]}]) if p.turns else list(p.ids) for p in PROMPTS]
    return [p + lm.generate(p, params=params).ids for p in prompts]


def rounds_of_engine(lm: dartspec.LM, drafter: Any, params: SamplingParams, nodes: int) -> list[list[tuple[int, ...]]]:
    own = lm.with_drafter(drafter, nodes=nodes)
    found = []
    for p in PROMPTS:
        ids = lm.encode([{"role": "user", "content": p.turns[0]}]) if p.turns else list(p.ids)
        metrics = own.generate(ids, params=params).metrics
        found.append([(r.num_drafted, r.num_accepted, r.num_committed) for r in metrics.rounds])
    return found


PARAMS = {
    "greedy": SamplingParams(max_tokens=40, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, seed=3, max_tokens=40),
    "ends early": SamplingParams(temperature=1.0, seed=1, max_tokens=40, logit_bias={EOS: 5.0}),
    "short": SamplingParams(temperature=0.8, seed=4, max_tokens=7),
    "one token": SamplingParams(max_tokens=2),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("with_index", [False, True])
def test_replayed_rounds_are_the_engines(
    lm: dartspec.LM, index: Path, params: SamplingParams, with_index: bool, tmp_path: Path
) -> None:
    opened = NgramIndex.open(index) if with_index else None
    guesser = Guesser(answers_of(lm, params), opened)
    data = Capture(
        list(capture(lm.with_drafter(guesser), PROMPTS, params)),
        frozenset(lm.target.eos_token_ids),
        lm.text.fingerprint,
    )
    assert [t.id for t in data.texts] == [p.id for p in PROMPTS]
    if params.max_tokens > 2:
        data.save(tmp_path / "x.safetensors")
        data = Capture.load(tmp_path / "x.safetensors")
    accepted = 0
    one = Replay(data, opened, guesser.search, 20)
    for nodes in (0, 1, 4, 20):
        engine = rounds_of_engine(lm, guesser, params, nodes)
        for i in range(len(PROMPTS)):
            replayed = [(r.num_drafted, r.num_accepted, r.num_committed) for r in one.rounds(i, nodes).rounds]
            assert replayed == engine[i], nodes
            accepted += sum(a for _, a, _ in replayed)
    if params.logit_bias:
        assert sum(t.ids[-1] == EOS for t in data.texts) > 1
    if params.max_tokens > 10:
        assert accepted > 10  # deep walks were compared, not empty ones


@pytest.mark.parametrize("horizon", [1, 3])
def test_a_smaller_horizon_is_a_drafter_that_guesses_less_far(
    lm: dartspec.LM, index: Path, horizon: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, opened = PARAMS["greedy"], NgramIndex.open(index)
    guesser = Guesser(answers_of(lm, params), opened)
    data = Capture(list(capture(lm.with_drafter(guesser), PROMPTS, params)), frozenset(), lm.text.fingerprint)
    one = Replay(data, opened, guesser.search, 20, horizon=horizon)
    monkeypatch.setattr(Guesser, "d", horizon)
    engine = rounds_of_engine(lm, guesser, params, 20)
    for i in range(len(PROMPTS)):
        assert [(r.num_drafted, r.num_accepted, r.num_committed) for r in one.rounds(i, 20).rounds] == engine[i]
    assert max(a for own in engine for _, a, _ in own) == horizon


def test_the_running_text_is_replayed(lm: dartspec.LM) -> None:
    params = PARAMS["greedy"]
    guesser = Guesser(answers_of(lm, params))
    data = Capture(list(capture(lm.with_drafter(guesser), PROMPTS, params)), frozenset(), lm.text.fingerprint)
    search = replace(guesser.search, ngram_weight=3.0, ngram_at_level0=True)
    with_text, without = (Replay(data, None, replace(search, running_text=t), 6) for t in (True, False))
    differs = 0
    for nodes in (2, 6):
        guesser.search, guesser.live = search, LiveText()
        engine = rounds_of_engine(lm, guesser, params, nodes)
        for i in range(len(PROMPTS)):
            replayed = [(r.num_drafted, r.num_accepted, r.num_committed) for r in with_text.rounds(i, nodes).rounds]
            assert replayed == engine[i], nodes
            differs += with_text.rounds(i, nodes).M != without.rounds(i, nodes).M
    assert differs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("running_text", [False, True])
def test_dart_itself_is_replayed(
    lm: dartspec.LM, index: Path, tmp_path: Path, temperature: float, running_text: bool
) -> None:
    """The real drafter, whose rows the engine reads several at a time; its weights are random, its index is not."""
    folder = save_drafter(tmp_path / "drafter")
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=48, ignore_eos=True)
    search = SearchConfig(ngram_weight=2.0, ngram_at_level0=True, running_text=running_text)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"search": search.changes()}))
    own = lm.with_drafter(folder, nodes=40, index=index)
    data = Capture(
        list(capture(lm.with_drafter(folder, nodes=0), PROMPTS, params)),
        frozenset(lm.target.eos_token_ids),
        lm.text.fingerprint,
    )
    one, total = Replay(data, NgramIndex.open(index), search, 40), 0
    for i, t in enumerate(data.texts):
        metrics = own.generate(t.prompt, params=params).metrics
        expected = [(r.num_drafted, r.num_accepted, r.num_committed) for r in metrics.rounds]
        assert [(r.num_drafted, r.num_accepted, r.num_committed) for r in one.rounds(i, 40).rounds] == expected
        assert (one.rounds(i, 40).A, one.rounds(i, 40).M) == (metrics.A, metrics.M)
        total += sum(a for _, a, _ in expected)
    assert total > (0 if temperature else 5)


class FirstChoices(Guesser):
    """Its first choice is the true token at 3 positions of 4."""

    def _one(self, history: list[int]) -> tuple[Tensor, Tensor]:
        log_probs, tokens = super()._one(history)
        at = len(history)
        text = next((t for t in self.texts if t[:at] == history), [])
        for t, token in enumerate(text[at : at + self.d]):
            if (at + t) % 4:
                tokens[t] = torch.tensor([token, *(i for i in range(100, 110) if i != token)][: self.k])
        return log_probs, tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_chain_is_what_the_engine_commits_of_first_choices(lm: dartspec.LM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    guesser = FirstChoices(answers_of(lm, params))
    curve = chain_curve(recorded(lm.with_drafter(guesser), PROMPTS, params))
    assert list(curve) == [1, 2, 3, 4, 5]  # as far as it guesses
    guesser.search = SearchConfig(top_k=1, beam=1)
    for k, M in curve.items():
        whole = []
        for p in PROMPTS:
            ids = lm.encode([{"role": "user", "content": p.turns[0]}]) if p.turns else list(p.ids)
            done = lm.with_drafter(guesser, nodes=k).generate(ids, params=params)
            start = loop_start(done.ids)
            whole.append(done.metrics if start is None else done.metrics.before(start))
        assert round(Metrics.merged(whole).M, 4) == M
    assert curve[3] > curve[1] > 1


def test_the_best_chain_is_the_longest_whose_last_draft_adds_enough() -> None:
    assert best_chain({1: 1.56, 2: 1.75, 3: 1.82, 4: 1.84}) == 3
    assert best_chain({1: 1.01, 2: 1.02}) == 1


def test_the_context_is_as_long_as_the_index_reads(lm: dartspec.LM) -> None:
    """Four tokens, across the border of prompt and answer; the script before gave two and got another tree."""
    params = PARAMS["greedy"]
    guesser = Guesser(answers_of(lm, params))
    data = Capture(list(capture(lm.with_drafter(guesser), PROMPTS[1:2], params)), frozenset(), lm.text.fingerprint)
    text, seen = data.texts[0], []

    class Asked(Replay):
        def _tree(self, number: int, at: int) -> Any:
            seen.append([*text.prompt, *text.ids[: at + 1]][-MOST_CONTEXT:])
            return super()._tree(number, at)

    Asked(data, None, guesser.search, 4).rounds(0, 4)
    assert seen[0] == [*text.prompt[-3:], text.ids[0]]


def test_rows_hold_what_intervals_need(lm: dartspec.LM) -> None:
    params = PARAMS["greedy"]
    data = Capture(
        list(capture(lm.with_drafter(Guesser(answers_of(lm, params))), PROMPTS, params)), frozenset(), "fingerprint"
    )
    searches = {"a": SearchConfig(top_k=6), "b": SearchConfig(top_k=2)}
    rows = list(replay(data, {"none": None}, searches, [2, 8]))
    assert [(r["search"], r["nodes"]) for r in rows] == [("a", 2), ("a", 8), ("b", 2), ("b", 8)]
    for r in rows:
        assert r["M"] == pytest.approx(sum(r["committed"]) / sum(r["rounds"]), abs=1e-4)
    assert rows[1]["M"] > rows[0]["M"] >= 1
    more = list(replay(data, {"none": None}, {"a": searches["a"]}, [8], horizons=(1, 5)))
    assert [r["horizon"] for r in more] == [1, 5]
    assert more[1]["committed"] == rows[1]["committed"]


def test_what_does_not_fit_is_refused(lm: dartspec.LM, index: Path, tmp_path: Path) -> None:
    params = PARAMS["greedy"]
    with pytest.raises(DartspecError, match="prompt_lookup has no lattice"):
        list(capture(lm.with_drafter("prompt_lookup"), PROMPTS, params))
    texts = list(capture(lm.with_drafter(Guesser(answers_of(lm, params))), PROMPTS[:1], params))
    with pytest.raises(DartspecError, match="top_k is 25, the capture holds 6"):
        Replay(Capture(texts, frozenset(), lm.text.fingerprint), None, SearchConfig(), 4)
    with pytest.raises(DartspecError, match="the index was built for tokenizer"):
        Replay(Capture(texts, frozenset(), "other"), NgramIndex.open(index), SearchConfig(top_k=6), 4)
    with pytest.raises(DartspecError, match="horizon is 6, the capture holds guesses of 5 positions"):
        Replay(Capture(texts, frozenset(), lm.text.fingerprint), None, SearchConfig(top_k=6), 4, horizon=6)
    path = tmp_path / "x.safetensors"
    with pytest.raises(DartspecError, match="is not there"):
        Capture.load(path)
    path.write_bytes(b"\x00" * 40)
    with pytest.raises(DartspecError, match="is no capture, or damaged"):
        Capture.load(path)


def test_the_verbs_capture_and_replay(tmp_path: Path, index: Path) -> None:
    model = str(tiny_cli.save(tmp_path / "model"))
    folder, suite, out = save_drafter(tmp_path / "drafter"), tmp_path / "mine.jsonl", tmp_path / "g.safetensors"
    suite.write_text('{"prompt": "the the the the"}\n{"prompt": "a b a b a b"}\n')

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["bench", *args])

    args = ("--model", model, "--drafter", str(folder), "--suite", str(suite), "--dtype", "float32", "-n", "20")
    made = run("capture", *args, "--temperature", "0,1", "--seed", "1,2", "--out", str(out))
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout.splitlines()[-1])["texts"] == 6
    chain = json.loads(made.stdout.splitlines()[-1])["chain"]
    assert list(chain) == [str(k) for k in range(1, len(chain) + 1)]
    grid = ("--search", "ngram_weight=0.5,2", "--search", "beam=4,20", "--index", str(index), "--index", "none")
    written = tmp_path / "replayed.json"
    done = run("replay", str(out), *grid, "--nodes", "4,16", "--record", str(folder), "--out", str(written))
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert json.loads(done.stdout.splitlines()[-1])["chain"] == chain
    assert json.loads(written.read_text())["chain"] == chain
    ran = run(
        "run", *args[:2], *args[4:], "--method", f"{folder}@4", "--chains", "--no-plain", "--out", str(tmp_path / "r")
    )
    assert ran.exit_code == 0, ran.stderr
    (as_chain,) = json.loads((tmp_path / "r").read_text())["chains"]
    assert as_chain["method"] == "dart"
    assert list(as_chain["M"]) == list(chain)
    assert len(rows) == 2 * 4 * 2
    less = run("replay", str(out), "--nodes", "4", "--horizon", "1,2")
    assert less.exit_code == 0, less.stderr
    assert "horizon 2" in less.stdout
    assert rows[0]["against_first"] == [1.0, 1.0, 1.0]
    assert json.loads((folder / "config.json").read_text())["acceptance"]["16"] == round(rows[1]["M"], 3)
    tuned = run("replay", str(out), "--search", "running_text=true", "--nodes", "4", "--record", str(folder))
    assert tuned.exit_code == 0, tuned.stderr
    assert json.loads((folder / "config.json").read_text())["search"] == {"running_text": True}
    again = run("capture", *args, "--out", str(out))
    assert again.exit_code == 0, again.stderr
    own = run("replay", str(out), "--nodes", "4", "--out", str(written))  # as the drafter itself would search
    assert own.exit_code == 0, own.stderr
    assert json.loads(written.read_text())["rows"][0]["settings"]["running_text"] is True
    config = json.loads((folder / "config.json").read_text())
    other = tmp_path / "other"  # a method that records M, and has no search
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"method": "dflash"}))
    kept = run("replay", str(out), "--nodes", "4", "--record", str(other))
    assert kept.exit_code == 2
    assert "dflash keeps no search" in kept.stderr
    (folder / "config.json").write_text(json.dumps(config | {"search": {}}))
    assert run("capture", *args, "--out", str(out)).exit_code == 0
    assert run("replay", str(out), "--nodes", "4", "--record", str(other)).exit_code == 0
    assert set(json.loads((other / "config.json").read_text())) == {"method", "acceptance"}
    for bad, said in (
        (("--search", "colour=1"), "the search has no 'colour'"),
        (("--search", "beam=wide"), "search is 'beam=wide'"),
        (("--preset", "mine"), "preset is 'mine'"),
        (("--nodes", "auto"), "replay needs fixed sizes"),
    ):
        refused = run("replay", str(out), *bad)
        assert refused.exit_code == 2
        assert said in refused.stderr
