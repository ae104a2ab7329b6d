"""`dartspec ngram`: build an index of which token follows which, look into it, ask it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal, printable
from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from dartspec.text import Text

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help=(
        "The n-gram index: which token follows which in ordinary text.\n\n"
        "DART ranks its guesses by how well they follow one another in such text. An index belongs to one "
        "tokenizer.\n\n"
        "\b\nExamples:\n"
        "  dartspec ngram build notes/ answers.jsonl --out my.ngram\n"
        "  dartspec ngram info my.ngram\n"
        '  dartspec ngram query my.ngram "in the middle of"'
    ),
)

TokenizerOption = Annotated[
    str | None,
    typer.Option("--tokenizer", "-m", help="The model's folder, hub id or GGUF file; default: the default model."),
]
IndexArgument = Annotated[Path, typer.Argument(help="Index file.", show_default=False)]


@app.command()
def build(
    sources: Annotated[
        list[str], typer.Argument(help="Text or jsonl files (also .gz), or folders of them.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The index file to write.")],
    tokenizer: TokenizerOption = None,
    order: Annotated[int, typer.Option(help="Longest gram: 3 looks two tokens back.")] = 3,
    min_count: Annotated[int, typer.Option(help="Leave out grams counted less often.")] = 1,
    exact: Annotated[bool, typer.Option("--exact", help="Exact counts instead of 8-bit log-probabilities.")] = False,
    description: Annotated[str | None, typer.Option(help="What the text was; kept in the file.")] = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Count the grams of some text and write an index.

    Files: .txt, .md and .py (one document each), .jsonl (records with `text`, `messages`, or `response` token ids).
    The best text is the target's own answers. The file is written aside and renamed when complete.

    \b
    Examples:
      dartspec ngram build answers.jsonl --out my.ngram
      dartspec ngram build docs/ src/ --tokenizer ./my-model --min-count 2 --out my.ngram
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.ngram.corpus import list_files, read_documents
    from dartspec.ngram.index import NgramIndex

    if out.parent != Path() and not out.parent.is_dir():
        raise DartspecError(f"the folder {out.parent} does not exist: make it, or choose another --out")
    files = list_files(sources)
    text = open_tokenizer(tokenizer)
    began = time.monotonic()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=term.err, transient=True) as progress:
        task = progress.add_task(f"reading {len(files)} files")
        num_documents, num_tokens = 0, 0

        def counted() -> Iterator[Any]:
            nonlocal num_documents, num_tokens
            for document in read_documents(files, lambda texts: encode_all(text, texts)):
                num_documents, num_tokens = num_documents + 1, num_tokens + len(document)
                progress.update(task, description=f"counting: {num_documents:,} documents, {num_tokens:,} tokens")
                yield document
            progress.update(task, description=f"building the index of {num_tokens:,} tokens")

        index = NgramIndex.build(
            counted(),
            order=order,
            vocab_size=text.num_tokens,
            fingerprint=text.fingerprint,
            name=str(tokenizer or "smollm2"),
            description=description or ", ".join(Path(s).name for s in sources),
            exact=exact,
            min_count=min_count,
            exclude=text.special_ids,
        )
        progress.update(task, description=f"writing {out}")
        index.save(out)
    seconds = time.monotonic() - began
    info = index.info()
    term.say(
        f"{out}: {info['num_nodes']:,} nodes from {num_documents:,} documents of {num_tokens:,} tokens, "
        f"{info['index_bytes'] / max(1, info['num_nodes']):.2f} bytes a node, {seconds:.1f} s"
    )
    term.emit({**info, "num_documents": num_documents, "num_tokens": num_tokens, "build_s": round(seconds, 2)})


@app.command()
def info(
    index: IndexArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every section too.")] = False,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Say what is in an index file.

    \b
    Examples:
      dartspec ngram info my.ngram
      dartspec ngram info my.ngram --verify
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.ngram.index import NgramIndex

    facts = NgramIndex.open(index, verify=verify).info()
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
    if verify:
        table.add_row("checked", "every section is whole")
    term.out.print(table)
    term.emit({**facts, "verified": verify})


@app.command()
def query(
    index: IndexArgument,
    context: Annotated[str, typer.Argument(help="Text; its last tokens are looked up.", show_default=False)],
    top: Annotated[int, typer.Option(min=1, help="How many continuations.")] = 10,
    tokenizer: TokenizerOption = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Show which tokens follow a piece of text, likeliest first.

    \b
    Examples:
      dartspec ngram query my.ngram "once upon a"
      dartspec ngram query my.ngram "import numpy" --top 5 --tokenizer ./my-model
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.ngram.index import NgramIndex

    opened = NgramIndex.open(index)
    text = open_tokenizer(tokenizer)
    if opened.fingerprint != text.fingerprint:
        raise DartspecError(
            f"index {index} is for tokenizer {opened.fingerprint} ({opened.info()['name']}), this one is "
            f"{text.fingerprint}: give the right --tokenizer"
        )
    ids = text.encode(context)
    if not ids:
        raise DartspecError("the context is empty: give at least one word")
    used = ids[-(opened.order - 1) :] if opened.order > 1 else []
    found = [
        {"token": text.decode([i], skip_special=False), "id": i, "probability": p}
        for i, p in opened.continuations(ids, top)
    ]
    term.say(f"after {printable(text.decode(used, skip_special=False))!r}:" if found else "nothing follows it here")
    table = Table(show_header=False, box=None)
    for entry in found:
        table.add_row(f"{entry['probability']:.4f}", printable(repr(entry["token"])), str(entry["id"]))
    if found:
        term.out.print(table)
    term.emit({"context": used, "continuations": found})


def open_tokenizer(source: str | None) -> Text:
    """The tokenizer of a folder, hub id or GGUF file, without the model's weights; None for the default model's."""
    from dartspec.target.load import DEFAULT_NAME, default_file, read_gguf_header
    from dartspec.text import Text, load_tokenizer

    path = default_file() if source in (None, DEFAULT_NAME) else Path(str(source))
    if path.is_file() and path.suffix == ".gguf":
        header = read_gguf_header(path)
        return Text(load_tokenizer(path.parent, gguf_file=path.name, gguf_pre=header.pre))
    return Text(load_tokenizer(str(source)))


def encode_all(text: Text, texts: list[str]) -> list[list[int]]:
    """Many texts at once, on all of the tokenizer's threads; no special tokens, nothing cut."""
    encoded = text.tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)
    return list(encoded["input_ids"])
