"""Writes the tables of README.md and of pages in docs/ from the results in docs/results/, between their marks.

    python benchmarks/write_tables.py            # write them
    python benchmarks/write_tables.py --check    # exit code 1 where a page and the results disagree (a test does this)

A table between <!-- NAME --> and <!-- /NAME --> is of docs/results/NAME.json, as `dartspec bench` or plain.py wrote
it. No number in a table is typed by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dartspec.accounting import with_interval
from dartspec.lattice import SearchConfig

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return new_layout(json.loads(path.read_text())) if path.exists() else None


def new_layout(result: dict[str, Any]) -> dict[str, Any]:
    """Results of the script that `dartspec bench run` replaced, as it would have written them; it had no intervals."""
    if not isinstance(result.get("sets"), dict):
        return result
    found = []
    for suite, r in result["sets"].items():
        row = {**r, "suite": suite, "method": "dart", "num_runs": r["num_prompts"], "uncut": {"M": r["uncut_M"]}}
        row["nodes"] = result["config"]["nodes"]
        if "speed_up" in r:
            found.append({"suite": suite, "method": "plain", "tokens_per_s": r["tokens_per_s"][0]})
            row["uncut"]["speed_up"] = [r["uncut_speed_up"]]
            row |= {"speed_up": [r["speed_up"]], "tokens_per_s": r["tokens_per_s"][1]}
        found.append(row)
    return {**result, "rows": found}


def rows(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(result: dict[str, Any], name: str) -> str:
    p = result["provenance"]
    return (
        f"`{p['command']}` at commit {p['commit']}; torch {p['torch']}, transformers {p['transformers']}; "
        f"{p['cpu']}, {p['threads']} threads; {p['date'][:10]}; [{name}.json](RESULTS/{name}.json)"
    )


def interval(e: list[float], *, bold: bool = False, unit: str = "x") -> str:
    text = with_interval(e, unit) if len(e) > 1 else f"{e[0]:.2f}{unit}"
    value, _, rest = text.partition(" ")
    return (f"**{value}**" if bold else value) + (f" {rest}" if rest else "")


def speed(result: dict[str, Any]) -> str:
    """`bench run` with plain decoding, by set: M, both speeds, S with its interval and terms, the bound."""
    found = result["rows"]
    plain = {(r["suite"], r.get("temperature")): r for r in found if r["method"] == "plain"}
    methods = {r["method"] for r in found} - {"plain"}
    several_t = len({t for _, t in plain}) > 1
    header = ["set", *["T"] * several_t, *["method"] * (len(methods) > 1), "M", "plain, tokens/s", "DART, tokens/s"]
    header += ["S [95 %]", "M * T_AR / T_round (ms)", "bound", "S, loops kept", "equal texts"]
    body = []
    for r in found:
        if "speed_up" not in r:
            continue
        body.append(
            [
                f"**{r['suite']}**" if r["suite"] == "all" else r["suite"],
                *[f"{r['temperature']:g}" for _ in range(several_t)],
                *[r["method"]] * (len(methods) > 1),
                f"{r['M']:.2f}",
                f"{plain[r['suite'], r.get('temperature')]['tokens_per_s']:.0f}",
                f"{r['tokens_per_s']:.0f}",
                interval(r["speed_up"], bold=True),
                f"{r['M']:.2f} * {r['plain_ms']:.1f} / {sum(r['ms_per_round'].values()):.1f}",
                f"{r['bound']:.2f}x",
                f"{r['uncut']['speed_up'][0]:.2f}x",
                f"{r['num_equal']}/{r['num_runs']}",
            ]
        )
    whole = [r for r in found if "speed_up" in r][-1]
    m = whole["ms_per_round"]
    return rows(header, body) + (
        f"\n\nA round: draft {m['draft']:.2f} ms, search {m['search']:.2f} ms, verify {m['verify']:.2f} ms, rest "
        f"{m['other']:.2f} ms; a plain step {whole['plain_ms']:.2f} ms; {whole['nodes']:.1f} nodes."
    )


def acceptance(result: dict[str, Any]) -> str:
    """`dartspec eval`: committed tokens a round by set, temperature and tree size, loops cut."""
    whole = next(s for s in result["sets"] if s["set"] == "all")
    sets = [s for s in result["sets"] if s is not whole]
    columns = [(t, n) for t, sizes in whole["M"].items() for n in sizes]
    body = [[s["set"], *(interval(s["M"][t][n], unit="") for t, n in columns)] for s in sets]
    means = (sum(s["M"][t][n][0] for s in sets) / len(sets) for t, n in columns)
    body.append(["**mean of sets**", *(f"**{m:.2f}**" for m in means)])
    body.append(["all rounds", *(interval(whole["M"][t][n], unit="") for t, n in columns)])
    return rows(["set", *(f"T = {t}, {n} nodes" for t, n in columns)], body)


def by_size(result: dict[str, Any]) -> str:
    """M of one method by set and tree size."""
    found = {(r["suite"], r["method"]): r["M"] for r in result["rows"]}
    methods = list(dict.fromkeys(m for _, m in found))
    suites = list(dict.fromkeys(s for s, _ in found if s != "all"))
    body = [[suite, *(f"{found[suite, m]:.2f}" for m in methods)] for suite in suites]
    means = [sum(found[suite, m] for suite in suites) / len(suites) for m in methods]
    body.append(["**mean of sets**", *(f"**{m:.2f}**" for m in means)])
    body.append(["all rounds", *(f"{found['all', m]:.2f}" for m in methods)])
    return rows(["set", *(f"M, `{m}`" for m in methods)], body)


def load_table(result: dict[str, Any]) -> str:
    """`bench load`: plain tokens a second, and every tree size against it, by batch."""
    methods = [m for m in result["config"]["methods"] if m != "plain"]
    by = {(r["suite"], r["temperature"], r["batch"], r["method"]): r for r in result["rows"]}
    body = []
    for e in result["auto"]:
        cell = e["suite"], e["temperature"], e["batch"]
        body.append(
            [
                f"{e['suite']}, T = {e['temperature']:g}",
                str(e["batch"]),
                f"{by[(*cell, 'plain')]['tokens_per_s']:.0f}",
                *(f"{by[(*cell, m)]['speed_up'][0]:.2f}x" for m in methods if m != e["method"]),
                interval(e["against_plain"], bold=True),
                e["best_fixed"].partition("@")[2],
                interval(e["against_best_fixed"]),
            ]
        )
    sizes = [f"{m.partition('@')[2]} nodes" for m in methods if "@auto" not in m]
    header = ["set", "batch", "plain, tokens/s", *sizes, "automatic", "best fixed", "automatic against it"]
    over = "; ".join(
        f"{name.replace('_', ' ')}: mean {c['mean']:.3f}, worst cell {c['worst']:.3f}, lowest lower bound "
        f"{c['worst_low']:.3f}"
        for name, c in result["over_cells"].items()
        if c
    )
    return f"{rows(header, body)}\n\nThe automatic size over all {len(body)} cells, {over}."


def plain(result: dict[str, Any]) -> str:
    body = [
        [
            name,
            f"{r['ms_per_token']:.1f}",
            f"{r['ratio']:.2f}x",
            f"{r['ratio_range'][0]:.2f} to {r['ratio_range'][1]:.2f}",
        ]
        for name, r in result["forms"].items()
    ]
    table = rows(["form", "ms a token", "speed against transformers", "range over prompts"], body)
    return f"{table}\n\nCompiling the static form took {result['compile_s']:.0f} s; ours compiles nothing."


def stages(result: dict[str, Any]) -> str:
    """`stages.py`: a plain step and a round, stage by stage, beside what the machine allows."""
    header = ["", "M", "round, ms", "draft", "search", "verify", "rest", "in kernels", "overhead"]
    body = [
        [
            {"plain": "a plain step", "dart": f"a round of DART, {result['provenance']['nodes']} nodes"}[name],
            *(f"{r[k]:.2f}" for k in ("M", "round_ms", "draft", "search", "verify", "other", "kernels_ms")),
            f"{r['overhead_share']:.1%}",
        ]
        for name, r in result["rows"].items()
    ]
    m = result["machine"]
    return rows(header, body) + (
        f"\n\nThe machine reads {m['GB_per_s']:.0f} GB/s and multiplies at {m['GFLOP_per_s']:.0f} GFLOP/s: the "
        f"{result['weight_bytes'] / 1e6:.0f} MB of weights take {result['read_bound_ms']:.1f} ms to read. Speed-up in "
        f"this run {result['speed_up']:.2f}x, of {result['bound_M_T_AR_over_T_V']:.2f}x if only the target's forwards "
        f"took time. The controller predicted {result['predicted_forwards']} forwards within "
        f"{result['prediction_error']['median']:.1%} (median; nine of ten: {result['prediction_error']['p90']:.1%})."
    )


def llamacpp(result: dict[str, Any]) -> str:
    """`llamacpp.py`: ours against llama.cpp on the same weights."""
    body = [
        [name, f"**{r['median']:.2f}x**", f"{r['range'][0]:.2f} to {r['range'][1]:.2f}", *(f"{x:.1f}" for x in r["ms"])]
        for name, r in result["rows"].items()
    ]
    same, of = result["first_32_tokens_equal"]
    return rows(["", "speed", "range over prompts", "ours, ms a token", "llama.cpp, ms a token"], body) + (
        f"\n\nllama-cpp-python {result['llama_cpp']['version']}; the first 32 tokens of bf16 are equal on {same} of "
        f"{of} prompts."
    )


def scheduler(result: dict[str, Any]) -> str:
    """`scheduler.py`: what a long prompt costs the others, what a shared beginning saves, random arrivals."""
    chunks = rows(
        ["rows a step", "step alone, ms", "step while it is read, ms", "longest step, ms", "its first token, ms"],
        [
            [
                str(r["prefill_rows"]),
                f"{r['step_alone_ms']:.0f}",
                f"{r['step_while_read_ms']:.0f}",
                f"{r['longest_step_ms']:.0f}",
                str(r["first_token_ms"]),
            ]
            for r in result["chunks"]
        ],
    )
    r = result["reuse"]
    reuse = (
        f"First token of a prompt of {r['prompt_tokens']} tokens: {r['first_token_fresh_ms']:.0f} ms; where "
        f"{r['reused_tokens']} of them are copied, **{r['first_token_shared_ms']:.0f} ms**."
    )
    load = rows(
        ["nodes", "one after the other, tokens/s", f"{result['load'][0]['slots']} slots, tokens/s", "equal texts"],
        [
            [
                r["nodes"],
                f"{r['tokens_per_s_alone']:.0f}",
                f"{r['tokens_per_s']:.0f}",
                f"{r['texts_equal']}/{r['requests']}",
            ]
            for r in result["load"]
        ],
    )
    one = result["load"][0]
    arrivals = (
        f"{one['requests']} requests that arrive at random, a third sampled, half with a shared beginning, "
        f"{one['cancelled']} cancelled on the way; texts are compared with plain decoding's as far as they came:"
    )
    return "\n\n".join([chunks, reuse, arrivals, load])


def rivals(result: dict[str, Any]) -> str:
    """Drafters trained on the same tokens: what each run learned, and what it commits."""
    body = []
    for m in sorted(result["methods"], key=lambda m: -m["M"]):
        last, sets = m["curve"][-1], m["by_set"].values()
        chains = ", ".join(f"{e['chain']:.2f}" for e in m["curve"])
        hits = " ".join(f"{x:.2f}" for x in last["hit1"][:4])
        body.append(
            [m["method"], f"{m['M']:.2f}", f"{min(sets):.2f} to {max(sets):.2f}", hits, chains, f"{m['megabytes']:.0f}"]
        )
    table = rows(
        ["method", f"M, {result['nodes']} nodes", "by set", "hit@1, offsets 1 to 4", "chain, evaluations", "MB"], body
    )
    return f"{result['tokens'] / 1e6:.2f} M tokens trained, {result['num_prompts']} prompts:\n\n{table}"


def ngram_build(result: dict[str, Any]) -> str:
    """`build_index.py`: rates from token ids, memory, against the official program and a dictionary."""
    body = [
        [
            r["case"],
            f"**{r['m_tokens_per_s']:.1f}** ({r['slowest']:.1f} to {r['fastest']:.1f})",
            f"{r['times_official']:.1f}x",
            f"{result['tokens'] / r['count_s'] / 1e6:.0f}",
            f"{r['peak_mib']} ({r['base_mib']})",
            f"{r['spilled_mib']}",
            f"{r['nodes'] / 1e6:.1f} M",
            f"{r['bytes_per_node']:.2f}",
        ]
        for r in result["cases"]
    ]
    header = ["case", "M tokens/s", "official's 2.4", "counting alone", "MiB at most (program)", "MiB of runs", "nodes"]
    return (
        f"{result['tokens'] / 1e6:.1f} M tokens in {result['documents']:,} documents, vocabulary "
        f"{result['vocab_size']:,}; a dictionary in Python counts {result['twin_tokens_per_s'] / 1e6:.2f} M tokens/s, "
        "half of what the official program does, so ratios are to the latter.\n\n"
        + rows([*header, "bytes a node"], body)
    )


def continuity(result: dict[str, Any]) -> str:
    """`continuity.py`: M by what the index is made of, with the running text, and as a live table grows."""
    sizes = [key for key in result["indexes"][0] if key.startswith("M at ")]
    by = {(r["index"], r["text"]): r for r in result["indexes"]}
    names = list(dict.fromkeys(r["index"] for r in result["indexes"]))
    made_of = [
        [name, f"{by[name, 'none']['nodes_in_index'] / 1e6:.2f} M"]
        + [f"{by[name, form][m]:.2f}" for m in sizes for form in ("none", "running text")]
        for name in names
    ]
    live = [
        [r["index"], f"{r['served']:,}", f"{r['live_grams']:,}", *(f"{r[m]:.2f}" for m in sizes)]
        for r in result["live"]
    ]
    header = [f"{m}{form}" for m in sizes for form in (" nodes", ", running text")]
    return (
        f"{result['tokens'] / 1e6:.2f} M tokens of own answers, {result['corpus_tokens'] / 1e6:.1f} M of corpus, "
        f"{result['texts']} recorded answers to other prompts.\n\n"
        + rows(["index", "its nodes", *header], made_of)
        + "\n\nA live table beside an index, after so many tokens of answers had been served:\n\n"
        + rows(["index", "served", "live grams", *(f"{m} nodes" for m in sizes)], live)
    )


def methods(result: dict[str, Any]) -> str:
    """`bench run --no-plain` of several methods: committed tokens a round, set by set."""
    names = list(dict.fromkeys(r["method"] for r in result["rows"]))
    by = {(r["suite"], r["method"]): r for r in result["rows"]}
    body = [[suite, *(f"{by[suite, m]['M']:.2f}" for m in names)] for suite in dict.fromkeys(s for s, _ in by)]
    return rows(["M", *(f"`{name}`" for name in names)], body)


def soundness(result: dict[str, Any]) -> str:
    """`soundness.py`: what ours and transformers' accept."""
    body = [[r["system"], f"{r['new_tokens']}", f"{r['forwards']}", f"{r['accepted']}"] for r in result["systems"]]
    return f"{result['prompts']} prompts, {result['texts_equal']} of the texts equal.\n\n" + rows(
        ["", "new tokens", "forwards of the target", "drafts accepted"], body
    )


