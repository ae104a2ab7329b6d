"""`dartspec inspect` and `dartspec convert`: other people's drafters, what they are and as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal, printable

DOES_NOT_RUN = 2

CheckpointArgument = Annotated[Path, typer.Argument(help="Folder with config.json and weights.", show_default=False)]


def inspect(
    checkpoint: CheckpointArgument,
    model: o.ModelOption = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Say what a drafter's checkpoint is, for which target, and whether it would run on --model.

    Reads sizes and names, no weights. Knows this package's own folders, official DART, EAGLE-3 (SafeAILab, AngelSlim,
    SpecForge), folders of speculators, and any causal LM as a small model. The exit code is 2 where it would not run.

    \b
    Examples:
      dartspec inspect ./qwen4b-dart
      dartspec inspect ./qwen4b-dart --model ./Qwen3-4B
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.interop import checkpoints
    from dartspec.target.load import read_sizes

    found = checkpoints.inspect(checkpoint)
    facts: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "layout": found.layout.name,
        "about": found.layout.about,
        "method": found.method,
        **checkpoints.described(found),
    }
    if model is not None:
        sizes = read_sizes(model)
        reason = checkpoints.problem(found, sizes)
        facts |= {"model": sizes.name, "runs": reason is None, "why_not": reason}
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        if value is not None:
            table.add_row(name.replace("_", " "), printable(str(value)))
    term.out.print(table)
    term.emit(facts)
    if facts.get("why_not"):
        raise typer.Exit(DOES_NOT_RUN)


def convert(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    model: o.ModelOption = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Write another program's drafter in this package's layout, for the target --model.

    The drafts stay the same; weights are stored in bfloat16. The folder then works wherever a trained one does
    (--drafter). Without this step --drafter reads the checkpoint just as well.

    \b
    Example:
      dartspec convert ./qwen4b-dart ./drafter --model ./Qwen3-4B
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.interop import checkpoints
    from dartspec.target.load import read_sizes

    sizes = read_sizes(model)
    net = checkpoints.convert(checkpoint, sizes, out, target=sizes.name)
    num_weights = sum(p.numel() for p in net.parameters())
    term.say(f"{out}: a {net.config.method} drafter of {num_weights / 1e6:.1f} million weights for {sizes.name}")
    term.emit({"out": str(out), "method": net.config.method, "num_weights": num_weights, "model": sizes.name})
