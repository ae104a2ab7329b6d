"""`bench report`: results as one HTML page that needs no network, and its charts as SVG files.

Reads what `bench run`, `load`, `latency` and `replay` wrote; measures and computes nothing that is not in them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dartspec.accounting import with_interval
from dartspec.bench.charts import Series, bars, colours, lines, stacks
from dartspec.bench.provenance import read_result
from dartspec.errors import DartspecError

Result = Mapping[str, Any]
TEMPLATE = Path(__file__).parent / "report.html"
STAGES = {"draft": "#56B4E9", "search": "#E69F00", "verify": "#0072B2", "other": "#8A8A8A"}
KINDS = ("run", "load", "replay", "latency")
WAITS = {"first_ms": "first token, ms", "per_token_ms": "a token, ms", "end_ms": "whole answer, ms"}
FEW = 8  # methods that a chart shows at most, plain decoding not counted


class Page:
    """The sections in order, and the charts by name."""

    def __init__(self) -> None:
        self.body: list[str] = []
        self.charts: dict[str, str] = {}

    def section(self, title: str, text: str) -> None:
        self.body.append(f"<h2>{escape(title)}</h2><p>{escape(text)}</p>")

    def chart(self, name: str, svg: str, caption: str = "") -> None:
        while name in self.charts:
            name += "-more"
        self.charts[name] = svg
        below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        self.body.append(f"<figure id='{escape(name)}'>{svg}{below}</figure>")


def read(path: Path) -> dict[str, Any]:
    """A result that can be shown."""
    result = read_result(path)
    if not isinstance(result, dict) or result.get("kind") not in KINDS:
        raise DartspecError(f"{path} is no result of dartspec bench {', '.join(KINDS)}")
    return result


def report(results: Sequence[Result], title: str = "Speculative decoding, measured") -> tuple[str, dict[str, str]]:
    """The page, and its charts by name."""
    page = Page()
    runs = [r for r in results if r["kind"] == "run"]
    timed = [r for r in runs if any("speed_up" in row for row in r["rows"])]
    page.body.append(f"<h1>{escape(title)}</h1>{_where(results[0])}")
    for result in timed[:1]:
        _tiles(page, result)
    for result in timed:
        _speed_ups(page, result)
    for result in timed:
        _stages(page, result)
    for result in runs:
        _positions(page, result)
    for result in timed:
        _tau_and_speed(page, result)
    for result in results:
        if result["kind"] != "latency":
            _sizes(page, result)
    for result in results:
        if result["kind"] == "load":
            _batches(page, result)
    for result in results:
        if result["kind"] == "latency":
            _waits(page, result)
    _reliability(page, results)
    traces = _prompts(page, results)
    for result in results:
        _table(page, result)
    page.body.append(_footer(results))
    data = json.dumps(traces, ensure_ascii=False).replace("<", "\\u003c")
    html = TEMPLATE.read_text(encoding="utf-8")
    for name, value in (("TITLE", escape(title)), ("BODY", "\n".join(page.body)), ("DATA", data)):
        html = html.replace("{{" + name + "}}", value, 1)
    return html, page.charts


def _where(result: Result) -> str:
    p = result["provenance"]
    bits = [p.get("model"), p.get("dtype"), p.get("gpu") or p.get("cpu"), f"{p.get('threads')} threads", p["date"][:10]]
    return f"<p class='note'>{escape(', '.join(str(b) for b in bits if b))}</p>"


def _tiles(page: Page, result: Result) -> None:
    """The best method over all sets at each temperature."""
    tiles = []
    for temperature, rows in _by_temperature(result):
        whole = [r for r in rows if r["suite"] == _whole(rows) and "speed_up" in r]
        best = max(whole, key=lambda r: r["speed_up"][0], default=None)
        if best is None:
            continue
        s, low, high = best["speed_up"]
        tiles.append(
            f"<div class='tile'><b>{s:.2f}x</b><span>T = {temperature:g}: {escape(best['method'])}, {best['M']:.2f} "
            f"tokens a round{f', interval [{low:.2f}, {high:.2f}]' if low < high else ''}</span></div>"
        )
    told = [r for r in result["rows"] if "num_equal" in r and r["suite"] == _whole(result["rows"])]
    equal, total = sum(r["num_equal"] for r in told), sum(r["num_runs"] for r in told)
    tiles.append(
        f"<div class='tile'><b>{equal} / {total}</b><span>texts are, token for token, plain decoding's</span></div>"
    )
    page.body.append(f"<div class='tiles'>{''.join(tiles)}</div>")


def _by_temperature(result: Result) -> Iterable[tuple[float, list[dict[str, Any]]]]:
    """Rows at the first batch size and number of threads, temperature by temperature."""
    rows = result["rows"]
    groups: dict[float, list[dict[str, Any]]] = defaultdict(list)
    for r in rows:
        if (r["batch"], r["threads"]) == (rows[0]["batch"], rows[0]["threads"]):
            groups[r["temperature"]].append(r)
    return groups.items()


def _whole(rows: Sequence[Mapping[str, Any]]) -> str:
    """The name of the row over everything."""
    return "all" if any(r["suite"] == "all" for r in rows) else str(rows[0]["suite"])


def _methods(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(r["method"] for r in rows if r["method"] != "plain"))[:FEW]


def _speed_ups(page: Page, result: Result) -> None:
    page.section(
        "Speed-up by task",
        "Committed tokens a second over plain decoding's in the same run, prompt by prompt in turn. A bar is a ratio "
        "of sums, its whisker the 95 % interval over prompts. Text that loops is cut.",
    )
    methods = _methods(result["rows"])
    colour = colours(methods)
    for temperature, rows in _by_temperature(result):
        suites = list(dict.fromkeys(r["suite"] for r in rows))
        found = {(r["suite"], r["method"]): r["speed_up"] for r in rows if "speed_up" in r}
        series = {m: [tuple(v) if (v := found.get((s, m))) else None for s in suites] for m in methods}
        page.body.append(f"<h3>Temperature {temperature:g}</h3>")
        page.chart(f"speed-up-t{temperature:g}", bars(suites, series, colour, unit="speed-up"))


def _stages(page: Page, result: Result) -> None:
    page.section(
        "Where a round's time goes",
        "Milliseconds a round, over all sets. A plain step is a round of one token; what a round costs in steps is the "
        "price, the tokens that it commits are the gain.",
    )
    for temperature, rows in _by_temperature(result):
        own = [r for r in rows if r["suite"] == _whole(rows)]
        shown = [(f"{r['method']}, M {r['M']:.2f}", r["ms_per_round"]) for r in own[: FEW + 1]]
        page.chart(f"stages-t{temperature:g}", stacks(shown, STAGES, unit=f"ms a round, T = {temperature:g}"))


def _positions(page: Page, result: Result) -> None:
    rows = [r for r in result["rows"] if r["suite"] == _whole(result["rows"]) and r["acceptance_by_position"]]
    if not rows:
        return
    page.section(
        "Acceptance by position",
        "The share of rounds that accepted the draft at a position, and with it all before it. Their sum is A.",
    )
    for temperature in dict.fromkeys(r["temperature"] for r in rows):
        own = {r["method"]: r for r in rows if r["temperature"] == temperature}
        names = list(own)[:FEW]
        series = [Series(m, [(i + 1, v) for i, v in enumerate(own[m]["acceptance_by_position"])]) for m in names]
        page.chart(
            f"positions-t{temperature:g}",
            lines(
                series, colours(names), x_label=f"position, T = {temperature:g}", y_label="share accepted", height=240
            ),
        )


def _tau_and_speed(page: Page, result: Result) -> None:
    rows = [r for r in result["rows"] if "speed_up" in r and r["suite"] != "all"]
    methods = _methods(rows)
    if len(rows) < 3:
        return
    page.section(
        "Tokens a round against speed",
        "Each point is one task. Points on a line through the origin pay the same for a round; a method that commits "
        "more tokens but lies lower pays more for them than they bring.",
    )
    series = [Series(m, [(r["M"], r["speed_up"][0]) for r in rows if r["method"] == m]) for m in methods]
    page.chart(
        "tau-speed",
        lines(
            series, colours(methods), x_label="M, committed tokens a round", y_label="speed-up", joined=False, mark=1.0
        ),
    )


def _sizes(page: Page, result: Result) -> None:
    """M and speed-up by tree size, where several fixed sizes of one drafter were tried."""
    if result["kind"] == "load":
        return
    by_name: dict[str, list[tuple[int, Mapping[str, Any]]]] = defaultdict(list)
    if result["kind"] == "replay":
        for r in result["rows"]:
            by_name[f"{r['index']}, {r['search']}"].append((r["nodes"], r))
    else:
        for r in result["rows"]:
            name, _, size = r["method"].partition("@")
            size, _, rest = size.partition(",")
            if size.isdecimal() and r["suite"] == _whole(result["rows"]):
                label = name + (f",{rest}" if rest else "") + f", T = {r['temperature']:g}"
                by_name[label].append((int(size), r))
    swept = {n: sorted(v, key=lambda e: e[0]) for n, v in by_name.items() if len({k for k, _ in v}) > 1}
    if not swept:
        return
    names = list(swept)[:FEW]
    how = " From recorded guesses, without the model." if result["kind"] == "replay" else ""
    page.section(
        "Tree size",
        "Larger trees commit more tokens a round, and cost more to verify: the best size is where speed turns." + how,
    )
    series = [Series(n, [(k, r["M"]) for k, r in swept[n]]) for n in names]
    page.chart(
        "sizes-m",
        lines(series, colours(names), x_label="drafted nodes", y_label="M", log2=True, zero=False, height=240),
    )
    timed = {n: [(k, r["speed_up"]) for k, r in swept[n] if "speed_up" in r] for n in names}
    series = [
        Series(n, [(k, s[0]) for k, s in v], [s[1] for _, s in v], [s[2] for _, s in v]) for n, v in timed.items() if v
    ]
    if series:
        page.chart(
            "sizes-speed",
            lines(
                series,
                colours(names),
                x_label="drafted nodes",
                y_label="speed-up",
                log2=True,
                zero=False,
                mark=1.0,
                height=240,
            ),
        )


def _batches(page: Page, result: Result) -> None:
    page.section(
        "Under load",
        "Committed tokens a second of the whole batch over plain decoding's at the same batch size. Bands are 95 % "
        "intervals over pairs of batches. The gain depends on arithmetic that would otherwise be idle, so it falls.",
    )
    rows = [r for r in result["rows"] if "speed_up" in r]
    methods = _methods(rows)
    listed = list(dict.fromkeys((r["suite"], r["temperature"]) for r in rows))
    alone = len({r["batch"] for r in rows}) == 1  # no curve to draw
    for temperature in dict.fromkeys(t for _, t in listed) if alone else ():
        found = {(r["suite"], r["method"]): r["speed_up"] for r in rows if r["temperature"] == temperature}
        suites = list(dict.fromkeys(s for s, _ in found))
        bars_of = {m: [tuple(v) if (v := found.get((s, m))) else None for s in suites] for m in methods}
        unit = f"speed-up, batch {rows[0]['batch']}, T = {temperature:g}"
        page.chart(f"load-t{temperature:g}", bars(suites, bars_of, colours(methods), unit=unit))
    for suite, temperature in listed:
        if suite == "all" or alone:
            continue
        own = [r for r in rows if (r["suite"], r["temperature"]) == (suite, temperature)]
        series = []
        for m in methods:
            points = sorted(((r["batch"], r["speed_up"]) for r in own if r["method"] == m), key=lambda p: p[0])
            band = "@auto" in m
            low, high = ([s[i] for _, s in points] for i in (1, 2)) if band else ([], [])
            series.append(Series(m, [(b, s[0]) for b, s in points], low, high))
        page.body.append(f"<h3>{escape(str(suite))}, temperature {temperature:g}</h3>")
        page.chart(
            f"load-{suite}-t{temperature:g}",
            lines(series, colours(methods), x_label="batch", y_label="speed-up", log2=True, mark=1.0, height=240),
        )
    for name, c in result.get("over_cells", {}).items():
        if c:
            page.body.append(
                f"<p class='note'>Automatic size {escape(name.replace('_', ' '))}: mean {c['mean']:.3f}, worst cell "
                f"{c['worst']:.3f}, lowest lower bound {c['worst_low']:.3f}, over {c['cells']} cells.</p>"
            )


def _waits(page: Page, result: Result) -> None:
    c = result["config"]
    page.section(
        "What users wait",
        f"Requests come at random ({c['arrivals']}, {c['requests']} at each rate), answered or not; times count from "
        "when they were due. Bands are 95 % intervals, over blocks of neighbours.",
    )
    rates = {r["rate"] for r in result["rows"]}
    names = list(dict.fromkeys(r["service"] for r in result["rows"]))
    for wait, label in WAITS.items():
        for p, said in (("p50", "median"), ("p90", "nine of ten")):
            series = []
            for name in names:
                own = sorted((r["rate"], r[wait][p]) for r in result["rows"] if r["service"] == name and r[wait][p])
                series.append(Series(name, [(x, e[0]) for x, e in own], [e[1] for _, e in own], [e[2] for _, e in own]))
            if all(s.points for s in series):
                page.chart(
                    f"waits-{wait.removesuffix('_ms').replace('_', '-')}-{p}",
                    lines(
                        series,
                        colours(names),
                        x_label=f"requests a second ({said})",
                        y_label=label,
                        log2=len(rates) > 1,
                        joined=len(rates) > 1,
                        height=200,
                    ),
                )


def _reliability(page: Page, results: Sequence[Result]) -> None:
    found = {label: bins for r in results for label, bins in r.get("reliability", {}).items() if bins}
    if not found:
        return
    page.section(
        "Are the controller's probabilities right?",
        "Nodes by the probability that the controller gave them, and the share of each group that was accepted. On the "
        "diagonal, what was promised is what came.",
    )
    series = [Series(label, [(p, share) for p, share, _ in bins]) for label, bins in found.items()][:FEW]
    page.chart(
        "reliability",
        lines(
            series,
            colours([s.name for s in series]),
            x_label="predicted probability of acceptance",
            y_label="share accepted",
            diagonal=True,
            height=360,
        ),
    )


def _prompts(page: Page, results: Sequence[Result]) -> list[dict[str, Any]]:
    traces = [
        {"name": f"{r['id']}, {r['method']}, T = {r['temperature']:g}", "trace": r["trace"]}
        for result in results
        for r in result.get("records", ())
        if "trace" in r and r["method"] != "plain" and r["trace"]["rounds"]
    ]
    if traces:
        page.section(
            "Round by round",
            "What was drafted, which path the target would have written itself, and the token that it added.",
        )
        page.body.append(
            "<div class='view' id='view'><div class='bar'><select class='which' aria-label='prompt and method'>"
            "</select>"
            "<button class='back' aria-label='round before'>←</button><input class='at' type='range' min='0' "
            "aria-label='round'><button class='next' aria-label='next round'>→</button></div>"
            "<div class='note count'></div><div class='tree'></div><div class='times'></div><div class='note legend'>"
            "</div><pre class='text'></pre><div class='key'><span><i style='color:#0072b2'>accepted</i> a draft that "
            "stands</span><span><i style='color:#b34700'>bonus</i> the target's own token</span><span><i "
            "style='color:#888'>grey</i> drafted in vain</span><span>· is a space, ⏎ a line end</span></div></div>"
        )
    return traces


def _table(page: Page, result: Result) -> None:
    if result["kind"] == "latency":
        _table_of_waits(page, result)
    if result["kind"] in ("replay", "latency"):
        return
    name = {"run": "All figures", "load": "All figures under load"}[result["kind"]]
    head = (
        "set",
        "T",
        "batch",
        "method",
        "M",
        "A",
        "tokens/s",
        "speed-up",
        "",
        "median pair",
        "bound",
        "M uncut",
        "equal",
    )
    right = range(4, len(head))
    body, last = [], None
    for r in result["rows"]:
        cells = [r["suite"], f"{r['temperature']:g}", r["batch"], r["method"], f"{r['M']:.2f}", f"{r['A']:.2f}"]
        cells.append(f"{r['tokens_per_s']:.0f}")
        if "speed_up" in r:
            s, low, high = r["speed_up"]
            pair = f"{r['median_pair'][0]:.2f}x" if r["median_pair"] else ""
            cells += [f"{s:.2f}x", f"[{low:.2f}, {high:.2f}]" if low < high else "", pair, f"{r['bound']:.2f}x"]
            cells += [f"{r['uncut']['M']:.2f}", f"{r['num_equal']}/{r['num_runs']}"]
        cells += [""] * (len(head) - len(cells))
        kind = " ".join(["all"] * (r["suite"] == "all") + ["first"] * (last not in (None, r["suite"])))
        last = r["suite"]
        columns = "".join(f"<td{' class=n' if i in right else ''}>{escape(str(c))}</td>" for i, c in enumerate(cells))
        body.append(f"<tr class='{kind}'>{columns}</tr>")
    top = "".join(f"<th{' class=n' if i in right else ''}>{escape(h)}</th>" for i, h in enumerate(head))
    page.body.append(
        f"<h2>{name}</h2><div class='wide'><table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        "</div>"
    )


def _table_of_waits(page: Page, result: Result) -> None:
    head = ("a second", "service", "at once", "tokens/s", *(f"{label}: p50 / p90 / p99" for label in WAITS.values()))
    head = (*head, "answer p50, faster", "equal", "refused")
    body = []
    for r in result["rows"]:
        e = r.get("against_first") or {}
        ratio = (e.get("end_ms") or {}).get("p50")
        cells = [f"{r['rate']:g}", r["service"], f"{r['in_progress']:.1f}", f"{r['tokens_per_s']:.0f}"]
        cells += [" / ".join(f"{v[0]:.4g}" if (v := r[w][p]) else "-" for p in ("p50", "p90", "p99")) for w in WAITS]
        cells += [with_interval(ratio, "x") if ratio else ""]
        cells += [f"{e['num_equal']}/{e['num_pairs']}" if e else "", str(r["num_refused"] or "")]
        body.append(
            "<tr>"
            + "".join(f"<td{' class=n' if i > 1 else ''}>{escape(c)}</td>" for i, c in enumerate(cells))
            + "</tr>"
        )
    top = "".join(f"<th{' class=n' if i > 1 else ''}>{escape(h)}</th>" for i, h in enumerate(head))
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    page.body.append(f"<h2>All waits</h2><div class='wide'>{table}</div>")


def _footer(results: Sequence[Result]) -> str:
    lines_of = []
    for r in results:
        p = r["provenance"]
        facts = ", ".join(f"{k} {p[k]}" for k in ("torch", "transformers", "commit", "date") if p.get(k))
        lines_of.append(f"<p><code>{escape(p['command'])}</code><br>{escape(facts)}</p>")
    return (
        "<h2>Where this is from</h2><footer>"
        + "".join(lines_of)
        + "<p>M: committed tokens a round, accepted drafts and the bonus. A: accepted drafts. Speed-up = M * plain "
        "step / round, from sums. Bound = M * plain step / verify: what a free drafter would reach.</p></footer>"
    )