def soak(result: dict[str, Any]) -> str:
    """`soak.py`: what was asked of the server, what must never happen, its memory, and the tests of single faults."""
    counts, memory = result["counts"], result["memory"]
    first, last = memory[0], memory[-1]
    passed = [f["test"] for f in result["faults"] if f["result"] == "passed"]
    facts = [
        ["requests", f"{result['requests']:,} from {result['clients']} clients at once, in {result['seconds']:.0f} s"],
        *[[name, f"{count:,}"] for name, count in counts.items()],
        ["**texts, streams or counts that were wrong**", f"**{len(result['wrong'])}**"],
        ["errors in the server's log", str(result["errors_logged"])],
        [
            f"memory after {first['requests']:,} and after {last['requests']:,} requests",
            f"{first['mib']:.0f} and {last['mib']:.0f} MiB",
        ],
        ["open files then", f"{first['open_files']} and {last['open_files']}"],
        ["exit code after SIGTERM", str(result["exit_code"])],
    ]
    kinds: dict[str, list[str]] = {}
    for test in passed:
        kinds.setdefault(test.split("[")[0].rpartition("::")[2], []).append(test)
    listed = [[f"`{name}`", f"{len(tests)} passed"] for name, tests in kinds.items()]
    failed = [[f"`{f['test']}`", f["result"]] for f in result["faults"] if f["result"] != "passed"]
    return f"{rows(['', ''], facts)}\n\n{rows(['test of a fault', ''], [*listed, *failed])}"


