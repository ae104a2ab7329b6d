"""`dartspec ngram`: make an index of which token follows which, look into it, ask it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal, printable
from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from dartspec.ngram.build import Built, Tokens
    from dartspec.ngram.build import Progress as Step
    from dartspec.text import Text

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help=(
        "The n-gram index: which token follows which in ordinary text.\n\n"
        "DART ranks its guesses by how well they follow one another in such text. An index belongs to one "
        "tokenizer.\n\n"
        "\b\nExamples:\n"
        "  dartspec ngram build notes/ --answers answers.jsonl --out my.ngram\n"
        "  dartspec ngram info my.ngram\n"
        '  dartspec ngram query my.ngram "in the middle of"'
    ),
)

TokenizerOption = Annotated[
    str | None,
    typer.Option("--tokenizer", "-m", help="The model's folder, hub id or GGUF file; default: the default model."),
]
IndexArgument = Annotated[Path, typer.Argument(help="Index file.", show_default=False)]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="The index file to write.")]
MinCountOption = Annotated[int, typer.Option(min=1, help="Leave out grams counted less often.")]
ExactOption = Annotated[bool, typer.Option("--exact", help="Exact counts instead of 8-bit log-probabilities.")]
DescriptionOption = Annotated[str | None, typer.Option(help="What the text was; kept in the file.")]
MemoryOption = Annotated[str, typer.Option(help="Memory that is not exceeded, the program's own included.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads; default: all cores.", show_default=False)]


@app.command()
def build(
    out: OutOption,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files of text, jsonl or parquet, folders of them, token ids (.npy, .bin), or hf:NAME for a data set.",
            show_default=False,
        ),
    ] = None,
    answers: Annotated[
        list[str] | None,
        typer.Option("--answers", help="The target's own answers (jsonl with `response`); loops are cut."),
    ] = None,
    answers_weight: Annotated[int, typer.Option(min=1, help="How many times a gram of the answers counts.")] = 64,
    tokenizer: TokenizerOption = None,
    order: Annotated[int, typer.Option(min=2, max=5, help="Longest gram: 3 looks two tokens back.")] = 3,
    min_count: MinCountOption = 1,
    exact: ExactOption = False,
    description: DescriptionOption = None,
    column: Annotated[str, typer.Option(help="Column of tables and data sets that holds the text.")] = "text",
    memory: MemoryOption = "2G",
    threads: ThreadsOption = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Count the grams of some text and write an index.

    Files: .txt, .md and .py (one document each), .jsonl (records with `text`, `messages`, or `response` token ids),
    also .gz and .zst; .parquet; .npy and .bin with token ids. The best text is the target's own answers: give them by
    --answers. An interrupted build goes on where it was when the same command is given again. The file is written
    aside and renamed when complete.

    \b
    Examples:
      dartspec ngram build --answers answers.jsonl --out my.ngram
      dartspec ngram build docs/ src/ --answers answers.jsonl --answers-weight 64 --min-count 2 --out my.ngram
      dartspec ngram build hf:roneneldan/TinyStories --tokenizer ./my-model --memory 4G --out my.ngram
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.accounting import loop_start
    from dartspec.ngram import build as building
    from dartspec.ngram.corpus import Reader, list_sources

    if not sources and not answers:
        raise DartspecError("nothing to count: give files, folders or data sets, or --answers FILE.jsonl")
    check_out(out)
    limit = building.parse_bytes(memory)
    groups = []
    for names, weight in ((answers, answers_weight), (sources, 1)):
        if names:
            groups.append((list_sources(names), weight))
    text = open_tokenizer(tokenizer)
    name = str(tokenizer or "smollm2")
    reader = Reader(
        text.encode_all,
        column=column,
        id_bits=16 if text.num_tokens <= 1 << 16 else 32,
        overlap=order - 1,
        clip=lambda ids: ids[: loop_start(ids)],
    )
    parts = [f"answers x {answers_weight}"] if answers and sources else []
    parts += [Path(s).name for s in (*(answers or ()), *(sources or ()))]
    with shown(term) as watch:
        built = building.build_index(
            groups,
            out,
            reader=reader,
            tokens=tokens_of(text, name),
            order=order,
            description=description or ", ".join(parts),
            exact=exact,
            min_count=min_count,
            memory=limit,
            threads=threads,
            watch=watch,
        )
    fresh = built.num_tokens - built.taken_up
    facts = built.index.info()
    again = f" ({built.taken_up:,} of them counted before an interruption)" if built.taken_up else ""
    term.say(f"{out}: {size_line(facts)}")
    term.say(
        f"{built.num_documents:,} documents, {built.num_tokens:,} tokens{again}: tokenizer {built.encode_s:.1f} s, "
        f"counting {rate(fresh, built.count_s)}, merging and writing {rate(built.num_tokens, built.merge_s)}, "
        f"{built.peak_memory / 2**20:,.0f} MiB at most"
    )
    term.emit({**facts, **made(built)})


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
    for label, value in described(facts):
        table.add_row(label, printable(value))
    if verify:
        table.add_row("checked", "every section is whole")
    term.out.print(table)
    term.emit({**facts, "verified": verify})


@app.command()
def verify(
    index: IndexArgument,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Read a whole index and check it: every checksum, every order, every bound.

    \b
    Examples:
      dartspec ngram verify my.ngram
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.ngram.index import NgramIndex

    began = time.monotonic()
    opened = NgramIndex.open(index, verify=True)
    seconds = time.monotonic() - began
    term.say(f"{index}: every section is whole ({size_line(opened.info())}, {seconds:.1f} s)")
    term.emit({**opened.info(), "verified": True, "verify_s": round(seconds, 3)})


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
    """Show which tokens follow a piece of text, likeliest first, and how much of the text each was seen after.

    \b
    Examples:
      dartspec ngram query my.ngram "once upon a"
      dartspec ngram query my.ngram "import numpy" --top 5 --tokenizer ./my-model
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec import _core
    from dartspec.ngram.index import NgramIndex, as_ids

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
    ranked = opened.continuations(ids, top)
    lengths = _core.context_lengths(opened.core, as_ids(ids), as_ids([i for i, _ in ranked]))
    found: list[dict[str, Any]] = [
        {"token": text.decode([i], skip_special=False), "id": i, "probability": p, "context_tokens": n}
        for (i, p), n in zip(ranked, lengths, strict=True)
    ]
    used = ids[-(opened.order - 1) :]
    term.say(f"after {printable(repr(text.decode(used, skip_special=False)))}:" if found else "nothing follows it here")
    table = Table("probability", "token", "seen after", "id", box=None, pad_edge=False)
    for entry in found:
        seen = text.decode(ids[-entry["context_tokens"] :], skip_special=False)
        table.add_row(
            percent(entry["probability"]),
            printable(repr(entry["token"])),
            printable(repr(seen)) + ("" if entry["context_tokens"] == len(used) else " (shorter)"),
            str(entry["id"]),
        )
    if found:
        term.out.print(table)
    term.emit({"context": used, "continuations": found})


