"""What a run says of itself while it goes on: `log.jsonl`, TensorBoard's event files, a table that stays in place.

A record is JSON-ready and has a kind: "train" (every `log_every` updates), "eval", "m" and, once, "final". In the log a
"train" record stands by itself, any other under its kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dartspec.errors import DartspecError
from dartspec.files import written_aside

Record = dict[str, Any]
Watch = Callable[[str, Record], None]
"""Called with each record's kind and the record."""

_KINDS = ("eval", "m", "final")


def read_log(path: Path) -> list[tuple[str, Record]]:
    """Kind and record of every line. A last line that a kill cut short is left out."""
    found: list[tuple[str, Record]] = []
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):  # no line end behind it
                continue
            raise DartspecError(f"{path}, line {number}: not a JSON object; mend or delete the line") from None
        kind = next((k for k in _KINDS if k in record), "train")
        found.append((kind, record if kind == "train" else record[kind]))
    return found


class Log:
    """The files. tensorboard: write event files too; needs the extra `train`."""

    def __init__(self, folder: Path, step: int, *, tensorboard: bool = False) -> None:
        """Goes on at `step`: what an earlier process wrote of later ones, and did not save, is taken out."""
        self.path = folder / "log.jsonl"
        kept = [(kind, r) for kind, r in read_log(self.path) if r["step"] <= step and kind != "final"]
        with written_aside(self.path) as aside:
            aside.write_text("".join(map(_line, *zip(*kept, strict=True))) if kept else "", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise DartspecError(
                    "tensorboard = true needs the package tensorboard: pip install 'dartspec[train]'"
                ) from None
            writer: Any = SummaryWriter
            self._events = writer(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def __call__(self, kind: str, record: Record) -> None:
        with self.path.open("a", encoding="utf-8") as log:
            log.write(_line(kind, record))
        if self._events is not None:
            for name, value in scalars(kind, record):
                self._events.add_scalar(name, value, record["step"])
            self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def _line(kind: str, record: Record) -> str:
    return json.dumps(record if kind == "train" else {kind: record}) + "\n"


def scalars(kind: str, record: Record) -> list[tuple[str, float]]:
    """The curves of a record, its numbers: a list is one a place, counted from 1 (the offset)."""
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if name in ("step", "time"):
            continue
        parts = [(f"{kind}/{name}/{i}", x) for i, x in enumerate(value, 1)] if isinstance(value, list) else []
        for curve, number in parts or [(f"{kind}/{name}", value)]:
            if isinstance(number, int | float):
                found.append((curve, float(number)))
    return found


class View:
    """The last record of each kind as a table."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.last: dict[str, Record] = {}
        self.best: Record | None = None

    def __call__(self, kind: str, record: Record) -> None:
        self.last[kind] = record
        if kind == "m" and record["best"]:
            self.best = record

    def __rich__(self) -> Group:
        train, held, m = (self.last.get(k, {}) for k in ("train", "eval", "m"))
        rows = [("loss", train, "loss"), ("held-out loss", held, "loss"), *((n, held, k) for n, k in _HITS)]
        table = Table()
        table.add_column("offset")
        for t in range(1, 1 + max(len(r.get(name, ())) for _, r, name in rows)):
            table.add_column(str(t), justify="right")
        for label, record, name in rows:
            if name in record:
                table.add_row(label, *(f"{x:.3f}" for x in record[name]))
        return Group(Text(self.title(train)), *([table] if table.row_count else []), Text(self.caption(held, m)))

    def title(self, train: Record) -> str:
        if not train:
            return f"0 of {self.steps} updates"
        return (
            f"{train['step']:,} of {self.steps:,} updates, {train['tokens'] / 1e6:.2f} M tokens, learning rate "
            f"{train['lr']:.2e}, {train['tokens_per_s']:,} tokens/s, {duration(train['seconds_left'])} left"
        )

    def caption(self, held: Record, m: Record) -> str:
        parts = [f"held-out figures of update {held['step']:,}"] if held else []
        if m:
            parts.append(f"M {m['M']:.3f} at update {m['step']:,}")
        if self.best:
            parts.append(f"best {self.best['M']:.3f} at update {self.best['step']:,}")
        return ", ".join(parts)


def lines(report: Callable[[str], None]) -> Watch:
    """A watch for a file or a pipe: a line an evaluation and a measurement."""

    def watch(kind: str, r: Record) -> None:
        at = f"step {r['step']}"
        if kind == "train":
            return
        if kind == "m":
            report(f"{at}  M {r['M']:.3f} over {r['rounds']} rounds ({r['nodes']} nodes){'  best so far' * r['best']}")
            return
        hits = "  ".join(f"{label} {' '.join(f'{x:.3f}' for x in r[name])}" for label, name in _HITS)
        ends = f"the weights of {at}, kept: " if kind == "final" else f"{at}  {r['tokens'] / 1e6:.2f} M tokens  "
        report(f"{ends}{hits}  loss {r['loss'][0]:.3f}")

    return watch


_HITS = (("hit@1", "hit1"), ("hit@10", "hit10"))


def duration(seconds: float) -> str:
    """ "3 h 05 min", "12 min", "40 s"."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
