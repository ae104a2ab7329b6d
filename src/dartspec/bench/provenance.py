"""Where a number comes from: everything that a reader needs to have it again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dartspec import __version__
from dartspec.errors import DartspecError
from dartspec.files import written_aside

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
MEASURED_SUFFIXES = (".py", ".so", ".pyd", ".safetensors", ".ngram", ".json", ".jsonl")
MEASURING = ("measure.py", "run.py", "latency.py", "prompts")  # files of this folder that decide what is measured


def provenance(**more: Any) -> dict[str, Any]:
    """Commit, versions, machine, threads, command and time; `more` (seed, dtype, ...) is added."""
    return {
        "dartspec": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": " ".join([_program(), *map(shown, sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **more,
    }


def shown(argument: str) -> str:
    """An argument as others can use it: where a file lay on this machine is nobody's business."""
    return ",".join("=".join(_last(word) for word in part.split("=")) for part in argument.split(","))


def _last(word: str) -> str:
    return Path(word).name if os.path.isabs(word) else word


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "python -m dartspec" if name == "__main__.py" else name


def read_result(path: Path) -> Any:
    """What a result file holds, whatever it is; one sentence where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DartspecError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DartspecError(f"{path} is not JSON: {error}") from error


def save_result(path: Path, result: dict[str, Any]) -> None:
    """Writes a result as JSON, aside and renamed, so that an interrupted run leaves the old one."""
    write(path, layout(result) + "\n")


def write(path: Path, text: str) -> None:
    """A text file, written aside and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def layout(result: dict[str, Any]) -> str:
    """JSON that diffs well and stays small: a line for each key, and for each entry of a list of objects."""
    result = json.loads(json.dumps(result))  # numbers as keys become text, as everywhere in JSON
    lines = []
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            entries = ",\n".join(f"  {json.dumps(v, ensure_ascii=False)}" for v in value)
            lines.append(f" {json.dumps(key)}: [\n{entries}\n ]")
        elif isinstance(value, dict) and len(value) > 1:
            entries = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{entries}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def commit() -> str | None:
    """The checkout's commit, with "+" where files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def code_digest() -> str:
    """Of all that a measured figure depends on in this package: its code, core and weights, without the command line,
    training, other people's formats, and what makes pages of results."""
    here = Path(__file__).parent
    whole = hashlib.sha256()
    for path in sorted(p for p in here.parent.rglob("*") if p.is_file() and p.suffix in MEASURED_SUFFIXES):
        parts = path.relative_to(here.parent).parts
        if parts[0] in ("cli", "train", "interop") or (parts[0] == "bench" and parts[1] not in MEASURING):
            continue
        whole.update("/".join(parts).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16]


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
