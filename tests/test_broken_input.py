"""What a hostile or unlucky user gives: one sentence, never a traceback from a library and never a wrong answer."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dartspec
import tiny_cli
from dartspec.api import LM
from dartspec.budget import cached_times
from dartspec.drafters.dart import Config, DartNet
from dartspec.errors import DartspecError
from dartspec.ngram.corpus import read_documents
from dartspec.target import load as loading


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTSPEC_CACHE", str(tmp_path / "cache"))


def memory(drafter: Any = "prompt_lookup", **options: Any) -> LM:
    return dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter=drafter, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random DART drafter for the tiny model."""
    lm = memory("none")
    config = Config(
        d=4,
        taps=(1, 2, 3),
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        draft_vocab_size=lm.target.vocab_size,
        vocab_size=lm.target.vocab_size,
        target_hidden_size=32,
        num_target_layers=4,
    )
    net = DartNet(config)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    net.save(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"stop": None}, "stop is None"),
        ({"stop": [1]}, "stop is"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is"),
        ({"processors": [5]}, "processors is"),
        ({"logit_bias": None}, "logit_bias is None"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias is"),
        ({"logit_bias": {3: "x"}}, "logit_bias is"),
        ({"max_tokens": "5"}, "max_tokens is '5'"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"logprobs": True}, "logprobs is True"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"n": 3}, "generate_batch"),
        ({"processors": [lambda ids, logits: None]}, "processor returned NoneType"),
        ({"processors": [lambda ids, logits: logits[0]]}, "processor returned"),
        ({"processors": [lambda ids, logits: logits[:, :5]]}, "processor returned"),
    ],
)
def test_parameters_of_a_wrong_kind(params: dict[str, Any], words: str) -> None:
    with pytest.raises(DartspecError, match=words):
        memory().generate("hello", **{"max_tokens": 4, **params})


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        b"hello",
        {"role": "user", "content": "x"},
        ["a", "b"],
        [1.5],
        [[1, 2]],
        torch.tensor([[1, 2]]),
        "half \ud800",
        [{"content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "\udcff"}],
        [{"role": "user", "content": "x"}, 5],
    ],
    ids=repr,
)
def test_prompts_of_a_wrong_kind(prompt: Any) -> None:
    with pytest.raises(DartspecError):
        memory().generate(prompt, max_tokens=4)


def test_prompts_of_unusual_but_right_kinds() -> None:
    lm = memory()
    wanted = lm.generate([1, 2], max_tokens=4).ids
    assert lm.generate((1, 2), max_tokens=4).ids == wanted
    assert lm.generate(torch.tensor([1, 2]), max_tokens=4).ids == wanted  # type: ignore[arg-type]
    assert lm.generate([{"role": "user", "content": ""}], max_tokens=4).ids


@pytest.mark.parametrize("n", [0, -1, "x"])
def test_a_number_of_answers_below_one(n: Any) -> None:
    with pytest.raises(DartspecError, match="n is"):
        memory().generate_batch(["hello"], n=n)


def test_one_string_is_no_batch() -> None:
    with pytest.raises(DartspecError, match="one string"):
        memory().generate_batch("hello")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": None}, "nodes is None"),
        ({"nodes": 2.5}, "nodes is 2.5"),
        ({"nodes": True}, "nodes is True"),
        ({"threads": 2.5}, "threads is 2.5"),
        ({"threads": 10**6}, "threads is 1000000"),
        ({"drafter": 5}, "drafter is a int"),
        ({"drafter": None}, "drafter is a NoneType"),
        ({"index": "my.ngram"}, "reads none"),
        ({"drafter": "none", "index": "my.ngram"}, "reads none"),
        ({"drafter": "auto", "index": "my.ngram"}, "reads none"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DartspecError, match=words):
        memory(**options)


@pytest.mark.parametrize("model", [5, "", ["x"]])
def test_a_model_that_is_none(model: Any) -> None:
    with pytest.raises(DartspecError, match="model is"):
        dartspec.load(model)


@pytest.mark.parametrize("method", ["prompt_lookup", "dart"])
def test_a_stream_nobody_closed_does_not_disturb_the_next_answer(method: str, folder: Path) -> None:
    lm = memory(folder if method == "dart" else method)
    wanted = memory("none").generate("hello", max_tokens=12).ids
    left = iter(lm.stream("hello there hello there", max_tokens=30))
    next(left), next(left)
    assert lm.generate("hello", max_tokens=12).ids == wanted


# -- a drafter's folder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"taps": None},
        {"taps": "123"},
        {"taps": 3},
        {"taps": [1.0, 2.0, 3.0]},
        {"rms_norm_eps": "x"},
        {"rms_norm_eps": -1},
        {"rope_theta": None},
        {"rope_theta": 0},
        {"acceptance": "x"},
        {"acceptance": {"a": 1}},
        {"acceptance": None},
        {"d": 10**9},
    ],
    ids=repr,
)
def test_a_damaged_config(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DartspecError, match=f"{next(iter(change))} is"):
        memory(folder)


@pytest.mark.parametrize("content", [b"[]", b"5", b"\xff\xfe", b'{"method": "none"}', b'{"method": "oracle"}', b""])
def test_a_config_that_is_no_drafters(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(DartspecError, match=r"config\.json"):
        memory(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers(folder: Path, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][3] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DartspecError, match=r"norm\.weight holds numbers that are not finite"):
        memory(folder)


@pytest.mark.parametrize(("name", "dtype"), [("fc.weight", torch.int8), ("d2t", torch.float32)])
def test_weights_of_another_kind(folder: Path, name: str, dtype: torch.dtype) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DartspecError, match=f"{name} is {dtype}"):
        memory(folder)


# -- files and folders -------------------------------------------------------------------------------------------------


def test_times_that_cannot_be_remembered_are_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="cannot be remembered"):
        times = cached_times(memory("none").target, tmp_path / "file", "key")
    assert min(times.rows) == 1


@pytest.mark.parametrize("record", [{"text": "a\ud800"}, {"messages": [{"role": "user", "content": "\udfff"}]}])
def test_half_a_surrogate_in_a_corpus_is_refused_with_its_line(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + json.dumps(record) + "\n")
    with pytest.raises(DartspecError, match=r"a\.jsonl, line 2: half a surrogate pair"):
        list(read_documents([tmp_path / "a.jsonl"], lambda texts: [[1] for _ in texts]))


def test_a_damaged_cache_of_the_default_says_which_folder_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "default.gguf"
    gguf.write_bytes(b"GGUF")

    def half(_found: Any, place: Path) -> None:
        tiny_cli.save(place)
        weights = (place / "model.safetensors").read_bytes()
        (place / "model.safetensors").write_bytes(weights[:-100])

    monkeypatch.setattr(loading, "default_file", lambda: gguf)
    monkeypatch.setattr(loading, "_gguf", lambda path: path)
    monkeypatch.setattr(loading, "_convert", half)
    with pytest.raises(DartspecError, match="cache is damaged, remove the folder"):
        dartspec.load()


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_with_drafters_of_their_own_share_a_target(folder: Path) -> None:
    lm = memory("none")
    prompts = ["hello", "quite another and longer text"]
    wanted = [lm.generate(p, max_tokens=60).ids for p in prompts]
    own = [lm.with_drafter(folder, nodes=6) for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            answers = pool.map(
                lambda pair: pair[0].generate(pair[1], max_tokens=60).ids, zip(own, prompts, strict=True)
            )
            assert list(answers) == wanted
