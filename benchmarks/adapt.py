"""What a fine-tune costs a drafter, and what adapting it brings back: on a SmolLM2 that is fine-tuned here.

    python benchmarks/adapt.py tune --text corpus.txt --out runs/tuned                 # 200 updates on one kind of text
    dartspec data regenerate PROMPTS.jsonl --model runs/tuned --out runs/tuned-answers.jsonl
    dartspec train --target runs/tuned --init-from DRAFTER --data runs/tuned-answers.jsonl --out runs/adapted \\
        --steps 2000 --m-every 100 --m-prompts 24 --learning-rate 4e-4
    python benchmarks/adapt.py collect --run runs/adapted --tune runs/tuned --out docs/results/adapt.json

The fine-tune changes all weights, by AdamW on the next token of the text. Ctrl-C is safe only for the third command.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from dartspec.bench.provenance import provenance, read_result, save_result
from dartspec.errors import DartspecError
from dartspec.target.load import load_model

FACTS = "tune.json"


def tune(a: argparse.Namespace) -> None:
    """A fine-tuned copy of the default model, or of --model, as a Hugging Face folder."""
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    loaded = load_model(a.model, dtype="bfloat16", attention="sdpa")
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = tokenizer(a.text.read_text(encoding="utf-8", errors="replace")[: a.characters])["input_ids"]
    if len(ids) < 2 * a.length:
        raise DartspecError(f"{a.text} has {len(ids)} tokens; at least {2 * a.length} are needed")
    stream = torch.tensor(ids)
    # float32 masters: steps of 1e-5 are lost in bfloat16
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=a.learning_rate, weight_decay=0.0)
    model.train()
    began, losses = time.monotonic(), []
    for step in range(a.steps):
        at = int(torch.randint(len(ids) - a.length, ()))
        batch = stream[None, at : at + a.length]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = None if p.grad is None else p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(float(loss.detach()))
        if (step + 1) % 20 == 0:
            print(
                f"{step + 1}/{a.steps}: loss {sum(losses[-20:]) / 20:.3f}, {time.monotonic() - began:.0f} s", flush=True
            )
    model.eval().save_pretrained(a.out)
    tokenizer.save_pretrained(a.out)
    few = max(1, min(20, a.steps // 2))
    facts = {
        "base": loaded.name,
        "text": a.text.name,
        "steps": a.steps,
        "length": a.length,
        "learning_rate": a.learning_rate,
        "seed": a.seed,
        "loss_first": round(sum(losses[:few]) / few, 3),
        "loss_last": round(sum(losses[-few:]) / few, 3),
        "minutes": round((time.monotonic() - began) / 60, 2),
    }
    (a.out / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def collect(a: argparse.Namespace) -> None:
    """The run's figures with their provenance, as one result."""
    found = read_result(a.run / "adapt.json")
    if "gain" not in found:
        raise DartspecError(f"{a.run} has not ended: start the same `dartspec train` again")
    settings = read_result(a.run / "train.json")
    names = ("steps", "learning_rate", "m_every", "m_prompts", "m_tokens", "m_nodes", "low_rank", "sequences_per_step")
    result = {
        "kind": "adapt",
        "tune": read_result(a.tune / FACTS),
        "train": {name: settings[name] for name in names},
        **{name: found[name] for name in ("kept", "gain", "minutes", "before", "after", "measured")},
        "provenance": provenance(),
    }
    save_result(a.out, result)
    print(f"M {found['before']['M']:.2f} -> {found['after']['M']:.2f}, {found['minutes']:.1f} minutes: {found['kept']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    t = verbs.add_parser("tune", help="fine-tune the model")
    t.add_argument("--text", type=Path, required=True, help="a text file of one kind")
    t.add_argument("--model", default=None, help="folder or hub id (default: the default model)")
    t.add_argument("--out", type=Path, required=True)
    t.add_argument("--steps", type=int, default=200)
    t.add_argument("--length", type=int, default=256, help="tokens an update")
    t.add_argument("--characters", type=int, default=2_000_000, help="of the text that are read")
    t.add_argument("--learning-rate", type=float, default=5e-5)
    t.add_argument("--seed", type=int, default=0)
    t.add_argument("--threads", type=int, default=1)
    t.set_defaults(run_verb=tune)
    c = verbs.add_parser("collect", help="write the result of a run")
    c.add_argument("--run", type=Path, required=True)
    c.add_argument("--tune", type=Path, required=True)
    c.add_argument("--out", type=Path, required=True)
    c.set_defaults(run_verb=collect)
    a = parser.parse_args()
    a.run_verb(a)


if __name__ == "__main__":
    main()
