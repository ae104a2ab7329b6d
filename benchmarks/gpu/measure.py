"""The measurements of `run.sh`, one step a call; each writes `STEP.json` with provenance into --out.

    attention   the ways of torch to attend (`dartspec.target.attention.WAYS`) at a target's shapes, in a CUDA graph
    stages      Qwen3-1.7B, 4B and 8B shapes with random weights: verify by rows and batch, eager and recorded, draft,
                search, pick; and M, the committed tokens a round, from which on a round pays
    smol        SmolLM2 in bfloat16 and float32: texts with and without drafts, margins where they part; speed, eager
                and recorded, by tree size
    load        SmolLM2, 1 to 64 sequences at once
    table       prints what the other steps wrote, in a few lines

--dry does the same on the CPU with tiny shapes and a tape in the place of CUDA graphs: its times mean nothing.
--seconds is the time a step may begin new measurements in; what is left out is named in its JSON and on the screen.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dartspec import drafters
from dartspec.accounting import Metrics, SpeedUp
from dartspec.api import ASSETS
from dartspec.bench.equality import first_divergence
from dartspec.bench.provenance import provenance, save_result
from dartspec.bench.suites import load_suites
from dartspec.device import TapeRecorder, default_recorder
from dartspec.engine import Request, generate
from dartspec.lattice import SearchConfig, build_tree
from dartspec.sampling import Sampler
from dartspec.target import attention
from dartspec.target.load import as_target, load_model
from dartspec.target.target import Session, Target
from dartspec.text import Text
from dartspec.types import Committed, SamplingParams, Scores, TokenTree
from dartspec.verify import Together

QWEN3 = {  # sizes as published; weights are random, so only times mean anything
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False),
    "tiny": (64, 4, 4, 96, True),
}
ROWS = (1, 9, 17, 33, 61)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Run:
    """What every step shares: the device, the time that is left, and what was left out."""

    def __init__(self, step: str, arguments: argparse.Namespace) -> None:
        self.step, self.out, self.dry = step, arguments.out, arguments.dry
        self.device = torch.device("cpu" if self.dry else "cuda")
        self.model = arguments.model
        self.left_out: list[str] = []
        self._end = time.monotonic() + arguments.seconds

    def has_time_for(self, what: str) -> bool:
        if time.monotonic() < self._end:
            return True
        self.left_out.append(what)
        return False

    def recorder(self) -> Any:
        return TapeRecorder() if self.dry else default_recorder(self.device)

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def median_ms(self, call: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
        """Wall-clock milliseconds of one call, the device's work included."""
        times = []
        for i in range((warm_up + repeats) if not self.dry else 2):
            self.sync()
            began = time.perf_counter()
            call()
            self.sync()
            if i >= (warm_up if not self.dry else 1):
                times.append(1e3 * (time.perf_counter() - began))
        return round(statistics.median(times), 4)

    def save(self, **result: Any) -> None:
        peak = None if self.dry else round(torch.cuda.max_memory_allocated() / 2**30, 2)
        more = provenance(dry=self.dry, left_out=self.left_out, peak_gib=peak)
        save_result(self.out / f"{self.step}.json", {**result, "provenance": more})
        if self.left_out:
            print(f"{self.step}: out of time, left out: {', '.join(self.left_out)}")


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_step(run: Run) -> None:
    """Microseconds of one layer's attention by shape and way; the error against float64 beside it."""
    shapes = [(1, 61, 2048), (1, 1, 2048), (8, 61, 2048), (32, 61, 1024), (1, 17, 512), (32, 1, 1024)]
    heads = [(32, 8, 128), (16, 8, 128)]
    if run.dry:
        shapes, heads = [(1, 5, 64), (2, 9, 64)], [(4, 2, 16)]
    rows = []
    for (H, Hkv, D), (B, N, K) in [(h, s) for h in heads for s in shapes]:
        g = torch.Generator(device=run.device).manual_seed(B * N)
        make = {"generator": g, "device": run.device, "dtype": torch.bfloat16}
        q = torch.randn(B, H, N, D, **make)
        # views of a cache with room behind them, as the target's layers give
        k, v = (torch.randn(B, Hkv, K + 64, D, **make)[:, :, :K] for _ in range(2))
        mask = torch.rand(B, 1, N, K, generator=g, device=run.device) < 0.7
        mask[..., 0] = True
        want = _float64(q, k, v, mask)
        for way in ("repeated", *attention.WAYS):
            name = f"{way} at {(B, H, N, K)}"
            # each shape is compiled for seconds: the two that matter most
            if (way == "flex" and shapes[0][1:] != (N, K)) or not run.has_time_for(name):
                continue

            def call(way: str = way, q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: Tensor = mask) -> Tensor:
                if way == "repeated":
                    G = q.shape[1] // k.shape[1]
                    k, v, way = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), "folded"
                return attention.WAYS[way](q, k, v, mask, q.shape[-1] ** -0.5, False)

            row = {"way": way, "batch": B, "heads": H, "kv_heads": Hkv, "rows": N, "keys": K}
            try:
                row["error"] = round(float((call().double() - want).norm() / want.norm()), 5)
                row["us"] = round(1e3 * run.median_ms(_repeated(run, call)) / 10, 2)
            except Exception as error:  # a way that this machine cannot go is a result
                row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            rows.append(row)
    run.save(attention=rows)


