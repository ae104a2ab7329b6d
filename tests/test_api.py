"""The public face: load, generate, stream, batches, other drafters, transformers' own generate."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import dartspec
import tiny_cli
from dartspec import LM, DartspecError, SamplingParams
from dartspec.accounting import Metrics
from dartspec.drafters import oracle
from dartspec.types import RoundRecord

PROMPTS = ["in the thick of the thing", "on and on and on and on", "a"]
MESSAGES = [{"role": "user", "content": "What is the thing?"}]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_cli.save(tmp_path_factory.mktemp("model"))


def memory(drafter: Any = "none", **options: Any) -> LM:
    return dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter=drafter, **options)


def knowing(lm: LM, prompt: list[int], rate: float = 1.0, **params: Any) -> LM:
    """The same target with a drafter that knows this answer and is right at `rate`."""
    answer = lm.with_drafter("none").generate(prompt, **params).ids
    config = oracle.Config(texts=((*prompt, *answer),), rate=rate)
    return lm.with_drafter(oracle.load(config, lm.target), nodes=8)


# -- loading ---------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, dartspec; print([m for m in ('torch', 'transformers', 'typer') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_folder_and_memory_give_the_same_text(folder: Path) -> None:
    from_folder = dartspec.load(folder, drafter="none", dtype="float32")
    assert from_folder.generate(MESSAGES, max_tokens=20).ids == memory().generate(MESSAGES, max_tokens=20).ids


def test_the_plan_comes_before_the_weights_and_the_note_says_what_was_chosen(folder: Path) -> None:
    plans: list[Any] = []
    lm = dartspec.load(folder, dtype="float32", on_plan=plans.append)
    assert plans[0].needed_bytes == sum(p.numel() for p in tiny_cli.model().parameters()) * 4
    assert lm.drafter_name == "prompt_lookup"
    assert "no drafter trained for this model" in lm.drafter_note


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drafter": "dartz"}, "unknown drafter 'dartz'; there are: dart, "),
        ({"drafter": "dart"}, "no dart drafter for"),
        ({"drafter": "/nowhere/at/all"}, "is no drafter: it has no config.json"),
        ({"nodes": 600}, "nodes is 600"),
        ({"nodes": "many"}, "nodes is 'many'"),
        ({"threads": 0}, "threads is 0"),
        ({"device": "abacus"}, "device 'abacus' is not known"),
        ({"device": "cuda:77"}, "device cuda:77 is not there"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DartspecError) as caught:
        memory(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_in_memory_needs_its_tokenizer() -> None:
    with pytest.raises(DartspecError, match="needs its tokenizer"):
        dartspec.load(tiny_cli.model())


# -- generating ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2}])
def test_generate_stream_and_batches_write_the_same(params: dict[str, Any]) -> None:
    lm = memory("prompt_lookup")
    alone = [lm.generate(p, max_tokens=24, **params) for p in PROMPTS]
    for size in (1, 2, 3):
        together = lm.generate_batch(PROMPTS, batch=size, max_tokens=24, **params)
        assert [r.ids for r in together] == [r.ids for r in alone]
        assert [r.text for r in together] == [r.text for r in alone]
    stream = lm.stream(PROMPTS[0], max_tokens=24, **params)
    chunks = list(stream)
    assert "".join(c.text for c in chunks) == stream.result.text == alone[0].text
    assert stream.result.metrics.num_new_tokens == len(alone[0].ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_seed_gives_the_same_text_with_every_drafter(temperature: float) -> None:
    params = {"temperature": temperature, "seed": 11, "max_tokens": 30, "ignore_eos": True}
    plain = memory("none").generate(PROMPTS[1], **params)
    prompt = memory().encode(PROMPTS[1])
    for lm in (
        memory("prompt_lookup"),
        memory("prompt_lookup", nodes=0),
        knowing(memory(), prompt, 1.0, **params),
        knowing(memory(), prompt, 0.5, **params),
        knowing(memory(), prompt, 0.0, **params),
    ):
        assert lm.generate(PROMPTS[1], **params).ids == plain.ids
    assert knowing(memory(), prompt, 1.0, **params).generate(PROMPTS[1], **params).metrics.A > 2


def test_a_request_without_a_seed_reports_the_one_it_got() -> None:
    lm = memory()
    first = lm.generate("in", temperature=1.0, max_tokens=12)
    assert lm.generate("in", temperature=1.0, max_tokens=12, seed=first.seed).ids == first.ids


def test_several_answers_to_one_prompt_differ_and_come_in_order() -> None:
    lm = memory("prompt_lookup")
    three = lm.generate_batch(["in the"], n=3, temperature=1.0, seed=3, max_tokens=10)
    assert len({tuple(r.ids) for r in three}) == 3
    assert three[0].ids == lm.generate("in the", temperature=1.0, seed=3, max_tokens=10).ids


def test_accepted_marks_the_drafted_tokens() -> None:
    lm = memory()
    prompt = lm.encode("in the")
    result = knowing(lm, prompt, 1.0, max_tokens=21).generate(prompt, max_tokens=21)
    assert len(result.accepted) == len(result.ids)
    assert sum(result.accepted) == sum(r.num_accepted for r in result.metrics.rounds)
    assert not result.accepted[0]  # the prefill's token


def test_logprobs_are_the_models_own() -> None:
    lm = memory("prompt_lookup")
    prompt = lm.encode("in the thick")
    result = lm.generate(prompt, max_tokens=6, logprobs=2, ignore_eos=True)
    with torch.no_grad():
        logits = tiny_cli.model()(torch.tensor([[*prompt, *result.ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits[:, : lm.target.num_tokens].log_softmax(-1)
    assert result.log_probs is not None
    for row, token, (log_prob, top) in zip(expected, result.ids, result.log_probs, strict=True):
        assert log_prob == pytest.approx(float(row[token]), abs=1e-4)
        assert [i for i, _ in top] == row.topk(2).indices.tolist()


def test_a_stop_string_ends_the_text_before_it() -> None:
    lm = memory("prompt_lookup")
    whole = lm.generate("the", max_tokens=30, ignore_eos=True).text
    printable = next(c for c in whole[3:] if c != "\ufffd")
    cut = lm.generate("the", max_tokens=30, ignore_eos=True, stop=printable)
    assert cut.text == whole[: whole.index(printable)]
    assert cut.finish_reason == "stop"


def test_prompts_in_all_forms() -> None:
    lm = memory()
    ids = lm.encode(MESSAGES)
    assert ids == lm.text.encode_chat(MESSAGES)
    assert lm.generate(ids, max_tokens=8).ids == lm.generate(MESSAGES, max_tokens=8).ids


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ("the " * 300, {}, "has a context of 256"),
        ([99999], {}, "token id 99999"),
        ("a", {"max_tokens": 0}, "max_tokens is 0"),
        ("a", {"temperature": -1.0}, "temperature is -1.0"),
        ("a", {"top_p": 0.0}, "top_p is 0.0"),
        ("a", {"top_p": 1.5}, "top_p is 1.5"),
        ("a", {"temprature": 1.0}, "unknown parameter 'temprature'; there are: temperature"),
        ("a", {"params": SamplingParams(), "seed": 1}, "give params= or seed=, not both"),
        ("a", {"params": {"seed": 1}}, "must be a SamplingParams"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(prompt: Any, params: dict[str, Any], words: str) -> None:
    with pytest.raises(DartspecError) as caught:
        memory().generate(prompt, **params)
    assert words in str(caught.value)


# -- streams and drafters ----------------------------------------------------------------------------------------------


def test_a_closed_stream_leaves_nothing_behind() -> None:
    lm = memory("prompt_lookup")
    expected = lm.generate(PROMPTS[1], max_tokens=20).ids
    stream = lm.stream(PROMPTS[0], max_tokens=40, ignore_eos=True)
    next(iter(stream))
    with pytest.raises(DartspecError, match="has not ended"):
        _ = stream.result
    stream.close()
    assert list(stream) == []
    assert lm.generate(PROMPTS[1], max_tokens=20).ids == expected


def test_with_drafter_shares_the_target() -> None:
    lm = memory("none")
    other = lm.with_drafter("prompt-lookup", nodes=3)
    assert other.target is lm.target
    assert (other.drafter_name.replace("-", "_"), other.nodes) == ("prompt_lookup", 3)
    assert lm.drafter_name == "none"
    result = other.generate("on and on and on and on and", max_tokens=16)
    assert max(r.num_drafted for r in result.metrics.rounds) <= 3


# -- transformers' generate ------------------------------------------------------------------------------------------


def both() -> tuple[Any, LM]:
    """A model without padding rows (transformers would write their ids) and ours over it."""
    model = tiny_cli.model(vocab_size=len(tiny_cli.tokenizer()))
    return model, dartspec.load(model, tiny_cli.tokenizer(), drafter="prompt_lookup")


def padded(texts: list[str]) -> dict[str, torch.Tensor]:
    """A left-padded batch, as transformers wants it."""
    tokenizer = tiny_cli.tokenizer()
    rows = [tokenizer(t)["input_ids"] for t in texts]
    longest = max(map(len, rows))
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([[pad] * (longest - len(r)) + r for r in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows]),
    }


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS])
@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.3}])
def test_custom_generate_is_greedy_generate(texts: list[str], extra: dict[str, Any]) -> None:
    model, lm = both()
    batch = padded(texts)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tiny_cli.tokenizer().pad_token_id, **extra}
    expected = model.generate(**batch, **options)
    got = model.generate(**batch, custom_generate=lm.custom_generate, **options)
    assert got.tolist() == expected.tolist()


def test_custom_generate_samples_from_torchs_seed() -> None:
    model, lm = both()
    batch = padded(PROMPTS)

    def run(seed: int, used: LM) -> list[list[int]]:
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 16}
        made = model.generate(**batch, custom_generate=used.custom_generate, **options)
        return made.tolist()  # type: ignore[no-any-return]

    assert run(1, lm) == run(1, lm) == run(1, lm.with_drafter("none"))
    assert run(1, lm) != run(2, lm)


def test_custom_generate_refuses_what_it_cannot_do() -> None:
    model, lm = both()
    batch = padded(PROMPTS[:1])
    with pytest.raises(DartspecError, match="num_beams=2"):
        model.generate(**batch, custom_generate=lm.custom_generate, num_beams=2, do_sample=False, max_new_tokens=4)


def test_far_fewer_accepted_drafts_than_in_training_are_warned_of_once() -> None:
    lm = dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="prompt_lookup", nodes=8)
    assert lm.trained is None

    class Recorded:
        acceptance: ClassVar[dict[str, float]] = {"4": 2.5, "8": 3.0}

    def rounds(accepted: int) -> Metrics:
        return Metrics(rounds=[RoundRecord(8, accepted, accepted + 1, 1.0, 0.0, 9.0, 0.0, 1) for _ in range(500)])

    lm.trained = Recorded()
    lm._watch(rounds(1))
    assert not lm.below_record
    with pytest.warns(UserWarning, match=r"M is 1\.0 over 500 rounds; with 8 nodes it was 3\.0"):
        lm._watch(rounds(0))
    assert lm.below_record
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm._watch(rounds(0))
