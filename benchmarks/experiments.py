"""Questions that the paper leaves open, answered from recorded guesses: trees are built again, no model decodes.

    dartspec bench capture --drafter dart --temperature 0,1 --seed 0,1,2 --per-set 4 --out g.safetensors
    python benchmarks/experiments.py factorial g.safetensors --out docs/results/factorial.json
    python benchmarks/experiments.py ngram g.safetensors --out docs/results/ngram-off-on.json
    python benchmarks/experiments.py budget g.safetensors --run table-t0.json --out docs/results/budget.json
    python benchmarks/experiments.py frontier g.safetensors --corpus-ids IDS.npz --answers A.jsonl --run ... --out ...
    python benchmarks/experiments.py deep FOLDER    # and dartspec bench capture --drafter FOLDER --out deep.safetensors
    python benchmarks/experiments.py horizon deep.safetensors --run ... --out docs/results/horizon.json

factorial  M with each of several factors at two levels, all crossed: effects, interactions, intervals over prompts, and
           the spread over seeds. Two captures make one more factor, LABEL=FILE LABEL=FILE: drafters trained apart.
ngram      M with the n-gram term off and on, set by set (the paper's Table 2).
budget     M, a round's time and the speed-up by tree size: where the next node stops paying (marginal value).
frontier   n-gram indexes by order, cut-off and share of the corpus, the answers' own, and the running text's: bytes,
           memory, opening, lookup and search times, M, and the speed-up that follows, at one tree size.
horizon    M by how far ahead is guessed, and what drafting takes, with a capture of a drafter that guesses further.

Speed-ups here are *predicted*: M from the replay, forwards as measured by rows on this machine (`dartspec doctor
--measure`), draft, search and the rest as `--run` has them. M is counted up to a text's first loop. Index files are
built in a temporary folder. Anything timed wants a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import dartspec
from dartspec.accounting import Metrics, loop_start
from dartspec.api import ASSETS
from dartspec.bench.lattices import Capture, Replay
from dartspec.bench.provenance import provenance, save_result
from dartspec.bench.stats import Estimate, bootstrap, rate_ratio
from dartspec.budget.cost import CostModel
from dartspec.lattice import MOST_CONTEXT, SearchConfig, build_tree
from dartspec.ngram import NgramIndex
from dartspec.types import Committed

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 44, 59)
SHIPPED_INDEX = ASSETS / "smollm2-135m-instruct" / "index.ngram"


def part(data: Capture, temperature: float) -> Capture:
    """The texts of one temperature."""
    return replace(data, texts=[t for t in data.texts if t.temperature == temperature])


def sums(one: Replay, nodes: int) -> NDArray[np.float64]:
    """(texts, 2): committed tokens and rounds, loops cut."""
    found = []
    for i, t in enumerate(one.data.texts):
        m, cut = one.rounds(i, nodes), loop_start(t.ids)
        m = m if cut is None else m.before(cut)
        found.append((sum(r.num_committed for r in m.rounds), m.num_rounds))
    return np.array(found, dtype=np.float64)


def by_prompt(data: Capture, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(prompts, ...): the sums of a prompt's texts, which differ by seed. What the bootstrap draws."""
    ids = list(dict.fromkeys(t.id for t in data.texts))
    rows = {i: [k for k, t in enumerate(data.texts) if t.id == i] for i in ids}
    return np.array([values[rows[i]].sum(0) for i in ids])


def M(s: NDArray[np.float64]) -> NDArray[np.float64]:  # noqa: N802  (the paper's letter)
    return s[..., 0] / s[..., 1]


# -- factorial ---------------------------------------------------------------------------------------------------------