def _float64(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    G = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(G, 1), v.double().repeat_interleave(G, 1)
    scores = q.double() @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def _repeated(run: Run, call: Callable[[], Tensor]) -> Callable[[], None]:
    """Ten calls in one recording: what the device takes, without the time to start each operation."""
    if run.dry:
        return lambda: [call() for _ in range(10)] and None
    return run.recorder().record(lambda: tuple(call() for _ in range(10))).replay  # type: ignore[no-any-return]


# -- stages ------------------------------------------------------------------------------------------------------------


def random_target(run: Run, name: str) -> Target:
    hidden, layers, heads, inner, tied = QWEN3[name]
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8 if heads >= 8 else 2,
        head_dim=128 if heads >= 8 else 16,
        intermediate_size=inner,
        vocab_size=151936 if heads >= 8 else 211,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
        initializer_range=0.05,  # far from flat, so that the target's probe sees what a sibling would change
    )
    torch.manual_seed(0)
    how = "sdpa" if run.dry else attention.register()  # a tape does not see our CPU kernels
    with torch.device(run.device):
        # bfloat16 on a CPU would run kernels of ours that no tape sees
        dtype = torch.float32 if run.dry else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, attn_implementation=how, dtype=dtype)
    target = Target(model, name=name)
    target.recorder = run.recorder()
    return target


