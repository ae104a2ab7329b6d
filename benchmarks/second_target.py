"""A target that is no Llama, from end to end: what docs/second-target.md claims of Gemma 3 270M.

    python benchmarks/second_target.py --model ./gemma --drafter runs/gemma/latest --out docs/results/gemma.json

In float32: plain decoding against transformers' own `generate`, and decoding with the drafter against plain decoding,
greedy and at temperature 0.8, on prompts shorter and longer than the sliding window. Figures are those that
`dartspec eval --save` left beside the drafter. Neither weights nor texts are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import dartspec
from dartspec.bench.provenance import provenance, read_result, save_result
from dartspec.bench.suites import load_suites

PROMPTS = ("The history of the printing press begins", "def fibonacci(n):\n", "Question: What is 12 times 7?\nAnswer:")
LONG_CHARACTERS = 3600  # of passages; more than 512 tokens in any tokenizer


def compare(lm: dartspec.LM, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Whether the texts of one prompt are equal, and what the drafter brought."""
    ids = lm.encode(prompt)
    plain = lm.with_drafter("none", nodes=0)
    with torch.inference_mode():
        theirs = lm.target.model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)
    row: dict[str, Any] = {"prompt_tokens": len(ids)}
    for name, params in {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 3}}.items():
        want = plain.generate(ids, max_tokens=max_tokens, **params).ids
        got = lm.generate(ids, max_tokens=max_tokens, **params)
        row[name] = {"equal_to_plain": got.ids == want, "tokens": len(want), "M": round(got.metrics.M, 3)}
        if name == "greedy":
            row["plain_is_transformers"] = want == theirs[0, len(ids) :].tolist()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    lm = dartspec.load(a.model, drafter=str(a.drafter), nodes=16, dtype="float32", threads=a.threads)
    config = lm.target.config
    passages = "\n\n".join(p.turns[0] for p in load_suites(["rag"], 8)["rag"])[:LONG_CHARACTERS]
    texts = [compare(lm, prompt, a.max_tokens) for prompt in (*PROMPTS, passages)]
    trained = json.loads((a.drafter / "config.json").read_text(encoding="utf-8"))
    judged = read_result(a.drafter / "eval.json") if (a.drafter / "eval.json").exists() else None
    save_result(
        a.out,
        {
            "kind": "second target",
            "target": {
                "name": lm.target.name,
                "layers": config.num_hidden_layers,
                "sliding_layers": sum(t == "sliding_attention" for t in getattr(config, "layer_types", None) or ()),
                "window": getattr(config, "sliding_window", None),
                "vocab_size": lm.target.vocab_size,
                "weights_fingerprint": lm.target.weights_fingerprint,
                "tokenizer_fingerprint": lm.target.tokenizer_fingerprint,
            },
            "float32": texts,
            "drafter": {k: trained[k] for k in ("method", "d", "taps", "draft_vocab_size", "rope_theta", "provenance")},
            "eval": judged,
            "provenance": provenance(dtype="float32", seed=3),
        },
    )
    wrong = [
        t
        for t in texts
        if not (t["plain_is_transformers"] and all(t[k]["equal_to_plain"] for k in ("greedy", "sampled")))
    ]
    print(f"{len(texts) - len(wrong)} of {len(texts)} prompts: every text equal; written: {a.out}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
