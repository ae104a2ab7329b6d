"""The harness: its statistics against known answers, its order, its journal, its tables, and its two verbs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import dartspec
import tiny_cli
from dartspec.accounting import Metrics, SpeedUp, loop_start
from dartspec.bench import measure as measuring
from dartspec.bench import provenance as provenance_of
from dartspec.bench import summary
from dartspec.bench.measure import Method, acceptance_by_position, add_sums, measure, reliability_of, sums
from dartspec.bench.provenance import layout, provenance
from dartspec.bench.run import Cell, Journal, RunConfig, _parted, execute, plan
from dartspec.bench.stats import bootstrap, median, rate_ratio, ratio_of_sums
from dartspec.bench.suites import FOLDER, GROUPS, Prompt, load_suites, read, shipped
from dartspec.cli.main import app
from dartspec.engine import Request
from dartspec.errors import DartspecError
from dartspec.tree import check
from dartspec.types import RoundRecord, SamplingParams, TokenTree

PROMPTS = {
    "talk": [Prompt(f"talk/{i}", "talk", (f"the the {i} the", "and again the the")) for i in range(3)],
    "ids": [Prompt("ids/0", "ids", (), (5, 6, 5, 6, 5, 6, 5))],
}
METHODS = (Method("none", 0), Method("prompt_lookup", 3), Method("prompt_lookup", 1))


@pytest.fixture(scope="module")
def lm() -> dartspec.LM:
    return dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="none", nodes=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_cli.save(tmp_path_factory.mktemp("model")))


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{"suites": ("x",), "methods": METHODS, "max_tokens": 12, "ignore_eos": True, **changes})


# -- statistics ------------------------------------------------------------------------------------------------------


def test_a_ratio_of_sums_is_no_mean_of_ratios() -> None:
    e = ratio_of_sums([10, 1], [10, 2])
    assert e.value == pytest.approx(11 / 12)
    assert e.low == pytest.approx(0.5)  # the second unit drawn twice: one resample in four
    assert e.high == pytest.approx(1.0)


def test_equal_ratios_and_single_units_leave_no_doubt() -> None:
    assert ratio_of_sums([2, 4, 6], [1, 2, 3]) == (2, 2, 2)
    assert rate_ratio([(30, 10)], [(10, 10)]) == (3, 3, 3)
    assert median([1.5]) == (1.5, 1.5, 1.5)


def test_the_bootstrap_is_the_enumeration_of_all_resamples() -> None:
    """Three units: 27 resamples, all equally likely; the quantiles are those of the drawn ones."""
    a, b = np.array([1.0, 5.0, 2.0]), np.array([2.0, 3.0, 1.0])
    every = np.array([a[list(p)].sum() / b[list(p)].sum() for p in itertools.product(range(3), repeat=3)])
    e = ratio_of_sums(a, b, level=0.8)
    low, high = np.quantile(every, [0.1, 0.9])
    assert (e.low, e.high) == (pytest.approx(low), pytest.approx(high))
    medians = [np.median(a[list(p)]) for p in itertools.product(range(3), repeat=3)]
    m = median([1.0, 5.0, 2.0], level=0.8)
    assert (m.value, m.low, m.high) == (2.0, *np.quantile(medians, [0.1, 0.9]))


def test_a_seed_fixes_the_interval() -> None:
    a, b = np.random.default_rng(1).uniform(1, 2, (2, 30))
    assert ratio_of_sums(a, b, seed=3) == ratio_of_sums(a, b, seed=3) != ratio_of_sums(a, b, seed=4)


def test_intervals_cover_the_truth() -> None:
    """95 % intervals for 40 units hold the true ratio 2 in 90 to 99 of 100 samples."""
    rng = np.random.default_rng(0)
    held = 0
    for k in range(100):
        b = rng.gamma(4.0, size=40)
        a = 2 * b * rng.normal(1, 0.2, size=40)
        e = bootstrap(np.column_stack([a, b]), lambda s: s[..., 0] / s[..., 1], resamples=400, seed=k)
        held += e.low <= 2 <= e.high
    assert 90 <= held <= 99


# -- prompt sets -----------------------------------------------------------------------------------------------------


def test_the_shipped_sets_are_whole() -> None:
    sets = load_suites(["all"])
    assert list(sets) == shipped()
    assert len(sets) >= 9
    assert all(len(prompts) >= 4 for prompts in sets.values())
    assert {name for group in GROUPS.values() for name in group} <= {*sets, *load_suites(["own"])}
    assert all(name in (FOLDER / "SOURCES.md").read_text() for name in sets)
    assert [len(p) for p in load_suites(["code", "qa"], 2).values()] == [2, 2, 2]


def test_our_own_sets_are_what_they_say() -> None:
    own = load_suites(["own", "long8k"])
    assert not set(own) & set(shipped())
    assert all(len(p.turns) == 4 for p in own["chat"])
    assert all("```python\n" in p.turns[0] for p in own["code_edit"])
    assert all(json.loads(p.turns[0].partition("tools:\n")[2].partition("\n\nAnswer")[0]) for p in own["tool_call"])
    assert all(len(p.turns[0]) > 25_000 for p in own["long8k"])
    assert len({p.turns[0] for prompts in own.values() for p in prompts}) == sum(map(len, own.values()))
    assert [len(p) for p in load_suites(["own", "long8k"], 3).values()] == [3] * 8


def test_users_files_may_be_written_in_several_ways(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": "one", "id": 7},
        {"turns": ["a", "b"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"ids": [3, 4]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read(path) == [
        Prompt("7", "mine", ("one",)),
        Prompt("mine/2", "mine", ("a", "b")),
        Prompt("mine/3", "mine", ("u",)),
        Prompt("mine/4", "mine", (), (3, 4)),
    ]
    assert list(load_suites([str(tmp_path)])) == ["mine"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no prompt"),
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 has no prompt"),
        ('{"turns": []}', "line 1 has no prompt"),
        ('{"turns": ["a", ""]}', "line 1 has no prompt"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "two prompts with one id"),
    ],
)
def test_bad_files_are_refused_in_a_sentence(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DartspecError, match=said):
        load_suites([str(path)])


def test_unknown_and_doubled_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DartspecError, match="no prompt set 'poems'"):
        load_suites(["poems"])
    (tmp_path / "qa.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(DartspecError, match="two prompt sets are called qa"):
        load_suites(["qa", str(tmp_path / "qa.jsonl")])


# -- methods and one measurement -------------------------------------------------------------------------------------


def test_methods_are_named_by_what_they_are() -> None:
    assert [m.label for m in Method.parse("dart", [2, "auto"])] == ["dart@2", "dart@auto"]
    assert Method.parse("dart@8,index=none", [2]) == [Method("dart", 8, None)]
    assert Method.parse("runs/x/latest@4,index=a/b.ngram")[0].label == "latest@4,index=b.ngram"
    assert Method.parse("none", [1, 2])[0].label == "plain"
    for text, said in (("dart@x", "nodes is 'x'"), ("dart,weight", "'weight'"), ("@4", "no name")):
        with pytest.raises(DartspecError, match=said):
            Method.parse(text)


def test_a_measurement_counts_what_the_engine_counts(lm: dartspec.LM) -> None:
    own = METHODS[1].of(lm)
    requests = [Request([5, 6, 5, 6, 5, 6, 5, 6], SamplingParams(max_tokens=40, ignore_eos=True))] * 2
    answers, records = measure(own, requests, trace=True)
    for ids, record in zip(answers, records, strict=True):
        expected = own.generate(requests[0].prompt, max_tokens=40, ignore_eos=True)
        assert ids == expected.ids
        assert record["uncut"]["rounds"] == expected.metrics.num_rounds
        assert record["uncut"]["committed"] == len(ids) - 1
        assert record["uncut"]["histogram"] == expected.metrics.acceptance_histogram
        assert record["loop"] == loop_start(ids)
        assert record["decode_wall_ms"] <= record["wall_ms"]
        rounds = record["trace"]["rounds"]
        assert len(rounds) == record["uncut"]["rounds"]
        assert sum(len(r["path"]) - 1 for r in rounds) == record["uncut"]["accepted"]
        assert any(len(r["path"]) > 1 for r in rounds)
        for r in rounds:
            assert all(r["parents"][b] == a for a, b in itertools.pairwise(r["path"]))


def test_loops_are_cut_and_counted_beside() -> None:
    rounds = [RoundRecord(4, a, a + 1, 1.0, 0.5, 2.0, 0.5) for a in (0, 2, 1, 3)]
    m = Metrics(rounds)
    assert sums(m.before(6))["committed"] == 4
    whole = sums(m)
    assert (whole["drafted"], whole["accepted"], whole["committed"], whole["rounds"]) == (16, 6, 10, 4)
    assert whole["histogram"] == [1, 1, 1, 1]
    assert add_sums([whole, sums(m.before(6))])["histogram"] == [2, 1, 2, 1]
    assert acceptance_by_position([1, 1, 1, 1]) == [0.75, 0.5, 0.25]
    assert sums(Metrics())["histogram"] == []


def test_a_trace_shows_real_trees(lm: dartspec.LM) -> None:
    import torch

    _, (record,) = measure(METHODS[1].of(lm), [Request([5, 6] * 6, SamplingParams(max_tokens=20))], trace=True)
    for r in record["trace"]["rounds"]:
        n = len(r["parents"])
        check(TokenTree(torch.zeros(n, dtype=torch.int32), torch.tensor(r["parents"]).int(), torch.zeros(n)))
        assert len(r["tokens"]) == n
        assert len(r["ms"]) == 4


def test_what_a_controller_promised_is_kept(lm: dartspec.LM) -> None:
    class Told:
        class controller:  # noqa: N801
            @staticmethod
            def reliability() -> list[tuple[float, float, int]]:
                return [(0.12345, 0.25, 400), (0.9, 1.0, 3)]

    assert reliability_of(Told()) == [[0.1235, 0.25, 400]]  # type: ignore[arg-type]
    assert reliability_of(METHODS[1].of(lm)) == []
    auto = Method("prompt_lookup", "auto").of(lm)
    measure(auto, [Request([5, 6] * 8, SamplingParams(max_tokens=60, ignore_eos=True))] * 3)
    assert all(0 <= p <= 1 and 0 <= share <= 1 and n >= 20 for p, share, n in reliability_of(auto))


# -- the run ---------------------------------------------------------------------------------------------------------


def test_every_cell_once_and_repeats_apart() -> None:
    c = config(temperatures=(0.0, 1.0), seeds=(1, 2), batches=(1, 2), repeats=2)
    cells = plan(c, PROMPTS)
    assert len({cell.key for cell in cells}) == len(cells) == 2 * (1 + 2) * (3 + 1 + 2 + 1)
    assert [cell.repeat for cell in cells] == sorted(cell.repeat for cell in cells)
    assert {cell.seed for cell in cells if not cell.temperature} == {1}


def test_pairs_fill_their_batches() -> None:
    cells = plan(config(pairs=3, batches=(2, 4)), {"talk": PROMPTS["talk"]})
    assert [cell.prompts for cell in cells] == [(0, 1), (2, 0), (1, 2), (0, 1, 2, 0), (1, 2, 0, 1), (2, 0, 1, 2)]
    assert [cell.unit for cell in cells[:3]] == ["pair 0", "pair 1", "pair 2"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"batches": (0,)}, "batch is 0"),
        ({"temperatures": ()}, "temperatures is empty"),
        ({"temperatures": (-1.0,)}, "temperature is -1"),
        ({"methods": (METHODS[0], METHODS[0])}, "given twice"),
        ({"pairs": 0}, "pairs is 0"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DartspecError, match=said):
        config(**changes)


def test_methods_take_turns_and_write_the_same_text(lm: dartspec.LM) -> None:
    """Losslessness through the harness: both temperatures, batches, later turns of a conversation, in float32."""
    c = config(temperatures=(0.0, 0.8), batches=(1, 3), turns=2, repeats=2)
    records = execute(c, PROMPTS, lambda _threads: lm)
    labels = [m.label for m in METHODS]
    assert all(r["parted"] is None for r in records)
    assert {r["turn"] for r in records} == {0, 1}
    alone = [(r["method"]) for r in records if r["batch"] == 1]
    assert alone == labels * (len(alone) // 3)  # A B C A B C ...
    texts = {}
    for r in records:
        key = r["id"], r["turn"], r["temperature"]
        assert texts.setdefault(key, r["digest"]) == r["digest"]  # whatever the batch, the method, the repeat
    assert len({d for (_, _, t), d in texts.items() if t}) == len([k for k in texts if k[2]])


def test_copies_of_a_prompt_in_a_batch_are_different_samples(lm: dartspec.LM) -> None:
    c = config(temperatures=(1.0,), batches=(2,), pairs=1, methods=METHODS[:1], max_tokens=30)
    records = execute(c, {"ids": PROMPTS["ids"]}, lambda _threads: lm)
    assert len({r["digest"] for r in records}) == 2


def test_an_interrupted_run_goes_on_where_it_was(lm: dartspec.LM, tmp_path: Path) -> None:
    path, header, c = tmp_path / "out" / "a.journal.jsonl", {"commit": "x", "seed": 1}, config()
    seen: list[Cell] = []

    def stop_after_two(cell: Cell) -> None:
        seen.append(cell)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(c, PROMPTS, lambda _t: lm, journal=Journal.open(path, header), advance=stop_after_two)
    with open(path, "a") as file:
        file.write('{"key": "half a li')
    first = Journal.open(path, header)
    assert list(first.done) == [cell.key for cell in plan(c, PROMPTS)[:2]]
    records = execute(c, PROMPTS, lambda _t: lm, journal=first)
    kept = list(itertools.chain(*first.done.values()))
    assert records[: len(kept)] == kept  # times too: nothing was measured twice
    assert len(records) == 4 * len(METHODS)

    def nothing_to_load(_threads: int | None) -> dartspec.LM:
        raise AssertionError("a finished run loads no model")

    assert execute(c, PROMPTS, nothing_to_load, journal=Journal.open(path, header)) == records
    with pytest.raises(DartspecError, match="unfinished run that has seed 1, this run has 2"):
        Journal.open(path, {"commit": "x", "seed": 2})


def test_a_run_goes_on_though_the_checkout_moved(tmp_path: Path) -> None:
    """Where the code that is measured is the same, another commit is no other run; where it is not, only if asked."""
    path, header = tmp_path / "a.journal.jsonl", {"code": "abc", "seed": 1}
    Journal.open(path, header, "one").append("cell 1", [])
    later = Journal.open(path, header, "two")
    assert list(later.done) == ["cell 1"]
    assert later.facts() == {"commits": ["one", "two"]}
    later.append("cell 2", [])
    changed = {**header, "code": "def"}
    with pytest.raises(DartspecError, match=r"other code \(commit one, now three\): give --mixed-code"):
        Journal.open(path, changed, "three")
    mixed = Journal.open(path, changed, "three", mixed=True)
    assert mixed.facts() == {"commits": ["one", "two", "three"]}
    assert Journal.open(path, header, "two").facts() == {"commits": ["one", "two"]}
    with pytest.raises(DartspecError, match="that has seed 1"):
        Journal.open(path, {**changed, "seed": 2}, "three", mixed=True)
    assert Journal.open(tmp_path / "new.jsonl", header, "one").facts() == {}


def test_a_journal_that_was_cut_off_in_its_first_line_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.journal.jsonl"
    path.write_text('{"code": "ab')
    assert Journal.open(path, {"seed": 1}).done == {}
    assert path.read_text() == '{"seed": 1}\n'


def test_the_code_that_matters_is_not_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(**changes: str) -> str:
        files = {
            "engine.py": "a",
            "cli/bench.py": "b",
            "bench/run.py": "c",
            "bench/report.py": "d",
            "bench/provenance.py": "",
        }
        for name, text in {**files, **changes}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return provenance_of.code_digest()

    monkeypatch.setattr(provenance_of, "__file__", str(tmp_path / "bench" / "provenance.py"))
    base = digest()
    assert digest(**{"cli/bench.py": "x", "bench/report.py": "y"}) == base
    assert digest(**{"engine.py": "x"}) != base
    assert digest(**{"bench/run.py": "x"}) != base


def test_energy_is_recorded_where_the_system_tells(
    lm: dartspec.LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "RAPL", tmp_path)
    assert measuring.energy_joules() is None
    for i, uj in enumerate((2_000_000, 500_000)):
        (tmp_path / f"intel-rapl:{i}").mkdir()
        (tmp_path / f"intel-rapl:{i}" / "energy_uj").write_text(f"{uj}\n")
    assert measuring.energy_joules() == 2.5
    _, (record,) = measure(lm, [Request([5, 6], SamplingParams(max_tokens=3))])
    assert "joules" not in record  # the counter stood still
    readings = iter([1.0, 4.0])
    monkeypatch.setattr(measuring, "energy_joules", lambda: next(readings))
    _, (record,) = measure(lm, [Request([5, 6], SamplingParams(max_tokens=3, ignore_eos=True))])
    assert record["joules"] == 3.0
    rows = summary.rows([made("plain", "a", 10, 10, 100.0, joules=22.0)])
    assert rows[0]["joules_per_token"] == 2.0


def test_a_prompt_that_does_not_fit_is_named(lm: dartspec.LM) -> None:
    long = {"long": [Prompt("long/0", "long", (), tuple([5] * lm.target.max_positions))]}
    with pytest.raises(DartspecError, match="prompt long/0 has 256 tokens"):
        execute(config(), long, lambda _threads: lm)


def test_where_texts_part() -> None:
    assert _parted([1, 2, 3], [1, 5, 3]) == 1
    assert _parted([1, 2], [1, 2, 3]) == 2


# -- tables ----------------------------------------------------------------------------------------------------------


def made(
    method: str, id: str, rounds: int, committed: int, ms: float, *, parted: int | None = None, **where: Any
) -> dict[str, Any]:
    """A record with known sums."""
    half = {"draft_ms": 0.0, "search_ms": 0.0, "verify_ms": ms / 2, "other_ms": ms / 2}
    s = {"rounds": rounds, "drafted": 4 * rounds, "accepted": committed - rounds, "committed": committed, **half}
    record = {
        "id": id,
        "unit": id,
        "suite": "x",
        "turn": 0,
        "method": method,
        "threads": None,
        "temperature": 0.0,
        "seed": 0,
        "batch": 1,
        "repeat": 0,
        "num_prompt_tokens": 5,
        "num_new_tokens": committed + 1,
        "prefill_ms": 1.0,
        "wall_ms": ms + 1,
        "decode_wall_ms": ms * 1.25,
        "cpu_ms": ms,
        "loop": None,
        "parted": parted,
        "cut": s | {"histogram": [rounds]},
        "uncut": s | {"histogram": [rounds]},
    }
    return record | where


def test_rows_are_sums_then_ratios() -> None:
    records = [
        made("plain", "a", 100, 100, 1000.0),
        made("d@4", "a", 50, 100, 600.0),
        made("plain", "b", 10, 10, 50.0),
        made("d@4", "b", 10, 10, 100.0, parted=3),
    ]
    plain, d = summary.rows(records)
    assert (plain["method"], plain["M"], "speed_up" in plain) == ("plain", 1.0, False)
    assert d["speed_up"][0] == pytest.approx((110 / 700) / (110 / 1050), abs=1e-4)
    assert d["speed_up"][0] == pytest.approx(
        SpeedUp(d["M"], d["plain_ms"], sum(d["ms_per_round"].values()), 1.0).speed_up, rel=1e-3
    )
    assert d["speed_up"][1:] == [0.5, 1.6667]  # one prompt drawn twice, or the other
    assert d["median_pair"][0] == pytest.approx((1000 / 600 + 0.5) / 2, abs=1e-4)
    assert d["pair_range"] == [0.5, 1.6667]
    assert d["bound"] == pytest.approx(2 * d["speed_up"][0], abs=1e-3)
    assert (d["num_equal"], d["num_runs"], d["num_prompts"]) == (1, 2, 2)
    assert d["A"] == pytest.approx(50 / 60, abs=1e-4)
    assert d["nodes"] == 4
    assert d["wall_tokens_per_s"] == pytest.approx(110 / 0.875, abs=0.01)
    assert d["outside_rounds"] == pytest.approx(0.2)


def test_repeats_and_seeds_of_a_prompt_are_one_unit() -> None:
    """Ten repeats of one prompt say nothing about other prompts: no interval from them."""
    noise = [60.0, 40.0, 55.0, 45.0]
    records = [made("plain", "a", 10, 10, 100.0, repeat=i) for i in range(4)]
    records += [made("d@4", "a", 5, 10, ms, repeat=i) for i, ms in enumerate(noise)]
    row = summary.rows(records)[1]
    assert row["speed_up"] == [2.0, 2.0, 2.0]
    assert row["num_pairs"] == 4
    assert row["median_pair"][1] < row["median_pair"][0] < row["median_pair"][2]


def test_several_sets_have_a_row_over_all() -> None:
    records = [made("plain", "a", 10, 10, 100.0), made("plain", "a", 10, 10, 300.0, suite="y")]
    rows = summary.rows(records)
    assert [(r["suite"], r["tokens_per_s"], r["num_prompts"]) for r in rows] == [
        ("x", 100.0, 1),
        ("y", 33.33, 1),
        ("all", 50.0, 2),
    ]


def test_text_that_loops_at_once_gives_no_figure() -> None:
    records = [made("plain", "a", 10, 10, 100.0), made("d@4", "a", 5, 10, 50.0)]
    for r in records:
        r["cut"], r["loop"] = sums(Metrics()), 0
    row = summary.rows(records)[1]
    assert "speed_up" not in row
    assert row["looped_share"] == 1.0


def test_the_best_fixed_size_is_chosen_cell_by_cell() -> None:
    records = []
    for batch, times in ((1, (100, 40, 50, 50)), (8, (100, 200, 150, 98))):
        for method, ms in zip(("plain", "d@8", "d@2", "d@auto"), times, strict=True):
            records += [made(method, f"pair {k}", 10, 10, float(ms), batch=batch) for k in range(2)]
    small, large = summary.against_best_fixed(records)
    assert (small["best_fixed"], small["against_best_fixed"][0], small["against_plain"][0]) == ("d@8", 0.8, 2.0)
    assert (large["best_fixed"], large["best_fixed_against_plain"][0]) == ("d@2", 0.6667)
    assert large["against_best_fixed"] == [1.5306] * 3
    over = summary.over_cells([small, large], "against_plain")
    assert over is not None
    assert over["mean"] == pytest.approx((2 * 100 / 98) ** 0.5, abs=1e-4)
    assert over["worst"] == 1.0204
    assert summary.over_cells([], "against_plain") is None


def test_results_are_json_of_one_line_an_entry() -> None:
    result = {"kind": "run", "config": {"a": 1, "b": [1, 2]}, "rows": [{"x": 1}, {"x": "é"}], "none": []}
    assert json.loads(layout(result)) == result
    assert len(layout(result).splitlines()) == 12


# -- the verbs -------------------------------------------------------------------------------------------------------


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", *args])


def last(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "the the the the"}\n{"prompt": "a b a b a b"}\n')
    return str(path)


def test_bench_run_writes_a_result_that_says_where_it_is_from(folder: str, mine: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    args = ("run", "--model", folder, "--suite", mine, "--method", "prompt_lookup", "--nodes", "2,4", "-n", "16")
    brief = last(run(*args, "--dtype", "float32", "--out", str(out), "--trace", "1", "--temperature", "0,1"))
    result = json.loads(out.read_text())
    methods = ["plain", "prompt_lookup@2", "prompt_lookup@4"]
    assert result["config"]["methods"] == methods
    assert [(r["temperature"], r["method"]) for r in brief["rows"]] == [(t, m) for t in (0.0, 1.0) for m in methods]
    assert all(r["num_equal"] == r["num_runs"] == 2 for r in result["rows"] if r["method"] != "plain")
    assert {"commit", "torch", "cpu", "command", "weights_fingerprint", "dtype", "kernels"} <= set(result["provenance"])
    assert {r["id"] for r in result["records"] if "trace" in r} == {"mine/1"}
    assert not out.with_suffix(".journal.jsonl").exists()


def test_a_dry_run_says_how_much_and_writes_nothing(folder: str, mine: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    brief = last(run("run", "--model", folder, "--suite", mine, "--repeats", "3", "--out", str(out), "--dry-run"))
    assert (brief["cells"], brief["answers"]) == (6, 12)
    assert brief["hours"] > 0
    assert not list(tmp_path.glob("r*"))


def test_bench_load_compares_sizes_at_each_batch(folder: str, mine: str) -> None:
    args = (
        "load",
        "--model",
        folder,
        "--suite",
        mine,
        "--drafter",
        "prompt_lookup",
        "--batch",
        "1,3",
        "--fixed",
        "1,4",
    )
    brief = last(run(*args, "-n", "12", "--pairs", "2", "--temperature", "0", "--dtype", "float32", "--busy", "1"))
    assert [r["method"] for r in brief["rows"]] == ["plain", *(f"prompt_lookup@{n}" for n in (1, 4, "auto"))] * 2
    assert [e["batch"] for e in brief["auto"]] == [1, 3]
    assert brief["over_cells"]["against_plain"]["cells"] == 2
    assert all(r["num_equal"] == r["num_runs"] for r in brief["rows"] if r["method"] != "plain")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("run", "--suite", "poems"), "no prompt set 'poems'"),
        (("run", "--temperature", "warm"), "temperature is 'warm'"),
        (("run", "--nodes", "many"), "nodes is 'many'"),
        (("run", "--repeats", "0"), "repeats is 0"),
        (("load", "--batch", "0"), "batch is 0"),
        (("load", "--pairs", "0"), "pairs is 0"),
    ],
)
def test_bad_flags_are_one_sentence(args: tuple[str, ...], said: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_result_takes_the_place_of_a_result_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"
    notes.write_text('{"mine": 1}')
    for verb in ("run", "load", "latency"):
        for out, said in ((notes, "other than a result, which would be lost"), (tmp_path, "is a folder")):
            result = run(verb, "--out", str(out))
            assert result.exit_code == 2
            assert said in result.stderr
            assert len(result.stderr.splitlines()) == 1
    assert notes.read_text() == '{"mine": 1}'


def test_a_recorded_command_names_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["/a/b/run.py", "--out", "/c/d.json", "--index=/e/f.ngram", "docs/x.json", "-t", "0"]
    )
    assert provenance()["command"] == "run.py --out d.json --index=f.ngram docs/x.json -t 0"
    assert provenance_of.shown("/a/b/dart@8,index=/c/d.ngram") == "dart@8,index=d.ngram"
    assert provenance_of.shown("/a/b/latest=/c/log.jsonl") == "latest=log.jsonl"
