"""The report: one page, no network, every chart well-formed, nothing that a model wrote is obeyed."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dartspec.bench import summary
from dartspec.bench.charts import COLOURS, Series, bars, colours, lines, stacks, ticks
from dartspec.bench.report import read, report
from dartspec.cli.main import app
from dartspec.errors import DartspecError
from test_bench import made

HOSTILE = "</script><img src=x onerror=alert(1)>&'\""
SVG = "{http://www.w3.org/2000/svg}"


def trace() -> dict[str, Any]:
    rounds = [
        {"tokens": ["a", HOSTILE, " c"], "parents": [-1, 0, 1], "path": [0, 1], "bonus": "\n", "ms": [1, 0.5, 9, 1]},
        {"tokens": ["\n"], "parents": [-1], "path": [0], "bonus": "x", "ms": [0, 0, 0, 0]},
    ]
    return {"first": "a", "rounds": rounds}


def result(kind: str = "run", methods: tuple[str, ...] = ("plain", "d@2", "d@8"), **more: Any) -> dict[str, Any]:
    records = []
    for suite in ("code", HOSTILE):
        for batch in (1, 8) if kind == "load" else (1,):
            for i, method in enumerate(methods):
                for k in range(3):
                    r = made(method, f"{suite}/{k}", 10, 10 + 5 * i, 100.0 + k, suite=suite, batch=batch)
                    for sums in (r["cut"], r["uncut"]):
                        sums["histogram"] = [10] if not i else [4, 3, 3]
                    records.append(r | ({"trace": trace()} if i and not k else {}))
    facts = {
        "command": f"dartspec {HOSTILE}",
        "commit": "abc",
        "date": "2026-01-01T00:00:00Z",
        "torch": "2",
        "threads": 1,
    }
    made_of = {"kind": kind, "config": {"methods": list(methods)}, "rows": summary.rows(records), "records": records}
    if kind == "load":
        entries = summary.against_best_fixed(records)
        over = {n: summary.over_cells(entries, n) for n in ("against_plain", "against_best_fixed")}
        made_of |= {"auto": entries, "over_cells": over}
    return {**made_of, "provenance": facts, **more}


def sweep() -> dict[str, Any]:
    rows = [{"index": "own", "search": "shipped", "nodes": n, "M": 1 + n / 10, "A": n / 10} for n in (1, 4, 16)]
    return {"kind": "replay", "rows": rows, "provenance": result()["provenance"]}


def waits() -> dict[str, Any]:
    wait = {"p50": [1.0, 0.9, 1.1], "p90": [2.0, 1.5, 2.5], "p99": None}
    rows = []
    for rate in (1.0, 2.0):
        for name in ("plain", HOSTILE):
            row = {"rate": rate, "service": name, "in_progress": 0.5, "tokens_per_s": 9.0, "num_refused": 0}
            row |= dict.fromkeys(("first_ms", "per_token_ms", "end_ms"), wait)
            other = {"num_equal": 3, "num_pairs": 4, "end_ms": wait}
            rows.append(row | ({"against_first": other} if name != "plain" else {}))
    config = {"arrivals": "poisson", "requests": 4}
    return {"kind": "latency", "config": config, "rows": rows, "provenance": result()["provenance"]}


def test_waits_are_drawn_and_listed() -> None:
    page, charts = report([waits()])
    assert [n for n in charts if n.startswith("waits-")] == [
        f"waits-{w}-{p}" for w in ("first", "per-token", "end") for p in ("p50", "p90")
    ]
    assert "<td class=n>3/4</td>" in page
    assert HOSTILE not in page
    for svg in charts.values():
        ET.fromstring(svg)


def test_one_batch_size_is_drawn_as_bars() -> None:
    load = result("load", ("plain", "d@2", "d@8"))
    load["rows"] = [r for r in load["rows"] if r["batch"] == 8]
    _, charts = report([load])
    (name,) = charts
    assert name == "load-t0"
    assert charts[name].count("d@8:") == 3  # both sets and all


def everything() -> tuple[str, dict[str, str]]:
    bins = [[0.1, 0.12, 400], [0.5, 0.45, 200], [0.9, 0.95, 100]]
    load = result("load", ("plain", "d@2", "d@8", "d@auto"), reliability={"d@auto": bins})
    return report([result(), load, sweep()], HOSTILE)


def test_every_chart_is_there_and_stands_alone() -> None:
    html, charts = everything()
    names = {"speed-up-t0", "stages-t0", "positions-t0", "tau-speed", "sizes-m", "sizes-speed", "reliability"}
    assert names <= set(charts)
    assert {"load-code-t0", "sizes-m-more"} <= set(charts)
    for name, svg in charts.items():
        root = ET.fromstring(svg)
        assert root.tag == f"{SVG}svg", name
        assert root.get("aria-label")
        assert svg in html
        for shape in root.iter():
            for key in ("x", "y", "cx", "cy", "width", "height"):
                assert re.fullmatch(r"-?[\d.]+", shape.get(key, "0")), (name, shape.attrib)  # no nan, no inf


def test_the_page_needs_no_network() -> None:
    html, _ = everything()
    attributes: set[str] = set()

    class Attributes(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            attributes.update(name for name, _ in attrs)

    Attributes().feed(html)
    assert {"viewbox", "stroke"} <= attributes
    assert not {"src", "href", "xlink:href", "srcset", "onerror"} & attributes
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", html)
    assert set(re.findall(r"https?://[^'\"<> ]+", html)) == {"http://www.w3.org/2000/svg"}
    assert len(html) < 200_000


def test_what_a_model_wrote_is_shown_and_not_obeyed() -> None:
    html, _ = everything()
    assert "<img" not in html
    data = re.search(r'<script type="application/json" id="traces">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    traces = json.loads(data[1])
    assert len(traces) == 2 * 2 + 2 * 3 * 2
    assert traces[0]["trace"] == trace()
    assert html.count("<script") == html.count("</script") == 2
    assert "{{" not in html


def test_bars_are_as_long_as_their_figures() -> None:
    svg = bars(
        ["x", "y"],
        {"m": [(1.0, 0.9, 1.1), (2.0, 2.0, 2.0)], "n": [None, (1.5, 1.0, 2.5)]},
        colours(["m", "n"]),
        unit="u",
    )
    shapes = [r for r in ET.fromstring(svg).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    widths = [float(r.get("width", "0")) for r in shapes]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    assert widths[2] == pytest.approx(1.5 * widths[0], rel=0.01)
    stack = stacks([("a", {"p": 1.0, "q": 3.0})], {"p": "#000", "q": "#111"}, unit="ms")
    parts = [
        float(r.get("width", "0")) for r in ET.fromstring(stack).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None
    ]
    assert parts[1] == pytest.approx(3 * parts[0], rel=0.01)


def test_a_better_point_lies_higher_and_a_doubling_is_a_step() -> None:
    svg = lines([Series("m", [(1, 1.0), (2, 3.0), (4, 2.0)])], colours(["m"]), x_label="x", y_label="y", log2=True)
    dots = [c for c in ET.fromstring(svg).iter(f"{SVG}circle")][1:]  # the first is the legend's
    x, y = ([float(c.get(k, "0")) for c in dots] for k in ("cx", "cy"))
    assert y[1] < y[2] < y[0]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.11)


def test_colours_differ_and_ticks_are_round() -> None:
    names = [f"m{i}" for i in range(7)]
    assert len({*colours([*names, "plain"]).values()}) == 8
    assert set(colours(names).values()) & set(COLOURS)
    assert ticks(0, 2) == [0, 0.5, 1, 1.5, 2]
    assert ticks(0, 0.0) == [0]
    assert all(low <= t <= high for low, high in ((0.3, 7.7), (10, 1000)) for t in ticks(low, high))


def test_acceptance_alone_makes_a_page_too() -> None:
    one = result(methods=("d@2", "d@8"))
    html, charts = report([one])
    assert set(charts) == {"positions-t0", "sizes-m"}
    assert "All figures" in html


def test_the_verb_writes_page_and_pictures(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result()))
    done = CliRunner().invoke(
        app, ["bench", "report", str(path), "--out", str(tmp_path / "r.html"), "--svg", str(tmp_path / "svg")]
    )
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (tmp_path / "r.html").stat().st_size == said["bytes"]
    assert sorted(p.stem for p in (tmp_path / "svg").iterdir()) == sorted(said["charts"])
    path.write_text('{"kind": "poem"}')
    with pytest.raises(DartspecError, match="is no result of dartspec bench"):
        read(path)
    assert CliRunner().invoke(app, ["bench", "report", str(path)]).exit_code == 2