def vllm(result: dict[str, Any]) -> str:
    """`vllm_chain.py`: equality with vLLM, and M as a chain."""
    curve = result["M_as_a_chain"]
    return (
        f"{result['texts_equal']} of {result['prompts']} texts equal; {result['drafts_equal']} of {result['drafts']} "
        f"drafts in {result['rounds']} rounds equal, {result['steps']} tokens a round.\n\n"
        + rows(["drafts a round", *curve], [["M as a chain", *(f"{m:.2f}" for m in curve.values())]])
    )


def settings(result: dict[str, Any]) -> str:
    """`search_settings.py`: each method at its best of the settings that were tried."""
    body = []
    for m in result["methods"]:
        best, worst = m["best"], min(m["rows"][1:], key=lambda r: r["tokens_per_s"])
        ms = best["ms_per_round"]
        body.append(
            [
                f"{m['method']}{' (trained)' if m['trained'] else ''}",
                f"`{best['setting']}`",
                f"{best['M']:.2f}",
                f"{m['speed_up_of_best']:.2f}",
                f"{ms['draft'] + ms['search']:.1f}",
                f"{ms['verify']:.1f}",
                f"`{worst['setting']}` {worst['tokens_per_s'] / m['rows'][0]['tokens_per_s']:.2f}",
            ]
        )
    head = ["method", "best setting@nodes", "M", "times plain", "draft ms", "verify ms", "worst setting, times plain"]
    return f"{result['prompts']} prompts, {result['max_tokens']} tokens each.\n\n{rows(head, body)}"


