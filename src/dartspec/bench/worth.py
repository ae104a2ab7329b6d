"""`bench worth`: from what was measured to an answer: is it worth it, and after how many tokens is the work repaid?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from dartspec.accounting import with_interval
from dartspec.errors import DartspecError

# need no training; by name, for a result may be another machine's
FREE = ("prompt_lookup", "suffix", "lookahead")


def best_row(result: Mapping[str, Any], method: str | None = None) -> Mapping[str, Any]:
    """The row over all sets of the fastest method, or of one; the first temperature, batch size and number of threads.

    Raises DartspecError for a result without plain decoding, and for a method that it does not hold.
    """
    if result.get("kind") != "run":
        raise DartspecError(f"expected a result of dartspec bench run, this is one of bench {result.get('kind')}")
    timed = [r for r in result["rows"] if "speed_up" in r]
    if not timed:
        raise DartspecError("the result has no speed-up: measure with plain decoding (without --no-plain)")
    suite = "all" if any(r["suite"] == "all" for r in timed) else timed[-1]["suite"]
    first = timed[0]
    same = [
        r for r in timed if r["suite"] == suite and all(r[k] == first[k] for k in ("temperature", "batch", "threads"))
    ]
    chosen = [r for r in same if method in (None, r["method"])]
    if not chosen:
        raise DartspecError(f"the result has no method {method!r}; it has {', '.join(r['method'] for r in same)}")
    return max(chosen, key=lambda r: float(r["speed_up"][0]))


def break_even(plain_ms: float, speed_up: Sequence[float], spent_hours: float) -> list[float | None]:
    """Tokens after which `spent_hours` of this machine's time are repaid: at the figure, at its high and its low end.

    A token saves `plain_ms * (1 - 1/S)`. None: never, since nothing is saved.
    """
    if spent_hours < 0:
        raise DartspecError(f"spent-hours is {spent_hours}; it must be 0 or more")
    value, low, high = speed_up
    saved = [plain_ms * (1 - 1 / s) for s in (value, high, low)]
    return [3.6e6 * spent_hours / ms if ms > 0 else None for ms in saved]


def answer(
    result: Mapping[str, Any],
    latency: Mapping[str, Any] | None = None,
    *,
    method: str | None = None,
    spent_hours: float = 0.0,
    tokens_per_day: float | None = None,
) -> dict[str, Any]:
    """Figures and sentences: alone, under traffic, and when it is repaid."""
    for given in (result, latency):
        if given is not None and not isinstance(given, Mapping):
            raise DartspecError(f"expected a result of dartspec bench, a JSON object, found {type(given).__name__}")
    if spent_hours < 0 or not isfinite(spent_hours):
        raise DartspecError(f"spent_hours is {spent_hours}; it must be hours, 0 or more")
    if tokens_per_day is not None and not (isfinite(tokens_per_day) and tokens_per_day > 0):
        raise DartspecError(f"tokens_per_day is {tokens_per_day}; it must be a number of tokens above 0")
    row = best_row(result, method)
    s, m = row["speed_up"], row["method"]
    keys = ("suite", "temperature", "batch", "threads")
    plain = next(r for r in result["rows"] if r["method"] == "plain" and all(r[k] == row[k] for k in keys))
    verdict = "yes" if s[1] > 1 else "no" if s[2] < 1 else "unclear"
    times = f"{with_interval(s, ' times')} as fast as plain decoding"
    uncut = row["uncut"]["speed_up"][0]
    sentences = [
        {
            "yes": f"Alone, yes: {m} writes {times}, over {row['num_prompts']} prompts; loops kept, {uncut:.2f} times.",
            "no": f"Alone, no: {m} writes {times}.",
            "unclear": f"Alone, it is unclear: {m} writes {times}: measure more prompts.",
        }[verdict],
        f"{row['num_equal']} of {row['num_runs']} texts are plain decoding's, token for token.",
    ]
    found: dict[str, Any] = {"method": m, "verdict": verdict, "speed_up": s, "plain_ms": row["plain_ms"]}
    if plain["cpu_ms_per_token"] and row["cpu_ms_per_token"]:
        found["cpu_time"] = round(row["cpu_ms_per_token"] / plain["cpu_ms_per_token"], 4)
        sentences.append(f"A token takes {found['cpu_time']:.2f} times the processor time, prefill included.")
    worst, best = _extremes(result["rows"], row)
    if worst is not None and best is not None:
        texts = [f"{r['speed_up'][0]:.2f} times on {r['suite']}" for r in (best, worst)]
        sentences.append(f"It depends on the text: {', '.join(texts)}.")
        found |= {"best": [best["suite"], best["speed_up"]], "worst": [worst["suite"], worst["speed_up"]]}
    if latency is not None:
        if latency.get("kind") != "latency":
            kind = latency.get("kind")
            raise DartspecError(f"expected a result of dartspec bench latency, this is one of bench {kind}")
        found["latency"] = []
        for r in latency["rows"]:
            e = r.get("against_first")
            if not e or e["end_ms"]["p50"] is None:
                continue
            half, late = e["end_ms"]["p50"], e["end_ms"]["p90"]
            found["latency"].append({"rate": r["rate"], "service": r["service"], "p50": half, "p90": late})
            sentences.append(
                f"At {r['rate']:g} requests a second ({r['in_progress']:.1f} at once), {r['service']}: the median "
                f"answer comes {with_interval(half, ' times')} as soon, p90 {late[0]:.2f} times."
            )
    if spent_hours:
        hours = "1 hour" if spent_hours == 1 else f"{spent_hours:g} hours"
        free = _best_free(result["rows"], row)
        base = 1.0 if free is None else max(1.0, float(free["speed_up"][0]))
        if free is not None and base > 1:
            found["free"] = [free["method"], base]
            sentences.append(
                f"{free['method']}, which needs no training, writes {base:.2f} times as fast: only what is gained "
                "above it repays the work."
            )
        tokens = break_even(row["plain_ms"] / base, [x / base for x in s], spent_hours)
        found |= {"spent_hours": spent_hours, "break_even_tokens": tokens}
        if tokens[0] is None:
            sentences.append(f"The {hours} of work: never repaid.")
        else:
            most = "never" if tokens[2] is None else f"{tokens[2] / 1e6:.1f} M"
            line = f"The {hours} of work on this machine: repaid after {tokens[0] / 1e6:.1f} M tokens"
            sentences.append(f"{line}, at the ends of the interval {(tokens[1] or 0) / 1e6:.1f} M and {most}.")
            if tokens_per_day:
                found["break_even_days"] = round(tokens[0] / tokens_per_day, 2)
                sentences.append(f"At {tokens_per_day:,.0f} tokens a day that is {found['break_even_days']:.1f} days.")
    return found | {"sentences": sentences}


def _extremes(
    rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The sets on which a method gains least and most; None where there is one set."""
    keys = ("method", "temperature", "batch", "threads")
    own = [r for r in rows if r["suite"] != "all" and "speed_up" in r and all(r[k] == row[k] for k in keys)]
    if len(own) < 2:
        return None, None
    return min(own, key=lambda r: float(r["speed_up"][0])), max(own, key=lambda r: float(r["speed_up"][0]))


def _best_free(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fastest method that needs no training, measured in the same cell as the row of one that does."""
    if _is_free(row["method"]):
        return None
    keys = ("suite", "temperature", "batch", "threads")
    same = [r for r in rows if "speed_up" in r and all(r[k] == row[k] for k in keys) and r["method"] != row["method"]]
    return max((r for r in same if _is_free(r["method"])), key=lambda r: float(r["speed_up"][0]), default=None)


def _is_free(method: str) -> bool:
    return all(re.split("[,@]", part)[0] in FREE for part in method.split("+"))
