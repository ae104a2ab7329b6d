"""`bench table`: the rows of a result as CSV, Markdown or LaTeX, for a paper or a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from dartspec.errors import DartspecError

FORMATS = ("csv", "markdown", "latex")
COLUMNS = ("suite", "temperature", "batch", "threads", "method", "A", "M", "tokens_per_s", "speed_up")
SPECIAL = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})


def export(result: Mapping[str, Any], form: str) -> str:
    """Every figure of every row for csv (intervals as `_low` and `_high`); the main columns for the others.

    Raises DartspecError for another format.
    """
    if form not in FORMATS:
        raise DartspecError(f"format is {form!r}; it must be one of {', '.join(FORMATS)}")
    if form == "csv":
        return _csv([flat(r) for r in result["rows"]])
    body = [[_cell(r.get(c)) for c in COLUMNS] for r in result["rows"]]
    if form == "markdown":
        lines = [list(COLUMNS), ["---"] * len(COLUMNS), *body]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)
    rows = [" & ".join(cell.translate(SPECIAL) for cell in line) + r" \\" for line in (list(COLUMNS), *body)]
    kinds = "l" * 5 + "r" * 4
    return "\n".join(
        [rf"\begin{{tabular}}{{{kinds}}}", r"\hline", rows[0], r"\hline", *rows[1:], r"\hline", r"\end{tabular}", ""]
    )


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """One level: `ms_per_round.verify`, `speed_up`, `speed_up_low`, `speed_up_high`, `acceptance_by_position.1`."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{k}": v for k, v in flat(value).items()}
        elif key in ("speed_up", "median_pair") and isinstance(value, Sequence):
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
        return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