def latency(result: dict[str, Any]) -> str:
    """`bench latency`: percentiles of the waits, and ratios to plain decoding."""
    waits = ("first_ms", "per_token_ms", "end_ms")

    def three(r: dict[str, Any], wait: str) -> str:
        digits = 1 if wait == "per_token_ms" else 0
        return " / ".join("-" if r[wait][p] is None else f"{r[wait][p][0]:.{digits}f}" for p in ("p50", "p90", "p99"))

    body = []
    for r in result["rows"]:
        e = r.get("against_first")
        ratios = [interval(e["end_ms"][p], bold=p == "p50") if e else "" for p in ("p50", "p90")]
        equal = f"{e['num_equal']}/{e['num_pairs']}" if e else ""
        begin = [f"{r['rate']:g}", r["service"], f"{r['in_progress']:.1f}", f"{r['tokens_per_s']:.0f}"]
        body.append([*begin, *(three(r, w) for w in waits), *ratios, equal])
    header = ["requests a second", "", "at once", "tokens/s", "first token, ms", "a token, ms", "whole answer, ms"]
    header += ["answer p50, faster [95 %]", "answer p90, faster", "equal texts"]
    c = result["config"]
    return (
        f"{c['requests']} requests at each rate, {c['arrivals']}, {c['max_tokens']} tokens at most, T = "
        f"{c['temperature']:g}; p50 / p90 / p99.\n\n" + rows(header, body)
    )


def by_task(result: dict[str, Any]) -> str:
    """`bench run`, tasks down and methods across: S and M (the paper's Table 1)."""
    methods = [m for m in dict.fromkeys(r["method"] for r in result["rows"]) if m != "plain"]
    by = {(r["suite"], r["method"]): r for r in result["rows"]}
    suites = list(dict.fromkeys(r["suite"] for r in result["rows"]))
    body = []
    for suite in suites:
        cells = [by[suite, m] for m in methods]
        best = max(r["speed_up"][0] for r in cells)
        body.append(
            [
                f"**{suite}**" if suite == "all" else suite,
                *(interval(r["speed_up"], bold=r["speed_up"][0] == best) + f", {r['M']:.2f}" for r in cells),
            ]
        )
    whole = [by[suites[-1], m] for m in methods]
    loops = ", ".join(f"{m} {r['uncut']['speed_up'][0]:.2f}x" for m, r in zip(methods, whole, strict=True))
    cpu = ", ".join(
        f"{m} {r['cpu_ms_per_token'] / by[suites[-1], 'plain']['cpu_ms_per_token']:.2f}"
        for m, r in zip(methods, whole, strict=True)
    )
    equal, runs = sum(r["num_equal"] for r in whole), sum(r["num_runs"] for r in whole)
    return (
        rows(["S [95 %], M", *(f"`{m.partition(',')[0]}`" for m in methods)], body)
        + f"\n\nLoops kept: {loops}. Processor time a token, prefill included, over plain decoding's: {cpu}. "
        f"{equal} of {runs} texts are plain decoding's."
    )