@app.command()
def prune(
    index: IndexArgument,
    out: OutOption,
    min_count: MinCountOption = 1,
    exact: ExactOption = False,
    description: DescriptionOption = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Leave out rare grams, or turn exact counts into 8-bit log-probabilities.

    Counts of an 8-bit index are estimates, so that grams near --min-count may fall on either side.

    \b
    Examples:
      dartspec ngram prune big.ngram --min-count 3 --out small.ngram
      dartspec ngram prune exact.ngram --out quantised.ngram
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.ngram.build import prune as pruned
    from dartspec.ngram.index import NgramIndex

    check_out(out)
    before = NgramIndex.open(index).num_nodes
    facts = pruned(index, out, min_count=min_count, exact=exact, description=description).info()
    term.say(f"{out}: {size_line(facts)}, {facts['num_nodes'] / max(1, before):.0%} of {index}'s")
    term.emit({**facts, "num_nodes_before": before})


@app.command()
def merge(
    parts: Annotated[
        list[Path], typer.Argument(help="Indexes, and folders of shards of a counting pipeline.", show_default=False)
    ],
    out: OutOption,
    weight: Annotated[
        list[int] | None,
        typer.Option("--weight", "-w", help="How many times each part counts; one for each, in order."),
    ] = None,
    tokenizer: TokenizerOption = None,
    order: Annotated[int, typer.Option(min=2, max=5, help="Of shards without an index beside them.")] = 3,
    min_count: MinCountOption = 1,
    exact: ExactOption = False,
    description: DescriptionOption = None,
    memory: MemoryOption = "2G",
    threads: ThreadsOption = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Join indexes of one tokenizer and order, each with a weight.

    Counts of an 8-bit index are estimates; exact ones and shards are added up to the last count.

    \b
    Examples:
      dartspec ngram merge corpus.ngram answers.ngram --weight 1 --weight 64 --out both.ngram
      dartspec ngram merge shards/ --tokenizer ./my-model --out corpus.ngram
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.ngram import build as building

    check_out(out)
    weights = weight or [1] * len(parts)
    if len(weights) != len(parts):
        raise DartspecError(f"{len(weights)} --weight for {len(parts)} parts: give one for each, in order, or none")
    limit = building.parse_bytes(memory)
    only_shards = all(p.is_dir() or p.suffix == building.SHARD_SUFFIX for p in parts)
    with shown(term) as watch:
        built = building.join(
            list(zip(parts, weights, strict=True)),
            out,
            tokens=tokens_of(open_tokenizer(tokenizer), str(tokenizer or "smollm2")) if only_shards else None,
            order=order if only_shards else None,
            description=description,
            exact=exact,
            min_count=min_count,
            memory=limit,
            threads=threads,
            watch=watch,
        )
    facts = built.index.info()
    term.say(f"{out}: {size_line(facts)}, {built.count_s + built.merge_s:.1f} s")
    term.emit({**facts, **made(built)})


@app.command("import")
def import_(
    trie: Annotated[Path, typer.Argument(help="Index file of the official program (.trie).", show_default=False)],
    out: OutOption,
    tokenizer: TokenizerOption = None,
    min_count: MinCountOption = 1,
    exact: Annotated[
        bool, typer.Option("--exact/--quantised", help="The counts themselves, or 8-bit log-probabilities.")
    ] = False,
    description: DescriptionOption = None,
    memory: MemoryOption = "2G",
    threads: ThreadsOption = None,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Turn an index of the official DART program into one of ours, in one pass and bounded memory.

    Such a file does not say for which tokenizer it was built: --tokenizer is taken at its word.

    \b
    Examples:
      dartspec ngram import full.trie --tokenizer Qwen/Qwen3-4B --out full.ngram
    """
    term = Terminal(json=json, no_color=no_color)
    from dartspec.interop.official import convert_trie
    from dartspec.ngram.build import parse_bytes

    check_out(out)
    limit = parse_bytes(memory)
    name = str(tokenizer or "smollm2")
    with shown(term) as watch:
        built = convert_trie(
            trie,
            out,
            tokens=tokens_of(open_tokenizer(tokenizer), name),
            description=description or f"imported from {trie.name}",
            exact=exact,
            min_count=min_count,
            memory=limit,
            threads=threads,
            watch=watch,
        )
    facts = built.index.info()
    share = facts["index_bytes"] / max(1, trie.stat().st_size)
    term.say(f"{out}: {size_line(facts)}, {share:.0%} of {trie.name}, {built.count_s + built.merge_s:.1f} s")
    term.emit({**facts, **made(built)})


# -- helpers ---------------------------------------------------------------------------------------------------------


def open_tokenizer(source: str | None) -> Text:
    """The tokenizer of a folder, hub id or GGUF file, without the model's weights; None for the default model's."""
    from dartspec.target.load import DEFAULT_NAME, default_file, read_gguf_header
    from dartspec.text import Text, load_tokenizer

    path = default_file() if source in (None, DEFAULT_NAME) else Path(str(source))
    if path.is_file() and path.suffix == ".gguf":
        header = read_gguf_header(path)
        return Text(load_tokenizer(path.parent, gguf_file=path.name, gguf_pre=header.pre))
    return Text(load_tokenizer(str(source)))


def tokens_of(text: Text, name: str) -> Tokens:
    from dartspec.ngram.build import Tokens

    return Tokens(text.num_tokens, text.fingerprint, name, text.special_ids)


def check_out(out: Path) -> None:
    if out.parent != Path() and not out.parent.is_dir():
        raise DartspecError(f"the folder {out.parent} does not exist: make it, or choose another --out")
    if out.is_dir():
        raise DartspecError(f"{out} is a folder: give the name of the file to write as --out")


@contextmanager
def shown(term: Terminal) -> Iterator[Callable[[Step], None]]:
    """A bar with rate and time left on a terminal; for piped output nothing."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=term.err, transient=True) as bars:
        task = bars.add_task("starting", total=None)
        stage, began, tokens_then = "", time.monotonic(), 0

        def watch(step: Step) -> None:
            nonlocal stage, began, tokens_then
            if step.stage != stage:
                stage, began, tokens_then = step.stage, time.monotonic(), step.num_tokens
                bars.reset(task, total=step.total)
            label = step.stage
            if step.stage == "counting":
                label += f" {step.num_tokens:,} tokens, {rate(step.num_tokens - tokens_then, time.monotonic() - began)}"
            bars.update(task, description=label, completed=step.done, total=step.total)

        yield watch


def rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / max(seconds, 1e-9) / 1e6:.1f} M tokens/s" if num_tokens else "nothing"


def made(built: Built) -> dict[str, Any]:
    return {
        "num_documents": built.num_documents,
        "num_tokens": built.num_tokens,
        "taken_up": built.taken_up,
        "spilled_bytes": built.spilled_bytes,
        "peak_memory_bytes": built.peak_memory,
        **{name: round(getattr(built, name), 3) for name in ("encode_s", "count_s", "merge_s")},
    }


def size_line(facts: dict[str, Any]) -> str:
    return f"{facts['num_nodes']:,} nodes, {size(facts['index_bytes'])}, {facts['bytes_per_node']:.2f} bytes a node"


def size(num_bytes: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:,.1f} {unit}" if unit != "bytes" else f"{num_bytes} bytes"
        num_bytes /= 1024  # type: ignore[assignment]
    raise AssertionError("unreachable")


def percent(probability: float) -> str:
    return f"{100 * probability:.1f} %" if probability >= 0.001 else f"{100 * probability:.4f} %"


def described(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What an index says of itself, in the words and units of people; a name that is new here is shown as it is."""
    left = dict(facts)
    yield "file", str(left.pop("path"))
    yield "text", str(left.pop("description"))
    yield "tokenizer", f"{left.pop('name')} (fingerprint {left.pop('fingerprint')}, {left.pop('vocab_size'):,} ids)"
    yield "counted", f"{left.pop('num_tokens'):,} tokens (a weighted document as often as its weight)"
    order = left.pop("order")
    yield "longest gram", f"{order} tokens"
    yield "least count", f"{left.pop('min_count'):,}"
    by_level = left.pop("num_nodes_by_level")
    yield "nodes", f"{left.pop('num_nodes'):,}: " + ", ".join(f"{n:,} of {i}" for i, n in enumerate(by_level, start=1))
    yield "size", f"{size(left.pop('index_bytes'))}, {left.pop('bytes_per_node'):.2f} bytes a node"
    error = left.pop("log_prob_error")
    if left.pop("counts") == "exact":
        yield "values", "exact counts"
    else:
        yield "values", f"8-bit log-probabilities, off by {error:.4f} at most ({100 * (2.718281828**error - 1):.2f} %)"
    yield "format", f"version {left.pop('version')}"
    for name, value in left.items():
        yield name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)


__all__ = ["app"]
