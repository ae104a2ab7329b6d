"""`dartspec train`: a drafter for a model, from a config file and flags. Thin: `dartspec.train` does the work.

Every key of `TrainConfig` is a flag; they are made from it, so none is named here.
"""

from __future__ import annotations

import inspect
import json as json_module
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal
from dartspec.errors import DartspecError
from dartspec.train.config import TrainConfig, check_names, read_values
from dartspec.train.watch import View, Watch


def train(
    config: Annotated[Path | None, typer.Argument(help="The same as --config.", show_default=False)] = None,
    config_: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML or JSON file of a training config.", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="KEY=VALUE over the config file; may be repeated.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Three real updates: say memory, tokens/s, hours and disk; write nothing."),
    ] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="With --dry-run: what the run may take, such as 8GB.  [default: what is free]"),
    ] = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
    **flags: Any,
) -> None:
    """Train a drafter for a model.

    Needs a target, data (jsonl files of the target's own answers as token ids) and an output folder, from a config
    file, from flags, or from both: flags win. Ctrl-C is safe: the same command goes on from the last saved step, and
    does nothing where the run is finished. The folder that it names at its end can be given to --drafter.

    --init-from a drafter of the model that the target was fine-tuned from adapts it: M before, updates until M is flat,
    M after; where the difference is within noise the old one is kept.

    Several processes or machines: accelerate launch ... -m dartspec train ...

    \b
    Examples:
      dartspec train --config my-run.yaml
      dartspec train --config my-run.yaml --steps 4000 --dry-run
      dartspec train --target ./my-model --data answers.jsonl --out runs/first
      dartspec train --config my-run.yaml --method eagle3 --out runs/rival
      dartspec train --target ./my-tune --init-from runs/first/best --data its-answers.jsonl --out runs/tuned
    """
    term = Terminal(json=json, no_color=no_color)
    if config is not None and config_ is not None:
        raise DartspecError(f"two training configs were given, {config} and {config_}: give one")
    path = config_ or config
    values = read_values(path) if path is not None else {}
    values |= dict(map(_override, set_ or ()))
    values |= {name: _flag(name, value) for name, value in flags.items() if value not in (None, [])}
    settings = TrainConfig.from_dict(values)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    if limit is not None and not dry_run:
        raise DartspecError("--memory-limit asks what would fit: give it with --dry-run")
    # oneDNN keeps kernel and buffers of the last thousand shapes, and sequences of all lengths would fill gigabytes; it
    # looks here when torch is imported
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")
    from dartspec.api import load
    from dartspec.train.parallel import own_device, own_index
    from dartspec.train.run import train as run

    first = own_index() == 0  # of the processes that a launcher started, the one that speaks
    # the target as transformers has it: training reads its hidden states, and our kernels are for decoding
    lm = load(
        settings.target,
        drafter="none",
        nodes=0,
        dtype=settings.dtype or None,
        device=settings.device or own_device() or None,
        revision=settings.revision or None,
        fast=False,
        on_plan=lambda plan: term.note(str(plan)) if first else None,
    )
    with _watching(term, settings.steps, first and not dry_run) as watch:
        folder = run(
            settings,
            lm.target,
            dry_run=dry_run,
            memory_limit=limit,
            report=term.say,
            watch=watch,
            template_hash=lm.text.template_hash,
        )
    if not dry_run and not finished(Path(settings.out), settings.steps):
        if first:
            term.note(f"what was learned is in {folder}; the same command goes on from there")
        raise KeyboardInterrupt
    if first:
        if not dry_run:
            term.say(f"drafter: {folder}")
            _write_card(folder, Path(settings.out), term)
        term.emit({"drafter": str(folder), "dry_run": dry_run, "config": settings.to_dict()})


def _write_card(folder: Path, out: Path, term: Terminal) -> None:
    """The model card of a drafter that this run left; another's stays as it is."""
    from dartspec.train.card import write_card

    if folder.parent != out:
        return
    try:
        term.say(f"card: {write_card(folder, log=out / 'log.jsonl')}")
    except DartspecError as error:  # without matplotlib
        term.note(f"no card was written: {error}")


@contextmanager
def _watching(term: Terminal, steps: int, wanted: bool) -> Iterator[Watch | None]:
    """A table that stays in place where stdout is a terminal; None elsewhere: the run says lines."""
    if not wanted or not term.out.is_terminal:
        yield None
        return
    from rich.live import Live

    view = View(steps)
    with Live(view, console=term.out, refresh_per_second=2):
        yield view


def finished(out: Path, steps: int) -> bool:
    """Whether a run got to its last step and judged what it leaves. One that Ctrl-C stopped has saved and returned."""
    from dartspec.train.run import read_done

    return int(read_done(out).get("steps", 0)) >= steps


def parse_bytes(text: str) -> int:
    """ "8GB", "500 MB", "2.5GiB" as bytes."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number <= 0:
        raise DartspecError(f"memory limit {text!r} is not a size such as 8GB or 500MiB")
    return int(number * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))


def _override(text: str) -> tuple[str, Any]:
    """KEY=VALUE; the value is JSON where it can be read as such, else a string."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise DartspecError(f"--set {text!r} is not KEY=VALUE, such as steps=4000")
    name = name.replace("-", "_")
    check_names({name: value}, "--set")
    try:
        return name, json_module.loads(value)
    except ValueError:
        return name, value


def _flag(name: str, value: Any) -> Any:
    """A flag's value as a config file would hold it."""
    if name != "options":
        return value
    try:
        return json_module.loads(value)
    except ValueError:
        raise DartspecError(f'--options {value!r} is not a JSON object such as {{"num_blocks": 2}}') from None


def _with_flags() -> None:
    """Gives `train` an option for each key of the config, in the order that they stand there."""
    hints = get_type_hints(TrainConfig)
    plain = inspect.signature(train, eval_str=True)
    kept = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
    made = []
    for f in fields(TrainConfig):
        hint, name = hints[f.name], (f.metadata["flag"] or f.name).replace("_", "-")
        default = f.default if f.name != "options" else {}
        about = f.metadata["about"][0].upper() + f.metadata["about"][1:] + "."
        if default not in ("", (), {}):
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()
            about += f"  [default: {shown}]"
        kind: Any = hint if hint in (str, int, float, bool) else str
        if hint == tuple[str, ...]:
            kind = list[str]
        metavar = {"taps": "N,N,...", "cache_taps": "N,N,...", "betas": "X,X", "options": "JSON"}.get(f.name)
        option = typer.Option(
            f"--{name}/--no-{name}" if hint is bool else f"--{name}", help=about, show_default=False, metavar=metavar
        )
        assert kind is not str or hint is str or get_origin(hint) in (tuple, dict)
        made.append(
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    train.__signature__ = inspect.Signature([*kept, *made])  # type: ignore[attr-defined]


_with_flags()
