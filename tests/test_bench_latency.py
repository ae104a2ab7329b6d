"""`bench latency`: when requests come, what a wait counts from, its percentiles. Times are made up, never asserted."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import dartspec
import tiny_cli
from dartspec.bench.arrivals import arrivals, mean_rate, read_trace, stretched
from dartspec.bench.endpoint import Server
from dartspec.bench.latency import InProcess, Remote, measure, play, rows
from dartspec.bench.run import Journal
from dartspec.bench.stats import quantiles_in_order
from dartspec.bench.suites import Prompt
from dartspec.cli.main import app
from dartspec.errors import DartspecError
from dartspec.scheduler import QueueFullError
from dartspec.types import SamplingParams
from test_bench_endpoint import server

PROMPTS = [Prompt(f"p/{i}", "p", (f"the the {i} the the",)) for i in range(3)]


@pytest.fixture(scope="module")
def lm() -> dartspec.LM:
    return dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="none", nodes=0)


# -- when requests come ----------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_their_rate_and_exponential_gaps() -> None:
    times = np.array(arrivals("poisson", 4.0, 4000, seed=1))
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


def test_the_pattern_of_a_seed_is_the_same_at_every_rate() -> None:
    slow, fast = arrivals("poisson", 1.0, 9, seed=3), arrivals("poisson", 4.0, 9, seed=3)
    assert np.allclose(slow, 4 * np.array(fast))
    assert arrivals("poisson", 1.0, 9, seed=4) != slow


def test_bursts_come_at_once_and_keep_the_rate() -> None:
    times = arrivals("bursts:5", 2.0, 4000, seed=1)
    assert all(len({*times[i : i + 5]}) == 1 for i in range(0, 4000, 5))
    assert len(set(times)) == 800
    assert 4000 / times[-1] == pytest.approx(2.0, rel=0.1)
    assert len(arrivals("bursts", 1.0, 3)) == 3


@pytest.mark.parametrize("kind", ["poison", "poisson:3", "bursts:0", "bursts:x"])
def test_other_arrivals_are_refused(kind: str) -> None:
    with pytest.raises(DartspecError, match="it must be poisson, bursts"):
        arrivals(kind, 1.0, 3)


def test_a_rate_and_a_number_are_above_zero() -> None:
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DartspecError, match="rate is"):
            arrivals("poisson", rate, 3)
    with pytest.raises(DartspecError, match="seed is -1"):
        arrivals("poisson", 1.0, 3, seed=-1)
    with pytest.raises(DartspecError, match="requests is 0"):
        arrivals("poisson", 1.0, 0)


def test_a_trace_keeps_its_gaps_and_prompts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"at": 100.5, "prompt": "a"}\n\n{"at": 101, "prompt": "b"}\n{"at": 103, "turns": ["c", "d"]}\n')
    times, prompts = read_trace(path)
    assert times == [0.0, 0.5, 2.5]
    assert [p.turns[0] for p in prompts] == ["a", "b", "c"]
    assert mean_rate(times) == 0.8
    assert stretched(times, 1.6) == [0.0, 0.25, 1.25]
    path.write_text('{"at": 1}\n{"at": 2}\n')
    assert read_trace(path) == ([0.0, 1.0], [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request"),
        ('{"time": 1}\n', "line 1 has no time"),
        ("at 3\n", "line 1 has no time"),
        ('{"at": NaN}\n', "line 1 has no time"),
        ('{"at": 1, "prompt": 5}\n', "line 1: prompt holds no text"),
        ('{"at": 2}\n{"at": 1}\n', "line 2 is of 1 s, the line before of 2 s"),
        ('{"at": 2}\n{"at": 3, "prompt": "x"}\n', "some requests have a prompt"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(DartspecError, match=said):
        read_trace(path)


def test_a_trace_of_one_moment_has_no_rate() -> None:
    with pytest.raises(DartspecError, match="come at once"):
        stretched([0.0, 0.0], 2.0)
    with pytest.raises(DartspecError, match="cannot be read"):
        read_trace(Path("nowhere.jsonl"))


# -- statistics ------------------------------------------------------------------------------------------------------


def test_quantiles_over_blocks() -> None:
    ones = quantiles_in_order(np.ones((20, 1)), 0.9, lambda s: s[..., 0])
    assert ones == (1, 1, 1)
    queue = np.arange(100.0)[:, None]  # a queue that only grows: neighbours are alike
    e = quantiles_in_order(queue, 0.5, lambda s: s[..., 0])
    mixed = quantiles_in_order(np.random.default_rng(0).permutation(queue), 0.5, lambda s: s[..., 0])
    assert e.value == mixed.value == 49.5
    assert e.high - e.low > 1.5 * (mixed.high - mixed.low)  # drawn one by one both would be as sure
    twice = quantiles_in_order(np.column_stack([2 * queue[1:], queue[1:]]), 0.9, lambda s: s[..., 0] / s[..., 1])
    assert twice == (2, 2, 2)  # paired


def record(service: str, number: int, end: float, **more: Any) -> dict[str, Any]:
    return {
        "service": service,
        "rate": 1.0,
        "repeat": 0,
        "number": number,
        "at_s": float(number),
        "late_ms": 0.0,
        "num_tokens": 10,
        "first_ms": end / 10,
        "per_token_ms": end / 10,
        "end_ms": end,
        "digest": "x",
        **more,
    }


def test_rows_of_known_records() -> None:
    refused = {k: v for k, v in record("b", 3, 0.0).items() if not k.endswith(("_ms", "tokens"))}
    refused |= {"refused": "full", "late_ms": 1.0}
    records = [record("a", i, 1000.0) for i in range(4)]
    records += [*(record("b", i, 500.0, digest="xyz"[i]) for i in range(3)), refused]
    a, b = rows(records)
    assert (a["service"], a["num_requests"], a["num_refused"]) == ("a", 4, 0)
    assert a["end_ms"]["p99"] == [1000.0, 1000.0, 1000.0]
    assert a["tokens_per_s"] == 10.0  # forty tokens, the last answer ends at 3 + 1 s
    assert a["in_progress"] == 1.0  # one at a time all the while
    assert "against_first" not in a
    assert (b["num_refused"], b["most_late_ms"]) == (1, 1.0)
    against = b["against_first"]
    assert (against["num_pairs"], against["num_equal"]) == (3, 1)
    assert against["end_ms"]["p50"] == [2.0, 2.0, 2.0]


def test_single_tokens_have_no_time_a_token() -> None:
    records = [record(s, i, 5.0) | {"per_token_ms": None} for s in "ab" for i in range(2)]
    a, b = rows(records)
    assert a["per_token_ms"] == {"p50": None, "p90": None, "p99": None}
    assert b["against_first"]["per_token_ms"]["p50"] is None


# -- playing ---------------------------------------------------------------------------------------------------------


def in_process(lm: dartspec.LM, name: str, **changes: Any) -> InProcess:
    params = SamplingParams(max_tokens=12, ignore_eos=True, **changes)
    ids = {p.id: lm.encode([{"role": "user", "content": p.turns[0]}]) for p in PROMPTS}
    return InProcess(name, lm, params, ids, num_slots=2)


def test_answers_are_those_of_a_prompt_alone(lm: dartspec.LM) -> None:
    plain, drafting = in_process(lm, "plain"), in_process(lm.with_drafter("prompt_lookup", nodes=4), "lookup")
    records = measure([plain, drafting], PROMPTS, [(0, 1.0, [0.0] * 5)])
    assert [r["service"] for r in records] == ["plain"] * 5 + ["lookup"] * 5
    assert [r["id"] for r in records[:5]] == ["p/0", "p/1", "p/2", "p/0", "p/1"]
    assert all(r["num_tokens"] == 12 for r in records)
    alone = in_process(lm, "alone")
    for number in range(5):
        (one,) = play(alone, [0.0], [PROMPTS[number % 3]])
        assert one["digest"] == records[number]["digest"] == records[5 + number]["digest"]
    assert rows(records)[1]["against_first"]["num_equal"] == 5


def test_a_prompt_that_comes_again_is_another_sample(lm: dartspec.LM) -> None:
    records = play(in_process(lm, "plain", temperature=1.0, seed=3), [0.0] * 4, PROMPTS[:1])
    assert len({r["digest"] for r in records}) == 4


def test_a_wait_counts_from_when_the_request_was_due(lm: dartspec.LM) -> None:
    service = in_process(lm, "plain")
    service.start(1)
    try:
        made = service.submit(0, PROMPTS[0], time.perf_counter() - 100).result()
    finally:
        service.stop()
    assert made["first_ms"] > 100_000
    assert made["end_ms"] >= made["first_ms"]
    with server() as (url, _):
        remote = Remote(Server(url), {})
        remote.start(1)
        made = remote.submit(0, PROMPTS[0], time.perf_counter() - 100).result()
        remote.stop()
    assert made["first_ms"] > 100_000


class Refusing:
    """Takes every second request; the others find a full queue, or break off."""

    name = "full"

    def __init__(self, *, at_once: bool) -> None:
        self.at_once, self.stopped = at_once, False

    def start(self, most: int) -> None:
        assert most == 4

    def stop(self) -> None:
        self.stopped = True

    def submit(self, number: int, prompt: Prompt, due: float) -> Future[dict[str, Any]]:
        if number % 2 and self.at_once:
            raise QueueFullError("full up")
        done: Future[dict[str, Any]] = Future()
        if number % 2:
            done.set_exception(DartspecError("broke off"))
        else:
            done.set_result({"num_tokens": 1, "first_ms": 1.0, "per_token_ms": None, "end_ms": 1.0, "digest": ""})
        return done


@pytest.mark.parametrize(("at_once", "said"), [(True, "full up"), (False, "broke off")])
def test_what_is_refused_is_counted_and_said(at_once: bool, said: str) -> None:
    service = Refusing(at_once=at_once)
    records = play(service, [0.0] * 4, PROMPTS)
    assert [r.get("refused") for r in records] == [None, said, None, said]
    assert service.stopped


def test_a_service_that_answers_nothing_is_an_error(lm: dartspec.LM) -> None:
    with (
        server(broken="refuses") as (url, _),
        pytest.raises(DartspecError, match=r"answered none of 2 requests: .*400"),
    ):
        measure([Remote(Server(url), {})], PROMPTS, [(0, 1.0, [0.0, 0.0])])


def test_an_interrupted_measurement_goes_on(tmp_path: Path) -> None:
    schedule = [(k, 1.0, [0.0] * 4) for k in range(3)]
    path = tmp_path / "l.journal.jsonl"
    seen: list[str] = []

    def stop(what: str) -> None:
        seen.append(what)
        if len(seen) == 2:
            raise KeyboardInterrupt

    class Four(Refusing):
        def start(self, most: int) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        measure([Four(at_once=True)], PROMPTS, schedule, journal=Journal.open(path, {}), advance=stop)
    again = Journal.open(path, {})
    assert list(again.done) == ["0 1 full", "1 1 full"]
    assert len(measure([Four(at_once=True)], PROMPTS, schedule, journal=again)) == 12


# -- the verb --------------------------------------------------------------------------------------------------------


def test_the_verb_in_this_process_and_against_servers(tmp_path: Path) -> None:
    folder = str(tiny_cli.save(tmp_path / "model"))
    trace, out = tmp_path / "t.jsonl", tmp_path / "l.json"
    trace.write_text("".join(json.dumps({"at": i / 50, "prompt": f"the {i}"}) + "\n" for i in range(3)))
    base = ["bench", "latency", "--arrivals", str(trace), "-n", "6"]
    here = [*base, "--model", folder, "--dtype", "float32", "--method", "prompt_lookup@2", "--out", str(out)]
    done = CliRunner().invoke(app, here)
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert result["config"]["services"] == ["plain", "prompt_lookup@2"]
    assert [r["rate"] for r in result["rows"]] == [50.0, 50.0]
    assert result["rows"][1]["against_first"]["num_equal"] == 3
    assert result["provenance"]["dtype"] == "float32"
    assert not list(tmp_path.glob("*.journal.jsonl"))
    dry = CliRunner().invoke(app, [*here, "--dry-run"])
    assert json.loads(dry.stdout.splitlines()[-1])["cells"] == 2
    with server() as (a, at_a), server() as (b, _):
        there = CliRunner().invoke(app, [*base, a, b, "--rate", "100,200"])
        both = CliRunner().invoke(app, [*base, a, "--method", "dart"])
    assert there.exit_code == 0, there.output
    found = json.loads(there.stdout.splitlines()[-1])["rows"]
    assert [(r["rate"], r["service"]) for r in found] == [(100.0, a), (100.0, b), (200.0, a), (200.0, b)]
    assert len(at_a) == 2 + 6  # the warm-up
    assert both.exit_code == 2
    assert "one or the other" in both.stderr
