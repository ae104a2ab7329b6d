"""Each method at its best: the same small search of settings for all, so that no rival is compared at a bad one.

    python benchmarks/search_settings.py MODEL --folders runs/rivals --out docs/results/settings.json

For every method nine settings are tried: three tree sizes times three values of the number that matters most to it.
All settings of a method answer a prompt in turn before the next prompt, in one process; each is warmed up before. The
best is the one with the most tokens a second; M stands beside it, which no load of the machine can change. The prompts
are the last of each set, which the other tables do not use. `--folders` has a trained drafter a method
(`NAME/latest`, or `NAME-WORD/latest` for another one of the same method); the drafters without weights need none.
Each method's rows are kept as they are measured: the same command goes on behind them.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

SIZES = (4, 8, 16)
# what a method is searched over beside the tree size; every one has three values
AXES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "dart": ("d", (3, 5, 8)),
    "dflash": ("d", (3, 5, 8)),
    "eagle3": ("d", (2, 4, 6)),
    "hydra": ("top_k", (2, 4, 10)),
    "medusa": ("top_k", (2, 4, 10)),
    "prompt_lookup": ("max_ngram", (2, 3, 4)),
    "suffix": ("length", (4, 8, 16)),
    "lookahead": ("window", (2, 3, 5)),
    "index": ("top_k", (2, 4, 8)),
}


def measured(lm: Any, specs: dict[str, tuple[str, int]], prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Sums of each setting over the prompts, the text before its first loop."""
    from dartspec.accounting import Metrics, loop_start

    lms = {label: lm.with_drafter(spec, nodes=nodes) for label, (spec, nodes) in specs.items()}
    for one in lms.values():
        one.generate(prompts[0], max_tokens=8)
    found: dict[str, list[Metrics]] = {label: [] for label in lms}
    for prompt in prompts:
        for label, one in lms.items():
            done = one.generate(prompt, max_tokens=max_tokens)
            start = loop_start(done.ids)
            found[label].append(done.metrics if start is None else done.metrics.before(start))
    return {label: Metrics.merged(own) for label, own in found.items()}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--folders", type=Path, default=Path("runs/rivals"))
    p.add_argument("--methods", default=",".join(AXES))
    p.add_argument("--prompts", type=int, default=5)
    p.add_argument("--max-tokens", type=int, default=40)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()

    import torch

    import dartspec
    from dartspec.bench.provenance import provenance, save_result
    from dartspec.bench.suites import load_suites

    torch.set_num_threads(a.threads)
    part = a.out.with_suffix(".journal.json")
    asked = {"model": a.model, "prompts": a.prompts, "max_tokens": a.max_tokens, "threads": a.threads}
    kept: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {"asked": asked, "methods": {}}
    if kept["asked"] != asked:
        raise dartspec.DartspecError(f"{part} is of another search, {kept['asked']}: remove it")
    lm = dartspec.load(a.model, drafter="none", nodes=0)
    suites = load_suites(["all"], None)
    texts = [own[-1].turns[0] for own in suites.values() if own[-1].turns][:: max(1, len(suites) // a.prompts)]
    prompts = [lm.encode([{"role": "user", "content": t}]) for t in texts[: a.prompts]]
    for method in a.methods.split(","):
        if method in kept["methods"]:
            continue
        folder = a.folders / method / "latest"
        base = str(folder) if (folder / "config.json").exists() else method
        key, values = AXES[method.partition("-")[0]]
        specs = {f"{key}={v}@{n}": (f"{base},{key}={v}", n) for v in values for n in SIZES}
        rows = [
            {
                "setting": label,
                "M": round(m.M, 3),
                "tokens_per_s": round(m.tokens_per_s, 1),
                "ms_per_round": {
                    stage: round(sum(getattr(r, f"{stage}_ms") for r in m.rounds) / m.num_rounds, 2)
                    for stage in ("draft", "search", "verify", "other")
                },
            }
            for label, m in measured(lm, {"plain": ("none", 0), **specs}, prompts, a.max_tokens).items()
        ]
        kept["methods"][method] = {"trained": base != method, "rows": rows}
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(kept))
    methods = []
    for method, own in kept["methods"].items():
        plain, *rows = own["rows"]
        best = max(rows, key=lambda r: r["tokens_per_s"])
        speed_up = round(best["tokens_per_s"] / plain["tokens_per_s"], 3)
        methods.append({"method": method, **own, "best": best, "speed_up_of_best": speed_up})
    methods.sort(key=lambda m: -m["speed_up_of_best"])
    save_result(
        a.out,
        {
            **{k: v for k, v in asked.items() if k != "model"},
            "axes": {m: list(AXES[m.partition("-")[0]]) for m in kept["methods"]},
            "sizes": list(SIZES),
            "machine_load": round(os.getloadavg()[0], 1),
            "methods": methods,
            "provenance": provenance(
                model=lm.target.name, dtype=str(lm.target.dtype).removeprefix("torch."), kernels=lm.fast_note
            ),
        },
    )
    part.unlink()
    for m in methods:
        print(
            f"{m['method']:14s} {m['best']['setting']:16s} M {m['best']['M']:.2f}  {m['speed_up_of_best']:.2f}x plain"
        )


if __name__ == "__main__":
    main()
