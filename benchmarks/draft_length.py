"""The share of a round that drafting takes, and tokens a round, by draft length (the paper's Figure 1, Appendix A).

    python benchmarks/draft_length.py MODEL --eagle3 RUNS/eagle3/latest --out docs/results/draft-length.json

DART drafts all positions in one forward, EAGLE-3 and a small model one a forward. Same target, prompts and number of
nodes; each prompt is decoded by every form before the next. The small model is a copy of the target's first layers.
DART beyond the d that it was trained for repeats its mask: time is what it would be, M is not. The EAGLE-3 drafter may
have seen fewer tokens than DART; its time does not depend on that.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from experiments import deep_copy
from soundness import first_layers

import dartspec
from dartspec.bench.measure import STAGES, add_sums, measure
from dartspec.bench.provenance import provenance, save_result
from dartspec.bench.suites import load_suites
from dartspec.drafters import small_model
from dartspec.engine import Request
from dartspec.target.load import load_model
from dartspec.types import SamplingParams

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def longer(source: Path, d: int, folder: Path) -> Path:
    """A drafter's folder with another d."""
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"d": d}))
    (folder / "model.safetensors").symlink_to((source / "model.safetensors").resolve())
    return folder


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", help="folder or hub id; default: the embedded model")
    p.add_argument("--eagle3", type=Path, help="a trained EAGLE-3 drafter")
    p.add_argument("--layers", type=int, default=26, help="of the small model; 0 leaves it out")
    p.add_argument("--nodes", type=int, default=16)
    p.add_argument("--prompts", type=int, default=6)
    p.add_argument("--max-tokens", type=int, default=48)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    torch.set_num_threads(1)
    lm = dartspec.load(a.model, threads=1, drafter="none", nodes=0)
    forms: dict[tuple[str, int], dartspec.LM] = {("plain", 0): lm}
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"
        if a.layers:
            loaded = load_model(a.model, dtype="bfloat16")
            first_layers(loaded.model, a.layers).save_pretrained(small)
            loaded.tokenizer.save_pretrained(small)
        for n in LENGTHS:
            (own := Path(folder) / f"dart{n}").mkdir()
            forms["dart", n] = lm.with_drafter(deep_copy(n, own), nodes=a.nodes)
            if a.eagle3 is not None:
                forms["eagle3", n] = lm.with_drafter(longer(a.eagle3, n, Path(folder) / f"eagle3{n}"), nodes=a.nodes)
            if a.layers:
                config = small_model.Config(str(small), length=n)
                forms["small_model", n] = lm.with_drafter(small_model.load(config, lm.target), nodes=a.nodes)
    sets = load_suites(["all"], -(-a.prompts // 9))
    turns = [q.turns[0] for own in sets.values() for q in own][: a.prompts]
    params = SamplingParams(max_tokens=a.max_tokens)
    found: dict[tuple[str, int], list[dict[str, Any]]] = {form: [] for form in forms}
    for k, turn in enumerate([turns[0], *turns]):
        ids = lm.encode([{"role": "user", "content": turn}])
        request = Request(ids, params if k else replace(params, max_tokens=8))
        for form, one in forms.items():
            _, (record,) = measure(one, [request])
            if k:  # the first prompt warms up
                found[form].append(record["cut"])
    totals = {form: add_sums(own) for form, own in found.items()}
    step_ms = sum(totals["plain", 0][s] for s in STAGES) / totals["plain", 0]["committed"]
    rows = []
    for (method, length), s in totals.items():
        stages = {stage.removesuffix("_ms"): s[stage] / s["rounds"] for stage in STAGES}
        whole = sum(stages.values())
        rows.append(
            {
                "method": method,
                "length": length,
                "M": round(s["committed"] / s["rounds"], 4),
                "ms_per_round": {k: round(v, 3) for k, v in stages.items()},
                "draft_share": round((stages["draft"] + stages["search"]) / whole, 4),
                "speed_up": round(s["committed"] / s["rounds"] * step_ms / whole, 4),
            }
        )
        print(rows[-1], flush=True)
    facts = {"nodes": a.nodes, "prompts": len(turns), "max_tokens": a.max_tokens, "layers": a.layers}
    save_result(a.out, {"kind": "draft_length", "rows": rows, **facts, "provenance": provenance()})


if __name__ == "__main__":
    main()
