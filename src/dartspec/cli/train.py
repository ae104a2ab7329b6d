"""`dartspec train`: a drafter for a model, from a config file and overrides. Thin: `dartspec.train` does the work."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal
from dartspec.errors import DartspecError


def train(
    config: Annotated[Path | None, typer.Argument(help="JSON file of a training config.", show_default=False)] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="KEY=VALUE over the config file; may be repeated.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", help="Which drafter to train; one with weights.  [default: dart]", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how much data, memory and time it takes; write nothing.")
    ] = False,
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Train a drafter for a model.

    Needs a target, data (jsonl files of the target's own answers as token ids) and an output folder. Ctrl-C is safe:
    the same command goes on from the last saved step. The folder OUT/latest can be given to --drafter.

    \b
    Examples:
      dartspec train my-run.json
      dartspec train my-run.json --set steps=4000 --dry-run
      dartspec train --set target=./my-model --set data=answers.jsonl --set out=runs/first
      dartspec train my-run.json --method eagle3 --set out=runs/rival
    """
    term = Terminal(json=json, no_color=no_color)
    values = {**_from_file(config), **dict(map(_override, set_ or ()))}
    if method is not None:
        values["method"] = method
    if isinstance(values.get("data"), str):
        values["data"] = [values["data"]]
    for name in ("target", "data", "out"):
        values.setdefault(name, "")
    from dartspec.api import load
    from dartspec.train.config import TrainConfig
    from dartspec.train.run import train as run

    settings = TrainConfig.from_dict(values)
    # the target as transformers has it: training reads its hidden states, and our kernels are for decoding
    lm = load(
        settings.target,
        drafter="none",
        nodes=0,
        dtype=dtype,
        device=device,
        fast=False,
        on_plan=lambda plan: term.note(str(plan)),
    )
    folder = run(settings, lm.target, dry_run=dry_run, report=term.say, template_hash=lm.text.template_hash)
    if not dry_run:
        if not finished(folder.parent, settings.steps):
            term.note(f"what was learned is in {folder}; the same command goes on from there")
            raise KeyboardInterrupt
        term.say(f"drafter: {folder}")
    term.emit({"drafter": str(folder), "dry_run": dry_run, "config": settings.to_dict()})


def finished(out: Path, steps: int) -> bool:
    """Whether a run got to its last step: it is evaluated there. A run that Ctrl-C stopped has saved and returned."""
    try:
        records = [json_module.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return False
    return any(r.get("eval", {}).get("step", 0) >= steps for r in records)


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = json_module.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DartspecError(f"the training config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DartspecError(f"the training config {path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DartspecError(f"the training config {path} holds a {type(values).__name__}, expected a JSON object")
    return values


def _override(text: str) -> tuple[str, Any]:
    """KEY=VALUE; the value is JSON where it can be read as such, else a string."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise DartspecError(f"--set {text!r} is not KEY=VALUE, such as steps=4000")
    try:
        return key.replace("-", "_"), json_module.loads(value)
    except ValueError:
        return key.replace("-", "_"), value
