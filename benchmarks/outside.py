"""Other programs in one run: transformers' generate in four forms, llama.cpp with and without lookup, flashspec, ours.

    python -m venv llama && llama/bin/pip install llama-cpp-python gguf    # compiles llama.cpp for this machine
    pip install --no-deps flashspec                                       # left out where it is not installed
    python benchmarks/outside.py --llama-python llama/bin/python --gguf MODEL.Q4_1.gguf --out docs/results/outside.json

Same target (bfloat16; llama.cpp's Q4_1 file too), same prompts and lengths, one thread each. Every form answers a
prompt before the next prompt comes (A B C ..., A B C ...). Greedy; exactly --max-tokens new tokens, whatever they are:
end of text does not stop, and loops are kept. Each answer is timed at 1 and at --max-tokens tokens and the difference
counts, so the prefill is left out of all alike. Ratios are taken prompt by prompt. The small model of assisted
generation is a copy of the target's first layers, since there is no smaller sibling.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llamacpp import WRITER
from rich.console import Console
from rich.table import Table
from soundness import first_layers

import dartspec
from dartspec.bench.provenance import provenance, save_result
from dartspec.bench.stats import median
from dartspec.bench.suites import load_suites
from dartspec.target.load import load_model

Form = Callable[[list[int], int], tuple[float, list[int]]]  # ids, new tokens -> milliseconds, new ids
SETS = ("mt_bench", "humaneval", "gsm8k", "qa", "rag", "translation")
SERVER = """
import itertools, json, sys, time
import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
models = {}
for line in sys.stdin:
    a = json.loads(line)
    key = a["path"], a["lookup"]
    if key not in models:
        draft = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=a["lookup"]) if a["lookup"] else None
        threads = {"n_threads": a["threads"], "n_threads_batch": a["threads"]}
        models[key] = llama_cpp.Llama(a["path"], n_ctx=2048, verbose=False, draft_model=draft, **threads)
    m = models[key]
    m.reset()
    began = time.perf_counter()
    try:
        out = list(itertools.islice(m.generate(a["ids"], temp=0.0, repeat_penalty=1.0), a["n"]))
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
        continue
    ms = 1e3 * (time.perf_counter() - began)
    print(json.dumps({"ms": ms, "ids": out, "version": llama_cpp.__version__}), flush=True)
