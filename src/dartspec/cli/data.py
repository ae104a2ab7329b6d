"""`dartspec data`: conversations to training data, and the target's own answers. `dartspec.train` does the work."""

from __future__ import annotations

import json as json_module
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dartspec.cli import options as o
from dartspec.cli.ngram import open_tokenizer
from dartspec.cli.terminal import Terminal
from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from dartspec.train.data import FileInfo

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help=(
        "Training data: token ids, which of them the assistant wrote, and what they were made with.\n\n"
        "\b\nExamples:\n"
        "  dartspec data prepare chats.jsonl --model ./my-model --out data.jsonl\n"
        "  dartspec data regenerate prompts.jsonl --model ./my-model --out answers.jsonl\n"
        "  dartspec data info data.jsonl"
    ),
)

OutOption = Annotated[Path, typer.Option("--out", "-o", help="The JSONL file to write.", show_default=False)]
SplitOption = Annotated[str, typer.Option(help="Split of a data set.")]
ArgumentOption = Annotated[
    list[str] | None,
    typer.Option("--template", "-t", help="KEY=VALUE for the chat template (enable_thinking=false); may be repeated."),
]
SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Files (.jsonl, .json: chat messages, ShareGPT, Alpaca, prompt and answer; others: plain text), folders "
        "of data sets, or OWNER/NAME of the hub.",
        show_default=False,
    ),
]


