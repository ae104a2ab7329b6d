"""`dartspec eval`: how good a trained drafter is, set by set: M through the engine, hits and chain beside it."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal, printable
from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from dartspec.api import LM
    from dartspec.bench.suites import Prompt

RECORD = "eval.json"  # beside the drafter; the model card reads it
SHOWN_OFFSETS = 3
PIPED_WIDTH = 140  # of the table where no terminal says how wide it is


def evaluate(
    drafter: Annotated[Path, typer.Argument(help="Folder of a trained drafter.", show_default=False)],
    model: o.ModelOption = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="Prompt set by name, a group of them, all, or a JSONL file; may be repeated."),
    ] = None,
    per_set: Annotated[int, typer.Option(min=1, help="Prompts of each set.")] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="New tokens at most.")] = 96,
    temperatures: Annotated[str, typer.Option(help="Comma-separated; a column of M for each.")] = "0,1",
    nodes: Annotated[str, typer.Option(help="Draft tokens a tree may have; comma-separated.")] = "16",
    index: o.IndexOption = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Answers written at a time.")] = 4,
    save: Annotated[
        bool, typer.Option("--save", help="Write eval.json beside the drafter, and its M into its config.json.")
    ] = False,
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: o.ThreadsOption = None,
    fast: o.FastOption = True,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Judge a trained drafter on prompts that it never saw.

    M: committed tokens a round through the engine, loops cut, with its 95 % interval over prompts. hit@k: how often the
    model's first choice is among the drafter's k first, at the first three offsets of every answer position. chain:
    how many offsets in a row are right at the drafter's first choice. hit@k and chain are of the greedy answers.

    \b
    Examples:
      dartspec eval runs/mine/best --model ./my-model
      dartspec eval runs/mine/best --model ./my-model --set code --per-set 20 --nodes 8,16,59 --save
    """
    term = Terminal(json=json, no_color=no_color)
    asked = Asked(
        tuple(sets or ("all",)), per_set, max_tokens, numbers(temperatures), sizes(nodes), batch, str(drafter)
    )
    from dartspec.bench.provenance import provenance, save_result
    from dartspec.bench.suites import load_suites
    from dartspec.types import SamplingParams

    for t in asked.temperatures:
        SamplingParams(temperature=t)
    suites = load_suites(list(asked.sets), per_set)
    loading = o.Loading(model, asked.drafter, index, str(max(asked.nodes)), dtype, device, threads, fast)
    lm = loading.load(term)
    rows = [judge(lm, name, prompts, asked, index) for name, prompts in suites.items()]
    for row in rows:
        term.note(f"{row['set']}: {row['answers']} answers")
    rows.append(whole(rows))
    result = {
        "drafter": drafter.name,
        "target": lm.target.name,
        "weights_fingerprint": lm.target.weights_fingerprint,
        "method": lm.drafter_name,
        "index": _index(lm),
        "max_tokens": max_tokens,
        "per_set": per_set,
        "sets": [{k: v for k, v in row.items() if k not in ("sums", "hits")} for row in rows],
        "provenance": provenance(dtype=str(lm.target.dtype).removeprefix("torch."), seed=0),
    }
    term.out.print(_table(rows, asked), width=None if term.out.is_terminal else PIPED_WIDTH)
    if save:
        save_result(drafter / RECORD, result)
        write_acceptance(drafter, rows[-1]["M"].get(label(0.0)) or {})
        term.say(f"written: {drafter / RECORD}")
    term.emit(result)


@dataclass(frozen=True)
class Asked:
    """What is measured. drafter: its folder."""

    sets: tuple[str, ...]
    per_set: int
    max_tokens: int
    temperatures: tuple[float, ...]
    nodes: tuple[int, ...]
    batch: int
    drafter: str


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(t) for t in text.split(",")))
    except ValueError:
        raise DartspecError(f"--temperatures is {text!r}; it must be numbers such as 0,1") from None


