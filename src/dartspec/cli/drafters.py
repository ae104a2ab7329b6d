"""`dartspec drafters`, `card` and `push`: the trained drafters at hand, and how one gets to others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal, printable

FolderArgument = Annotated[Path, typer.Argument(help="Folder of a trained drafter.", show_default=False)]
BaseOption = Annotated[str, typer.Option("--base-model", help="Hub id of the model that it is for.")]
LicenseOption = Annotated[str, typer.Option("--license", help="Of the drafter; the model's own terms may bind it.")]


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


def card(
    drafter: FolderArgument,
    base_model: BaseOption = "",
    license_: LicenseOption = "",
    log: Annotated[
        Path | None,
        typer.Option(help="The run's log.jsonl.  [default: the one beside the drafter]", show_default=False),
    ] = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Write a drafter's model card: README.md, and its curves as PNG.

    It says whose drafter it is, how it was trained, and what `dartspec eval --save` found.

    \b
    Examples:
      dartspec card runs/mine/best
      dartspec card runs/mine/best --base-model owner/my-model --license apache-2.0
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.train.card import write_card

    path = write_card(drafter, log=log, base_model=base_model, license_=license_)
    term.say(f"written: {path}")
    term.emit({"card": str(path)})


def push(
    drafter: FolderArgument,
    to: Annotated[str, typer.Argument(help="owner/name on the hub, or a folder (./name).", show_default=False)],
    public: Annotated[bool, typer.Option("--public", help="A new repository is for all to see.")] = False,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Upload a drafter with its card to the Hugging Face hub, or copy it to a folder.

    On the hub, `load` finds it by the card's base_model where DARTSPEC_DRAFTERS names hub.

    \b
    Examples:
      dartspec push runs/mine/best owner/my-model-dart
      dartspec push runs/mine/best ~/drafters/my-model
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.train.card import push as send

    place = send(drafter, to, private=not public)
    term.say(f"there: {place}")
    term.emit({"place": place})
