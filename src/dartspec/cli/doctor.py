"""`dartspec doctor`: what is installed, what this machine can do, and whether a model could be served. Changes nothing
but the caches that looking at a hub or GGUF model fills."""

from __future__ import annotations

import importlib.metadata
import itertools
import json as json_module
import os
import platform
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal
from dartspec.errors import DartspecError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub", "gguf", "accelerate")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_vnni", "bf16", "asimd")
OPTIONAL = {"gguf": "models from GGUF files", "accelerate": "models from GGUF files"}


SHOWN_ROWS = (1, 3, 5, 9, 12, 17, 25, 33, 65, 129)
MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Load the model, and measure threads and times on this machine again.")
]


class _EnoughSeenError(Exception):
    """Ends a load before the weights are read."""


def doctor(
    model: o.ModelArgument = None,
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    revision: o.RevisionOption = None,
    trust_remote_code: o.TrustOption = False,
    measure: MeasureOption = False,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Say what is installed, which device and dtype would be used, and why.

    With MODEL also: whether it can be served, the memory it needs, and the drafter it would get. The weights are not
    read. A model that would be refused gives exit code 2.

    With --measure the model (MODEL, or the default one) is loaded, and the number of threads and the times that choose
    the tree size are measured again and remembered: for when the machine was busy the first time.

    \b
    Examples:
      dartspec doctor
      dartspec doctor --measure
      dartspec doctor ./my-model
      dartspec doctor --json | tail -1 | jq .dtype
    """
    term = Terminal(json=json, no_color=no_color)
    facts = _machine(dtype, device)
    if model is not None:
        facts["model"] = _model(model, dtype, device, revision, trust_remote_code)
    if measure and not (model is not None and facts["model"]["refused"]):
        facts["times"] = _measured(model, dtype, device, revision, trust_remote_code)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(facts):
        table.add_row(name, value)
    term.out.print(table)
    term.emit(facts)
    if model is not None and facts["model"]["refused"]:
        raise DartspecError(facts["model"]["refused"])


def _machine(dtype: str | None, device: str | None) -> dict[str, Any]:
    import torch

    from dartspec import __version__, drafters
    from dartspec.api import checked_device
    from dartspec.bench.provenance import cpu_name
    from dartspec.target.load import cache_dir, default_device, default_file, free_memory, resolve_dtype

    place = checked_device(device) if device is not None else default_device()
    kind = resolve_dtype(dtype, place)
    try:
        default = str(default_file())
    except DartspecError as error:
        default = f"no: {error}"
    free = free_memory(place)
    return {
        "dartspec": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "cpu_flags": _flags(),
        "threads": torch.get_num_threads(),
        "device": str(place),
        "device_name": torch.cuda.get_device_name(place) if place.type == "cuda" else None,
        "dtype": str(kind).removeprefix("torch."),
        "dtype_why": _why(dtype, place, kind),
        "kernels": _kernels(kind, place),
        "free_bytes": free,
        "drafters": drafters.names(),
        "trained_drafters": _trained(),
        "default_model": default,
        "cache": str(cache_dir()),
        "cache_bytes": sum(f.stat().st_size for f in cache_dir().rglob("*") if f.is_file()),
        "offline": os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "yes", "on"),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flags() -> list[str]:
    info = Path("/proc/cpuinfo")
    match = re.search(r"^(flags|Features)\s*:(.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    found = set(match[2].split()) if match else set()
    return [flag for flag in CPU_FLAGS if flag in found]


def _why(asked: str | None, place: Any, kind: Any) -> str:
    import torch

    if asked not in (None, "auto"):
        return "as asked"
    where = "the GPU" if place.type == "cuda" else "the CPU"
    if kind == torch.bfloat16:
        return f"{where} computes in bfloat16"
    return f"{where} does not compute in bfloat16 (no avx512_bf16 or amx_bf16)" if place.type == "cpu" else where


def _kernels(kind: Any, place: Any) -> str:
    """Whether our CPU kernels would be used."""
    import torch

    from dartspec import _core

    if place.type != "cpu":
        return f"not used on {place.type}"
    if kind != torch.bfloat16:
        return "not used: they are for bfloat16"
    if not _core.kernels_supported():
        return "not used: this CPU has no AVX512_BF16"
    return "used where the model's layers allow it"


def _trained() -> list[dict[str, Any]]:
    """The drafters in the package."""
    from dartspec.api import ASSETS

    found = []
    for path in sorted(ASSETS.glob("*/config.json")):
        config = json_module.loads(path.read_text(encoding="utf-8"))
        found.append(
            {
                "name": path.parent.name,
                "method": config.get("method", "dart"),
                "target": config.get("target"),
                "tokenizer_fingerprint": config.get("tokenizer_fingerprint"),
                "index": (path.parent / "index.ngram").exists(),
                "bytes": sum(f.stat().st_size for f in path.parent.iterdir() if f.is_file()),
            }
        )
    return found


def _model(source: str, dtype: str | None, device: str | None, revision: str | None, trust: bool) -> dict[str, Any]:
    """What loading would say, up to the moment where it would read the weights."""
    from dartspec.target.load import MemoryPlan, load_model

    plans: list[MemoryPlan] = []

    def stop(plan: MemoryPlan) -> None:
        plans.append(plan)
        raise _EnoughSeenError

    refused: str | None = None
    try:
        load_model(source, dtype=dtype, device=device, revision=revision, trust_remote_code=trust, on_plan=stop)
    except _EnoughSeenError:
        if not plans[0].fits:
            refused = f"{source} does not fit: {plans[0]}"
    except DartspecError as error:
        refused = str(error)
    plan = plans[0] if plans else None
    facts: dict[str, Any] = {
        "source": source,
        "refused": refused,
        "needed_bytes": plan.needed_bytes if plan else None,
        "file_bytes": plan.file_bytes if plan else None,
        "free_bytes": plan.free_bytes if plan else None,
        "drafter": None,
    }
    if refused is None:
        facts["drafter"] = _drafter_for(source)
    return facts


def _measured(
    source: str | None, dtype: str | None, device: str | None, revision: str | None, trust: bool
) -> dict[str, Any]:
    """Times of the target's forward on this machine, measured now."""
    from dartspec.api import load

    lm = load(source, dtype=dtype, device=device, revision=revision, trust_remote_code=trust, remeasure=True)
    times = lm.times()
    return {
        "threads": lm.target.num_threads,
        "ms_by_rows": times.rows,
        "ms_by_row_and_1000_tokens": 1e3 * times.row_key,
        "cache_bytes_by_1000_tokens": 1000 * lm.target.bytes_per_position,
    }


def _times(times: dict[str, Any]) -> list[tuple[str, str]]:
    from dartspec.budget import interpolate

    ms = times["ms_by_rows"]
    shown = [n for n in SHOWN_ROWS if n <= max(ms)]
    plain = ms[min(ms)]
    # what the rows up to here cost each, against a plain step: a node that is accepted more often than that pays
    pays = [
        f"{a} to {b - 1}: {(interpolate(ms, b) - interpolate(ms, a)) / (b - a) / plain:.3f}"
        for a, b in itertools.pairwise(shown)
    ]
    return [
        ("best threads", str(times["threads"])),
        ("a forward", ", ".join(f"{n} rows {interpolate(ms, n):.1f} ms" for n in shown)),
        ("attention", f"{times['ms_by_row_and_1000_tokens']:.3f} ms more for each row and 1,000 tokens of context"),
        ("keys and values", f"{_mib(times['cache_bytes_by_1000_tokens'])} for each 1,000 tokens of a sequence"),
        ("a node pays", f"where it is accepted more often than (by nodes in the tree) {', '.join(pays)}"),
    ]


def _drafter_for(source: str) -> str:
    from dartspec.cli.ngram import open_tokenizer

    fingerprint = open_tokenizer(source).fingerprint
    for drafter in _trained():
        if drafter["tokenizer_fingerprint"] == fingerprint:
            return f"{drafter['method']}, trained for {drafter['target']} (same tokenizer; sizes are checked at load)"
    return "prompt_lookup (copies from the text): none in the package was trained for its tokenizer"


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as rows for people."""
    packages = ", ".join(f"{name} {v}" for name, v in facts["packages"].items() if v)
    missing = [f"{n} (for {OPTIONAL[n]})" if n in OPTIONAL else n for n, v in facts["packages"].items() if not v]
    trained = [
        f"{d['name']}: {d['method']} for {d['target']}, {'with' if d['index'] else 'without'} index, {_mib(d['bytes'])}"
        for d in facts["trained_drafters"]
    ]
    device = facts["device"] + (f" ({facts['device_name']})" if facts["device_name"] else "")
    rows = [
        ("dartspec", f"{facts['dartspec']} on Python {facts['python']}"),
        ("packages", packages),
        ("not installed", ", ".join(missing) or "nothing is missing"),
        ("machine", facts["machine"]),
        ("CPU flags", ", ".join(facts["cpu_flags"]) or "none that matter here"),
        ("threads", str(facts["threads"])),
        ("device", device),
        ("dtype", f"{facts['dtype']}: {facts['dtype_why']}"),
        ("own kernels", facts["kernels"]),
        ("free memory", _mib(facts["free_bytes"])),
        ("methods", ", ".join(n for n in facts["drafters"] if n != "oracle")),
        ("trained drafters", "; ".join(trained) or "none in the package"),
        ("default model", facts["default_model"]),
        ("cache", f"{facts['cache']} ({_mib(facts['cache_bytes'])})"),
        ("hub", "offline (HF_HUB_OFFLINE)" if facts["offline"] else "asked for models given by hub id"),
    ]
    if times := facts.get("times"):
        rows += _times(times)
    if model := facts.get("model"):
        rows.append(("model", f"{model['source']}: {'refused' if model['refused'] else 'can be served'}"))
        if model["needed_bytes"] is not None:
            need = f"{_mib(model['needed_bytes'])} needed, {_mib(model['file_bytes'])} on disk"
            rows.append(("its memory", f"{need}, {_mib(model['free_bytes'])} free"))
        if model["drafter"]:
            rows.append(("its drafter", model["drafter"]))
    return rows


def _mib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"