def factorial(a: argparse.Namespace) -> dict[str, Any]:
    captures = dict(c.split("=", 1) if "=" in c else ("", c) for c in a.captures)
    loaded = {name: part(Capture.load(Path(path)), a.temperature) for name, path in captures.items()}
    index = NgramIndex.open(a.index)
    factors: dict[str, tuple[Any, Any]] = {
        "n-gram weight": (0.0, SearchConfig().ngram_weight),
        "running text": (False, True),
        "beam": (5, SearchConfig().beam),
        "logit decay": (1.0, SearchConfig().logit_decay),
        "nodes": (8, 59),
    }
    if len(loaded) == 2:
        factors = {"drafter": tuple(loaded), **factors}  # type: ignore[dict-item]
    elif len(loaded) > 2:
        raise SystemExit("give one capture, or two: a factor has two levels")
    cells: dict[tuple[int, ...], NDArray[np.float64]] = {}
    seeds: dict[tuple[int, ...], dict[int, float]] = {}
    replays: dict[tuple[Any, ...], Replay] = {}
    for levels in itertools.product((0, 1), repeat=len(factors)):
        at = {name: values[level] for (name, values), level in zip(factors.items(), levels, strict=True)}
        data = loaded[at.get("drafter", next(iter(loaded)))]
        search = SearchConfig(
            ngram_weight=at["n-gram weight"],
            beam=at["beam"],
            logit_decay=at["logit decay"],
            running_text=at["running text"],
        )
        used = index if at["n-gram weight"] else None
        key = (at.get("drafter"), search)
        if key not in replays:
            replays.clear()  # one setting's trees at a time; its sizes come one after the other
            replays[key] = Replay(data, used, search, 59)
        s = sums(replays[key], at["nodes"])
        cells[levels] = by_prompt(data, s)
        per_seed = {t.seed: [k for k, u in enumerate(data.texts) if u.seed == t.seed] for t in data.texts}
        seeds[levels] = {seed: float(M(s[rows].sum(0))) for seed, rows in per_seed.items()}
        print(dict(at), round(float(M(s.sum(0))), 3), flush=True)
    order = list(cells)
    units = np.concatenate([cells[k] for k in order], axis=1)  # (prompts, 2 * cells)

    def log_m(s: NDArray[np.float64]) -> NDArray[np.float64]:
        """(..., cells) log M of each cell."""
        return np.asarray(np.log(s[..., 0::2] / s[..., 1::2]))

    def effect(signs: NDArray[np.float64]) -> Estimate:
        """exp of the mean over cells of sign * log M, twice: what the high level multiplies M by, on average."""
        return bootstrap(units, lambda s: np.exp(2 * (log_m(s) * signs).mean(-1)))

    def over_seeds(signs: NDArray[np.float64]) -> list[float]:
        """The same for each seed alone: how much of an effect is the luck of the draw."""
        logs = {n: np.log([seeds[k][n] for k in order]) for n in seeds[order[0]]}
        return [round(float(np.exp(2 * (log * signs).mean())), 4) for log in logs.values()]

    sign = {name: np.array([2.0 * k[i] - 1 for k in order]) for i, name in enumerate(factors)}
    effects = [
        {"factor": name, "levels": list(factors[name]), "times_M": effect(s).rounded(), "by_seed": over_seeds(s)}
        for name, s in sign.items()
    ]
    # of two factors: how much more the one multiplies M by where the other is high (the square root of the ratio)
    pairs = [
        {"factors": [x, y], "times_M": effect(sign[x] * sign[y]).rounded(), "by_seed": over_seeds(sign[x] * sign[y])}
        for x, y in itertools.combinations(sign, 2)
    ]
    rows = [
        {
            **{name: factors[name][level] for name, level in zip(factors, k, strict=True)},
            "M": bootstrap(cells[k], M).rounded(),
            "M_by_seed": [round(m, 4) for m in seeds[k].values()],
        }
        for k in order
    ]
    some = next(iter(loaded.values()))
    return {
        "kind": "factorial",
        "temperature": a.temperature,
        "prompts": len({t.id for t in some.texts}),
        "seeds": sorted({t.seed for t in some.texts}),
        "effects": effects,
        "interactions": pairs,
        "cells": rows,
        "captures": {name: c.facts for name, c in loaded.items()},
    }


# -- n-gram off and on -------------------------------------------------------------------------------------------------


def ngram(a: argparse.Namespace) -> dict[str, Any]:
    whole = Capture.load(Path(a.capture))
    index, rows = NgramIndex.open(a.index), []
    for temperature in sorted({t.temperature for t in whole.texts}):
        data = part(whole, temperature)
        off, on = (Replay(data, i, SearchConfig(), 59) for i in (None, index))
        for n in (8, 16, 59):
            pair = [sums(one, n) for one in (off, on)]
            for suite in [*dict.fromkeys(t.suite for t in data.texts), "all"]:
                kept = [k for k, t in enumerate(data.texts) if suite in (t.suite, "all")]
                some = replace(data, texts=[data.texts[k] for k in kept])
                a_off, a_on = (by_prompt(some, s[kept]) for s in pair)
                rows.append(
                    {
                        "temperature": temperature,
                        "nodes": n,
                        "suite": suite,
                        "off": bootstrap(a_off, M).rounded(),
                        "on": bootstrap(a_on, M).rounded(),
                        "ratio": rate_ratio(a_on, a_off).rounded(),
                    }
                )
    return {"kind": "ngram", "rows": rows, "capture": whole.facts}


# -- times -------------------------------------------------------------------------------------------------------------


