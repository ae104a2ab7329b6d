"""From records to the rows of a table. Nothing is measured here; the same records give the same rows.

A speed-up is a ratio of sums over everything in the row, its interval the bootstrap over prompts (or over pairs of
batches); the median of the pairs' own ratios stands beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dartspec.accounting import SpeedUp
from dartspec.bench.measure import STAGES, acceptance_by_position, add_sums
from dartspec.bench.stats import Estimate, median, rate_ratio

Record = Mapping[str, Any]
KEY = ("suite", "threads", "temperature", "batch")
ALL = "all"


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each suite (and `all` of them), threads, temperature, batch size and method; plain first."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    suites = list(dict.fromkeys(r["suite"] for r in records))
    for suite in [*suites, ALL] if len(suites) > 1 else suites:
        for r in records:
            if suite in (ALL, r["suite"]):
                groups[(suite, *(r[k] for k in KEY[1:]), r["method"])].append(r)
    return [_row(key, own, groups.get((*key[:-1], "plain"))) for key, own in groups.items()]


def _row(key: tuple[Any, ...], own: Sequence[Record], plain: Sequence[Record] | None) -> dict[str, Any]:
    whole = {kind: add_sums([r[kind] for r in own]) for kind in ("cut", "uncut")}
    new = sum(r["num_new_tokens"] for r in own)
    wall = sum(r["decode_wall_ms"] for r in own)
    row: dict[str, Any] = {
        **dict(zip(KEY, key, strict=False)),
        "method": key[-1],
        "num_prompts": len({(r["suite"], r["id"]) for r in own}),
        "num_runs": len(own),
        **_figures(whole["cut"]),
        "acceptance_by_position": acceptance_by_position(whole["cut"]["histogram"]),
        "cpu_ms_per_token": _rounded(sum(r["cpu_ms"] for r in own), new),
        **(
            {"joules_per_token": _rounded(sum(r["joules"] for r in own), new)}
            if all("joules" in r for r in own)
            else {}
        ),
        "looped_share": _rounded(sum(r["num_new_tokens"] - r["loop"] for r in own if r["loop"] is not None), new, 4),
        # by the clock on the wall, everything after the prefill: what a user waits, loops kept
        "wall_tokens_per_s": _rounded(1e3 * whole["uncut"]["committed"], wall, 2),
        "outside_rounds": round(1 - _rounded(_ms(whole["uncut"]), wall, 6), 4),
        "uncut": _figures(whole["uncut"]),
    }
    if plain is None or key[-1] == "plain":
        return row
    base = {kind: add_sums([r[kind] for r in plain]) for kind in ("cut", "uncut")}
    s, p = whole["cut"], base["cut"]
    if not (s["rounds"] and p["rounds"]):
        return row
    terms = SpeedUp(
        s["committed"] / s["rounds"], _ms(p) / p["committed"], _ms(s) / s["rounds"], s["verify_ms"] / s["rounds"]
    )
    ratios = pair_ratios(own, plain)
    row |= {
        "speed_up": speed_up(own, plain).rounded(),
        "median_pair": median(ratios).rounded() if ratios else None,
        "pair_range": [round(min(ratios), 4), round(max(ratios), 4)] if ratios else None,
        "num_pairs": len(ratios),
        "bound": round(terms.bound, 4),
        "plain_ms": round(terms.plain_ms, 4),
        "num_equal": sum(r["parted"] is None for r in own),
    }
    row["uncut"]["speed_up"] = speed_up(own, plain, "uncut").rounded()
    return row


def _figures(s: Mapping[str, Any]) -> dict[str, Any]:
    n = s["rounds"]
    return {
        "A": _rounded(s["accepted"], n),
        "M": _rounded(s["committed"], n),
        "nodes": _rounded(s["drafted"], n, 2),
        "rounds": n,
        "tokens_per_s": _rounded(1e3 * s["committed"], _ms(s), 2),
        "ms_per_round": {stage.removesuffix("_ms"): _rounded(s[stage], n, 3) for stage in STAGES},
    }


def _ms(s: Mapping[str, Any]) -> float:
    return float(sum(s[stage] for stage in STAGES))


def _rounded(a: float, b: float, digits: int = 4) -> float:
    return round(a / b, digits) if b else 0.0


def by_unit(records: Iterable[Record], kind: str = "cut") -> dict[tuple[str, str], tuple[float, float]]:
    """Tokens and milliseconds of each unit of the bootstrap."""
    units: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in records:
        units[r["suite"], r["unit"]].append(r)
    return {u: (sum(r[kind]["committed"] for r in rs), sum(_ms(r[kind]) for r in rs)) for u, rs in units.items()}


def speed_up(a: Sequence[Record], b: Sequence[Record], kind: str = "cut", level: float = 0.95) -> Estimate:
    """How much faster a is than b over the units that both have: a ratio of sums, its interval over units."""
    ua, ub = by_unit(a, kind), by_unit(b, kind)
    both = sorted(set(ua) & set(ub))
    if not both or not all(sum(u[x][i] for x in both) > 0 for u in (ua, ub) for i in (0, 1)):
        return Estimate(math.nan, math.nan, math.nan)
    return rate_ratio([ua[u] for u in both], [ub[u] for u in both], level=level)


def pair_ratios(a: Sequence[Record], b: Sequence[Record]) -> list[float]:
    """How much faster a is than b in each pair: the same prompts, seed and repeat, decoded one after the other."""

    def rates(records: Sequence[Record]) -> dict[tuple[Any, ...], float]:
        pairs: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
        for r in records:
            pairs[r["suite"], r["unit"], r["seed"], r["repeat"]].append(r)
        sums = {k: (sum(r["cut"]["committed"] for r in rs), sum(_ms(r["cut"]) for r in rs)) for k, rs in pairs.items()}
        return {k: tokens / ms for k, (tokens, ms) in sums.items() if ms and tokens}

    ra, rb = rates(a), rates(b)
    return [ra[k] / rb[k] for k in ra if k in rb]


def against_best_fixed(records: Sequence[Record]) -> list[dict[str, Any]]:
    """`bench load`: in each cell, the best fixed tree size (chosen afterwards, by the cell's own tokens a second) and
    what every `auto` method makes of the cell against it and against plain decoding.

    Chosen in the same run that it is judged by, the best fixed size is flattered a little: a mark, not a method.
    """
    cells: dict[tuple[Any, ...], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        cells[tuple(r[k] for k in KEY)][r["method"]].append(r)
    found = []
    for key, methods in cells.items():
        fixed = {m: own for m, own in methods.items() if m != "plain" and "@auto" not in m}
        rate = {m: sum(t for t, _ in u) / sum(ms for _, ms in u) for m, own in fixed.items() if (u := _units(own))}
        best = max(rate, key=lambda m: rate[m], default=None)
        for name in (m for m in methods if "@auto" in m):
            entry: dict[str, Any] = {**dict(zip(KEY, key, strict=True)), "method": name}
            if "plain" in methods:
                entry["against_plain"] = speed_up(methods[name], methods["plain"]).rounded()
            if best is not None:
                entry |= {"best_fixed": best, "against_best_fixed": speed_up(methods[name], fixed[best]).rounded()}
                if "plain" in methods:
                    entry["best_fixed_against_plain"] = speed_up(fixed[best], methods["plain"]).rounded()
            found.append(entry)
    return found


def _units(records: Sequence[Record]) -> list[tuple[float, float]]:
    units = list(by_unit(records).values())
    return units if sum(ms for _, ms in units) else []


def over_cells(entries: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    """Mean and worst over the cells of `against_best_fixed`: the mean is geometric, as befits ratios."""
    ratios = [e[name] for e in entries if name in e and not math.isnan(e[name][0])]
    if not ratios:
        return None
    return {
        "cells": len(ratios),
        "mean": round(math.exp(sum(math.log(r[0]) for r in ratios) / len(ratios)), 4),
        "worst": min(r[0] for r in ratios),
        "worst_low": min(r[1] for r in ratios),
    }