def shares(result: dict[str, Any]) -> str:
    """`bench run`: what a round's stages take, by method (the paper's Figures 1 and 5)."""
    body = []
    for r in (r for r in result["rows"] if r["suite"] == "all"):
        ms = r["ms_per_round"]
        whole = sum(ms.values())
        share = f"{(ms['draft'] + ms['search']) / whole:.0%}"
        stages = [f"{ms[k]:.2f}" for k in ("draft", "search", "verify", "other")]
        name = r["method"].partition(",")[0]
        body.append([f"`{name}`", f"{r['nodes']:.1f}", f"{r['M']:.2f}", f"{whole:.2f}", *stages, share])
    header = ["", "nodes", "M", "round, ms", "draft", "search", "verify", "rest", "draft and search"]
    return rows(header, body)


def factorial(result: dict[str, Any]) -> str:
    """`experiments.py factorial`: what each factor multiplies M by, and pairs of factors."""
    body = [
        [
            e["factor"],
            " -> ".join(map(str, e["levels"])),
            times(e["times_M"]),
            ", ".join(f"{x:.3f}" for x in e["by_seed"]),
        ]
        for e in result["effects"]
    ]
    pairs = sorted(result["interactions"], key=lambda e: -abs(e["times_M"][0] - 1))[:4]
    said = "; ".join(f"{' with '.join(e['factors'])} {times(e['times_M'])}" for e in pairs)
    return (
        f"T = {result['temperature']:g}, {result['prompts']} prompts, {len(result['seeds'])} seeds, all "
        f"{len(result['cells'])} combinations.\n\n"
        + rows(["factor", "from, to", "multiplies M by [95 %]", "each seed alone"], body)
        + f"\n\nThe strongest interactions: {said}."
    )


def times(e: list[float]) -> str:
    return f"{e[0]:.3f} [{e[1]:.3f}, {e[2]:.3f}]"


def ngram_off_on(result: dict[str, Any]) -> str:
    """`experiments.py ngram`: M without and with the n-gram term (the paper's Table 2)."""
    paper = {"humaneval": (3.13, 3.63), "math500": (2.89, 3.37)}
    by = {(r["temperature"], r["nodes"], r["suite"]): r for r in result["rows"]}
    most = max(n for _, n, _ in by)
    suites = list(dict.fromkeys(r["suite"] for r in result["rows"]))
    body = []
    for suite in suites:
        r, few = by[0.0, most, suite], by[0.0, 8, suite]
        theirs = paper.get(suite)
        body.append(
            [
                f"**{suite}**" if suite == "all" else suite,
                f"{r['off'][0]:.2f}",
                f"{r['on'][0]:.2f}",
                interval(r["ratio"]),
                interval(few["ratio"]),
                *([f"{theirs[0]:.2f}", f"{theirs[1]:.2f}", f"{theirs[1] / theirs[0]:.2f}x"] if theirs else [""] * 3),
            ]
        )
    sampled = [f"{n} nodes {interval(by[1.0, n, 'all']['ratio'])}" for t, n, s in by if t == 1.0 and s == "all"]
    header = ["", f"off, {most} nodes", "on", "ratio", "ratio, 8 nodes", "paper: off", "on", "ratio"]
    return rows(header, body) + f"\n\nAt T = 1, all sets: {'; '.join(sampled)}."


def budget_table(result: dict[str, Any]) -> str:
    """`experiments.py budget`: where the next node stops paying."""
    body = []
    for r in result["rows"]:
        gain, cost = r.get("dM_over_M_per_node"), r.get("dT_over_T_per_node")
        best = result["best_fixed"][str(r["temperature"])] == r["nodes"]
        s = f"{r['predicted_speed_up']:.2f}x"
        body.append(
            [
                f"{r['temperature']:g}",
                str(r["nodes"]),
                times(r["M"]),
                f"{r['round_ms']:.2f}",
                f"**{s}**" if best else s,
                *(["", ""] if gain is None else [f"{gain:.2%}", f"{cost:.2%}"]),
            ]
        )
    return rows(
        ["T", "nodes", "M [95 %]", "round, ms", "predicted S", "M grows, a node", "the round grows, a node"], body
    )


