"""`bench run` and `bench load`: what is decoded by which method in which order, kept on disk as it is done.

A *cell* is some prompts at one temperature, seed, batch size and number of threads. Every method decodes it, one after
the other, before the next cell: A B A B ..., so that a machine that drifts drifts for all. Each cell is one line of
a journal beside the result; an interrupted run goes on behind the last whole line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dartspec.bench.measure import PLAIN, Method, measure
from dartspec.bench.suites import Prompt
from dartspec.engine import Request
from dartspec.errors import DartspecError
from dartspec.files import written_aside
from dartspec.types import SamplingParams

if TYPE_CHECKING:
    from dartspec.api import LM

WARM_TOKENS = 12


@dataclass(frozen=True)
class RunConfig:
    """What is measured. suites: names or files. pairs: how many groups of prompts a batch size gets in `bench load`
    (a group at batch 64 repeats prompts where a set has fewer); None takes every prompt once a repeat.
    turns: how many of a conversation's turns are answered. trace: prompts a set whose rounds are kept one by one.
    texts: keep every text and how many tokens each of its rounds committed."""

    suites: tuple[str, ...] = ("all",)
    per_set: int | None = 10
    methods: tuple[Method, ...] = (Method(PLAIN, 0), Method("auto"))
    temperatures: tuple[float, ...] = (0.0,)
    seeds: tuple[int, ...] = (0,)
    batches: tuple[int, ...] = (1,)
    threads: tuple[int | None, ...] = (None,)
    repeats: int = 1
    max_tokens: int = 128
    ignore_eos: bool = False
    turns: int = 1
    trace: int = 0
    pairs: int | None = None
    busy: int = 0
    texts: bool = False

    def __post_init__(self) -> None:
        for name in ("suites", "methods", "temperatures", "seeds", "batches", "threads"):
            if not getattr(self, name):
                raise DartspecError(f"{name} is empty; at least one is needed")
        for name, least in (("repeats", 1), ("max_tokens", 2), ("turns", 1), ("trace", 0), ("busy", 0)):
            if (value := getattr(self, name)) < least:
                raise DartspecError(f"{name} is {value}; it must be {least} or more")
        for name in ("per_set", "pairs"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise DartspecError(f"{name} is {value}; it must be 1 or more")
        if min(self.batches) < 1:
            raise DartspecError(f"batch is {min(self.batches)}; it must be 1 or more")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        labels = [m.label for m in self.methods]
        if twice := next((m for m in labels if labels.count(m) > 1), None):
            raise DartspecError(f"method {twice} is given twice; name each once")

    def params(self, cell: Cell) -> SamplingParams:
        return SamplingParams(
            temperature=cell.temperature,
            seed=cell.seed,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class Cell:
    """prompts: indices into the suite. unit: what the bootstrap draws; "" means each prompt by itself."""

    suite: str
    threads: int | None
    temperature: float
    seed: int
    batch: int
    repeat: int
    prompts: tuple[int, ...]
    unit: str = ""

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def plan(config: RunConfig, suites: Mapping[str, Sequence[Prompt]]) -> list[Cell]:
    """Every cell, in the order of the run. Repeats come outermost, so that they lie apart in time."""
    cells = []
    for threads in config.threads:
        for repeat in range(config.repeats):
            for temperature in config.temperatures:
                for seed in config.seeds if temperature else config.seeds[:1]:  # greedy text knows no seed
                    for batch in config.batches:
                        for suite, prompts in suites.items():
                            for unit, members in _groups(len(prompts), batch, config.pairs):
                                cells.append(Cell(suite, threads, temperature, seed, batch, repeat, members, unit))
    return cells


def _groups(num: int, batch: int, pairs: int | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    if pairs is None:
        for start in range(0, num, batch):
            yield "", tuple(range(start, min(start + batch, num)))
    else:
        for pair in range(pairs):
            yield f"pair {pair}", tuple((pair * batch + i) % num for i in range(batch))


def execute(
    config: RunConfig,
    suites: Mapping[str, Sequence[Prompt]],
    load: Callable[[int | None], LM],
    *,
    journal: Journal | None = None,
    advance: Callable[[Cell], None] = lambda _cell: None,
    finished: Callable[[Mapping[str, LM]], None] = lambda _lms: None,
) -> list[dict[str, Any]]:
    """All cells' records, those of the journal first. load: the model at a number of threads, with any drafter.
    finished: called with the methods, by label, when they have been measured.

    The first cell of each kind is decoded once before (by a few tokens), untimed: that is the warm-up.
    """
    records: list[dict[str, Any]] = []
    lms: dict[str, LM] = {}
    loaded: int | str | None = "nothing"
    warm: set[tuple[int, float]] = set()
    for cell in plan(config, suites):
        if journal is not None and (known := journal.done.get(cell.key)) is not None:
            records += known
            advance(cell)
            continue
        if loaded != cell.threads:
            finished(lms)
            base = load(cell.threads)
            lms = {m.label: m.of(base) for m in config.methods}
            loaded, warm = cell.threads, set()
        if (cell.batch, cell.temperature) not in warm:
            warm.add((cell.batch, cell.temperature))
            _decode(config, cell, suites[cell.suite], lms, warm_up=True)
        made = _decode(config, cell, suites[cell.suite], lms)
        if journal is not None:
            journal.append(cell.key, made)
        records += made
        advance(cell)
    finished(lms)
    return records


def _decode(
    config: RunConfig, cell: Cell, prompts: Sequence[Prompt], lms: Mapping[str, LM], *, warm_up: bool = False
) -> list[dict[str, Any]]:
    """One cell by every method in turn, turn of the conversation by turn. All continue the first method's answers."""
    params = config.params(cell)
    if warm_up:
        params = SamplingParams(temperature=cell.temperature, seed=cell.seed, max_tokens=WARM_TOKENS)
    talks: list[list[dict[str, str]]] = [[] for _ in cell.prompts]
    records: list[dict[str, Any]] = []
    for turn in range(1 if warm_up else config.turns):
        here = [i for i, p in enumerate(cell.prompts) if turn < max(1, len(prompts[p].turns))]
        if not here:
            break
        some = next(iter(lms.values()))
        requests = []
        for i in here:
            prompt = prompts[cell.prompts[i]]
            if prompt.turns:
                talks[i].append({"role": "user", "content": prompt.turns[turn]})
            ids = some.encode(talks[i]) if prompt.turns else list(prompt.ids)
            if (room := some.target.max_positions) <= len(ids) + 1:
                raise DartspecError(
                    f"prompt {prompt.id} has {len(ids)} tokens, {some.target.name} a context of {room}: leave it out"
                )
            # two copies of one prompt in a batch are different samples of it
            requests.append(Request(ids, params, cell.prompts[:i].count(cell.prompts[i])))
        reference: list[list[int]] | None = None
        for label, lm in lms.items():
            traced = not warm_up and cell.repeat == 0 and bool(config.trace) and min(cell.prompts) < config.trace
            answers, made = measure(lm, requests, trace=traced, texts=config.texts and not warm_up)
            reference = answers if reference is None else reference
            for i, ids, first, record in zip(here, answers, reference, made, strict=True):
                prompt = prompts[cell.prompts[i]]
                where = {k: v for k, v in asdict(cell).items() if k != "prompts"} | {"unit": cell.unit or prompt.id}
                parted = None if ids == first else _parted(ids, first)
                records.append({"id": prompt.id, "turn": turn, "method": label, **where, "parted": parted, **record})
        assert reference is not None
        for i, ids in zip(here, reference, strict=True):
            talks[i].append({"role": "assistant", "content": some.text.decode(ids)})
    return records


