"""Capture once, then try any tree, index and weights without the model.

    python benchmarks/replay.py capture DRAFTER_FOLDER --out runs/lattices.pt --per-set 8
    python benchmarks/replay.py sweep runs/lattices.pt --index A.ngram --index B.ngram
    python benchmarks/replay.py record runs/lattices.pt DRAFTER_FOLDER

The text depends on prompt and seed alone, and the drafter's guesses at a position on the text before it alone. So
what a setting would have committed, round by round, follows from the recorded guesses and the recorded text:
exactly the engine's A and M, hundreds of settings a minute. Loops are cut. `capture` uses the last prompts of each
set; tables use the first ones.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from table import prompts

import dartspec
from dartspec.accounting import loop_start
from dartspec.bench.provenance import save_result
from dartspec.lattice import SearchConfig, build_tree
from dartspec.ngram import NgramIndex
from dartspec.tree import root_only

HERE = Path(__file__).parent
SIZES = (1, 2, 4, 6, 8, 11, 16, 24, 32, 44, 59)


class Recorder:
    """Drafts nothing and notes the guesses that DART would have had at every position."""

    def __init__(self, dart) -> None:
        self.dart, self.taps = dart, dart.taps
        self.lattices: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reset(self, slots) -> None:
        self.dart.reset(slots)

    def propose(self, new, budget):
        log_probs, tokens = self.dart.lattice(new)
        self.lattices.append((log_probs[0].half(), tokens[0]))
        return [root_only(int(new[0].history[-1]))]


def capture(a: argparse.Namespace) -> None:
    lm = dartspec.load(a.model, drafter=a.drafter, nodes=0, threads=a.threads)
    recorder = Recorder(lm.drafter)
    lm = lm.with_drafter(recorder, nodes=0)
    sets = prompts(a.prompts or [HERE / "prompts"], None, 10**6)
    texts = []
    for name, turn in track([(n, t) for n, g in sets.items() for t in g[-a.per_set :]], console=Console(stderr=True)):
        recorder.lattices = []
        messages = [{"role": "user", "content": turn}]
        r = lm.generate(messages, max_tokens=a.max_tokens, temperature=a.temperature, seed=0)
        cut = loop_start(r.ids)
        texts.append(
            {
                "set": name,
                "before": lm.encode(messages)[-1],
                "ids": r.ids if cut is None else r.ids[:cut],
                "log_probs": torch.stack([x for x, _ in recorder.lattices]),
                "tokens": torch.stack([t for _, t in recorder.lattices]),
            }
        )
    a.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"texts": texts, "eos": sorted(lm.target.eos_token_ids)}, a.out)


def rounds(text: dict, index: NgramIndex | None, config: SearchConfig, nodes: int, eos: frozenset[int]) -> list[int]:
    """Committed tokens of each round over one recorded text; a round that the end cuts off is left out."""
    ids, out, at = text["ids"], [], 0  # ids[at] is the root
    while at + 1 < len(ids):
        context = [ids[at - 1] if at else text["before"], ids[at]]
        log_probs = text["log_probs"][at].float()
        tree = build_tree(ids[at], log_probs, text["tokens"][at], context, nodes, index, config, eos)
        children = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
        node, n = 0, 1
        while at + n < len(ids) and (node := children.get((node, ids[at + n]), -1)) >= 0:
            n += 1
        if at + n >= len(ids):
            break
        out.append(n)
        at += n
    return out


def sweep(a: argparse.Namespace) -> None:
    data = torch.load(a.lattices)
    eos = frozenset(data["eos"])
    indices = {"none": None} | {path.name: NgramIndex.open(path) for path in a.index}
    variants = {
        "shipped": {},
        "paper": {"ngram_at_level0": True, "softmax_over_kept": False},
        **{f"ngram {w}": {"ngram_weight": w} for w in (0.25, 0.35, 0.75, 1.0)},
        **{f"decay {x}": {"logit_decay": x} for x in (0.8, 1.0)},
        **{f"exponent {x}": {"level_exponent": x} for x in (0.0, 0.35, 1.0)},
        **{f"eps {x}": {"eps": x} for x in (1e-6, 1e-4, 1e-3)},
        "full p": {"softmax_over_kept": False},
    }
    if a.only:
        variants = {k: v for k, v in variants.items() if k in a.only}
    table = Table("index", "search", *(f"M, {n} nodes" for n in a.nodes))
    rows = []
    for name, index in indices.items():
        for label, changes in variants.items():
            config = SearchConfig(**changes)
            M = []
            for n in a.nodes:
                all_rounds = [r for text in data["texts"] for r in rounds(text, index, config, n, eos)]
                M.append(round(sum(all_rounds) / len(all_rounds), 3))
            rows.append({"index": name, "search": label, **dict(zip(map(str, a.nodes), M, strict=True))})
            table.add_row(name, label, *map(str, M))
    Console().print(table)
    print(json.dumps({"texts": len(data["texts"]), "M": rows}))


def record(a: argparse.Namespace) -> None:
    """M by tree size into the drafter's config.json: from it and from forward times a machine's tree size is chosen."""
    data = torch.load(a.lattices)
    index, eos = NgramIndex.open(a.drafter / "index.ngram"), frozenset(data["eos"])
    acceptance = {"0": 1.0}
    for n in SIZES:
        committed = [r for text in data["texts"] for r in rounds(text, index, SearchConfig(), n, eos)]
        acceptance[str(n)] = round(sum(committed) / len(committed), 3)
    config = json.loads((a.drafter / "config.json").read_text()) | {"acceptance": acceptance}
    save_result(a.drafter / "config.json", config)
    print(json.dumps({"texts": len(data["texts"]), "M": acceptance}))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = p.add_subparsers(required=True)
    c = verbs.add_parser("capture")
    c.add_argument("drafter", type=Path)
    c.add_argument("--model", default=None)
    c.add_argument("--out", type=Path, required=True)
    c.add_argument("--prompts", type=Path, action="append")
    c.add_argument("--per-set", type=int, default=8)
    c.add_argument("--max-tokens", type=int, default=96)
    c.add_argument("--temperature", type=float, default=0.0)
    c.add_argument("--threads", type=int, default=os.cpu_count())
    c.set_defaults(run=capture)
    s = verbs.add_parser("sweep")
    s.add_argument("lattices", type=Path)
    s.add_argument("--index", type=Path, action="append", default=[])
    s.add_argument("--nodes", type=int, nargs="+", default=[16, 59])
    s.add_argument("--only", nargs="+", help="names of variants")
    s.set_defaults(run=sweep)
    r = verbs.add_parser("record")
    r.add_argument("lattices", type=Path)
    r.add_argument("drafter", type=Path, help="folder with config.json and index.ngram")
    r.set_defaults(run=record)
    a = p.parse_args()
    torch.set_grad_enabled(False)
    a.run(a)


if __name__ == "__main__":
    main()