def frontier(result: dict[str, Any]) -> str:
    """`experiments.py frontier`: indexes side by side at one tree size."""
    by = {(r["index"], r["running_text"]): r for r in result["rows"]}
    body = []
    for name in dict.fromkeys(r["index"] for r in result["rows"]):
        r, text = by[name, False], by[name, True]
        body.append(
            [
                name,
                f"{r['num_nodes'] / 1e6:.2f} M" if "num_nodes" in r else "",
                f"{r['index_bytes'] / 1e6:.1f}" if "index_bytes" in r else "",
                f"{r['resident_mb']:.1f}" if "resident_mb" in r else "",
                f"{r['build_s']:.1f}" if "build_s" in r else "",
                f"{r['open_cold_ms']:.2f}" if "open_cold_ms" in r else "",
                f"{r['lookup_us']:.1f}" if "lookup_us" in r else "",
                f"{r['search_us']:.0f}",
                f"{r['M'][0]:.3f}",
                interval(r["against_none"]),
                f"{text['M'][0]:.3f}",
                f"{r['predicted_speed_up']:.2f}x",
            ]
        )
    header = ["index", "grams", "MB", "resident MB", "build, s", "open cold, ms", "lookup, us", "search, us", "M"]
    header += ["against none [95 %]", "M with running text", "predicted S"]
    return (
        f"{result['nodes']} nodes, T = {result['temperature']:g}, {result['texts']} recorded answers; "
        f"{result['corpus_tokens'] / 1e6:.1f} M tokens of corpus, {result['answer_tokens'] / 1e6:.2f} M of own answers."
        f"\n\n{rows(header, body)}"
    )


def horizon(result: dict[str, Any]) -> str:
    """`experiments.py horizon`: M and time by how far ahead is guessed."""
    by = {(r["horizon"], r["nodes"]): r for r in result["rows"]}
    sizes = sorted({n for _, n in by})
    body = [
        [
            f"{d} (as trained)" if d == result["trained_horizon"] else str(d),
            f"{by[d, sizes[0]]['draft_ms']:.2f}",
            *(f"{by[d, n]['M'][0]:.3f}" for n in sizes),
            *(f"{by[d, n]['predicted_speed_up']:.2f}x" for n in sizes),
        ]
        for d in sorted({d for d, _ in by})
    ]
    header = ["d", "draft, ms", *(f"M, {n} nodes" for n in sizes), *(f"predicted S, {n}" for n in sizes)]
    return rows(header, body)


def draft_length(result: dict[str, Any]) -> str:
    """`draft_length.py`: the paper's Figure 1."""
    by = {(r["method"], r["length"]): r for r in result["rows"]}
    methods = [m for m in dict.fromkeys(m for m, _ in by) if m != "plain"]
    names = {"small_model": f"small model ({result['layers']} layers)"}
    body = [
        [
            str(n),
            *(
                f"{by[m, n]['draft_share']:.0%}, {by[m, n]['M']:.2f}, {by[m, n]['speed_up']:.2f}x"
                if (m, n) in by
                else ""
                for m in methods
            ),
        ]
        for n in sorted({n for _, n in by} - {0})
    ]
    return (
        f"{result['nodes']} nodes, {result['prompts']} prompts; share of a round that drafting and search take, M, S."
        f"\n\n{rows(['draft length', *(names.get(m, m) for m in methods)], body)}"
    )


def outside(result: dict[str, Any]) -> str:
    """`outside.py`: other programs in one run."""
    body = [
        [
            r["form"],
            f"{r['ms_per_token']:.1f}",
            interval(r["speed"]),
            interval(r["ours_against_it"], bold=True),
            f"{r['faster_than_ours']}/{result['prompts']}",
            f"{r['first_32_equal']}/{result['prompts']}",
        ]
        for r in result["rows"]
    ]
    header = [
        "",
        "ms a token",
        "against transformers [95 %]",
        "ours against it",
        "it was faster",
        "first 32 tokens ours",
    ]
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    compiled = f" Compiling took {result['compile_s']:.0f} s." if result["compile_s"] else ""
    return (
        f"{rows(header, body)}\n\n{versions}; {result['max_tokens']} tokens of {result['prompts']} prompts.{compiled}"
    )


def worth(result: dict[str, Any]) -> str:
    """`bench worth` on the shipped drafter's run."""
    from dartspec.bench.worth import answer

    return "\n".join(f"- {s}" for s in answer(result, method="dart@auto", spent_hours=SPENT_HOURS)["sentences"])


def objective_forms(result: dict[str, Any]) -> str:
    """`objective.py`: the three ways to attend."""
    body = [
        [
            f"{r['tokens']:,}",
            f"{r['first']:,}",
            f"{r['anchors']:,}",
            form,
            f"{r[form]['ms']:,.0f}",
            f"{r[form]['times_faster']:.1f}x" if "times_faster" in r[form] else "",
            f"{r[form]['loss_off']:.0e} / {r[form]['gradient_off']:.0e}" if "loss_off" in r[form] else "",
        ]
        for r in result["forms"]
        for form in ("dense", "block", "flex")
        if form in r
    ]
    return rows(
        ["tokens", "rows of offset 1", "anchors", "form", "ms", "faster", "loss / gradients off by, relative"], body
    )


def objective_memory(result: dict[str, Any]) -> str:
    """`objective.py`: what the loss adds to the peak."""
    if not result.get("memory"):
        return "Not measured yet: `benchmarks/objective.py --parts memory`."
    names = {
        "naive": "all logits, autograd",
        "rows": "256 rows at a time",
        "vocabulary": "256 rows, 8,192 ids at a time",
    }
    one = result["memory"][0]
    return f"{one['rows']:,} rows, {one['vocabulary']:,} ids, float32, forward and backward.\n\n" + rows(
        ["", "MB above the inputs", "seconds", "loss"],
        [[names[r["way"]], f"{r['peak_mb']:,}", f"{r['seconds']:.1f}", f"{r['loss']:.5f}"] for r in result["memory"]],
    )