class Clock:
    """What a round of n nodes takes, from forwards measured here and the other stages of a `bench run`."""

    def __init__(self, run: Path, method: str, *, again: bool) -> None:
        result = json.loads(run.read_text())
        whole = [r for r in result["rows"] if r["suite"] in ("all", result["rows"][-1]["suite"])]
        row = next((r for r in whole if r["method"] == method), None)
        if row is None:
            raise SystemExit(f"{run} has no row of {method}: {sorted({r['method'] for r in whole})}")
        plain = next(r for r in whole if r["method"] == "plain")
        self.lm = dartspec.load(drafter="dart", threads=1)
        self.cost = CostModel(self.lm.times(again=again))
        self.stages, self.plain_rest = row["ms_per_round"], plain["ms_per_round"]["other"]
        self.facts = {"run": run.name, "method": method, "stages_ms": self.stages, "plain_rest_ms": self.plain_rest}

    @property
    def step_ms(self) -> float:
        return self.cost.base_ms(1) + self.plain_rest

    def round_ms(self, nodes: int, *, search: float | None = None, draft: float | None = None) -> float:
        s = self.stages
        return (
            self.cost.base_ms(nodes + 1)
            + (s["draft"] if draft is None else draft)
            + (s["search"] if search is None else search)
            + s["other"]
        )

    def speed_up(self, m: float, nodes: int, **changed: float) -> float:
        return m * self.step_ms / self.round_ms(nodes, **changed)


# -- budget ------------------------------------------------------------------------------------------------------------


def budget(a: argparse.Namespace) -> dict[str, Any]:
    clock = Clock(a.run, a.method, again=a.measure)
    rows = []
    for temperature in (0.0, 1.0):
        data = part(Capture.load(Path(a.capture)), temperature)
        if not data.texts:
            continue
        one = Replay(data, NgramIndex.open(a.index), data.search, max(SIZES))
        before = None
        for n in (0, *SIZES):
            m = bootstrap(by_prompt(data, sums(one, n)), M)
            ms = clock.round_ms(n) if n else clock.step_ms
            row: dict[str, Any] = {
                "temperature": temperature,
                "nodes": n,
                "M": m.rounded(),
                "round_ms": round(ms, 3),
                "predicted_speed_up": round(m.value * clock.step_ms / ms, 4),
            }
            if before is not None:  # the rule: the next nodes pay while dM / M > dT / T
                last_n, last_m, last_ms = before
                row["dM_over_M_per_node"] = round((m.value / last_m - 1) / (n - last_n), 5)
                row["dT_over_T_per_node"] = round((ms / last_ms - 1) / (n - last_n), 5)
            before = n, m.value, ms
            rows.append(row)
    best = {
        str(t): max((r for r in rows if r["temperature"] == t), key=lambda r: float(r["predicted_speed_up"]))["nodes"]
        for t in {r["temperature"] for r in rows}
    }
    return {"kind": "budget", "rows": rows, "best_fixed": best, "clock": clock.facts}


# -- frontier ----------------------------------------------------------------------------------------------------------


