"""Flags that several verbs share, and what they mean: loading, sampling, where output goes.

A flag that was not given is None: the defaults are those of `load` and `SamplingParams`, and stand nowhere else.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dartspec.cli.terminal import Terminal, quiet_libraries
from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from dartspec.api import LM
    from dartspec.types import SamplingParams

_debug = False


def forget() -> None:
    """A new run begins."""
    global _debug
    _debug = False


def debugging() -> bool:
    return _debug


def _set_debug(value: bool) -> None:
    global _debug
    _debug = _debug or value
    quiet_libraries(_debug)


ModelArgument = Annotated[
    str | None,
    typer.Argument(help="Folder, hub id or GGUF file; without one, the small default model.", show_default=False),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder, hub id or GGUF file; without one, the small default model."),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        help="auto, a method (dart, prompt_lookup, mix, none, ...), a folder (a trained drafter, another program's "
        "checkpoint, a smaller model), or several of these joined by +. Settings follow a name: dart,d=4,top_k=10."
    ),
]
IndexOption = Annotated[
    str,
    typer.Option(help="N-gram index file, auto (the one beside the drafter) or none."),
]
NodesOption = Annotated[
    str,
    typer.Option(help="Draft tokens a tree may have, or auto: measured once on this machine."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; default: bfloat16 where the machine computes in it."),
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU where there is one.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's own choice.")]
FastOption = Annotated[
    bool, typer.Option("--fast/--no-fast", help="Our own CPU kernels where they apply, or stock transformers.")
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with a hub model.")]

TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 always takes the likeliest token (the default).")
]
TopKOption = Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens only; 0 is off.")]
TopPOption = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens of this share, in (0, 1].")]
MinPOption = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest, in [0, 1].")]
RepetitionOption = Annotated[
    float | None, typer.Option("--repetition-penalty", help="Above 1 discourages tokens seen before; 1 is off.")
]
PresenceOption = Annotated[
    float | None, typer.Option("--presence-penalty", help="Subtracted once from tokens already written; 0 is off.")
]
FrequencyOption = Annotated[
    float | None, typer.Option("--frequency-penalty", help="Subtracted for each time a token was written; 0 is off.")
]
BiasOption = Annotated[
    list[str] | None, typer.Option("--logit-bias", help="ID=NUMBER added to a token's logit; may be repeated.")
]
SeedOption = Annotated[
    int | None, typer.Option(help="The same seed gives the same text; without one, a fresh one that is reported.")
]
MaxTokensOption = Annotated[int | None, typer.Option("--max-tokens", "-n", help="New tokens at most.")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")]
StopIdOption = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="End with this token id; may be repeated.")
]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the model's end-of-text token.")]
LogprobsOption = Annotated[
    int | None, typer.Option(help="Report each token's log-probability and this many alternatives.")
]

SystemOption = Annotated[str | None, typer.Option(help="System message; default: the chat template's own.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For machines: the last line of stdout is one JSON object.")]
NoColorOption = Annotated[bool, typer.Option("--no-color", help="No colours (also: the variable NO_COLOR).")]
DebugOption = Annotated[
    bool,
    typer.Option("--debug", callback=_set_debug, is_eager=True, help="Tracebacks, and the libraries' own messages."),
]


@dataclass(frozen=True)
class Loading:
    """The flags that `load` takes."""

    model: str | None
    drafter: str = "auto"
    index: str = "auto"
    nodes: str = "auto"
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    fast: bool = True
    revision: str | None = None
    trust_remote_code: bool = False

    def load(self, term: Terminal) -> LM:
        """The model, with the memory plan before and the choice of drafter after it on stderr."""
        nodes = self._nodes()
        term.note(f"loading {self.model or 'the default model'}")
        from dartspec.api import load

        lm = load(
            self.model,
            drafter=self.drafter,
            index=None if self.index == "none" else self.index,
            nodes=nodes,
            dtype=self.dtype,
            device=self.device,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            threads=self.threads,
            fast=self.fast,
            on_plan=lambda plan: term.note(str(plan)),
        )
        size = "as many nodes as pay" if lm.nodes == "auto" else f"{lm.nodes} nodes a tree"
        if self.drafter != "none":
            term.note(f"{lm.drafter_note}; {size}")
        if lm.nodes == "auto" and lm.drafter_name != "none" and not lm.is_measured:
            term.note("measuring this machine, once; it takes about ten seconds")
            lm.times()
        return lm

    def _nodes(self) -> int | str:
        if self.nodes == "auto":
            return "auto"
        try:
            return int(self.nodes)
        except ValueError:
            raise DartspecError(f"nodes is {self.nodes!r}; it must be auto or a whole number") from None


def sampling(bias: list[str] | None = None, **given: Any) -> SamplingParams:
    """SamplingParams of the flags that were given."""
    from dartspec.types import SamplingParams

    if bias:
        given["logit_bias"] = dict(map(_bias, bias))
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise DartspecError(f"logit bias {text!r} is not ID=NUMBER, such as 42=-5") from None


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, from stdin for `-`, or from a file."""
    if (prompt is None) == (file is None):
        found = "neither" if prompt is None else "both"
        raise DartspecError(f"a prompt or --file is needed, found {found}: give one of them (- reads stdin)")
    try:
        if file is not None:
            prompt = file.read_text(encoding="utf-8")
        elif prompt == "-":
            prompt = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DartspecError(f"the prompt is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise DartspecError(f"{file} cannot be read: {error.strerror}") from error
    assert prompt is not None
    if not prompt.strip():
        raise DartspecError("the prompt is empty: give at least one word")
    return prompt


def provenance(lm: LM, seed: int | None) -> dict[str, Any]:
    """What a figure depends on: versions, machine, model, settings and the command."""
    from dartspec.bench.provenance import provenance as of

    return of(
        device=str(lm.target.device),
        dtype=str(lm.target.dtype).removeprefix("torch."),
        kernels=lm.fast_note,
        model=lm.target.name,
        weights_fingerprint=lm.target.weights_fingerprint,
        drafter=lm.drafter_name,
        nodes=lm.nodes,
        seed=seed,
    )