def objective_continuity(result: dict[str, Any]) -> str:
    """`objective.py`: time of a search by continuity."""
    body = [
        [
            r["continuity"],
            str(r["rank"] or ""),
            f"{r['us_median']:,}",
            f"{r['us_p99']:,}",
            f"{r['us_first']:,}" if r["rank"] else "",
            f"{r['load_ms']:.0f}" if r["rank"] else "",
        ]
        for r in result["continuity"]
    ]
    return rows(["continuity", "rank", "us, median", "us, 99 %", "us, first round", "ms to load"], body)


def _with_interval(e: list[float], percent: bool = False) -> str:
    low, high = (f"{100 * x:.1f}" if percent else f"{x:.2f}" for x in e[1:])
    return (f"**{100 * e[0]:.1f}**" if percent else f"**{e[0]:.2f}**") + f" [{low}, {high}]"


def _then(result: dict[str, Any]) -> str:
    tokens = [t for t in result["inference_tokens"] if t]
    return f", when {' and '.join(f'{t:,}' for t in tokens)} tokens had been seen" if tokens else ""


def ablations_training(result: dict[str, Any]) -> str:
    """`ablations.py`: hits of every variant where all had seen the most tokens."""
    found = result["training"]
    last = [r for r in found if r["tokens"] == found[-1]["tokens"]]
    by = {
        (r["variant"], r["continuity"], r["nodes"]): r
        for r in result["inference"]
        if r["weight"] == 0.5 and r["beam"] == 20
    }
    body = []
    for r in last:
        m = [by.get((r["variant"], c, n)) for c in ("none", "answers + context") for n in (16, 59)]
        hits = [_with_interval(e, percent=True) for e in r["hit1"]] + [f"{100 * e[0]:.1f}" for e in r["hit10"]]
        less = _with_interval(r["hit1_less_base"][0], percent=True) if r["variant"] != "shifted 0.6" else ""
        body.append([r["variant"], hits[0], less, *hits[1:], *("" if e is None else f"{e['M'][0]:.2f}" for e in m)])
        less_m = (m[0] or {}).get("M_less_base"), (m[-1] or {}).get("M_less_base")
        body[-1] += ["" if e is None else _with_interval(e) for e in less_m]
    seeds = len(last[0]["seeds"])
    head = ["variant", "hit@1, 1", "less that of shifted 0.6"]
    head += [*(f"hit@1, {t}" for t in (2, 3)), *(f"hit@10, {t}" for t in (1, 2, 3))]
    return (
        f"{last[0]['tokens']:,} tokens each, {seeds} seed{'s' * (seeds > 1)}, {last[0]['held_out_answers']} held-out "
        "answers; hits in percent at offsets 1 to 3, 95 % intervals over answers. M on "
        f"{result['inference_answers']} of them"
        + _then(result)
        + ".\n\n"
        + rows(
            [
                *head,
                *(f"M, {c}, {n}" for c in ("no index", "answers + context") for n in (16, 59)),
                "first M less",
                "last M less",
            ],
            body,
        )
    )


def ablations_inference(result: dict[str, Any]) -> str:
    """`ablations.py`: one checkpoint under many searches."""
    body = [
        [
            r["continuity"],
            f"{r['nodes']}",
            f"{r['weight']}",
            f"{r['beam']}",
            _with_interval(r["M"]),
            _with_interval(r["M_above_none"]) if "M_above_none" in r else "",
        ]
        for r in result["inference"]
        if r["variant"] == "shifted 0.6"
    ]
    return rows(["continuity", "nodes", "n-gram weight", "beam", "M", "above none, as many nodes"], body)


def curve(result: dict[str, Any]) -> str:
    """M by trained tokens, and the line through them further on."""
    ahead = {(r["tokens"], r["nodes"]): r["M"] for r in result["ahead"]}
    body = [
        [f"{r['tokens'] / 1e6:.1f}", *(f"**{m:.2f}**" for m in r["M"].values())]
        for r in sorted(result["rows"], key=lambda r: float(r["tokens"]))
    ]
    sizes = [int(n) for n in result["rows"][0]["M"]]
    for tokens in sorted({t for t, _ in ahead}):
        body.append([f"line, {tokens / 1e6:g}", *(with_interval(ahead[tokens, n]) for n in sizes)])
    header = ["million tokens trained", *(f"M, {n} nodes" for n in sizes)]
    return f"{result['prompts']} prompts, greedy, loops cut; one index, one search.\n\n" + rows(header, body)


def curve_held_out(result: dict[str, Any]) -> str:
    """Each stage's own held-out answers while it trained."""
    header = ["stage", "updates", "million tokens", "hit@1, offsets 1 to 3", "hit@10, 1 to 3", "loss, 1 to 3", "chain"]
    body = []
    for stage, r in enumerate(sorted(result["rows"], key=lambda r: float(r["tokens"])), 1):
        for e in r["held_out"]:
            hits = [" ".join(f"{x:.3f}" for x in e[k][:3]) for k in ("hit1", "hit10")]
            loss = " ".join(f"{x:.2f}" for x in e["loss"][:3])
            body.append([str(stage), f"{e['step']:,}", f"{e['tokens'] / 1e6:.2f}", *hits, loss, f"{e['chain']:.2f}"])
    return rows(header, body)


