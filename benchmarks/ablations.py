"""The paper's ablations, small: how the drafter is trained, crossed with how its guesses are searched.

    python benchmarks/ablations.py train --data ANSWERS.jsonl --target MODEL --run FOLDER
    python benchmarks/ablations.py bigram --data ANSWERS.jsonl --target MODEL --run FOLDER
    python benchmarks/ablations.py cross --data ANSWERS.jsonl --target MODEL --run FOLDER --corpus-ids IDS.npz
    python benchmarks/ablations.py table --run FOLDER --out docs/results/ablations.json

`train`: shifted or unshifted prediction x gamma, one-hot labels, and weights by acceptance; all variants in one process
on one forward of the target, with the same start, answers and rows, seed after seed. It may be ended and started again
at any time; every variant has then seen the same tokens. `bigram`: the learned continuity, which has no weight in
common with a drafter, so that one serves all variants. `cross`: M on held-out answers from recorded guesses, for all
variants, and for one of them under several continuities, weights, tree sizes and beams. `table`: both with intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dartspec.bench.provenance import provenance, save_result
from dartspec.bench.stats import Estimate, bootstrap, ratio_of_sums
from dartspec.drafters import dart
from dartspec.drafters._bigram import Bigram, Continuity
from dartspec.drafters._checkpoint import DraftNet
from dartspec.drafters._nn import head_rows
from dartspec.drafters._train import Predicted
from dartspec.files import write_json, written_aside
from dartspec.lattice import MOST_CONTEXT, SearchConfig, build_tree
from dartspec.ngram import NgramIndex
from dartspec.ngram.live import LiveText
from dartspec.target.load import as_target, load_model
from dartspec.target.target import Target
from dartspec.train.batch import Drawn, TrainBatch, draw_rows
from dartspec.train.config import TrainConfig
from dartspec.train.data import choose_vocabulary, loss_mask, read_examples, split_examples
from dartspec.train.evaluate import _Tested, prepare_held_out
from dartspec.train.features import StateCache, States, cache_info
from dartspec.train.loop import learning_rate
from dartspec.train.loss import Teacher
from dartspec.train.run import TargetStates, fresh_net

GAMMAS = (0.5, 0.6, 0.7, 0.8, 1.0)
OFFSETS = 3
D = 8
VOCABULARY = 8192


class Variant(NamedTuple):
    shifted: bool
    gamma: float
    objective: str = "kl"

    @property
    def name(self) -> str:
        kind = "" if self.objective == "kl" else f" {self.objective}"
        return f"{'shifted' if self.shifted else 'unshifted'} {self.gamma}{kind}"


VARIANTS = [
    *(Variant(shifted, gamma) for gamma in GAMMAS for shifted in (True, False)),
    Variant(True, 0.6, "one_hot"),
    Variant(True, 1.0, "acceptance"),
]


class _Shared:
    """The teacher of one batch, asked by all variants: what one has asked the others need not compute."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher, self.known = teacher, dict[bytes, Tensor]()

    def probabilities(self, rows: Tensor, ids: slice = slice(None)) -> Tensor:
        key = rows.numpy().tobytes()
        if key not in self.known:
            self.known[key] = self.teacher.probabilities(rows, ids)
        return self.known[key]


class SharedBatch(TrainBatch):
    shared: dict[torch.dtype, Any]

    def teacher(self, head: Tensor, dtype: torch.dtype) -> Any:
        if dtype not in self.shared:
            self.shared[dtype] = _Shared(super().teacher(head, dtype))
        return self.shared[dtype]


