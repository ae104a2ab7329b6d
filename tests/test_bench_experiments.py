"""The experiments over recorded guesses: effects are what the cells say, and every table can be written."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dartspec.bench.lattices import Capture, Text
from dartspec.ngram import NgramIndex

ROOT = Path(__file__).parent.parent
D, K, LENGTH = 4, 25, 24


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def experiments() -> ModuleType:
    return script("experiments")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Texts that walk through a fixed cycle now and then broken, guesses with the truth at a random rank, an index of
    the cycle."""
    folder = tmp_path_factory.mktemp("recorded")
    chance = np.random.default_rng(0)
    texts = []
    for number, (temperature, seed) in itertools.product(range(3), ((0.0, 0), (1.0, 0), (1.0, 1))):
        ids = [int(chance.integers(100))]
        while len(ids) < LENGTH:
            ids.append((7 * ids[-1] + 3) % 100 if chance.random() < 0.8 else int(chance.integers(100)))
        tokens = torch.from_numpy(chance.integers(100, 400, (LENGTH - 1, D, K)).astype(np.int32))
        for at, t in itertools.product(range(LENGTH - 1), range(D)):
            if at + 1 + t < LENGTH:
                tokens[at, t, int(chance.integers(6))] = ids[at + 1 + t]
        log_probs = torch.linspace(-1, -5, K).expand(LENGTH - 1, D, K).contiguous()
        name = f"p/{number}"
        texts.append(Text(name, "p", temperature, seed, [5, 6], ids, LENGTH, log_probs, tokens))
    Capture(texts, frozenset(), "print").save(folder / "g.safetensors")
    cycle = [1]
    while len(cycle) < 300:
        cycle.append((7 * cycle[-1] + 3) % 100)
    documents = [[(c + k) % 100 for c in cycle] for k in range(1)] + [[i, (7 * i + 3) % 100] for i in range(100)]
    NgramIndex.build(documents, vocab_size=400, fingerprint="print", name="", description="").save(folder / "i.ngram")
    return folder / "g.safetensors", folder / "i.ngram"


@pytest.fixture(scope="module")
def found(experiments: ModuleType, recorded: tuple[Path, Path]) -> dict[str, Any]:
    made: dict[str, Any] = experiments.factorial(
        argparse.Namespace(captures=[str(recorded[0])], temperature=1.0, index=recorded[1])
    )
    return made


def test_effects_are_ratios_of_the_cells(found: dict[str, Any]) -> None:
    assert (found["prompts"], found["seeds"], len(found["cells"])) == (3, [0, 1], 32)
    by_name = {e["factor"]: e for e in found["effects"]}
    for name, levels in (("nodes", (8, 59)), ("n-gram weight", (0.0, 0.5))):
        logs = [np.mean([math.log(c["M"][0]) for c in found["cells"] if c[name] == level]) for level in levels]
        assert by_name[name]["times_M"][0] == pytest.approx(math.exp(logs[1] - logs[0]), abs=2e-4)
        assert by_name[name]["times_M"][0] > 1.02
        assert len(by_name[name]["by_seed"]) == 2
    pair = next(e for e in found["interactions"] if e["factors"] == ["n-gram weight", "nodes"])
    cell = {
        (c["n-gram weight"], c["nodes"]): [
            math.log(x["M"][0])
            for x in found["cells"]
            if (x["n-gram weight"], x["nodes"]) == (c["n-gram weight"], c["nodes"])
        ]
        for c in found["cells"]
    }
    mean = {k: float(np.mean(v)) for k, v in cell.items()}
    both = (mean[0.5, 59] - mean[0.0, 59] - mean[0.5, 8] + mean[0.0, 8]) / 2
    assert pair["times_M"][0] == pytest.approx(math.exp(both), abs=2e-4)


def test_the_ngram_term_off_and_on(experiments: ModuleType, recorded: tuple[Path, Path]) -> None:
    capture, index = recorded
    rows = experiments.ngram(argparse.Namespace(capture=str(capture), index=index))["rows"]
    assert [(r["temperature"], r["nodes"], r["suite"]) for r in rows][:3] == [
        (0.0, 8, "p"),
        (0.0, 8, "all"),
        (0.0, 16, "p"),
    ]
    for r in rows:
        assert r["ratio"][0] == pytest.approx(r["on"][0] / r["off"][0], abs=1e-3)
        assert r["off"][0] > 1
        assert r["nodes"] > 8 or r["on"] != r["off"]


def test_a_folder_with_another_horizon(experiments: ModuleType, tmp_path: Path) -> None:
    made = experiments.deep_copy(12, tmp_path)
    assert '"d": 12' in (made / "config.json").read_text()
    assert (made / "model.safetensors").exists()


def test_tables_of_results(experiments: ModuleType, recorded: tuple[Path, Path], found: dict[str, Any]) -> None:
    tables = script("write_tables")
    assert tables.factorial(found).count("\n| ") == 7  # a head, its rule, five factors
    off_on = experiments.ngram(argparse.Namespace(capture=str(recorded[0]), index=recorded[1]))
    assert "| **all** |" in tables.ngram_off_on(off_on)
