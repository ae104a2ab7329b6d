"""`bench table`: the rows of a result as CSV, Markdown or LaTeX, and answers as Spec-Bench has them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dartspec.accounting import with_interval
from dartspec.errors import DartspecError

FORMATS = ("csv", "markdown", "latex")
SPEC_BENCH = "spec-bench"
COLUMNS = ("suite", "temperature", "batch", "threads", "method", "A", "M", "tokens_per_s", "speed_up")
LATENCY_COLUMNS = (
    *("rate", "service", "num_requests", "tokens_per_s"),
    *(f"{wait}.{p}" for wait in ("first_ms", "per_token_ms", "end_ms") for p in ("p50", "p90", "p99")),
    "against_first.end_ms.p50",
)
SPECIAL = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})


def export(result: Mapping[str, Any], form: str) -> str:
    """Every figure of every row for csv (intervals as `_low` and `_high`); the main columns for the others.

    Raises DartspecError for another format.
    """
    if form not in FORMATS:
        raise DartspecError(f"format is {form!r}; it must be one of {', '.join((*FORMATS, SPEC_BENCH))}")
    if form == "csv":
        return _csv([flat(r) for r in result["rows"]])
    columns, num_left = (LATENCY_COLUMNS, 2) if result.get("kind") == "latency" else (COLUMNS, 5)
    body = [[_cell(_at(r, c)) for c in columns] for r in result["rows"]]
    if form == "markdown":
        lines = [list(columns), ["---"] * len(columns), *body]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)
    rows = [" & ".join(cell.translate(SPECIAL) for cell in line) + r" \\" for line in (list(columns), *body)]
    kinds = "l" * num_left + "r" * (len(columns) - num_left)
    return "\n".join(
        [rf"\begin{{tabular}}{{{kinds}}}", r"\hline", rows[0], r"\hline", *rows[1:], r"\hline", r"\end{tabular}", ""]
    )


def spec_bench(result: Mapping[str, Any], method: str) -> str:
    """One method's answers as Spec-Bench's `evaluation/speed.py` reads them: a JSON object a question.

    A question's turns stand in one choice; every seed, temperature and repeat is a choice of its own. Times are those
    of the whole answer, prefill included, as there; `accept_lengths` leave the prefill's token out.

    Raises DartspecError for a result without texts, and for a method that it does not hold.
    """
    if method not in (known := list(dict.fromkeys(r["method"] for r in result["records"]))):
        raise DartspecError(f"the result has no method {method!r}; it has {', '.join(known)}: name one with --method")
    own = [r for r in result["records"] if r["method"] == method]
    if any("text" not in r for r in own):
        raise DartspecError("the result holds no texts: measure with bench run --texts")
    questions: dict[tuple[str, str], dict[tuple[Any, ...], list[Mapping[str, Any]]]] = {}
    for r in own:
        one = tuple(r[k] for k in ("threads", "temperature", "seed", "batch", "repeat"))
        questions.setdefault((r["suite"], r["id"]), {}).setdefault(one, []).append(r)
    lines = []
    for number, ((suite, name), choices) in enumerate(questions.items(), 1):
        found = re.search(r"\d+$", name)
        answer = {
            "question_id": int(found[0]) if found else number,
            "category": suite,
            "answer_id": f"{method}/{name}",
            "model_id": method,
            "choices": [
                {
                    "index": i,
                    "turns": [r["text"] for r in turns],
                    "decoding_steps": [r["uncut"]["rounds"] for r in turns],
                    "new_tokens": [r["num_new_tokens"] for r in turns],
                    "wall_time": [r["wall_ms"] / 1e3 for r in turns],
                    "accept_lengths": [n for r in turns for n in r["accept_lengths"]],
                }
                for i, turns in enumerate(choices.values())
            ],
            "tstamp": result["provenance"]["date"],
        }
        lines.append(json.dumps(answer, ensure_ascii=False) + "\n")
    return "".join(lines)


def _at(row: Mapping[str, Any], column: str) -> Any:
    """A figure by its path, `end_ms.p50`; None where there is none."""
    value: Any = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """One level: `ms_per_round.verify`, `speed_up`, `speed_up_low`, `speed_up_high`, `acceptance_by_position.1`."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{k}": v for k, v in flat(value).items()}
        elif (key in ("speed_up", "median_pair") or re.fullmatch(r"p\d+|per_token_ms", key)) and isinstance(
            value, list
        ):
            found |= dict(zip((key, f"{key}_low", f"{key}_high"), value, strict=True))
        elif isinstance(value, list):
            found |= {f"{key}.{i}": v for i, v in enumerate(value, 1)}
        else:
            found[key] = value
    return found


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(k for r in rows for k in r))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return with_interval(value)
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