def random_drafter(target: Target) -> Any:
    """A DART layer of the target's own layer shape, d = 8, 32,000 draft tokens, random weights."""
    module, c, n = drafters.get("dart"), target.config, target.num_layers
    config = module.Config(
        d=8,
        taps=(2, n // 2 + (n < 8), n - 3 if n >= 8 else n),
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        draft_vocab_size=min(32000, target.num_tokens),
        vocab_size=target.vocab_size,
        target_hidden_size=c.hidden_size,
        num_target_layers=n,
    )
    net = module.DartNet(config)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return module.DartDrafter(net, target)


def stages_step(run: Run) -> None:
    result: list[dict[str, Any]] = []
    context = 16 if run.dry else 512
    for name in ("tiny",) if run.dry else ("1.7B", "8B", "4B"):  # the most telling first
        if not run.has_time_for(name):
            continue
        target = random_target(run, name)
        drafter = random_drafter(target)
        for batch in (1, 2) if run.dry else BATCHES:
            if not run.has_time_for(f"{name} at batch {batch}"):
                continue
            result += _stages(run, target, drafter, name, batch, context)
        del target, drafter
        gc.collect()
        if not run.dry:
            torch.cuda.empty_cache()
    run.save(stages=result, context=context)


def _stages(run: Run, target: Target, drafter: Any, name: str, batch: int, context: int) -> list[dict[str, Any]]:
    """One row a number of nodes: milliseconds of each stage, and the M that pays."""
    session = target.session(batch, context + 96, drafter.taps)
    for slot in range(batch):
        session.prefill(slot, [(7 * i + slot) % 200 + 3 for i in range(context)])
    slots = list(range(batch))
    draft_ms, search_ms, trees = _draft_and_search(run, target, drafter, batch, context)
    drafter.reset(slots)
    params = SamplingParams(temperature=1.0, seed=1)
    samplers = [Sampler(params, target.num_tokens, context, i) for i in slots]
    greedy = [Sampler(SamplingParams(), target.num_tokens, context, i) for i in slots]
    together = Together(target.num_tokens, target.device, target.recorder)
    unrecorded = Together(target.num_tokens, target.device)
    out = []
    for n in ROWS:
        some = [TokenTree(t.tokens[:n], t.parents[:n], t.scores[:n]) for t in trees]
        if n > len(trees[0].tokens):
            continue
        row: dict[str, Any] = {"target": name, "batch": batch, "rows": n, "draft_ms": draft_ms, "search_ms": search_ms}
        row["verify_ms"] = run.median_ms(partial(session.score, slots, some))
        scores = [Scores(s.logits.clone(), None) for s in session.score(slots, some)]
        if batch in (1, 8):
            row["verify_eager_ms"] = run.median_ms(partial(_eager, session, slots, some), repeats=5)
        for key, who, what in (
            ("pick_ms", together, greedy),
            ("pick_t1_ms", together, samplers),
            ("pick_t1_eager_ms", unrecorded, samplers),
        ):
            row[key] = run.median_ms(partial(who.verify, scores, some, what, [context] * batch), repeats=10)
        out.append(row)
    plain = out[0]["verify_ms"] + out[0]["pick_ms"]
    for row in out:
        whole = row["verify_ms"] + row["pick_ms"] + (draft_ms + search_ms if row["rows"] > 1 else 0)
        row["round_ms"], row["pays_from_m"] = round(whole, 3), round(whole / plain, 3)
    recorded = session._recorded
    out[0]["recordings_mib"] = round((recorded.num_bytes if recorded else 0) / 2**20, 1)
    out[0]["failure"] = recorded.failure if recorded else "nothing is recorded"
    session.close()
    target._idle.clear()
    return out


def _eager(session: Session, slots: list[int], trees: list[TokenTree]) -> list[Scores]:
    kept, session._recorded = session._recorded, None
    try:
        return session.score(slots, trees)
    finally:
        session._recorded = kept


def _draft_and_search(
    run: Run, target: Target, drafter: Any, batch: int, context: int
) -> tuple[float, float, list[TokenTree]]:
    """Milliseconds of a round's draft, three new tokens a sequence, and of its search; the trees found."""
    c = drafter.config
    rows = lambda n: torch.randn(n, len(c.taps), c.target_hidden_size, device=run.device, dtype=target.dtype)  # noqa: E731
    length = context + 1
    history = torch.arange(length + 200) % 200 + 3
    drafter.lattice([Committed(i, history[:length], length - 1, rows(length - 1)) for i in range(batch)])
    features = rows(3)

    def draft() -> tuple[Tensor, Tensor]:
        nonlocal length
        length += 3
        lattice: tuple[Tensor, Tensor] = drafter.lattice(
            [Committed(i, history[:length], 3, features) for i in range(batch)]
        )
        return lattice

    draft_ms = run.median_ms(draft, repeats=10)
    log_probs, tokens = draft()
    found: list[TokenTree] = []

    def search() -> None:
        found.clear()
        for b in range(batch):
            found.append(build_tree(5, log_probs[b], tokens[b], [4, 5], 60, None, SearchConfig(), frozenset()))

    return draft_ms, run.median_ms(search, repeats=10), found


# -- SmolLM2 -----------------------------------------------------------------------------------------------------------


class Smol:
    """The default model in one dtype with its shipped drafter and index."""

    def __init__(self, run: Run, dtype: torch.dtype) -> None:
        loaded = load_model(run.model, dtype=dtype, device=run.device, attention="sdpa" if run.dry else None)
        self.run, self.text = run, Text(loaded.tokenizer)
        self.target = as_target(loaded)
        self.none = drafters.get("none").load(drafters.get("none").Config(), self.target)
        self.dart: Any = None

    def prompts(self, per_set: int) -> list[list[int]]:
        suites = load_suites(["all"], per_set).values()
        texts = [p.turns[0] for suite in suites for p in suite if p.turns]
        return [self.text.encode_chat([{"role": "user", "content": t}]) for t in texts]

    @contextmanager
    def recorded(self, on: bool) -> Iterator[None]:
        """Target and drafter with or without recordings."""
        self.target.recorder = self.run.recorder() if on else None
        folder = ASSETS / "smollm2-135m-instruct"
        self.dart = drafters.get("dart").load(folder, self.target, index=folder / "index.ngram")
        try:
            yield
        finally:
            self.target._idle.clear()
            self.dart = None

    def answers(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, nodes: int, batch: int = 1
    ) -> tuple[list[list[int]], list[Metrics], float]:
        """New ids and metrics of each, and the seconds that all took together."""
        ids: list[list[int]] = [[] for _ in prompts]
        metrics = [Metrics() for _ in prompts]
        requests = [Request(p, replace(params, seed=i)) for i, p in enumerate(prompts)]
        drafter = self.dart if nodes else self.none
        self.run.sync()
        began = time.perf_counter()
        for chunk in generate(self.target, drafter, requests, text=self.text, num_nodes=nodes, batch=batch):
            ids[chunk.index] += chunk.ids
            metrics[chunk.index] = chunk.metrics
        self.run.sync()
        return ids, metrics, time.perf_counter() - began


def smol_step(run: Run) -> None:
    """Speed and losslessness, plain and DART in turn on the same prompts."""
    per_set, tokens, sizes = (1, 8, (16,)) if run.dry else (2, 128, (16, 32, 60))
    rows: list[dict[str, Any]] = []
    partings: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        if not run.has_time_for(str(dtype)):
            continue
        smol = Smol(run, dtype)
        prompts = smol.prompts(per_set)[: 2 if run.dry else None]
        for on in (True, False):
            some = prompts if on else prompts[:4]  # operation by operation is slow, and no news
            for temperature in (0.0, 1.0):
                name = f"{dtype} T={temperature} {'recorded' if on else 'eager'}"
                if (not on and dtype == torch.float32) or not run.has_time_for(name):
                    continue
                params = SamplingParams(temperature=temperature, max_tokens=tokens)
                with smol.recorded(on):
                    for nodes in (0, *sizes):  # every shape once, so that recording is not timed
                        smol.answers(some[:2], replace(params, max_tokens=min(tokens, 24)), nodes)
                    plain, plain_metrics, plain_s = smol.answers(some, params, 0)
                    for nodes in sizes:
                        ids, metrics, seconds = smol.answers(some, params, nodes)
                        row = _compare(plain_metrics, metrics, plain_s, seconds)
                        row |= {"dtype": str(dtype), "temperature": temperature, "recorded": on, "nodes": nodes}
                        row["equal"] = [sum(a == b for a, b in zip(plain, ids, strict=True)), len(ids)]
                        parted = _partings(smol, some, params, plain, ids)
                        row["largest_gap_ulps"] = max((p["gap_ulps"] for p in parted), default=0.0)
                        partings += [{"dtype": str(dtype), "nodes": nodes, "recorded": on, **p} for p in parted]
                        rows.append(row)
        del smol
        gc.collect()
    run.save(smol=rows, partings=partings)


def _compare(plain: list[Metrics], spec: list[Metrics], plain_s: float, spec_s: float) -> dict[str, Any]:
    p, s = Metrics.merged(plain), Metrics.merged(spec)
    up = SpeedUp.of(p, s)
    return {
        "M": round(s.M, 3),
        "plain_ms": round(p.ms_per_token, 3),
        "ms_per_round": s.to_dict()["ms_per_round"],
        "speed_up": round(up.speed_up, 3),
        "bound": round(up.bound, 3),
        "wall_speed_up": round(plain_s / spec_s * s.num_new_tokens / max(1, p.num_new_tokens), 3),
    }


def _partings(
    smol: Smol,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
) -> list[dict[str, Any]]:
    """Where texts part, with the gap of the two best tokens there, in units in the last place."""
    out = []
    for i, (prompt, a, b) in enumerate(zip(prompts, plain, other, strict=True)):
        parted = first_divergence(smol.target, replace(params, seed=i), prompt, a, b)
        if parted is not None:
            gap = {"gap": round(parted.gap, 6), "gap_ulps": round(parted.gap_ulps, 2)}
            out.append({"prompt": i, "temperature": params.temperature, "at": parted.index, **gap})
    return out


def load_step(run: Run) -> None:
    """All sequences at once, one answer each; the same batch by plain decoding."""
    smol = Smol(run, torch.bfloat16)
    tokens, batches, sizes = (6, (1, 2), (4,)) if run.dry else (96, BATCHES, (4, 8, 16, 60))
    pool = smol.prompts(1 if run.dry else 8)
    rows: list[dict[str, Any]] = []
    with smol.recorded(True):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
            for batch in batches:
                if not run.has_time_for(f"batch {batch} at T={temperature}"):
                    continue
                prompts = [pool[i % len(pool)] for i in range(batch)]
                smol.answers(prompts, replace(params, max_tokens=4), 0, batch)
                _, plain, plain_s = smol.answers(prompts, params, 0, batch)
                for nodes in sizes:
                    smol.answers(prompts, replace(params, max_tokens=12), nodes, batch)
                    _, metrics, seconds = smol.answers(prompts, params, nodes, batch)
                    row = _compare(plain, metrics, plain_s, seconds)
                    row |= {"batch": batch, "nodes": nodes, "temperature": temperature}
                    row["tokens_per_s"] = [round(batch * tokens / t, 1) for t in (plain_s, seconds)]
                    rows.append(row)
    run.save(load=rows)


# -- the table ---------------------------------------------------------------------------------------------------------


def table_step(run: Run) -> None:
    """A few lines of each result there is; the whole lies in the JSON files."""

    def read(step: str) -> dict[str, Any]:
        path = run.out / f"{step}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    for key, of in _by(read("attention").get("attention", []), "heads", "kv_heads", "batch", "rows", "keys"):
        ways = ", ".join(f"{r['way']} {r['us']:.1f}" if "us" in r else f"{r['way']} failed" for r in of)
        print(f"attention {key}: us {ways}")
    for key, of in _by(read("stages").get("stages", []), "target", "batch"):
        one, most = of[0], of[-1]
        verify = " ".join(f"{r['rows']}:{r['verify_ms']:.2f}" for r in of)
        eager = f", eager {one['verify_eager_ms']:.2f}" if "verify_eager_ms" in one else ""
        print(
            f"{key}: verify ms {verify}{eager}; draft {one['draft_ms']:.2f}, search {one['search_ms']:.2f}, pick"
            f" {most['pick_ms']:.2f} (T=1 {most['pick_t1_ms']:.2f}); pays from M"
            f" {' '.join(str(r['pays_from_m']) for r in of[1:])}"
        )
    smol = read("smol").get("smol", [])
    for r in smol:
        how = "recorded" if r["recorded"] else "eager"
        print(
            f"smol {r['dtype'][6:]} T={r['temperature']} {how} n={r['nodes']}: M {r['M']}, plain {r['plain_ms']} ms,"
            f" speed-up {r['speed_up']} (bound {r['bound']}), equal {r['equal'][0]}/{r['equal'][1]},"
            f" gap <= {r['largest_gap_ulps']} ulps"
        )
    for key, of in _by(read("load").get("load", []), "temperature", "batch"):
        runs = ", ".join(f"n={r['nodes']} {r['tokens_per_s'][1]} ({r['wall_speed_up']}x)" for r in of)
        print(f"load T={key}: plain {of[0]['tokens_per_s'][0]} tokens/s, {runs}")
    for step in ("attention", "stages", "smol", "load"):
        if left := read(step).get("provenance", {}).get("left_out"):
            print(f"left out of {step}: {len(left)} measurements")


def _by(rows: Sequence[dict[str, Any]], *keys: str) -> list[tuple[str, list[dict[str, Any]]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(" ".join(str(row[k]) for k in keys), []).append(row)
    return list(groups.items())


STEPS = {"attention": attention_step, "stages": stages_step, "smol": smol_step, "load": load_step, "table": table_step}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("step", choices=STEPS)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument(
        "--model", default=None, help="SmolLM2-135M-Instruct: folder or GGUF file (default: the embedded one)"
    )
    p.add_argument("--seconds", type=float, default=120.0)
    p.add_argument("--dry", action="store_true")
    arguments = p.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if not arguments.dry and not torch.cuda.is_available():
        sys.exit("no CUDA device: use --dry")
    STEPS[arguments.step](Run(arguments.step, arguments))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
