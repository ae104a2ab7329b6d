"""Tokens a second of `dartspec data regenerate` on one core, beside batched transformers in the same run.

    python benchmarks/regenerate.py MODEL_FOLDER --prompts prompts.jsonl --out docs/results/regenerate.json

Both write the same prompts' answers in bf16, greedy, as many at a time: ours through the engine as the command does
(finished answers make room for new prompts), transformers through `generate` on batches of prompts padded to the left,
with its stock sdpa attention and its own cache. Only tokens that belong to an answer are counted, so not what
transformers writes behind an answer's end until its batch is done. In turn at every repeat; the best of each is the
figure, all are kept. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dartspec.bench.provenance import provenance, save_result
from dartspec.engine import Request
from dartspec.target.fast import accelerate
from dartspec.target.load import as_target, load_model
from dartspec.text import Text
from dartspec.train.regenerate import from_target, read_asks
from dartspec.types import SamplingParams


def measured(run: Callable[[], int]) -> dict[str, Any]:
    began = time.perf_counter()
    tokens = run()
    seconds = time.perf_counter() - began
    return {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds, 1)}


def stock(model: Any, requests: Sequence[Request], batch: int, max_tokens: int, end: int, padding: int) -> int:
    tokens = 0
    for at in range(0, len(requests), batch):
        prompts = [list(r.prompt) for r in requests[at : at + batch]]
        n = max(map(len, prompts))
        ids = torch.tensor([[padding] * (n - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (n - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=padding,
                eos_token_id=end,
            )
        for row in out[:, n:].tolist():
            tokens += row.index(end) + 1 if end in row else len(row)
    return tokens


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="folder")
    p.add_argument("--prompts", nargs="+", required=True, help="files as `dartspec data regenerate` reads them")
    p.add_argument("--num-prompts", type=int, default=128)
    p.add_argument("--max-prompt", type=int, default=176)
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--skip-stock", action="store_true", help="ours alone")
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    loaded = load_model(a.model, dtype="bfloat16")
    accelerate(loaded.model, torch.arange(3, 11)[None], a.threads)
    target, text = as_target(loaded), Text(loaded.tokenizer)
    requests: dict[float, list[Request]] = {0.0: [], 0.7: []}
    for i, ask in enumerate(sorted(read_asks(a.prompts), key=lambda ask: hash_of(ask.id))):
        prompt = text.encode_chat(ask.messages)
        if len(prompt) <= a.max_prompt:
            for t, some in requests.items():
                some.append(Request(prompt, SamplingParams(temperature=t, seed=i, max_tokens=a.max_tokens)))
        if len(requests[0.0]) == a.num_prompts:
            break
    answers = from_target(target, a.batch)

    def ours(t: float) -> int:
        return sum(len(ids or ()) for _, ids in answers(requests[t]))

    systems: dict[str, Callable[[], int]] = {"ours, T = 0": lambda: ours(0.0), "ours, T = 0.7": lambda: ours(0.7)}
    if not a.skip_stock:
        model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.bfloat16).eval()
        ids = (text.tokenizer.eos_token_id, text.tokenizer.pad_token_id)
        systems["transformers, T = 0"] = lambda: stock(
            model, requests[0.0], a.batch, a.max_tokens, ids[0], ids[0] if ids[1] is None else ids[1]
        )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for _ in range(a.repeats):
        for name, run in systems.items():
            runs[name].append(measured(run))
            print(f"{name}: {runs[name][-1]}", flush=True)
    result = {
        "best_tokens_per_s": {name: max(r["tokens_per_s"] for r in some) for name, some in runs.items()},
        "runs": [{"system": name, **r} for name, some in runs.items() for r in some],
        "num_prompts": len(requests[0.0]),
        "mean_prompt_tokens": round(sum(len(r.prompt) for r in requests[0.0]) / len(requests[0.0]), 1),
        "batch": a.batch,
        "max_tokens": a.max_tokens,
        "provenance": provenance(dtype="bfloat16", model=Path(a.model).name),
    }
    if a.out is not None:
        save_result(a.out, result)
    print(json.dumps(result["best_tokens_per_s"]))


def hash_of(name: str) -> int:
    """A shuffle that every machine makes alike."""
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 1_000_003


if __name__ == "__main__":
    main()
