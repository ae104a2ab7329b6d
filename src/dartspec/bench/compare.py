"""`bench compare`: what changed from one result to another, and whether it is more than noise.

Runs made at different times cannot be compared by milliseconds alone: the machine drifts. So the speed-up, the ratio
to the plain decoding of the same run, is compared; tokens a second stand beside it. Both runs' figures come from the
prompts that both hold, drawn together in the bootstrap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dartspec.bench.provenance import read_result
from dartspec.bench.stats import Estimate, Floats, bootstrap
from dartspec.bench.summary import ALL, KEY, Record, by_unit
from dartspec.errors import DartspecError

SETTINGS = ("max_tokens", "ignore_eos", "turns", "seeds", "pairs", "busy")
FACTS = (
    "model",
    "weights_fingerprint",
    "dtype",
    "device",
    "kernels",
    "cpu",
    "torch",
    "transformers",
    "threads",
    "commit",
)
FEWEST_UNITS = 4  # prompts or pairs below which an interval says nothing
FAMILY_ERROR = 0.05  # chance that a run in which nothing changed fails, over all rows together


def read(path: Path) -> dict[str, Any]:
    """A result of `bench run` or `bench load`."""
    result = read_result(path)
    if not isinstance(result, dict) or "records" not in result or "rows" not in result:
        raise DartspecError(f"{path} is no result of dartspec bench run or load: it has no records")
    if result.get("kind", "run") not in ("run", "load"):
        raise DartspecError(f"{path} is a result of dartspec bench {result.get('kind')}; expected one of run or load")
    return result


def compare(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float = 0.01) -> dict[str, Any]:
    """Row by row, `after` over `before`.

    A row is worse when its speed-up fell by more than `tolerance` and the whole interval lies below 1; its level is
    raised with the number of rows, so that all of them together raise a false alarm once in twenty runs. Without plain
    decoding in both runs M is compared in its place. A text that plain decoding does not write, where it did before,
    is worse whatever the speed.

    Raises DartspecError when the runs have no row in common, or their answers were cut at different lengths.
    """
    for name in SETTINGS:
        a, b = before["config"].get(name), after["config"].get(name)
        if a != b:
            raise DartspecError(f"{name} is {a} in the first result and {b} in the second: they cannot be compared")
    groups = _grouped(before["records"]), _grouped(after["records"])
    common = [k for k in groups[0] if k in groups[1] and k[-1] != "plain"]
    if not common:
        raise DartspecError(
            "the results have no row in common: methods "
            f"{', '.join(before['config']['methods'])} and {', '.join(after['config']['methods'])}"
        )
    level = 1 - FAMILY_ERROR / len(common)
    rows = [_compared(k, *groups, level, tolerance) for k in common]
    facts = {
        k: [before["provenance"].get(k), after["provenance"].get(k)]
        for k in FACTS
        if before["provenance"].get(k) != after["provenance"].get(k)
    }
    return {
        "rows": rows,
        "level": level,
        "tolerance": tolerance,
        "facts_changed": facts,
        "only_before": [list(k) for k in groups[0] if k not in groups[1]],
        "only_after": [list(k) for k in groups[1] if k not in groups[0]],
        "num_worse": sum(r["verdict"] == "worse" for r in rows),
        "num_better": sum(r["verdict"] == "better" for r in rows),
    }


Groups = dict[tuple[Any, ...], list[Record]]


def _grouped(records: Sequence[Record]) -> Groups:
    groups: Groups = defaultdict(list)
    several = len({r["suite"] for r in records}) > 1
    for r in records:
        for suite in (r["suite"], ALL) if several else (r["suite"],):
            groups[(suite, *(r[k] for k in KEY[1:]), r["method"])].append(r)
    return groups


def _compared(key: tuple[Any, ...], before: Groups, after: Groups, level: float, tolerance: float) -> dict[str, Any]:
    plain = (*key[:-1], "plain")
    paired = plain in before and plain in after
    sides = [before[key], after[key], *((before[plain], after[plain]) if paired else ())]
    units = [by_unit(s) for s in sides]
    both = sorted(set.intersection(*(set(u) for u in units)))
    row: dict[str, Any] = {**dict(zip((*KEY, "method"), key, strict=True)), "num_units": len(both)}
    unequal = [sum(r["parted"] is not None for r in s) for s in sides[:2]]
    row["num_unequal"] = unequal
    if not both:
        return row | {"verdict": "nothing in common"}
    times = np.hstack([np.array([u[x] for x in both]) for u in units])  # tokens, ms of each side
    tokens_per_s = bootstrap(times[:, :4], lambda s: _rate(s, 1) / _rate(s, 0), level=level)
    per_round = bootstrap(
        _rounds(sides[:2], both), lambda s: (s[..., 2] / s[..., 3]) / (s[..., 0] / s[..., 1]), level=level
    )
    row |= {"M": per_round.rounded(), "tokens_per_s": tokens_per_s.rounded()}
    judged: Estimate = per_round
    if paired:
        judged = bootstrap(times, lambda s: _rate(s, 1) / _rate(s, 3) / (_rate(s, 0) / _rate(s, 2)), level=level)
        row["speed_up"] = judged.rounded()
    verdict = "same" if len(both) >= FEWEST_UNITS else "too few"
    if verdict == "too few":
        pass
    elif judged.high < 1 and judged.value < 1 - tolerance:
        verdict = "worse"
    elif judged.low > 1 and judged.value > 1 + tolerance:
        verdict = "better"
    if unequal[1] / len(sides[1]) > unequal[0] / len(sides[0]):
        verdict = "worse"
    return row | {"verdict": verdict}


def _rate(s: Floats, side: int) -> Floats:
    return s[..., 2 * side] / s[..., 2 * side + 1]


def _rounds(sides: Sequence[Sequence[Record]], units: Sequence[tuple[str, str]]) -> Floats:
    """(n, 4): committed tokens and rounds of each unit, before and after."""
    sums: list[dict[tuple[str, str], list[float]]] = []
    for records in sides:
        own: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for r in records:
            own[r["suite"], r["unit"]][0] += r["cut"]["committed"]
            own[r["suite"], r["unit"]][1] += r["cut"]["rounds"]
        sums.append(own)
    return np.array([[*sums[0][u], *sums[1][u]] for u in units])