def frontier(a: argparse.Namespace) -> dict[str, Any]:
    data = part(Capture.load(Path(a.capture)), a.temperature)
    clock = Clock(a.run, a.method, again=a.measure)
    stored = np.load(a.corpus_ids)
    corpus = np.split(stored["ids"], stored["ends"][:-1])
    np.random.default_rng(0).shuffle(corpus)  # type: ignore[arg-type]
    answers: list[NDArray[np.int32]] = []
    with open(a.answers, encoding="utf-8") as file:
        for line in file:
            response = json.loads(line)["response"]
            answers.append(np.array(response[: loop_start(response)], dtype=np.int32))
    vocab = max(int(stored["ids"].max()), max(int(x.max(initial=0)) for x in answers)) + 1

    def share(of: float) -> list[NDArray[np.int32]]:
        return corpus[: max(1, round(of * len(corpus)))]

    made: dict[str, tuple[Callable[[], list[NDArray[np.int32]]], int, int]] = {}
    for order, cut, of in (
        *((o, 1, 1.0) for o in (2, 3, 4)),
        *((3, c, 1.0) for c in (2, 4, 8)),
        *((3, 1, s) for s in (0.03, 0.1, 0.3)),
    ):
        made[f"corpus, order {order}, counts >= {cut}, {of:.0%}"] = (lambda s=of: share(s)), order, cut
    made |= {f"own answers, order {o}": ((lambda: answers), o, 1) for o in (2, 3, 4)}
    rows, first = [], None
    search = data.search
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        for name in ["none", "shipped", *made]:
            path = a.index if name == "shipped" else Path(folder) / "one.ngram"
            build_s = None
            if name in made:
                documents, order, cut = made[name]
                began = time.perf_counter()
                NgramIndex.build(
                    documents(),
                    order=order,
                    min_count=cut,
                    vocab_size=vocab,
                    fingerprint=data.fingerprint,
                    name="",
                    description=name,
                    exclude=data.eos_ids,
                ).save(path)
                build_s = round(time.perf_counter() - began, 2)
            facts = {} if name == "none" else opened(path)
            index = None if name == "none" else NgramIndex.open(path)
            for text in (False, True):
                one = Replay(data, index, replace(search, running_text=text), a.nodes)
                s = by_prompt(data, sums(one, a.nodes))
                first = s if first is None else first
                row: dict[str, Any] = {
                    "index": name,
                    "running_text": text,
                    **facts,
                    **({} if index is None else {"resident_mb": resident_mb(path), "num_nodes": index.num_nodes}),
                    **({"build_s": build_s} if build_s is not None else {}),
                    "M": bootstrap(s, M).rounded(),
                    "against_none": rate_ratio(s, first).rounded(),
                }
                if not text:
                    row |= timed(data, index, search, a.nodes)
                    row["predicted_speed_up"] = round(
                        clock.speed_up(row["M"][0], a.nodes, search=row["search_us"] / 1e3), 4
                    )
                rows.append(row)
                print(row, flush=True)
            del index, one
    return {
        "kind": "frontier",
        "temperature": a.temperature,
        "nodes": a.nodes,
        "corpus_tokens": len(stored["ids"]),
        "answer_tokens": sum(map(len, answers)),
        "texts": len(data.texts),
        "rows": rows,
        "clock": clock.facts,
    }


def opened(path: Path) -> dict[str, Any]:
    """Bytes, and milliseconds to open after the file's pages were thrown out of memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    NgramIndex.open(path)
    return {"index_bytes": path.stat().st_size, "open_cold_ms": round(1e3 * (time.perf_counter() - began), 3)}


def resident_mb(path: Path) -> float:
    """Of the mapped file, what this process has in memory now."""
    text = Path("/proc/self/smaps").read_text()
    blocks = re.findall(rf"^\S+ r--s .*{re.escape(path.name)}\n(?:.*\n)*?VmFlags", text, re.M)
    found = [int(v) for b in blocks for v in re.findall(r"^Rss:\s+(\d+) kB", b, re.M)]
    return round(max(found, default=0) / 1e3, 2)


def timed(data: Capture, index: NgramIndex | None, search: SearchConfig, nodes: int) -> dict[str, float]:
    """Microseconds of a search over recorded guesses, and of a lookup of 25 tokens behind one context, both warm."""
    cases = list(itertools.islice(positions(data), 400))
    spent, lookups = [], []
    for again in range(3):
        for text, at in cases:
            context = [*text.prompt[-MOST_CONTEXT:], *text.ids[: at + 1]][-MOST_CONTEXT:]
            args = (text.ids[at], text.log_probs[at], text.tokens[at], context, nodes, index, search, data.eos_ids)
            began = time.perf_counter()
            build_tree(*args)
            if again:
                spent.append(time.perf_counter() - began)
            if index is not None:
                tokens = text.tokens[at, 0].numpy()
                used = context[-(index.order - 1) :]
                began = time.perf_counter()
                index.probabilities(used, tokens)
                if again:
                    lookups.append(time.perf_counter() - began)
    found = {"search_us": round(1e6 * float(np.median(spent)), 2)}
    return found | ({"lookup_us": round(1e6 * float(np.median(lookups)), 2)} if lookups else {})


def positions(data: Capture) -> Iterator[tuple[Any, int]]:
    for text in data.texts:
        for at in range(0, len(text.tokens), 5):
            yield text, at


# -- horizon -----------------------------------------------------------------------------------------------------------


def horizon(a: argparse.Namespace) -> dict[str, Any]:
    clock = Clock(a.run, a.method, again=a.measure)
    data = part(Capture.load(Path(a.capture)), 0.0)
    deepest = max(t.tokens.shape[1] for t in data.texts if t.tokens.dim() == 3)
    index, rows = NgramIndex.open(a.index), []
    draft = draft_ms(clock.lm, [d for d in range(1, deepest + 1)])
    for d in range(1, deepest + 1):
        one = Replay(data, index, data.search, 59, horizon=d)
        for n in (8, 16, 59):
            s = by_prompt(data, sums(one, n))
            m = bootstrap(s, M)
            accepted = Metrics.merged([one.rounds(i, n) for i in range(len(data.texts))])
            rows.append(
                {
                    "horizon": d,
                    "nodes": n,
                    "M": m.rounded(),
                    "uncut_M": round(accepted.M, 4),
                    "draft_ms": round(draft[d], 3),
                    "predicted_speed_up": round(clock.speed_up(m.value, n, draft=draft[d]), 4),
                }
            )
    trained = clock.lm.trained.d if clock.lm.trained is not None else None
    return {"kind": "horizon", "trained_horizon": trained, "texts": len(data.texts), "rows": rows, "clock": clock.facts}


def draft_ms(lm: dartspec.LM, horizons: Sequence[int]) -> dict[int, float]:
    """Milliseconds of the drafter's forward by how far it guesses, the least of twelve: two new rows behind 256."""
    found: dict[int, list[float]] = {d: [] for d in horizons}
    drafters: Mapping[int, Any] = {d: deeper(lm, d) for d in horizons}
    taps, width = len(lm.drafter.taps), lm.target.hidden_size
    history = torch.arange(3, 3 + 257)
    features = torch.randn(256, taps, width, dtype=lm.target.dtype)
    for drafter in drafters.values():
        drafter.lattice([Committed(0, history, 256, features)])
    for repeat in range(13):
        longer = torch.arange(3, 3 + 257 + 2 * (repeat + 1))
        for d, drafter in drafters.items():
            began = time.perf_counter()
            drafter.lattice([Committed(0, longer, 2, features[:2])])
            if repeat:
                found[d].append(1e3 * (time.perf_counter() - began))
    return {d: float(np.min(ms)) for d, ms in found.items()}