class Material:
    """Answers, the target's states of them, and what a fresh drafter begins with."""

    def __init__(self, args: argparse.Namespace, tokens: int) -> None:
        self.target: Target = as_target(load_model(str(args.target), dtype=torch.bfloat16))
        examples = read_examples(args.data, max_tokens=384, vocab_size=self.target.num_tokens)
        self.train, self.held = split_examples(examples, args.held_out)
        random.Random(0).shuffle(self.train)
        self.vocabulary = choose_vocabulary(self.train, VOCABULARY, self.target.num_tokens, self.target.eos_token_ids)
        self.config = TrainConfig(
            target=str(args.target),
            data=tuple(map(str, args.data)),
            out=str(args.run),
            d=D,
            draft_vocab_size=VOCABULARY,
            warmup_steps=50,
            steps=max(1, tokens // 228),
        )
        self.taps = self.net(Variant(True, 0.6), 0).config.taps
        self.teacher_head = head_rows(self.target, self.vocabulary.ids)
        self.source = TargetStates(self.target, self.taps)
        self.cache: StateCache | None = None
        if args.cache:
            ordered = [*self.held, *self.train]
            info = cache_info(ordered, self.target.weights_fingerprint, self.taps, self.target.hidden_size)
            self.cache = StateCache(args.cache, info, ordered)
            self.cache.fill(self.source)

    def net(self, variant: Variant, seed: int) -> dart.DartNet:
        from dataclasses import replace

        config = replace(self.config, seed=seed, options={"shifted": variant.shifted})
        net = fresh_net(config, self.target, self.vocabulary, {}, None)
        assert isinstance(net, dart.DartNet)
        return net

    def states(self, number: int) -> States:
        """Of held-out answer `number`, or, counted from there on, of a training answer."""
        if self.cache is not None:
            return self.cache.read(number)
        example = self.held[number] if number < len(self.held) else self.train[number - len(self.held)]
        return self.source.states(example)


class Seed:
    """All variants with the same start, at the same step."""

    def __init__(self, m: Material, seed: int, folder: Path) -> None:
        self.m, self.seed, self.folder = m, seed, folder
        self.nets = [m.net(v, seed) for v in VARIANTS]
        self.optimizers = [self._optimizer(net) for net in self.nets]
        self.step = self.tokens = 0
        if (path := folder / f"state{seed}.pt").exists():
            state = torch.load(path, map_location="cpu", weights_only=True)
            self.step, self.tokens = state["step"], state["tokens"]
            for net, optimizer, (weights, moments) in zip(self.nets, self.optimizers, state["variants"], strict=True):
                net.load_state_dict(weights)
                optimizer.load_state_dict(moments)

    def _optimizer(self, net: DraftNet) -> torch.optim.AdamW:
        c = self.m.config
        groups = [
            {"params": [p for p in net.parameters() if (p.dim() == 2) == matrix], "weight_decay": decay}
            for matrix, decay in ((True, c.weight_decay), (False, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=c.learning_rate, betas=c.betas, fused=True)

    def save(self) -> None:
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "variants": [(n.state_dict(), o.state_dict()) for n, o in zip(self.nets, self.optimizers, strict=True)],
        }
        with written_aside(self.folder / f"state{self.seed}.pt") as aside:
            torch.save(state, aside)

    def update(self) -> None:
        """One answer, one target forward, one step of every variant."""
        m, c = self.m, self.m.config
        order = torch.randperm(len(m.train), generator=torch.Generator().manual_seed(self.seed))
        number = int(order[self.step % len(order)])
        generator = torch.Generator().manual_seed(self.seed * 7_919 + self.step)
        example = m.train[number]
        first, anchors = draw_rows(example, num_first=c.num_first, num_anchors=c.num_anchors, generator=generator)
        drawn = [Drawn(example, m.states(len(m.held) + number), first, anchors)]
        shared: dict[torch.dtype, Any] = {}
        for variant, net, optimizer in zip(VARIANTS, self.nets, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(c, self.step)
            batch = SharedBatch(
                drawn,
                m.target,
                m.taps,
                m.taps,
                torch.bfloat16,
                m.teacher_head,
                D,
                variant.gamma,
                objective=variant.objective,
                draft_ids=net.target_ids(),
            )
            batch.shared = shared
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = dart.loss(net, batch)
            torch.autograd.backward(out.loss)
            torch.nn.utils.clip_grad_norm_(net.parameters(), c.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += len(example.ids)

    @torch.no_grad()
    def evaluate(self, num_answers: int) -> list[list[list[float]]]:
        """By variant and held-out answer: hit@1 and hit@10 summed at offsets 1 to 3, then the rows of each."""
        m = self.m
        held = m.held[:num_answers]
        ready = prepare_held_out(held, [m.states(i) for i in range(len(held))], m.target, 4)
        found = []
        for net in self.nets:
            rows = []
            for drawn, choice in zip(ready.batch, ready.choices, strict=True):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    tested = _Tested(drawn, choice, m.target, m.taps, net, m.teacher_head, torch.bfloat16)
                    sums = dart.loss(net, tested)
                rows.append([round(x, 4) for kind in (1, 2, 4) for x in sums[kind, :OFFSETS].tolist()])
            found.append(rows)
        return found


def train(args: argparse.Namespace) -> None:
    args.run.mkdir(parents=True, exist_ok=True)
    write_json(args.run / "train.json", provenance())
    m = Material(args, args.tokens)
    print(f"{len(m.train)} answers, {len(m.held)} held out; coverage {m.vocabulary.coverage:.3%}", flush=True)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    for seed in range(args.seeds):
        path = args.run / f"curve{seed}.json"
        curve = json.loads(path.read_text()) if path.exists() else []
        if (args.run / f"nets{seed}").exists():
            continue
        one = Seed(m, seed, args.run)
        last = time.monotonic()
        while one.tokens < args.tokens and not asked:
            one.update()
            due = one.tokens * args.points // args.tokens
            if due > len(curve):
                done = one.tokens >= args.tokens
                hits = one.evaluate(len(m.held) if done else 24)
                curve.append({"tokens": one.tokens, "step": one.step, "hits": hits})
                write_json(path, curve)
                one.save()
                totals = [[sum(c) for c in zip(*rows, strict=True)] for rows in hits]
                for v, t in zip(VARIANTS, totals, strict=True):
                    print(seed, one.tokens, v.name, [round(t[i] / t[6 + i % 3], 4) for i in range(6)], flush=True)
            if time.monotonic() - last > args.save_every:
                one.save()
                print(seed, one.step, one.tokens, flush=True)
                last = time.monotonic()
        if asked:
            one.save()
            return
        for v, net in zip(VARIANTS, one.nets, strict=True):
            net.save(args.run / "part" / v.name)
        os.replace(args.run / "part", args.run / f"nets{seed}")
        (args.run / f"state{seed}.pt").unlink(missing_ok=True)


def train_bigram(args: argparse.Namespace) -> None:
    """As a drafter trains it (`dart.loss`): every answer once, all its rows."""
    m = Material(args, args.tokens)
    bigram = Bigram(m.target.hidden_size, args.rank, VOCABULARY)
    bigram.start(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(bigram.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    ids, sums, tokens = m.vocabulary.ids, torch.zeros(2), 0
    for number, example in enumerate(m.train):
        if tokens >= args.tokens:
            break
        first = loss_mask(example, 1)[:, 0].nonzero().flatten()
        drawn = [Drawn(example, m.states(len(m.held) + number), first, first[:0])]
        batch = TrainBatch(drawn, m.target, m.taps, m.taps, torch.bfloat16, m.teacher_head, D, 1.0, draft_ids=ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = bigram.states(batch.embed(torch.tensor(example.ids))[first + 1])
            out = batch.loss([Predicted(states, bigram.outer.weight, first, torch.ones_like(first), continuity=True)])
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * max(0.02, 1 - tokens / args.tokens)
        torch.autograd.backward(out.loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sums += out.continuity
        tokens += len(example.ids)
        if number % 500 == 499:
            print(number + 1, tokens, round(float(sums[0] / sums[1]), 4), flush=True)
            sums.zero_()
    state = {"rank": args.rank, "tokens": tokens, "weights": bigram.state_dict()}
    with written_aside(args.run / "bigram.pt") as aside:
        torch.save(state, aside)


class Guesses(NamedTuple):
    """What a drafter guesses in one held-out answer: with token i of the answer as the root, (n, d, k) each."""

    prompt: list[int]
    answer: list[int]
    log_probs: Tensor
    tokens: Tensor


@torch.no_grad()
def guesses(m: Material, net: dart.DartNet, num_answers: int | None, top_k: int = 25) -> list[Guesses]:
    """The lattices that decoding would have had (the tests say that both are equal)."""
    found = []
    for number, example in enumerate(m.held[:num_answers]):
        start, end = example.answers[0]
        rows = torch.arange(start - 1, end - 2)  # row j knows token j + 1, the root
        if len(rows) == 0:
            continue
        states = m.states(number)
        ids = torch.tensor(example.ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first, masks = net.shared_forward(
                dart.SharedRows(
                    states.features[:-1].flatten(1), m.target.embed(ids[1:]), [len(ids) - 1], [rows], [rows]
                )
            )
            hidden = torch.cat((first[:, None], masks), dim=1).flatten(0, 1)
            best = [(some @ net.lm_head.weight.T).float().log_softmax(-1).topk(top_k) for some in hidden.split(512)]
        shape = (len(rows), D, top_k)
        tokens = m.vocabulary.ids[torch.cat([b.indices for b in best])].int()
        answer = list(example.ids[start:end])
        values = torch.cat([b.values for b in best])
        found.append(Guesses(list(example.ids[:start]), answer, values.view(shape), tokens.view(shape)))
    return found


class Search(NamedTuple):
    """One way to make trees."""

    continuity: str = "corpus + context"
    nodes: int = 16
    weight: float = 0.5
    beam: int = 20


CONTINUITIES = (
    "none", "corpus", "answers", "context", "corpus + context", "learned", "learned + corpus", "learned + answers",
    "learned + context", "learned + answers + context", "answers + context",
)  # fmt: skip
SEARCHES = [
    *(Search(c, n) for c in CONTINUITIES for n in (16, 59)),
    *(Search(c, n, w) for c in ("answers + context", "learned") for n in (16, 59) for w in (0.25, 1.0)),
    *(Search("answers + context", n) for n in (4, 8, 32)),
    *(Search("answers + context", n, 0.5, b) for n in (16, 59) for b in (5, 10, 40)),
]
EACH_VARIANT = [Search(c, n) for c in ("none", "answers + context") for n in (16, 59)]


CROSSED = Variant(True, 0.6)


def committed(
    texts: Sequence[Guesses],
    tables: Sequence[Tensor] | None,
    indexes: dict[str, NgramIndex],
    eos: frozenset[int],
    search: Search,
) -> list[tuple[int, int]]:
    """Of each answer the committed tokens and the rounds."""
    parts = search.continuity.split(" + ")
    index = next((indexes[p] for p in parts if p in indexes), None)
    config = SearchConfig(ngram_weight=search.weight, beam=search.beam)
    text = LiveText() if "context" in parts else None
    found = []
    for number, one in enumerate(texts):
        at = rounds = total = 0
        while at + 1 < len(one.answer) and at < len(one.tokens):
            history = one.prompt + one.answer[: at + 1]
            tree = build_tree(
                history[-1],
                one.log_probs[at],
                one.tokens[at],
                history[-MOST_CONTEXT:],
                search.nodes,
                index,
                config,
                eos,
                None if text is None else text.counts(number, history, len(one.prompt)),
                tables[number][at] if tables is not None and "learned" in parts else None,
            )
            edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
            children = {edge: i for i, edge in enumerate(edges)}
            node, n = 0, 1
            while at + n < len(one.answer) and (node := children.get((node, one.answer[at + n]), -1)) > 0:
                n += 1
            n = min(n, len(one.answer) - at - 1)
            total, rounds, at = total + n, rounds + 1, at + n
        found.append((total, rounds))
        if text is not None:
            text.forget([number])
    return found


def cross(args: argparse.Namespace) -> None:
    m = Material(args, 1)
    eos = m.target.eos_token_ids
    about: dict[str, Any] = {"vocab_size": m.target.vocab_size, "fingerprint": "", "name": "", "description": ""}
    stored = np.load(args.corpus_ids)
    corpus = np.split(stored["ids"], stored["ends"][:-1])
    np.random.default_rng(0).shuffle(corpus)  # type: ignore[arg-type]
    answers = [list(e.answer_ids()) for e in m.train]
    size = sum(map(len, answers))
    taken: list[Any] = []
    while corpus and sum(map(len, taken)) < size:
        taken.append(corpus.pop())
    indexes = {
        "answers": NgramIndex.build(answers, exclude=eos, **about),
        "corpus": NgramIndex.build(taken, exclude=eos, **about),
    }
    continuity = None
    if (path := args.run / "bigram.pt").exists():
        state = torch.load(path, weights_only=True)
        bigram = Bigram(m.target.hidden_size, state["rank"], VOCABULARY)
        bigram.load_state_dict(state["weights"])
        ids = m.vocabulary.ids
        continuity = Continuity(bigram, m.target.embed(ids), ids, m.target.vocab_size)
    for seed in range(args.seeds):
        folder, state_path, path = (args.run / name for name in (f"nets{seed}", f"state{seed}.pt", f"cross{seed}.json"))
        weights = {}
        if not folder.exists() and state_path.exists():  # still in training: as it was saved last
            state = torch.load(state_path, map_location="cpu", weights_only=True, mmap=True)
            weights = {v.name: w for v, (w, _) in zip(VARIANTS, state["variants"], strict=True)}
        elif not folder.exists():
            continue
        tokens = state["tokens"] if weights else None
        done = json.loads(path.read_text()) if path.exists() else {}
        if done.get("tokens") != tokens:
            done = {"tokens": tokens}
        for v in sorted(VARIANTS, key=lambda v: v != CROSSED):
            if v.name in done:
                continue
            if weights:
                net = m.net(v, seed)
                net.load_state_dict(weights[v.name])
            else:
                net = dart.DartNet.from_folder(folder / v.name).float()
            texts = guesses(m, net, args.answers)
            full = v == CROSSED
            tables = [continuity.table(t.tokens) for t in texts] if full and continuity is not None else None
            wanted = SEARCHES if full else EACH_VARIANT
            if tables is None:
                wanted = [s for s in wanted if "learned" not in s.continuity]
            done[v.name] = [{**s._asdict(), "sums": committed(texts, tables, indexes, eos, s)} for s in wanted]
            write_json(path, done)
            print(seed, v.name, [round(mean_committed(r["sums"]).value, 3) for r in done[v.name][:4]], flush=True)
    write_json(args.run / "cross.json", {"index_tokens": size, "corpus_tokens": sum(map(len, taken))})


def mean_committed(sums: Sequence[Sequence[int]]) -> Estimate:
    """Committed tokens a round, with an interval over answers."""
    total, rounds = np.array(sums, dtype=np.float64).T
    return ratio_of_sums(total, rounds)


def table(args: argparse.Namespace) -> None:
    seeds = [s for s in range(args.seeds) if (args.run / f"curve{s}.json").exists()]
    curves = {s: json.loads((args.run / f"curve{s}.json").read_text()) for s in seeds}
    crossed = {s: json.loads(p.read_text()) for s in seeds if (p := args.run / f"cross{s}.json").exists()}
    points = max(map(len, curves.values()), default=0)
    rows = []
    for point in range(points):
        there = [s for s in seeds if len(curves[s]) > point]
        for number, v in enumerate(VARIANTS):
            hits = np.array([curves[s][point]["hits"][number] for s in there])  # (seeds, answers, 9)
            row: dict[str, Any] = {
                "variant": v.name, **v._asdict(), "tokens": curves[there[0]][point]["tokens"], "seeds": there,
                "held_out_answers": hits.shape[1],
            }  # fmt: skip
            for k, name in enumerate(("hit1", "hit10")):
                row[name] = [
                    ratio_of_sums(hits[..., k * 3 + t].sum(0), hits[..., 6 + t].sum(0)).rounded() for t in range(3)
                ]
                base = np.array([curves[s][point]["hits"][VARIANTS.index(CROSSED)] for s in there])
                row[f"{name}_less_base"] = [
                    bootstrap(
                        np.column_stack([x[..., i].sum(0) for x in (hits, base) for i in (k * 3 + t, 6 + t)]),
                        lambda s: s[..., 0] / s[..., 1] - s[..., 2] / s[..., 3],
                    ).rounded()
                    for t in range(3)
                ]
                each = hits.sum(1)
                row[f"{name}_by_seed"] = (each[:, k * 3 : k * 3 + 3] / each[:, 6:]).round(4).tolist()
            rows.append(row)
    searches = []
    sums: dict[str, dict[Search, Any]] = {}  # by variant: by search: (seeds, answers, 2)
    for v in VARIANTS:
        found: dict[Search, list[Any]] = {}
        for s in crossed:
            for r in crossed[s].get(v.name, ()):
                found.setdefault(Search(*(r[k] for k in Search._fields)), []).append(r["sums"])
        sums[v.name] = {search: np.array(of_seeds) for search, of_seeds in found.items()}

    def less(a: Any, b: Any) -> list[float]:
        both = np.column_stack([a.sum(0), b.sum(0)])
        return bootstrap(both, lambda s: s[..., 0] / s[..., 1] - s[..., 2] / s[..., 3]).rounded()

    for name, of_searches in sums.items():
        for search, of_seeds in of_searches.items():
            row = {
                "variant": name,
                **search._asdict(),
                "M": mean_committed(of_seeds.sum(0)).rounded(),
                "M_by_seed": [round(mean_committed(x).value, 4) for x in of_seeds],
            }
            plain = of_searches.get(Search("none", search.nodes))
            if plain is not None and search.continuity != "none":
                row["M_above_none"] = less(of_seeds, plain)
            base = sums[CROSSED.name].get(search)
            if name != CROSSED.name and base is not None and len(base) == len(of_seeds):
                row["M_less_base"] = less(of_seeds, base)
            searches.append(row)
    result = {
        "training": rows,
        "inference": searches,
        "inference_tokens": [one.get("tokens") for one in crossed.values()],  # None: when training had ended
        "inference_answers": max((len(one[CROSSED.name][0]["sums"]) for one in crossed.values()), default=0),
        "index": json.loads(p.read_text()) if (p := args.run / "cross.json").exists() else None,
        "training_provenance": json.loads(p.read_text()) if (p := args.run / "train.json").exists() else None,
        "provenance": provenance(),
    }
    save_result(args.out, result)
    last = [r for r in rows if r["tokens"] == rows[-1]["tokens"]]
    for r in last:
        print(f"{r['variant']:22s}", *(f"{e[0]:.3f} [{e[1]:.3f}, {e[2]:.3f}]" for e in r["hit1"] + r["hit10"]))
    for r in searches:
        print(f"{r['variant']:22s} {r['continuity']:28s}", r["nodes"], r["weight"], r["beam"], Estimate(*r["M"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    made = {name: stages.add_parser(name) for name in ("train", "bigram", "cross", "table")}
    for name, p in made.items():
        p.add_argument("--run", type=Path, required=True)
        p.add_argument("--seeds", type=int, default=3)
        if name == "table":
            p.add_argument("--out", type=Path, required=True)
            continue
        p.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL of token ids, the target's answers")
        p.add_argument("--target", required=True)
        p.add_argument("--cache", type=Path, help="states of these answers, computed before")
        p.add_argument("--held-out", type=float, default=0.02, help="share of the answers, the last ones")
        if name == "cross":
            p.add_argument("--corpus-ids", type=Path, required=True, help="npz with ids and ends")
            p.add_argument("--answers", type=int, help="held-out answers.  [default: all]")
            continue
        p.add_argument("--tokens", type=int, default=1_000_000, help="of each variant and seed, prompts included")
    made["bigram"].add_argument("--rank", type=int, default=128)
    made["train"].add_argument("--points", type=int, default=4, help="of the curve")
    made["train"].add_argument("--save-every", type=float, default=300.0, help="seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    {"train": train, "bigram": train_bigram, "cross": cross, "table": table}[args.stage](args)


if __name__ == "__main__":
    main()