"""


class FormError(Exception):
    """A form that cannot do what is asked."""


def of_ours(lm: dartspec.LM) -> Form:
    def run(ids: list[int], n: int) -> tuple[float, list[int]]:
        began = time.perf_counter()
        out = lm.generate(ids, max_tokens=n, ignore_eos=True).ids
        return 1e3 * (time.perf_counter() - began), out

    return run


def of_transformers(model: Any, **options: Any) -> Form:
    def run(ids: list[int], n: int) -> tuple[float, list[int]]:
        prompt = torch.tensor([ids])
        began = time.perf_counter()
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False, **options
        )
        return 1e3 * (time.perf_counter() - began), out[0, len(ids) :].tolist()

    return run


def of_flashspec(model: Any) -> Form:
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import NgramDrafter, TargetModel

    device, dtype = torch.device("cpu"), torch.bfloat16
    config = FlashSpecConfig(
        device="cpu",
        drafter_strategy="bandit",
        bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(temperature=0.0, gamma=6),
    )
    engine = SpeculativeEngine(config, [NgramDrafter()], TargetModel("target", device, dtype, model=model))

    def run(ids: list[int], n: int) -> tuple[float, list[int]]:
        began = time.perf_counter()
        result = engine.generate(torch.tensor([ids]), max_new_tokens=n, eos_token_ids=())
        return 1e3 * (time.perf_counter() - began), result.output_ids[0, : result.n_tokens_generated].tolist()

    return run


def stock(model: str | None) -> Any:
    """The model as transformers has it by default; end of text does not stop it."""
    found = load_model(model, dtype="bfloat16", attention="sdpa").model
    found.generation_config.eos_token_id = None
    found.generation_config.pad_token_id = 0
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=None, help="folder or hub id (default: the embedded model)")
    p.add_argument("--llama-python", help="a Python with llama-cpp-python and gguf; left out without it")
    p.add_argument("--gguf", type=Path, help="the quantised file; a bf16 one is made of it")
    p.add_argument("--prompts", type=int, default=6, help="how many, spread over the sets")
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--layers", type=int, default=26, help="of the small model for assisted generation")
    p.add_argument(
        "--no-compiled", action="store_true", help="without the static compiled form (compiles for a minute)"
    )
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=None)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    sets = load_suites(list(SETS), -(-a.prompts // len(SETS)))
    turns = [q.turns[0] for group in zip(*sets.values(), strict=True) for q in group][: a.prompts]

    lm = dartspec.load(a.model, dtype="bfloat16", threads=a.threads)
    plain_model = stock(a.model)
    small = first_layers(plain_model, a.layers)
    small.generation_config.eos_token_id = None
    small.generation_config.num_assistant_tokens = 5
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0
    forms: dict[str, Form] = {
        "transformers": of_transformers(plain_model),
        "transformers, prompt lookup": of_transformers(plain_model, prompt_lookup_num_tokens=10),
        f"transformers, assisted by {a.layers} layers": of_transformers(plain_model, assistant_model=small),
        "dartspec, plain": of_ours(lm.with_drafter("none", nodes=0)),
        "dartspec, prompt lookup": of_ours(lm.with_drafter("prompt_lookup", nodes="auto")),
        f"dartspec, {lm.drafter_name}": of_ours(lm),
    }
    versions = {"transformers": importlib.metadata.version("transformers")}
    compile_s = None
    if not a.no_compiled:
        static = stock(a.model)
        static.forward = torch.compile(static.forward, dynamic=False)
        compiled = of_transformers(static, cache_implementation="static")
        began = time.perf_counter()
        compiled([5] * 64, 4)
        compile_s = round(time.perf_counter() - began, 1)
        forms["transformers, static and compiled"] = compiled
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["flashspec"] = importlib.metadata.version("flashspec")
        forms["flashspec, prompt lookup"] = of_flashspec(stock(a.model))
    server = None
    with tempfile.TemporaryDirectory() as folder:
        if a.llama_python:
            wide = Path(folder) / "bf16.gguf"
            subprocess.run([a.llama_python, "-c", WRITER, str(a.gguf), str(wide)], check=True)
            server = subprocess.Popen(
                [a.llama_python, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            assert server.stdin is not None
            assert server.stdout is not None

            def of_llama(path: Path, lookup: int) -> Form:
                def run(ids: list[int], n: int) -> tuple[float, list[int]]:
                    ask = {"path": str(path), "threads": a.threads, "ids": ids, "n": n, "lookup": lookup}
                    server.stdin.write(json.dumps(ask) + "\n")
                    server.stdin.flush()
                    told = json.loads(server.stdout.readline() or '{"failed": "its process ended"}')
                    if "failed" in told:
                        raise FormError(told["failed"])
                    versions["llama-cpp-python"] = told["version"]
                    return told["ms"], told["ids"]

                return run

            for name, path in (("bf16", wide), ("q4_1", a.gguf)):
                forms[f"llama.cpp {name}"] = of_llama(path, 0)
                forms[f"llama.cpp {name}, prompt lookup"] = of_llama(path, 10)
        failed: dict[str, str] = {}
        ms: dict[str, list[float]] = {name: [] for name in forms}
        texts: dict[str, list[list[int]]] = {name: [] for name in forms}
        for k, turn in enumerate([turns[0], *turns]):
            ids = lm.encode([{"role": "user", "content": turn}])
            for name, run in forms.items():
                if name in failed:
                    continue
                try:
                    with contextlib.redirect_stderr(io.StringIO()):
                        first, _ = run(ids, 1)
                        whole, out = run(ids, a.max_tokens)
                    if len(out) != a.max_tokens:
                        raise FormError(f"wrote {len(out)} tokens where {a.max_tokens} were asked for")
                except (FormError, BrokenPipeError) as error:  # said in the result, and left out of the table
                    failed[name] = f"prompt {k}: {error}"
                    continue
                if k:  # the first prompt warms up
                    ms[name].append((whole - first) / (a.max_tokens - 1))
                    texts[name].append(out)
        if server is not None:
            server.stdin.close()  # type: ignore[union-attr]
            server.wait()
    ours = next(n for n in forms if n == f"dartspec, {lm.drafter_name}")
    rows = []
    for name, own in ms.items():
        if name in failed:
            continue
        ratio = median([b / x for b, x in zip(ms["transformers"], own, strict=True)])
        rows.append(
            {
                "form": name,
                "ms_per_token": round(statistics.median(own), 3),
                "speed": ratio.rounded(),
                "ours_against_it": median([x / b for x, b in zip(own, ms[ours], strict=True)]).rounded(),
                "faster_than_ours": sum(x < b for x, b in zip(own, ms[ours], strict=True)),
                "first_32_equal": sum(
                    t[:32] == u[:32] for t, u in zip(texts[name], texts["dartspec, plain"], strict=True)
                ),
            }
        )
    table = Table("form", "ms a token", "speed against transformers", "ours against it", "first 32 tokens equal")
    for r in rows:
        speeds = [f"{e[0]:.2f}x [{e[1]:.2f}, {e[2]:.2f}]" for e in (r["speed"], r["ours_against_it"])]
        table.add_row(r["form"], f"{r['ms_per_token']:.2f}", *speeds, f"{r['first_32_equal']}/{len(turns)}")
    Console(width=150).print(table)
    result = {
        "kind": "outside",
        "rows": rows,
        "prompts": len(turns),
        "max_tokens": a.max_tokens,
        "compile_s": compile_s,
        "failed": failed,
        "versions": versions,
        "provenance": provenance(dtype="bfloat16"),
    }
    if a.out:
        save_result(a.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
