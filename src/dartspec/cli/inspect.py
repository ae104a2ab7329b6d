"""`dartspec inspect` and `dartspec convert`: other people's drafters, what they are and as ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal, printable
from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from dartspec.drafters.dart import DartNet
    from dartspec.target.target import Target
    from dartspec.text import Text

DOES_NOT_RUN = 2
CHAIN_TOKENS = 48  # of each answer that the chain is measured on

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
    SpecForge), Medusa, Hydra and DFlash, folders of speculators, and any causal LM as a small model. The exit code is 2
    where it would not run.

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
    to: Annotated[str, typer.Option(help="dartspec, or peagle: a folder of speculators, for vLLM.")] = "dartspec",
    steps: Annotated[
        int | None,
        typer.Option(help="peagle: tokens drafted a round; default: as many as pay, measured on some prompts."),
    ] = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Write a drafter in another layout, for the target --model.

    To this package's own: the drafts stay the same, weights are stored in bfloat16, and the folder works wherever a
    trained one does (--drafter, which reads the checkpoint itself just as well). To peagle: a DART drafter that was
    trained here, for vLLM, which drafts a chain of its first choices, without index and tree. How long a chain pays is
    measured on some prompts, unless --steps says it; that takes about as long as the model takes for 400 tokens.

    \b
    Examples:
      dartspec convert ./qwen4b-dart ./drafter --model ./Qwen3-4B
      dartspec convert ./my-drafter ./for-vllm --model ./my-model --to peagle --steps 4
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.interop import checkpoints
    from dartspec.target.load import read_sizes

    if to not in ("dartspec", "peagle"):
        raise DartspecError(f"--to is {to!r}; it must be dartspec or peagle")
    checkpoints.inspect(checkpoint)  # before the model is looked for
    sizes = read_sizes(model)
    if to == "peagle":
        facts = _to_peagle(checkpoint, out, model, steps)
        if curve := facts["M_as_a_chain"]:
            term.say(f"tokens a round as a chain: {', '.join(f'k = {k} {M:.2f}' for k, M in curve.items())}")
        term.say(f"{out}: for vLLM, {facts['steps']} tokens a round. Serve it with:")
        term.say(f"  {facts['serve']}")
        term.emit(facts)
        return
    net = checkpoints.convert(checkpoint, sizes, out, target=sizes.name)
    num_weights = sum(p.numel() for p in net.parameters())
    term.say(f"{out}: a {net.config.method} drafter of {num_weights / 1e6:.1f} million weights for {sizes.name}")
    term.emit({"out": str(out), "method": net.config.method, "num_weights": num_weights, "model": sizes.name})


def _to_peagle(checkpoint: Path, out: Path, model: str | None, steps: int | None) -> dict[str, Any]:
    from dartspec.drafters.dart import DartNet
    from dartspec.interop import checkpoints
    from dartspec.interop.peagle import export_peagle, unused_token
    from dartspec.target.load import as_target, load_model, read_sizes
    from dartspec.text import Text

    sizes = read_sizes(model)
    net = checkpoints.read(checkpoints.inspect(checkpoint), sizes)
    if not isinstance(net, DartNet):
        raise DartspecError(
            f"{checkpoint} is a drafter of the method {net.config.method}; only dart has the form peagle"
        )
    loaded = load_model(model, dtype="auto", device="cpu")
    text = Text(loaded.tokenizer)
    mask = unused_token(text, sizes.vocab_size)
    name = sizes.name if model is None else str(Path(model).resolve() if Path(model).exists() else model)
    table = loaded.model.get_input_embeddings().weight
    curve: dict[int, float] = {}
    if steps is None:
        from dartspec.bench.lattices import best_chain

        curve = _chain_curve(net, as_target(loaded), text)
        steps = best_chain(curve)
    export_peagle(net, table, out, model=name, architecture=sizes.architecture, mask_token_id=mask, steps=steps)
    return {
        "out": str(out),
        "steps": steps,
        "M_as_a_chain": curve,
        "mask_token_id": mask,
        "model": name,
        "serve": f"vllm serve {out}",
    }


def _chain_curve(net: DartNet, target: Target, text: Text) -> dict[int, float]:
    """Tokens a round by the length of the chain, on the first prompt of each set that the model has room for."""
    from dartspec.api import LM, Chosen
    from dartspec.bench.lattices import chain_curve, recorded
    from dartspec.bench.suites import Prompt, load_suites
    from dartspec.budget import Calibration
    from dartspec.drafters.dart import load
    from dartspec.types import SamplingParams

    lm = LM(target, text, Chosen(load(net, target), "dart", "", Calibration()), 0, "")
    first = [own[0].turns[0] for own in load_suites(["all"], 1).values()]
    ids = [lm.encode([{"role": "user", "content": t}] if text.chat_template else t) for t in first]
    room = target.max_positions - CHAIN_TOKENS
    fitting = [Prompt("", "", ids=tuple(i)) for i in ids if len(i) <= room]
    if not fitting:
        raise DartspecError(f"{target.name} has no room for the prompts that --steps is measured on: give --steps")
    return chain_curve(recorded(lm, fitting, SamplingParams(max_tokens=CHAIN_TOKENS)))