def on_policy(result: dict[str, Any]) -> str:
    """M of drafters on data with a share of the target's own answers."""
    body = []
    for r in result["rows"]:
        whole = r["eval"]["sets"][-1]
        columns = [(t, n) for t, by in whole["M"].items() for n in by]
        cells = [_with_interval(whole["M"][t][n]) for t, n in columns]
        hits = [" ".join(f"{100 * x:.0f}" for x in whole[k][:3]) for k in ("hit1", "hit10")]
        body.append([f"{100 * r['share']:g} %", *cells, *hits])
    header = ["own answers", *(f"M, T = {t}, {n} nodes" for t, n in columns), "hit@1, 1 to 3, %", "hit@10, 1 to 3, %"]
    facts = (
        f"{result['prompts']:,} prompts, given answers by {result['given_by']}, {result['tokens']:,} tokens trained."
    )
    return f"{facts}\n\n{rows(header, body)}"


def search(result: dict[str, Any]) -> str:
    """`bench replay` of one tree search against others."""
    sizes = list(dict.fromkeys(r["nodes"] for r in result["rows"]))
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in result["rows"]:
        changed = ", ".join(f"`{k}={v}`" for k, v in SearchConfig(**r["settings"]).changes().items()) or "default"
        groups.setdefault(changed, []).append(r)
    body = [[name, *(f"{r['M']:.2f}" for r in own), interval(own[-1]["against_first"])] for name, own in groups.items()]
    return rows(["search", *(f"M, {n} nodes" for n in sizes), f"against the first, {sizes[-1]} nodes"], body)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "table-t0": speed,
    "table-t08": speed,
    "acceptance": acceptance,
    "default-m": by_size,
    "plain": plain,
    "load": load_table,
    "scheduler": scheduler,
    "rivals": rivals,
    "copying": methods,
    "soundness": soundness,
    "soak": soak,
    "vllm": vllm,
    "vllm-eagle3": vllm,
    "settings": settings,
    "ngram-build": ngram_build,
    "continuity": continuity,
    "stages": stages,
    "llamacpp": llamacpp,
    "latency": latency,
    "bursts": latency,
    "latency-server": latency,
    "paper-t0": by_task,
    "paper-t1": by_task,
    "factorial": factorial,
    "ngram-off-on": ngram_off_on,
    "budget": budget_table,
    "frontier": frontier,
    "horizon": horizon,
    "draft-length": draft_length,
    "outside": outside,
    "worth": worth,
    "shares": shares,
    "objective-forms": objective_forms,
    "objective-memory": objective_memory,
    "objective-continuity": objective_continuity,
    "ablations-training": ablations_training,
    "ablations-inference": ablations_inference,
    "domain-busy-0": load_table,
    "domain-busy-2": load_table,
    "curve": curve,
    "curve-held-out": curve_held_out,
    "on-policy": on_policy,
    "search-t0": search,
    "search-t1": search,
}
PAGES = (
    (ROOT / "README.md", "docs/results"),
    (ROOT / "docs" / "numbers.md", "results"),
    (ROOT / "docs" / "methods.md", "results"),
    (ROOT / "docs" / "which-method.md", "results"),
    (ROOT / "docs" / "serving-many.md", "results"),
    (ROOT / "docs" / "building-an-index.md", "results"),
    (ROOT / "docs" / "performance.md", "results"),
    (ROOT / "docs" / "reproduction.md", "results"),
    (ROOT / "docs" / "worth-it.md", "results"),
    (ROOT / "docs" / "reliability.md", "results"),
    (ROOT / "docs" / "objective.md", "results"),
    (ROOT / "docs" / "ablations.md", "results"),
    (ROOT / "docs" / "training.md", "results"),
    (ROOT / "docs" / "training-data.md", "results"),
)
FROM = {
    "worth": "table-t0",
    "shares": "paper-t0",
    "curve-held-out": "curve",
    **{f"objective-{part}": "objective" for part in ("forms", "memory", "continuity")},
    **{f"ablations-{part}": "ablations" for part in ("training", "inference")},
}  # tables of another table's result
SPENT_HOURS = 3.9  # training of the shipped drafter and its cache: docs/training.md


def marks(text: str) -> list[str]:
    """Names of the tables that a page shows."""
    return re.findall(r"<!-- ([a-z0-9-]+) -->\n", text)


def written(path: Path, results: str) -> str:
    """The page with every table that has a result written anew."""
    text = path.read_text()
    for name, table in TABLES.items():
        source = FROM.get(name, name)
        if (result := load(source)) is not None:
            block = f"{table(result)}\n\n{provenance(result, source)}".replace("RESULTS", results)
            mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            text = mark.sub(lambda m, b=block: f"{m[1]}\n{b}\n\n{m[2]}", text)
    return text


def main() -> int:
    new = {path: written(path, results) for path, results in PAGES}
    stale = [path for path, text in new.items() if text != path.read_text()]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path} does not say what docs/results/ says: run python benchmarks/write_tables.py")
        return len(stale) > 0
    for path in stale:
        path.write_text(new[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
