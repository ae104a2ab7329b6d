"""`dartspec bench`: speed-up, acceptance and equality on prompt sets. Thin: `dartspec.bench` does the work."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal
from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from dartspec.api import LM
    from dartspec.bench.run import Cell, Journal, RunConfig
    from dartspec.bench.suites import Prompt

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help=(
        "Measurements: how much faster, on which text, and whether the text stays the same.\n\n"
        "Method and plain decoding run in the same engine on the same prompts in turn; ratios are ratios of sums, with "
        "95 % intervals. docs/bench.md says what every figure means.\n\n"
        "\b\nExamples:\n"
        "  dartspec bench run                               is it worth it on this machine?\n"
        "  dartspec bench run --suite my-prompts.jsonl --out mine.json\n"
        "  dartspec bench load --batch 1,4,16               ... and under load?"
    ),
)

LATE_MS = 50.0  # a request sent later than that is worth a word

SuiteOption = Annotated[
    list[str] | None,
    typer.Option("--suite", "-s", help="Prompt set by name, all, code, math, prose, or a JSONL file; may be repeated."),
]
MethodOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="NAME[@NODES][,index=FILE|none]: a method or a drafter's folder; none is plain. May be repeated.",
    ),
]
TemperaturesOption = Annotated[str, typer.Option("--temperature", "-t", help="Temperatures, separated by commas.")]
SeedsOption = Annotated[str, typer.Option("--seed", help="Seeds, separated by commas; greedy text uses the first.")]
ThreadsOption = Annotated[
    str | None, typer.Option("--threads", help="CPU threads, separated by commas; default: torch's own choice.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens a prompt, at most.")]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Always write so many tokens.")]


def _result_file(out: Path | None) -> Path | None:
    """Where a result may go: a new file, or one that holds a result. Raises DartspecError for any other file."""
    from dartspec.bench.provenance import read_result

    if out is not None and out.is_dir():
        raise DartspecError(f"--out {out} is a folder: give the name of a file to write")
    if out is not None and out.exists():
        try:
            held = read_result(out)
        except DartspecError:
            held = None
        if not (isinstance(held, dict) and "kind" in held):
            raise DartspecError(f"--out {out} holds something other than a result, which would be lost: give another")
    return out


OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="JSON file of the result; an interrupted run with the same --out goes on.",
        callback=_result_file,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be measured and for how long.")]
MixedOption = Annotated[
    bool, typer.Option("--mixed-code", help="Go on with an interrupted run though the code has changed since.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Tables to stderr; the last line of stdout is JSON always.")]


@app.command()
def run(
    suite: SuiteOption = None,
    method: MethodOption = None,
    nodes: Annotated[str, typer.Option(help="Tree sizes of methods without @NODES, separated by commas.")] = "auto",
    per_set: Annotated[int, typer.Option(help="Prompts of each set, the first ones; 0 takes all.")] = 10,
    temperature: TemperaturesOption = "0",
    seed: SeedsOption = "0",
    batch: Annotated[str, typer.Option(help="Sequences decoded together, separated by commas.")] = "1",
    repeats: Annotated[int, typer.Option(help="Times that everything is measured.")] = 1,
    max_tokens: MaxTokensOption = 128,
    ignore_eos: IgnoreEosOption = False,
    turns: Annotated[int, typer.Option(help="Turns of each conversation that are answered.")] = 1,
    trace: Annotated[int, typer.Option(help="Prompts a set whose rounds are kept for the report.")] = 0,
    texts: Annotated[
        bool, typer.Option("--texts", help="Keep every text, for bench table --format spec-bench.")
    ] = False,
    chains: Annotated[
        bool,
        typer.Option(
            "--chains", help="M as a chain of 1 to 7 first choices too: for drafters that guess all positions at once."
        ),
    ] = False,
    plain: Annotated[bool, typer.Option("--plain/--no-plain", help="Plain decoding too, or A and M only.")] = True,
    model: o.ModelOption = None,
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: ThreadsOption = None,
    fast: o.FastOption = True,
    out: OutOption = None,
    mixed_code: MixedOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Methods beside plain decoding, set by set.

    Every prompt is answered by plain decoding and by each method in turn (A B A B), after a warm-up. Figures count the
    text before it loops; the uncut ones stand beside them in the JSON file.

    \b
    Examples:
      dartspec bench run
      dartspec bench run --suite code --method dart@8 --method prompt_lookup@8 --temperature 0,1 --repeats 3
      dartspec bench run --method dart --nodes 2,4,8,16,59 --no-plain --out sizes.json
      dartspec bench run --suite my-prompts.jsonl --model ./my-model --out mine.json --dry-run
    """
    from dartspec.bench.measure import PLAIN, Method
    from dartspec.bench.run import RunConfig

    methods = [m for text in method or ["auto"] for m in Method.parse(text, _sizes(nodes))]
    plain_first = Method(PLAIN, 0)
    if plain or plain_first in methods:
        methods = [plain_first, *(m for m in methods if m != plain_first)]
    config = RunConfig(
        suites=tuple(suite or ["all"]),
        per_set=per_set or None,
        methods=tuple(methods),
        temperatures=_list(temperature, float, "temperature"),
        seeds=_list(seed, int, "seed"),
        batches=_list(batch, int, "batch"),
        threads=_list(threads, int, "threads") if threads else (None,),
        repeats=repeats,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        turns=turns,
        trace=trace,
        texts=texts,
    )
    term = Terminal(json=json, no_color=no_color)
    loading = o.Loading(model, "none", "auto", "0", dtype, device, None, fast)
    _run("run", config, loading, out, mixed_code, dry_run, term, chains=chains)