def _parted(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first difference of two different texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def estimate_hours(config: RunConfig, suites: Mapping[str, Sequence[Prompt]], lm: LM) -> float:
    """Upper bound: every method as slow as plain decoding of this machine, every answer as long as it may be."""
    plain = Method(PLAIN, 0).of(lm)
    prompt = next(iter(suites.values()))[0]
    ids = lm.encode([{"role": "user", "content": prompt.turns[0]}]) if prompt.turns else list(prompt.ids)
    one = SamplingParams(max_tokens=WARM_TOKENS, ignore_eos=True)
    measure(plain, [Request(ids, one)])
    _, (record,) = measure(plain, [Request(ids, one)])
    step, prefill = record["decode_wall_ms"] / (WARM_TOKENS - 1), record["prefill_ms"] / len(ids)
    total = 0.0
    for cell in plan(config, suites):
        # measured on small batches here: a row beside others costs about a third of a row alone
        steps = config.max_tokens * (1 + (cell.batch - 1) / 3)
        turns = [min(config.turns, max(1, len(suites[cell.suite][p].turns))) for p in cell.prompts]
        tokens = sum(len(t) / 4 for p in cell.prompts for t in suites[cell.suite][p].turns)
        total += len(config.methods) * (step * steps * max(turns) + prefill * tokens)
    return total / 3.6e6


@dataclass
class Journal:
    """Finished cells, one JSON line each, behind a first line that says what run they belong to.

    commits: of the code that the cells were measured with, this run's among them; more than one where the run was
    resumed after the code moved.
    """

    path: Path
    header: Mapping[str, Any]
    commit: str | None = None
    done: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    commits: list[str | None] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, header: Mapping[str, Any], commit: str | None = None, *, mixed: bool = False) -> Journal:
        """The journal at `path`, begun if it is not there; another run's is refused.

        commit: what each new cell is noted with. mixed: go on where `header["code"]` alone differs: cells of two
                versions of the code stand in one result then.
        """
        made = cls(path, json.loads(json.dumps(header)), commit, commits=[commit])
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        whole = lines[:-1]  # what comes behind the last line end was cut off in writing
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(made.header) + "\n", encoding="utf-8")
            return made
        old = json.loads(whole[0])
        differs = [k for k in {**made.header, **old} if k != "code" and old.get(k) != made.header.get(k)]
        moved = old.get("code") != made.header.get("code")
        if moved and not differs and not mixed:
            raise DartspecError(
                f"{path} holds an unfinished run of other code (commit {_commit_of(whole)}, now {commit}): give "
                "--mixed-code to go on and have both commits in the result, or remove the file"
            )
        if differs:
            raise DartspecError(
                f"{path} holds an unfinished run that has {differs[0]} {old.get(differs[0])!r}, this run has "
                f"{made.header.get(differs[0])!r}; remove the file, or choose another --out"
            )
        if lines[-1]:
            with written_aside(path) as aside:
                aside.write_text("\n".join(whole) + "\n", encoding="utf-8")
        for line in whole[1:]:
            entry = json.loads(line)
            made.done[entry["key"]] = entry["records"]
            if (then := entry.get("commit")) not in made.commits:
                made.commits.insert(-1, then)
        return made

    def append(self, key: str, records: list[dict[str, Any]]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "commit": self.commit, "records": records}) + "\n")

    def facts(self) -> dict[str, Any]:
        """What the result's provenance adds: every commit, where there was more than one."""
        return {"commits": self.commits} if len(self.commits) > 1 else {}


def _commit_of(lines: Sequence[str]) -> str | None:
    return next((json.loads(line).get("commit") for line in lines[1:]), None)