@app.command()
def prepare(
    sources: SourcesArgument,
    out: OutOption,
    model: o.ModelOption = None,
    template: ArgumentOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest example.")] = 2048,
    min_answer: Annotated[int, typer.Option(help="Fewest answer tokens of an example.")] = 2,
    long: Annotated[str, typer.Option(help="cut or drop conversations longer than --max-tokens.")] = "cut",
    split: SplitOption = "train",
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Turn conversations into token ids with the target's own chat template.

    Says how many tokens carry loss, what was dropped and why. Beside OUT lies OUT.info.json, which training checks.

    \b
    Examples:
      dartspec data prepare chats.jsonl more.json --model ./my-model --out data.jsonl
      dartspec data prepare owner/dataset --split train --out data.jsonl
      dartspec data prepare chats.jsonl --template enable_thinking=false --out data.jsonl
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.train.conversations import Limits
    from dartspec.train.conversations import prepare as run

    limits, arguments = Limits(max_tokens, min_answer, long), _arguments(template)
    info = run(
        sources, open_tokenizer(model), out, arguments=arguments, limits=limits, split=split, target=_name(model)
    )
    _show(term, out, info)
    term.emit({"data": str(out), "info": json_module.loads(info.path_of(out).read_text(encoding="utf-8"))})


@app.command()
def regenerate(
    sources: SourcesArgument,
    out: OutOption,
    model: o.ModelOption = None,
    template: ArgumentOption = None,
    temperatures: Annotated[str, typer.Option(help="Shared out over the prompts by their ids.")] = "0,0.7",
    batch: Annotated[int, typer.Option(min=1, help="Answers written at a time.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 208,
    max_prompt: Annotated[int, typer.Option(min=1, help="Longer prompts (in tokens) are left out.")] = 176,
    last: Annotated[bool, typer.Option("--last", help="Ask a conversation's last answer anew, not its first.")] = False,
    drafter: Annotated[str, typer.Option(help="none, or a drafter that helps; the answers are the same.")] = "none",
    nodes: o.NodesOption = "auto",
    endpoint: Annotated[str | None, typer.Option(help="Address of an OpenAI-compatible server that answers.")] = None,
    served_model: Annotated[str | None, typer.Option(help="Its name there; default: the first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent to the server.", envvar="OPENAI_API_KEY")] = None,
    split: SplitOption = "train",
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Let the target answer prompts itself: drafts for its own words are kept far more often.

    Ctrl-C is safe: the same command goes on. Answers are cut where they loop. With --endpoint a server answers, and
    --model is only read for its tokenizer, which checks every answer.

    \b
    Examples:
      dartspec data regenerate prompts.jsonl --model ./my-model --out answers.jsonl
      dartspec data regenerate chats.jsonl --temperatures 0,0.7,1 --batch 64 --out answers.jsonl
      dartspec data regenerate prompts.jsonl --endpoint http://localhost:8000 --out answers.jsonl
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.train.conversations import refuse_own_source
    from dartspec.train.regenerate import from_server, from_target, read_asks
    from dartspec.train.regenerate import regenerate as run

    try:
        mix = [float(t) for t in temperatures.split(",")]
    except ValueError:
        raise DartspecError(f"--temperatures is {temperatures!r}; it must be numbers such as 0,0.7") from None
    if endpoint is None and served_model is not None:
        raise DartspecError("--served-model names a server's model: give --endpoint as well, or leave it out")
    for name, given in (
        ("--drafter", drafter != "none"),
        ("--nodes", nodes != "auto"),
        ("--dtype", dtype is not None),
        ("--device", device is not None),
        ("--threads", threads is not None),
    ):
        if endpoint is not None and given:
            raise DartspecError(
                f"{name} is of the model in this process, and with --endpoint a server answers: drop one"
            )
    if nodes != "auto" and drafter == "none":
        raise DartspecError("--nodes is a drafter's, and --drafter is none: give a drafter, or leave --nodes out")
    arguments = _arguments(template)
    refuse_own_source(out, sources)
    asks = sorted(read_asks(sources, split, last), key=lambda ask: ask.id)
    if not asks:
        raise DartspecError(f"no prompt in {', '.join(sources)}: give files that hold at least one")
    random.Random(0).shuffle(asks)  # sets mixed, so that a run stopped half-way has some of each
    if endpoint is None:
        from dartspec.api import load

        count = int(nodes) if nodes.isdigit() else nodes
        lm = load(
            model,
            drafter=drafter,
            nodes=0 if drafter == "none" else count,
            dtype=dtype,
            device=device,
            threads=threads,
            on_plan=lambda plan: term.note(str(plan)),
        )
        term.note(lm.fast_note)
        text, answers = lm.text, from_target(lm.target, batch, lm.drafter, lm.controller)
    else:
        text = open_tokenizer(model)
        answers = from_server(_post(endpoint, served_model, api_key), text, batch)
    info = run(
        answers,
        text,
        asks,
        out,
        temperatures=mix,
        max_tokens=max_tokens,
        max_prompt=max_prompt,
        arguments=arguments,
        target=_name(model) if endpoint is None else f"{_name(model)} at {endpoint}",
        sources=sources,
        log=sys.stderr,
    )
    _show(term, out, info)
    term.emit({"data": str(out), "info": json_module.loads(info.path_of(out).read_text(encoding="utf-8"))})


@app.command("info")
def show_info(
    files: Annotated[list[Path], typer.Argument(help="Files of token ids.", show_default=False)],
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Say what files of training data hold and what they were made with.

    \b
    Example:
      dartspec data info answers.jsonl --json
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.train.conversations import reread
    from dartspec.train.data import FileInfo

    shown = []
    for path in files:
        if not path.is_file():
            raise DartspecError(f"{path}: no such file; give a JSONL file of token ids")
        info, found = FileInfo.read(path), reread([path])
        if info is None:
            term.say(f"{path}: no info file beside it, so training cannot check its tokenizer or template")
            _table(term, found)
        else:
            _show(term, path, info)
        shown.append({"data": str(path), "found": found, "has_info": info is not None})
    term.emit({"files": shown})


def _show(term: Terminal, path: Path, info: FileInfo) -> None:
    term.say(
        f"{path}: made by {info.made_by} for tokenizer {info.tokenizer_fingerprint}, template "
        f"{info.template_hash or 'none'} with {info.template_arguments or 'no arguments'}; loss on "
        f"{info.mask or 'every token'}"
    )
    _table(term, info.counts)
    for title, reasons in (("dropped", info.dropped), ("not written by the template", info.not_rendered)):
        for reason, n in sorted(reasons.items(), key=lambda pair: -pair[1])[:12]:
            term.say(f"{title}: {n:,} x {reason}")


def _table(term: Terminal, counts: dict[str, int]) -> None:
    table = Table(box=None, show_header=False)
    for name, n in counts.items():
        table.add_row(name.replace("_", " "), f"{n:,}")
    term.out.print(table)


def _arguments(template: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in template or ():
        key, sign, value = text.partition("=")
        if not sign or not key.isidentifier():
            raise DartspecError(f"--template {text!r} is not KEY=VALUE, such as enable_thinking=false")
        try:
            found[key] = json_module.loads(value)
        except ValueError:
            found[key] = value
    return found


def _name(model: str | None) -> str:
    return Path(model).name if model else "the default model"


def _post(url: str, model: str | None, key: str | None) -> Any:
    from dartspec.bench.endpoint import Server
    from dartspec.train.regenerate import RefusedError

    server = Server(url, model, key)
    name = server.model_name()

    def post(body: Any) -> Any:
        answer = server.request("POST", "/v1/completions", {"model": name, **body})
        content = answer.read()
        if answer.status != 200:
            said = " ".join(content.decode("utf-8", "replace").split())[:200]
            kind = RefusedError if answer.status in (400, 422) else DartspecError
            raise kind(f"{url}/v1/completions answers HTTP {answer.status}: {said}")
        try:
            return json_module.loads(content)
        except ValueError as error:
            raise DartspecError(f"{url}/v1/completions answers something other than JSON ({error})") from None

    return post