def deeper(lm: dartspec.LM, d: int) -> Any:
    """The shipped drafter, asked for d positions: its mask is one vector, and may be repeated."""
    with tempfile.TemporaryDirectory() as folder:
        return lm.with_drafter(deep_copy(d, Path(folder))).drafter


def deep_copy(d: int, folder: Path) -> Path:
    """The shipped drafter's folder with another d."""
    shipped = SHIPPED_INDEX.parent
    config = json.loads((shipped / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"d": d}))
    for name in ("model.safetensors", "index.ngram"):
        if not (folder / name).exists():
            (folder / name).symlink_to((shipped / name).resolve())
    return folder


def deep(a: argparse.Namespace) -> dict[str, Any]:
    a.folder.mkdir(parents=True, exist_ok=True)
    deep_copy(a.horizon, a.folder)
    return {"kind": "drafter", "horizon": a.horizon}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = p.add_subparsers(required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--index", type=Path, default=SHIPPED_INDEX, help="default: the shipped one")
    shared.add_argument("--out", type=Path)
    timing = argparse.ArgumentParser(add_help=False)
    timing.add_argument("--run", type=Path, required=True, help="result of bench run, for the stages' times")
    timing.add_argument("--method", default="dart@auto", help="whose stages")
    timing.add_argument("--measure", action="store_true", help="time the forwards again")
    f = verbs.add_parser("factorial", parents=[shared])
    f.add_argument("captures", nargs="+")
    f.add_argument("--temperature", type=float, default=1.0)
    f.set_defaults(do=factorial)
    g = verbs.add_parser("ngram", parents=[shared])
    g.add_argument("capture")
    g.set_defaults(do=ngram)
    b = verbs.add_parser("budget", parents=[shared, timing])
    b.add_argument("capture")
    b.set_defaults(do=budget)
    r = verbs.add_parser("frontier", parents=[shared, timing])
    r.add_argument("capture")
    r.add_argument("--temperature", type=float, default=0.0)
    r.add_argument("--corpus-ids", type=Path, required=True, help="npz with ids and ends")
    r.add_argument("--answers", type=Path, required=True, help="JSONL with response (token ids)")
    r.add_argument("--nodes", type=int, default=16)
    r.add_argument("--folder", type=Path, help="where index files are built; default: the system's temporary folder")
    r.set_defaults(do=frontier)
    h = verbs.add_parser("horizon", parents=[shared, timing])
    h.add_argument("capture")
    h.set_defaults(do=horizon)
    d = verbs.add_parser("deep", help="the shipped drafter with another d, as a folder for bench capture --drafter")
    d.add_argument("--horizon", type=int, default=16)
    d.add_argument("folder", type=Path)
    d.set_defaults(do=deep, out=None)
    a = p.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    result = a.do(a) | {"provenance": provenance()}
    if a.out is not None:
        save_result(a.out, result)
    print(json.dumps({k: v for k, v in result.items() if not k.startswith("capture")}))


if __name__ == "__main__":
    main()
