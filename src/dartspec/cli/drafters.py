"""`dartspec drafters` and `dartspec push`: the trained drafters at hand, and how one gets to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal, printable


def drafters(
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """List the trained drafters at hand: target, committed tokens a round (M), age.

    Those in the folders that the variable DARTSPEC_DRAFTERS names, and the package's own. `load` and every verb take
    the one that fits the model, without being told.

    \b
    Examples:
      dartspec drafters
      DARTSPEC_DRAFTERS=~/drafters dartspec drafters --json
      DARTSPEC_DRAFTERS=~/drafters:hub dartspec generate --model owner/model "Why?"
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.api import ASSETS
    from dartspec.interop import registry

    table = Table(box=None)
    for name in ("target", "method", "M", "age", "folder"):
        table.add_column(name, overflow="fold")
    rows: list[dict[str, Any]] = []
    for e in registry.entries([*registry.places(), ASSETS]):
        rows.append(
            {
                "target": e.target,
                "method": e.method,
                "M": e.M,
                "age_days": round(e.age_days, 3),
                "folder": str(e.folder),
                "weights_fingerprint": e.values.get("weights_fingerprint"),
                "tokenizer_fingerprint": e.values.get("tokenizer_fingerprint"),
            }
        )
        shown = "not measured" if e.M is None else f"{e.M:.2f}"
        table.add_row(printable(e.target), e.method, shown, age(e.age_days), printable(_short(e.folder)))
    term.out.print(table)
    term.emit({"drafters": rows})


def age(days: float) -> str:
    for size, name in ((1.0, "day"), (1 / 24, "hour"), (1 / 1440, "minute")):
        if days >= size:
            n = int(days / size)
            return f"{n} {name}" + ("" if n == 1 else "s")
    return "just now"


def _short(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