@app.command()
def load(
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,2,4,8,16,32,64",
    fixed: Annotated[str, typer.Option(help="Fixed tree sizes to try, separated by commas.")] = "2,4,8,16",
    drafter: o.DrafterOption = "auto",
    suite: SuiteOption = None,
    temperature: TemperaturesOption = "0,1",
    pairs: Annotated[int, typer.Option(help="Groups of prompts at each batch size; each is one pair.")] = 4,
    max_tokens: MaxTokensOption = 64,
    ignore_eos: IgnoreEosOption = False,
    auto: Annotated[bool, typer.Option("--auto/--no-auto", help="Measure the automatic tree size too.")] = True,
    busy: Annotated[int, typer.Option(help="Neighbours: this many processes spin beside the measurement.")] = 0,
    model: o.ModelOption = None,
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: o.ThreadsOption = None,
    fast: o.FastOption = True,
    out: OutOption = None,
    mixed_code: MixedOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Tokens a second by batch size: plain decoding, fixed tree sizes, the best of them, and the automatic size.

    The prompts of a batch are decoded by each method in turn, together from the first round on. Without --suite: prose
    (mt_bench, qa) and code (humaneval, mbpp). Intervals are over the pairs: below 6 pairs they are rough.

    \b
    Examples:
      dartspec bench load --batch 1,4,16 --temperature 0
      dartspec bench load --pairs 8 --out load.json
      dartspec bench load --batch 1,8 --busy 1
    """
    from dartspec.bench.measure import PLAIN, Method
    from dartspec.bench.run import RunConfig

    sizes: list[int | str] = [n for n in _sizes(fixed) if n not in ("auto", 0)]
    config = RunConfig(
        suites=tuple(suite or ["prose", "code"]),
        per_set=None,
        methods=(Method(PLAIN, 0), *(Method(drafter, n) for n in sizes + ["auto"] * auto)),
        temperatures=_list(temperature, float, "temperature"),
        batches=_list(batch, int, "batch"),
        threads=(threads,),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        pairs=pairs,
        busy=busy,
    )
    term = Terminal(json=json, no_color=no_color)
    loading = o.Loading(model, "none", "auto", "0", dtype, device, None, fast)
    with neighbours(busy):
        _run("load", config, loading, out, mixed_code, dry_run, term)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Result of bench run or load.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="The later one.", show_default=False)],
    tolerance: Annotated[float, typer.Option(help="A change of less than this share is no regression.")] = 0.01,
    json: JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """What changed between two results; exit code 1 when something got worse by more than noise.

    Compared is the speed-up over the plain decoding of the same run (M where there is none), over the prompts that both
    runs hold. Intervals hold for all rows together.

    \b
    Examples:
      dartspec bench compare before.json after.json
      dartspec bench compare docs/results/table-t0.json mine.json --tolerance 0.03
    """
    from dartspec.bench.compare import compare as compared
    from dartspec.bench.compare import read

    term = Terminal(json=json, no_color=no_color)
    result = compared(read(before), read(after), tolerance)
    table = Table("set", "T", "batch", "method", "prompts", box=box.SIMPLE_HEAD)
    for name in ("speed-up", "M", "tokens/s", "unequal texts", ""):
        table.add_column(name, justify="right")
    for r in result["rows"]:
        ratios = [_interval(r[k]) if k in r else "" for k in ("speed_up", "M", "tokens_per_s")]
        style = {"worse": "red", "better": "green"}.get(r["verdict"])
        unequal = f"{r['num_unequal'][0]} -> {r['num_unequal'][1]}" if any(r["num_unequal"]) else ""
        where = r["suite"], f"{r['temperature']:g}", str(r["batch"]), r["method"], str(r["num_units"])
        table.add_row(*where, *ratios, unequal, r["verdict"], style=style)
    _print(table, term)
    for name, (old, new) in result["facts_changed"].items():
        term.note(f"{name}: {old} -> {new}")
    term.say(f"{result['num_worse']} rows worse, {result['num_better']} better, of {len(result['rows'])}")
    _last_line(result)
    if result["num_worse"]:
        raise typer.Exit(1)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Results of bench run, load or replay.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "Speculative decoding, measured",
    svg: Annotated[Path | None, typer.Option(help="Also write each chart as an SVG file into this folder.")] = None,
    json: JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Results as one HTML page that needs no network.

    With `bench run --trace 2`, two prompts of each set can be watched round by round.

    \b
    Examples:
      dartspec bench report mine.json --out report.html
      dartspec bench report mine.json load.json sizes.json --svg docs/pictures
    """
    from dartspec.bench.provenance import write
    from dartspec.bench.report import read
    from dartspec.bench.report import report as made

    term = Terminal(json=json, no_color=no_color)
    page, charts = made([read(path) for path in results], title)
    write(out, page)
    for name, chart in charts.items() if svg is not None else ():
        assert svg is not None
        write(svg / f"{name}.svg", chart + "\n")
    term.say(f"{out}: {len(charts)} charts, {len(page.encode()) / 1e3:.0f} kB")
    _last_line({"out": str(out), "charts": list(charts), "bytes": len(page.encode())})


@app.command("table")
def table_of(
    result: Annotated[Path, typer.Argument(help="Result of bench run, load, latency or endpoint.", show_default=False)],
    form: Annotated[str, typer.Option("--format", "-f", help="csv, markdown, latex or spec-bench.")] = "csv",
    method: Annotated[str | None, typer.Option(help="Whose answers, for spec-bench: a method of the result.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write; default: stdout.")] = None,
    json: JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """A result's rows as CSV (every figure), Markdown or LaTeX (the main ones); or its answers in Spec-Bench's format.

    \b
    Examples:
      dartspec bench table mine.json > mine.csv
      dartspec bench table mine.json --format latex --out table.tex
      dartspec bench table mine.json --format spec-bench --method dart@auto --out dart.jsonl
    """
    from dartspec.bench.export import SPEC_BENCH, export, spec_bench
    from dartspec.bench.provenance import read_result, write

    found = read_result(result)
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise DartspecError(f"{result} is no result of dartspec bench: it has no rows")
    if form == SPEC_BENCH and found.get("kind") not in ("run", "load"):
        raise DartspecError(f"{result} is a result of bench {found.get('kind')}; spec-bench needs one of bench run")
    text = spec_bench(found, method or "") if form == SPEC_BENCH else export(found, form)
    if out is None and not json:
        sys.stdout.write(text)
        return
    if out is not None:
        write(out, text)
    Terminal(json=json, no_color=no_color).emit({"out": out and str(out), "text": text})


@app.command()
def worth(
    result: Annotated[Path, typer.Argument(help="Result of bench run, on your prompts.", show_default=False)],
    latency: Annotated[Path | None, typer.Option(help="Result of bench latency, with your traffic.")] = None,
    method: Annotated[str | None, typer.Option(help="Which method; default: the fastest.")] = None,
    spent_hours: Annotated[float, typer.Option(help="Hours that training and building the index took here.")] = 0.0,
    tokens_per_day: Annotated[float | None, typer.Option(help="Tokens that you write a day.")] = None,
    json: JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Is it worth it? What the results say, in sentences, and after how many tokens the work is repaid.

    \b
    Examples:
      dartspec bench worth mine.json
      dartspec bench worth mine.json --latency waits.json --spent-hours 6 --tokens-per-day 2e6
    """
    from dartspec.bench.provenance import read_result
    from dartspec.bench.worth import answer

    term = Terminal(json=json, no_color=no_color)
    found = answer(
        read_result(result),
        read_result(latency) if latency is not None else None,
        method=method,
        spent_hours=spent_hours,
        tokens_per_day=tokens_per_day,
    )
    for sentence in found["sentences"]:
        term.say(sentence)
    _last_line(found)


@app.command()
def endpoint(
    urls: Annotated[
        list[str], typer.Argument(help="Servers; the others are compared with the first.", show_default=False)
    ],
    suite: SuiteOption = None,
    per_set: Annotated[int, typer.Option(help="Prompts of each set, the first ones; 0 takes all.")] = 5,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Sent with every request.")] = 0,
    max_tokens: MaxTokensOption = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 1,
    served_model: Annotated[str | None, typer.Option(help="Model to ask for; default: the server's first.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="JSON file of the result.", callback=_result_file)
    ] = None,
    json: JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Servers that speak OpenAI's API: ours, vLLM, SGLang, llama-server.

    Time to the first text, and time per output token, (end - first) / (n - 1); gaps between pieces of text stand apart,
    for a piece may hold several tokens. Acceptance is read from /metrics where the server has it. A key is taken from
    the variable OPENAI_API_KEY.

    \b
    Examples:
      dartspec bench endpoint http://localhost:8000
      dartspec bench endpoint http://localhost:8001 http://localhost:8000 --suite code --concurrency 4
    """
    import os

    from rich.progress import Progress

    from dartspec.accounting import with_interval
    from dartspec.bench.endpoint import Server, measure
    from dartspec.bench.provenance import provenance, save_result
    from dartspec.bench.suites import load_suites

    term = Terminal(json=json, no_color=no_color)
    prompts = [p for own in load_suites(list(suite or ["all"]), per_set or None).values() for p in own]
    if len(set(urls)) < len(urls):
        raise DartspecError("a server is given twice: name each once")
    servers = [Server(url, served_model, os.environ.get("OPENAI_API_KEY")) for url in urls]
    settings = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    total = repeats * len(servers) * -(-len(prompts) // concurrency)
    with Progress(console=term.err, transient=True) as progress:
        task = progress.add_task("asking", total=total)
        result = measure(
            servers,
            prompts,
            settings,
            concurrency=concurrency,
            repeats=repeats,
            advance=lambda: progress.update(task, advance=1),
        )
    table = Table("server", "model", box=box.SIMPLE_HEAD)
    for name in ("first, ms (p50)", "ms a token [95 %]", "p99", "A", "speed-up [95 %]", "equal"):
        table.add_column(name, justify="right")
    for r in result["rows"]:
        e, per = r.get("against_first", {}), r["per_token_ms"]
        table.add_row(
            r["server"],
            r["model"],
            f"{r['first_ms']['p50']:.0f}",
            with_interval(per) if per else "",
            f"{r['per_token_percentiles_ms'].get('p99', 0):.2f}",
            f"{r['A']:.2f}" if "A" in r else "",
            _interval(e["speed_up"]) if "speed_up" in e else "",
            f"{e['num_equal']}/{e['num_pairs']}" if e else "",
        )
    _print(table, term)
    if any(r["counted_by"] != ["server"] for r in result["rows"]):
        term.note("a server does not say how many tokens it wrote: its pieces of text were counted in their place")
    config = {"suites": list(suite or ["all"]), "concurrency": concurrency, "repeats": repeats, **settings}
    whole = {"kind": "endpoint", "config": config, **result, "provenance": provenance()}
    if out is not None:
        save_result(out, whole)
    _last_line({"kind": "endpoint", "rows": result["rows"], "out": out and str(out)})


@app.command()
def latency(
    urls: Annotated[
        list[str] | None, typer.Argument(help="Servers; without any, methods in this process.", show_default=False)
    ] = None,
    method: MethodOption = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests a second, separated by commas; default: 0.5,1,2, or a trace's own.")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, bursts[:SIZE], or a JSONL file of a trace.")] = "poisson",
    requests: Annotated[int, typer.Option(min=1, help="Requests at each rate; of a trace, the first ones.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Times that everything is measured, at other times.")] = 1,
    suite: SuiteOption = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the text, and of the arrivals.")] = 0,
    max_tokens: MaxTokensOption = 64,
    slots: Annotated[int, typer.Option(min=1, help="Sequences decoded at once, at most; in this process.")] = 16,
    served_model: Annotated[str | None, typer.Option(help="Model to ask servers for; default: the first.")] = None,
    model: o.ModelOption = None,
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: o.ThreadsOption = None,
    fast: o.FastOption = True,
    out: OutOption = None,
    mixed_code: MixedOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """What users wait when requests come at random: first token, time a token, whole answer, by rate.

    Open loop: requests come at their time, answered or not, and times count from then; so a queue shows. Each service
    (plain decoding and --method, or the URLs) gets the same requests at the same times. A trace is a JSON object a line
    with `at` in seconds, and the prompt if it has one.

    \b
    Examples:
      dartspec bench latency --rate 1,2,4
      dartspec bench latency --arrivals bursts:8 --method dart@8 --method auto --out bursts.json
      dartspec bench latency http://localhost:8001 http://localhost:8000 --arrivals my-trace.jsonl
    """
    import os

    from rich.progress import Progress

    from dartspec.bench import arrivals as comes
    from dartspec.bench import latency as waits
    from dartspec.bench.endpoint import Server
    from dartspec.bench.measure import PLAIN, Method
    from dartspec.bench.provenance import provenance, save_result
    from dartspec.bench.suites import load_suites
    from dartspec.types import SamplingParams

    term = Terminal(json=json, no_color=no_color)
    names = list(suite or ["prose", "code"])
    prompts = _in_turn(load_suites(names))
    recorded: list[float] | None = None
    if arrivals.partition(":")[0] not in ("poisson", "bursts"):
        recorded, own = comes.read_trace(Path(arrivals))
        recorded, prompts = recorded[:requests], own[:requests] or prompts
    rates = _list(rate, float, "rate") if rate else (0.0,) if recorded else (0.5, 1.0, 2.0)
    schedule: list[tuple[int, float, list[float]]] = []
    for repeat in range(repeats):
        for r in rates:
            if recorded is None:
                times = comes.arrivals(arrivals, r, requests, seed + repeat)
            else:
                times = comes.stretched(recorded, r) if rate else recorded
            schedule.append((repeat, r or round(comes.mean_rate(times), 4), times))
    prompts = prompts[: max(len(times) for _, _, times in schedule)]
    settings: dict[str, Any] = {
        "arrivals": arrivals if recorded is None else Path(arrivals).name,
        "rates": [r for _, r, _ in schedule[: len(rates)]],
        "requests": len(schedule[0][2]),
        "repeats": repeats,
        "suites": sorted({p.suite for p in prompts}),
        "temperature": temperature,
        "seed": seed,
        "max_tokens": max_tokens,
    }
    facts: dict[str, Any] = {}
    services: list[waits.Service]
    if urls:
        if len(set(urls)) < len(urls):
            raise DartspecError("a server is given twice: name each once")
        if method:
            raise DartspecError("--method is measured in this process, URLs are servers: give one or the other")
        sent = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
        key = os.environ.get("OPENAI_API_KEY")
        services = [waits.Remote(Server(url, served_model, key), sent) for url in urls]
    else:
        lm = o.Loading(model, "none", "auto", "0", dtype, device, threads, fast).load(term)
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
        chosen = [m for text in method or ["auto"] for m in Method.parse(text)]
        plain = Method(PLAIN, 0)
        ids = {p.id: lm.encode([{"role": "user", "content": p.turns[0]}]) if p.turns else list(p.ids) for p in prompts}
        services = []
        for m in [plain, *(m for m in chosen if m != plain)]:
            of = m.of(lm)
            named = Method(of.drafter_name, m.nodes, m.index).label if m.drafter == "auto" else m.label
            services.append(waits.InProcess(named, of, params, ids, slots))
        facts = _facts(lm)
        settings["slots"] = slots
    settings["services"] = [s.name for s in services]
    least_s = len(services) * sum(times[-1] for _, _, times in schedule)
    cells = len(services) * len(schedule)
    if dry_run:
        term.say(f"{cells} cells by {', '.join(settings['services'])}: at least {least_s / 3600:.2f} hours")
        _last_line({"dry_run": True, "cells": cells, "hours": round(least_s / 3600, 4)})
        return
    journal = None
    if out is not None:
        journal = _journal(out, {"kind": "latency", **settings, **facts}, cells, mixed_code, term)
    with Progress(console=term.err, transient=True) as progress:
        task = progress.add_task("measuring", total=cells)
        records = waits.measure(
            services,
            prompts,
            schedule,
            journal=journal,
            advance=lambda what: progress.update(task, advance=1, description=what),
        )
    result: dict[str, Any] = {"kind": "latency", "config": settings, "rows": waits.rows(records), "records": records}
    result["provenance"] = provenance(**facts, **(journal.facts() if journal else {}))
    _latency_table(result, term)
    if out is not None and journal is not None:
        save_result(out, result)
        journal.path.unlink()
        term.note(f"written: {out}")
    _last_line({"kind": "latency", "rows": result["rows"], "out": out and str(out)})


def _latency_table(result: dict[str, Any], term: Terminal) -> None:
    from dartspec.bench.latency import WAITS

    table = Table("a second", "service", "at once", "tok/s", box=box.SIMPLE_HEAD)
    for wait in WAITS.values():
        table.add_column(f"{wait}, ms\np50 / p90 / p99", justify="right")
    for name in ("answer, p50: faster [95 %]", "p90: faster [95 %]", "equal", "refused"):
        table.add_column(name, justify="right")
    for r in result["rows"]:
        waits = [" / ".join(f"{e[0]:.4g}" if (e := r[w][p]) else "-" for p in ("p50", "p90", "p99")) for w in WAITS]
        e = r.get("against_first")
        ratios = [_interval(e["end_ms"][p]) if e and e["end_ms"][p] else "" for p in ("p50", "p90")]
        equal = f"{e['num_equal']}/{e['num_pairs']}" if e else ""
        begin = f"{r['rate']:g}", r["service"], f"{r['in_progress']:.1f}", f"{r['tokens_per_s']:.0f}"
        table.add_row(*begin, *waits, *ratios, equal, str(r["num_refused"] or ""))
    _print(table, term)
    if any(r["most_late_ms"] > LATE_MS for r in result["rows"]):
        term.note("some requests were sent more than 50 ms late: this machine is too busy for such a rate")


@app.command()
def capture(
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    drafter: o.DrafterOption = "auto",
    suite: SuiteOption = None,
    per_set: Annotated[int, typer.Option(help="Prompts of each set, the first ones; 0 takes all.")] = 8,
    temperature: TemperaturesOption = "0",
    seed: SeedsOption = "0",
    max_tokens: MaxTokensOption = 96,
    model: o.ModelOption = None,
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: o.ThreadsOption = None,
    fast: o.FastOption = True,
    json: JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Record a drafter's guesses at every position of the target's answers, for `bench replay`.

    \b
    Examples:
      dartspec bench capture --out guesses.safetensors
      dartspec bench capture --suite code --temperature 0,1 --drafter my-run/latest --out mine.safetensors
    """
    from rich.progress import track

    from dartspec.bench.lattices import Capture, chain_curve
    from dartspec.bench.lattices import capture as record
    from dartspec.bench.suites import load_suites
    from dartspec.lattice import SearchConfig
    from dartspec.types import SamplingParams

    term = Terminal(json=json, no_color=no_color)
    prompts = [p for own in load_suites(list(suite or ["all"]), per_set or None).values() for p in own]
    kinds = [
        SamplingParams(temperature=t, seed=s, max_tokens=max_tokens)
        for t in _list(temperature, float, "temperature")
        for s in (_list(seed, int, "seed") if t else _list(seed, int, "seed")[:1])
    ]
    lm = o.Loading(model, drafter, "none", "0", dtype, device, threads, fast).load(term)
    work = [(params, prompt) for params in kinds for prompt in prompts]
    texts = [
        text
        for params, prompt in track(work, "recording", console=term.err, transient=True)
        for text in record(lm, [prompt], params)
    ]
    facts = o.provenance(lm, None) | {"search": getattr(lm.drafter, "search", SearchConfig()).changes()}
    data = Capture(texts, frozenset(lm.target.eos_token_ids), lm.text.fingerprint, facts)
    data.save(out)
    positions = sum(len(t.tokens) for t in texts)
    chain = chain_curve(data)
    term.say(f"{len(texts)} answers, {positions} positions: {out}; M as a chain: {_chain(chain)}")
    _last_line({"out": str(out), "texts": len(texts), "positions": positions, "chain": chain, "provenance": facts})


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="What bench capture wrote.", show_default=False)],
    index: Annotated[list[str] | None, typer.Option(help="N-gram index file, or none; may be repeated.")] = None,
    nodes: Annotated[str, typer.Option(help="Tree sizes, separated by commas.")] = "1,2,4,8,16,32,59",
    search: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE[,VALUE...] of the tree search, such as ngram_weight=0.25,0.5; all are combined."),
    ] = None,
    preset: Annotated[str, typer.Option(help="What --search changes: the drafter's own, paper or official.")] = "own",
    horizon: Annotated[
        str | None, typer.Option(help="Guesses of the first so many positions, separated by commas; default: all.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Write the first row's search, and its M by tree size, into this drafter's config.json."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="JSON file of the result.", callback=_result_file)
    ] = None,
    json: JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """What other trees, indexes and weights would have committed over recorded guesses. No model is loaded.

    M by tree size, loops cut, with the ratio to the first setting of the table and its 95 % interval over the texts.

    \b
    Examples:
      dartspec bench replay guesses.safetensors --index my.ngram --index none
      dartspec bench replay guesses.safetensors --index my.ngram --search ngram_weight=0.25,0.5,1 --nodes 16,59
      dartspec bench replay guesses.safetensors --preset paper --nodes 59
      dartspec bench replay guesses.safetensors --index my.ngram --horizon 2,4,6,8
      dartspec bench replay guesses.safetensors --search running_text=false,true --search logit_decay=0.6,0.9
    """
    from itertools import product

    from rich.progress import track

    from dartspec.bench.lattices import Capture, chain_curve
    from dartspec.bench.lattices import replay as replayed
    from dartspec.bench.provenance import provenance, save_result
    from dartspec.bench.stats import rate_ratio
    from dartspec.drafters._checkpoint import read_json
    from dartspec.lattice import SearchConfig
    from dartspec.ngram import NgramIndex

    term = Terminal(json=json, no_color=no_color)
    data = Capture.load(file)
    if not data.texts:
        raise DartspecError(f"{file} holds no text: record some prompts with dartspec bench capture")
    presets = {"own": data.search, "paper": SearchConfig.paper(), "official": SearchConfig.official()}
    if preset not in presets:
        raise DartspecError(f"preset is {preset!r}; it must be one of {', '.join(presets)}")
    base, axes = asdict(presets[preset]), dict(map(_axis, search or []))
    if unknown := next((k for k in axes if k not in base), None):
        raise DartspecError(f"the search has no {unknown!r}; there are: {', '.join(base)}")
    grid = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    searches = {
        " ".join([preset, *(f"{k}={v}" for k, v in changes.items())]): SearchConfig(**{**base, **changes})
        for changes in grid
    }
    recorded = None if record is None else read_json(record / "config.json")
    if recorded is not None and "method" not in recorded:
        raise DartspecError(f"{record} holds another program's drafter: convert it first (`dartspec convert`)")
    changes = next(iter(searches.values())).changes()
    keeps = recorded is not None and "search" in _fields_of(recorded["method"])
    if recorded is not None and changes and not keeps:
        raise DartspecError(f"{record}: {recorded['method']} keeps no search; leave out --search and --preset")
    sizes = [n for n in _sizes(nodes) if isinstance(n, int)]
    if not sizes:
        raise DartspecError(f"nodes is {nodes!r}; replay needs fixed sizes, such as 8,16")
    horizons: tuple[int | None, ...] = _list(horizon, int, "horizon") if horizon else (None,)
    indices = {Path(i).name: None if i == "none" else NgramIndex.open(i) for i in index or ["none"]}
    total = len(indices) * len(searches) * len(horizons) * len(sizes)
    made = replayed(data, indices, searches, sizes, horizons=horizons)
    rows = list(track(made, "replaying", total, console=term.err, transient=True))
    table = Table("index", "search", *(f"M, {n} nodes" for n in sizes), "against the first", box=box.SIMPLE_HEAD)
    for start in range(0, len(rows), len(sizes)):
        own, first = rows[start : start + len(sizes)], rows[len(sizes) - 1]
        for r, reference in zip(own, rows, strict=False):
            sums = [list(zip(x["committed"], x["rounds"], strict=True)) for x in (r, reference)]
            r["against_first"] = rate_ratio(*sums).rounded()
        ratio = _interval(own[-1]["against_first"]) if own[-1] is not first else ""
        how = [own[0]["search"]]
        how += [f"horizon {own[0]['horizon']}"] if "horizon" in own[0] else []
        table.add_row(own[0]["index"], ", ".join(how), *(f"{r['M']:.3f}" for r in own), ratio)
    _print(table, term)
    chain = chain_curve(data)
    term.say(f"as a chain, without index: {_chain(chain)}")
    result = {"kind": "replay", "capture": data.facts, "rows": rows, "chain": chain, "provenance": provenance()}
    if out is not None:
        save_result(out, result)
    if recorded is not None and record is not None:
        config = dict(recorded)
        if keeps:
            config["search"] = changes
        config["acceptance"] = {"0": 1.0} | {str(r["nodes"]): round(r["M"], 3) for r in rows[: len(sizes)]}
        save_result(record / "config.json", config)
    brief = ("index", "search", "horizon", "nodes", "A", "M", "uncut_M", "against_first")
    _last_line({"texts": len(data.texts), "chain": chain, "rows": [{k: r[k] for k in brief if k in r} for r in rows]})


def _fields_of(method: str) -> set[str]:
    """What a drafter of this method says in its config.json."""
    from dataclasses import fields

    from dartspec import drafters

    return {f.name for f in fields(drafters.get(method).Config)}


def _axis(text: str) -> tuple[str, list[Any]]:
    """KEY=VALUE[,VALUE...], each value as JSON."""
    key, _, values = text.partition("=")
    try:
        return key, [json_module.loads(v) for v in values.split(",")]
    except ValueError:
        raise DartspecError(
            f"search is {text!r}; it must be KEY=VALUE[,VALUE...], such as ngram_weight=0.25,0.5"
        ) from None


def _run(
    kind: str,
    config: RunConfig,
    loading: o.Loading,
    out: Path | None,
    mixed_code: bool,
    dry_run: bool,
    term: Terminal,
    *,
    chains: bool = False,
) -> None:
    """Both verbs: the cells, the journal, the result, the table."""
    from dataclasses import replace

    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from dartspec.bench.measure import reliability_of
    from dartspec.bench.provenance import provenance, save_result, shown
    from dartspec.bench.run import estimate_hours, execute, plan
    from dartspec.bench.suites import load_suites
    from dartspec.bench.summary import against_best_fixed, over_cells, rows

    suites = load_suites(list(config.suites), config.per_set)
    if kind == "load":  # the sets of a group are one suite: a batch holds prompts of all of them
        suites = _merged(list(config.suites))
    cells = plan(config, suites)
    first = replace(loading, threads=config.threads[0]).load(term)
    if any(m.drafter == "auto" for m in config.methods):  # results name what was measured
        found = first.with_drafter("auto").drafter_name
        config = replace(
            config, methods=tuple(replace(m, drafter=found) if m.drafter == "auto" else m for m in config.methods)
        )
    ready: dict[int | None, LM] = {config.threads[0]: first}

    def at(threads: int | None) -> LM:
        if threads not in ready:
            ready.clear()  # one model in memory at a time
            ready[threads] = replace(loading, threads=threads).load(term)
        return ready[threads]

    names = {"methods": [m.label for m in config.methods], "suites": [shown(s) for s in config.suites]}
    settings = json_module.loads(json_module.dumps(asdict(config))) | names
    if dry_run:
        hours = estimate_hours(config, suites, first)
        prompts = sum(len(c.prompts) for c in cells) * len(config.methods)
        term.say(
            f"{len(cells)} cells, {prompts} answers by {', '.join(settings['methods'])}: at most {hours:.2f} hours"
        )
        _last_line({"dry_run": True, "cells": len(cells), "answers": prompts, "hours": round(hours, 4)})
        return
    facts = _facts(first)
    journal = None
    if out is not None:
        journal = _journal(out, {"kind": kind, **settings, **facts}, len(cells), mixed_code, term)
    reliability: dict[str, list[list[float]]] = {}
    as_chains: list[dict[str, Any]] = []

    def collect(lms: Mapping[str, LM]) -> None:
        if chains and not as_chains:
            as_chains.extend(_as_chains(lms, config, [p for own in suites.values() for p in own]))
        reliability.update({label: bins for label, lm in lms.items() if (bins := reliability_of(lm))})

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=term.err, transient=True) as progress:
        task = progress.add_task("measuring", total=len(cells))

        def advance(cell: Cell) -> None:
            progress.update(task, advance=1, description=f"{cell.suite} T={cell.temperature:g} batch {cell.batch}")

        records = execute(config, suites, at, journal=journal, advance=advance, finished=collect)
    result: dict[str, Any] = {"kind": kind, "config": settings, "rows": rows(records)}
    if reliability:
        result["reliability"] = reliability
    if chains:
        result["chains"] = as_chains
    if kind == "load":
        entries = against_best_fixed(records)
        result["auto"] = entries
        result["over_cells"] = {n: over_cells(entries, n) for n in ("against_plain", "against_best_fixed")}
    result |= {"records": records, "provenance": provenance(**facts, **(journal.facts() if journal else {}))}
    (_load_table if kind == "load" else _run_table)(result, term)
    for row in as_chains:
        term.say(f"{row['method']} as a chain, T = {row['temperature']:g}: {_chain(row['M'])}")
    if out is not None and journal is not None:
        save_result(out, result)
        journal.path.unlink()
        term.note(f"written: {out}")
    _last_line(
        {k: result[k] for k in ("kind", "over_cells", "auto", "rows") if k in result} | {"out": out and str(out)}
    )


def _as_chains(lms: Mapping[str, LM], config: RunConfig, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """M as a chain of each drafter and temperature; drafters that guess token by token are left out."""
    from dartspec.bench.lattices import chain_curve, recorded
    from dartspec.types import SamplingParams

    made, seen = [], set()
    for lm in lms.values():
        if lm.drafter_name in seen or not hasattr(lm.drafter, "lattice"):
            continue
        seen.add(lm.drafter_name)  # its tree sizes share the guesses
        for temperature in config.temperatures:
            params = SamplingParams(temperature=temperature, seed=config.seeds[0], max_tokens=config.max_tokens)
            curve = chain_curve(recorded(lm, prompts, params))
            made.append({"method": lm.drafter_name, "temperature": temperature, "M": curve})
    return made


def _chain(curve: Mapping[int, float]) -> str:
    return ", ".join(f"k = {k} {M:.2f}" for k, M in curve.items())


def _facts(lm: LM) -> dict[str, Any]:
    """What a measurement's provenance says of the model."""
    return {
        "model": lm.target.name,
        "weights_fingerprint": lm.target.weights_fingerprint,
        "device": str(lm.target.device),
        "dtype": str(lm.target.dtype).removeprefix("torch."),
        "kernels": lm.fast_note,
        "template_hash": lm.text.template_hash,
    }


def _journal(out: Path, header: Mapping[str, Any], num_cells: int, mixed_code: bool, term: Terminal) -> Journal:
    """The journal beside a result; a run goes on where neither its settings nor the code that matters changed."""
    from dartspec.bench.provenance import code_digest, commit
    from dartspec.bench.run import Journal

    whole = {**header, "code": code_digest()}
    journal = Journal.open(out.with_suffix(".journal.jsonl"), whole, commit(), mixed=mixed_code)
    if journal.done:
        term.note(f"{len(journal.done)} of {num_cells} cells are in {journal.path}: going on behind them")
    if len(journal.commits) > 1:
        term.note(f"measured at several commits: {', '.join(map(str, journal.commits))}")
    return journal


def _merged(names: list[str]) -> dict[str, list[Prompt]]:
    """Each name's sets joined into one, the sets' prompts in turn."""
    from dartspec.bench.suites import load_suites

    return {Path(name).stem: _in_turn(load_suites([name])) for name in names}


def _in_turn(sets: Mapping[str, list[Prompt]]) -> list[Prompt]:
    """One prompt of each set, then the next of each."""
    from itertools import chain, zip_longest

    return [p for p in chain(*zip_longest(*sets.values())) if p is not None]


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """`count` processes that spin as long as the block runs."""
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spin:
            process.kill()
        for process in spin:
            process.wait()


def _run_table(result: dict[str, Any], term: Terminal) -> None:
    several = {k: len({r[k] for r in result["rows"]}) > 1 for k in ("threads", "temperature", "batch")}
    shown = [k for k, more in several.items() if more]
    table = Table("set", *(k.replace("temperature", "T") for k in shown), "method", box=box.SIMPLE_HEAD)
    for name in ("M", "tok/s", "speed-up [95 %]", "plain ms", "round ms", "bound", "uncut", "equal"):
        table.add_column(name, justify="right")
    last = None
    for r in result["rows"]:
        cells = [f"{r['M']:.2f}", f"{r['tokens_per_s']:.0f}"]
        if "speed_up" in r:
            cells += [
                _interval(r["speed_up"]),
                f"{r['plain_ms']:.1f}",
                f"{sum(r['ms_per_round'].values()):.1f}",
                f"{r['bound']:.2f}x",
                f"{r['uncut']['speed_up'][0]:.2f}x",
                f"{r['num_equal']}/{r['num_runs']}",
            ]
        if last not in (None, r["suite"]):
            table.add_section()
        last = r["suite"]
        table.add_row(r["suite"], *(str(r[k]) for k in shown), r["method"], *cells)
    _print(table, term)


def _print(table: Table, term: Terminal) -> None:
    """As wide as it is where nobody's window limits it: in a pipe or a file."""
    if not term.out.is_terminal:
        term.out.width = 200
    term.out.print(table)


def _load_table(result: dict[str, Any], term: Terminal) -> None:
    rows = {(r["suite"], r["temperature"], r["batch"], r["method"]): r for r in result["rows"]}
    methods = result["config"]["methods"]
    table = Table("set", "T", "batch", *("plain tok/s" if m == "plain" else m for m in methods), box=box.SIMPLE_HEAD)
    for name in ("best fixed", "auto against it", "auto against plain"):
        table.add_column(name, justify="right")
    auto = {(e["suite"], e["temperature"], e["batch"]): e for e in result["auto"]}
    for suite, temperature, batch in dict.fromkeys(k[:3] for k in rows):
        if suite == "all" and "all" not in result["config"]["suites"]:
            continue
        own = [rows[suite, temperature, batch, m] for m in methods]
        cells = [f"{r['tokens_per_s']:.0f}" if "speed_up" not in r else f"{r['speed_up'][0]:.2f}x" for r in own]
        e = auto.get((suite, temperature, batch), {})
        best = e.get("best_fixed", "")
        last = [_interval(e[n]) if n in e else "" for n in ("against_best_fixed", "against_plain")]
        table.add_row(suite, f"{temperature:g}", str(batch), *cells, best, *last)
    _print(table, term)
    for name, c in result["over_cells"].items():
        if c:
            term.say(
                f"auto {name.replace('_', ' ')}: mean {c['mean']:.3f}, worst cell {c['worst']:.3f}, lowest lower bound "
                f"{c['worst_low']:.3f}, {c['cells']} cells"
            )


def _interval(e: list[float]) -> str:
    from dartspec.accounting import with_interval

    return with_interval(e, "x")


def _last_line(result: dict[str, Any]) -> None:
    """One JSON object, the last line of stdout."""
    sys.stdout.write(json_module.dumps(result, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _list(text: str, kind: Callable[[str], Any], name: str) -> tuple[Any, ...]:
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise DartspecError(f"{name} is {text!r}; it must be numbers separated by commas") from None


def _sizes(text: str) -> list[int | str]:
    from dartspec.bench.measure import parse_size

    return [parse_size(part.strip()) for part in text.split(",")]
