"""No straw men: our `prompt_lookup` and `small_model` against transformers' own, same model, same prompts, T = 0.

    python benchmarks/soundness.py MODEL --layers 26 --out docs/results/soundness.json

Both write the same text (float32), so the accepted drafts are what is left to compare: new tokens less forwards of the
target, each of which writes one token of its own. Settings are transformers': 10 tokens copied after the longest suffix
of at most 2; 5 tokens of the small model. The small model is a copy of the target's first layers. By default ours
copies more (several continuations, longer suffixes, as a tree). A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dartspec
from dartspec.bench.provenance import provenance, save_result
from dartspec.bench.suites import load_suites
from dartspec.drafters import prompt_lookup, small_model
from dartspec.target.target import Target

LOOKUP = {"max_ngram": 2, "min_ngram": 1, "num_continuations": 1, "length": 10}
NUM_DRAFTS = 5


def first_layers(model: nn.Module, count: int) -> Any:
    """A copy of the model with its first `count` decoder layers."""
    made: Any = copy.deepcopy(model)
    made.model.layers = made.model.layers[:count]
    made.config.num_hidden_layers = count
    if getattr(made.config, "layer_types", None):
        made.config.layer_types = made.config.layer_types[:count]
    return made.eval()


def theirs(model: Any, ids: list[int], max_tokens: int, **how: Any) -> tuple[list[int], int]:
    """transformers' answer, and the forwards of the target that it took."""
    count = 0

    def forward(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = model.register_forward_hook(forward)
    try:
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_tokens, **how
        )
    finally:
        handle.remove()
    return out[0, len(ids) :].tolist(), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--layers", type=int, default=26, help="layers of the small model")
    parser.add_argument("--out", type=Path, default=Path("runs/soundness.json"))
    parser.add_argument("--at-most", type=int, default=None, help="stop after so many prompts, to go on another time")
    parser.add_argument("--part", type=Path, default=Path("runs/soundness.part.jsonl"), help="what is done so far")
    a = parser.parse_args()
    lm = dartspec.load(a.model, drafter="none", dtype="float32", device="cpu", fast=False)
    model: Any = lm.target.model
    for name in ("temperature", "top_p", "top_k", "repetition_penalty"):  # what the checkpoint's makers sample with
        setattr(model.generation_config, name, None)
    small = first_layers(model, a.layers)
    small.generation_config.num_assistant_tokens = NUM_DRAFTS
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0
    chain = small_model.SmallModel(
        small_model.Config("its first layers", length=NUM_DRAFTS),
        Target(small, lm.target.num_tokens, lm.target.eos_token_ids, "its first layers"),
        lm.target,
    )
    drafters: dict[str, tuple[Any, int]] = {
        "prompt_lookup": (prompt_lookup.load(prompt_lookup.Config(**LOOKUP), lm.target), LOOKUP["length"]),
        "small_model": (chain, NUM_DRAFTS),
    }

    def ours(name: str) -> Callable[[list[int]], tuple[list[int], int]]:
        made = lm.with_drafter(drafters[name][0], nodes=drafters[name][1])

        def run(ids: list[int]) -> tuple[list[int], int]:
            result = made.generate(ids, max_tokens=a.max_tokens)
            return result.ids, 1 + len(result.metrics.rounds)

        return run

    systems: dict[str, Callable[[list[int]], tuple[list[int], int]]] = {
        "transformers prompt_lookup": lambda ids: theirs(
            model, ids, a.max_tokens, prompt_lookup_num_tokens=LOOKUP["length"]
        ),
        "transformers small_model": lambda ids: theirs(model, ids, a.max_tokens, assistant_model=small),
        **{name: ours(name) for name in drafters},
    }
    suites = load_suites(["all"], 1 + a.prompts // 9)  # as many of each set
    prompts = [p for row in zip(*suites.values(), strict=True) for p in row][: a.prompts]
    a.part.parent.mkdir(parents=True, exist_ok=True)
    key = {"model": lm.target.weights_fingerprint, "layers": a.layers, "max_tokens": a.max_tokens}
    done = [json.loads(line) for line in a.part.read_text().splitlines()] if a.part.exists() else []
    rows = {row["id"]: row for row in done if row["key"] == key}
    left = len(prompts) if a.at_most is None else a.at_most
    with open(a.part, "a", encoding="utf-8") as part:
        for i, prompt in enumerate(prompts):
            if prompt.id not in rows:
                if not left:
                    raise SystemExit(f"{len(rows)} of {len(prompts)} prompts are done; run it again to go on")
                left -= 1
                ids = lm.encode([{"role": "user", "content": prompt.turns[0]}])
                answers = {name: system(ids) for name, system in systems.items()}
                row = {
                    "key": key,
                    "id": prompt.id,
                    "equal": len({tuple(text) for text, _ in answers.values()}) == 1,
                    "new_tokens": {name: len(text) for name, (text, _) in answers.items()},
                    "forwards": {name: count for name, (_, count) in answers.items()},
                }
                rows[prompt.id] = row
                print(json.dumps(row), file=part, flush=True)
            print(f"\r{i + 1}/{len(prompts)}", end="", file=sys.stderr)
    table = []
    for name in systems:
        new = sum(rows[p.id]["new_tokens"][name] for p in prompts)
        forwards = sum(rows[p.id]["forwards"][name] for p in prompts)
        accepted = new - forwards
        table.append({"system": name, "new_tokens": new, "forwards": forwards, "accepted": accepted})
    accepted = {row["system"]: row["accepted"] for row in table}
    result = {
        "systems": table,
        "ours_to_theirs": {
            name: round(accepted[name] / accepted["transformers " + name.split()[0]], 4) for name in drafters
        },
        "texts_equal": sum(rows[p.id]["equal"] for p in prompts),
        "prompts": len(prompts),
        "small_model_layers": a.layers,
        "max_tokens": a.max_tokens,
        "lookup": LOOKUP,
        "provenance": provenance(dtype="float32", weights_fingerprint=lm.target.weights_fingerprint),
    }
    save_result(a.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