def sizes(text: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(t) for t in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise DartspecError(f"--nodes is {text!r}; it must be whole numbers from 1 on, such as 8,16")
    return found


def label(temperature: float) -> str:
    return f"{temperature:g}"


def _index(lm: LM) -> str:
    """The name of the index file that ranks the guesses, or none."""
    path = getattr(getattr(lm.drafter, "index", None), "path", None)
    return path.name if path else "none"


def judge(lm: LM, name: str, prompts: Sequence[Prompt], asked: Asked, index: str) -> dict[str, Any]:
    """One set: M by temperature and tree size, each with its interval, and the hits on its greedy answers.

    `sums`: (committed, rounds) of each answer, and `hits`: sums over positions, for figures over all sets.
    """
    from dartspec.bench.measure import measure
    from dartspec.engine import Request
    from dartspec.types import SamplingParams

    asks = [lm.encode([{"role": "user", "content": p.turns[0]}]) if p.turns else list(p.ids) for p in prompts]
    room = lm.target.max_positions - asked.max_tokens
    if room < 1:
        raise DartspecError(
            f"--max-tokens is {asked.max_tokens}; {lm.target.name} has a context of {lm.target.max_positions}: "
            "ask for fewer"
        )
    asks = [ids for ids in asks if len(ids) <= room]
    if not asks:
        raise DartspecError(
            f"set {name}: every prompt is longer than the {room} tokens that {lm.target.name} has room for"
        )
    counted: dict[str, dict[str, list[tuple[int, int]]]] = {}
    answers: list[tuple[list[int], list[int]]] = []
    for temperature in asked.temperatures:
        for nodes in asked.nodes:
            own = lm.with_drafter(lm.drafter, nodes=nodes) if nodes != lm.nodes else lm
            params = SamplingParams(temperature=temperature, seed=0, max_tokens=asked.max_tokens)
            into = counted.setdefault(label(temperature), {}).setdefault(str(nodes), [])
            for at in range(0, len(asks), asked.batch):
                some = asks[at : at + asked.batch]
                written, records = measure(own, [Request(ids, params) for ids in some])
                into += [(r["cut"]["committed"], r["cut"]["rounds"]) for r in records]
                if temperature == 0 and nodes == asked.nodes[0]:
                    answers += [(ids, new[: r["loop"]]) for ids, new, r in zip(some, written, records, strict=True)]
    found: dict[str, Any] = {"set": name, "answers": len(asks), "M": _estimates(counted), "sums": counted}
    hits = _hits(lm, Path(asked.drafter), answers)
    return {**found, "hits": hits, **_means(hits)}


def whole(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All sets together: over all their rounds and positions, not a mean of means."""
    counted: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for row in rows:
        for temperature, by_size in row["sums"].items():
            for nodes, own in by_size.items():
                counted.setdefault(temperature, {}).setdefault(nodes, []).extend(own)
    hits = [h for row in rows for h in row["hits"]]
    made = {"set": "all", "answers": sum(r["answers"] for r in rows), "M": _estimates(counted)}
    return {**made, "sums": counted, "hits": hits, **_means(hits)}


def _estimates(counted: Mapping[str, Mapping[str, Sequence[tuple[int, int]]]]) -> dict[str, dict[str, list[float]]]:
    """[M, low, high] by temperature and size; an answer without a round counts nothing."""
    from dartspec.bench.stats import ratio_of_sums

    return {
        temperature: {
            nodes: ratio_of_sums(*zip(*own, strict=True)).rounded(3)
            for nodes, own in by_size.items()
            if sum(rounds for _, rounds in own)
        }
        for temperature, by_size in counted.items()
    }


def _hits(lm: LM, folder: Path, answers: Sequence[tuple[list[int], list[int]]]) -> list[dict[str, Any]]:
    """An entry for each answer of the figures of `train.evaluate`, with the number of its answer tokens; [] for a
    drafter that cannot be trained here."""
    from dartspec import drafters
    from dartspec.interop import checkpoints

    checkpoint = checkpoints.inspect(folder)
    module = drafters.get(checkpoint.method)
    if not hasattr(module, "loss"):
        return []
    from dartspec.drafters._nn import head_rows
    from dartspec.train.data import Example
    from dartspec.train.evaluate import evaluate as judge_net
    from dartspec.train.evaluate import prepare_held_out
    from dartspec.train.run import TargetStates

    net = checkpoints.read(checkpoint, lm.target).float().to(lm.target.device)
    kept = tuple(t for t in net.config.taps if t != -1)
    head = head_rows(lm.target, net.target_ids())
    source, found = TargetStates(lm.target, kept), []
    for prompt, ids in answers:
        if len(ids) < net.config.d + 1:
            continue  # too short for all offsets at even one position
        example = Example.answered([*prompt, *ids], len(prompt))
        held = prepare_held_out([example], [source.states(example)], lm.target, 1)
        got = judge_net(module.loss, net, held, lm.target, kept, head, lm.target.dtype)
        found.append({"tokens": len(ids), **{k: got[k] for k in ("hit1", "hit10", "chain")}})
    return found


def _means(hits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """hit@1 and hit@10 by offset and chain, answers weighted by their tokens."""
    total = sum(h["tokens"] for h in hits)
    if not total:
        return {"hit1": None, "hit10": None, "chain": None}

    def mean(values: Sequence[float]) -> float:
        return float(round(sum(v * h["tokens"] for v, h in zip(values, hits, strict=True)) / total, 4))

    offsets = range(len(hits[0]["hit1"]))
    return {
        **{k: [mean([h[k][i] for h in hits]) for i in offsets] for k in ("hit1", "hit10")},
        "chain": mean([h["chain"] for h in hits]),
    }


def write_acceptance(folder: Path, by_size: Mapping[str, Sequence[float]]) -> None:
    """Puts measured M by tree size into a drafter's config.json: what `load` compares later answers with."""
    from dartspec.bench.provenance import write

    path = folder / "config.json"
    config = json_module.loads(path.read_text(encoding="utf-8"))
    if by_size and "num_target_layers" in config:
        config["acceptance"] = {**config.get("acceptance", {}), **{n: m[0] for n, m in by_size.items()}}
        write(path, json_module.dumps(config, indent=1, ensure_ascii=False) + "\n")


def _table(rows: Sequence[Mapping[str, Any]], asked: Asked) -> Table:
    from dartspec.accounting import with_interval

    table = Table(box=None)
    table.add_column("set")
    heads = [(label(t), str(n)) for t in asked.temperatures for n in asked.nodes]
    for temperature, nodes in heads:
        table.add_column(f"M, T = {temperature}, {nodes} nodes", justify="right")
    for name in ("chain", "hit@1", "hit@10"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = []
        for temperature, nodes in heads:
            m = row["M"].get(temperature, {}).get(nodes)
            cells.append("-" if m is None else with_interval(m))
        chain = "-" if row["chain"] is None else f"{row['chain']:.2f}"
        hits = [" ".join(f"{x:.2f}" for x in (row[k] or [])[:SHOWN_OFFSETS]) or "-" for k in ("hit1", "hit10")]
        table.add_row(printable(row["set"]), *cells, chain, *hits)
    return table
