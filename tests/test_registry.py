"""`$DARTSPEC_DRAFTERS` and the hub: which drafter `load(target)` takes, and what `dartspec drafters` says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import dartspec
import tiny_cli
from dartspec import DartspecError
from dartspec.cli.main import app
from dartspec.drafters.dart import Config, DartNet
from dartspec.interop import registry


def load(drafter: Any = "auto") -> dartspec.LM:
    return dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter=drafter)


@pytest.fixture(scope="module")
def bare() -> dartspec.LM:
    return load("none")


def save(folder: Path, lm: dartspec.LM, **changes: Any) -> Path:
    """A random DART drafter for the tiny model."""
    shape: dict[str, Any] = {
        "d": 4,
        "taps": (1, 2, 3),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "draft_vocab_size": lm.target.vocab_size,
        "vocab_size": lm.target.vocab_size,
        "target_hidden_size": 32,
        "num_target_layers": 4,
        "target": "tiny",
        "tokenizer_fingerprint": lm.text.fingerprint,
        "weights_fingerprint": lm.target.weights_fingerprint,
        "acceptance": {"16": 1.5},
    }
    DartNet(Config(**{**shape, **changes})).save(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DARTSPEC_DRAFTERS", str(tmp_path / "drafters"))
    (tmp_path / "drafters").mkdir()
    return tmp_path / "drafters"


def test_load_finds_the_drafter_of_its_target(place: Path, bare: dartspec.LM) -> None:
    save(place / "other-tokenizer", bare, tokenizer_fingerprint="0123456789abcdef")
    save(place / "other-width", bare, num_target_layers=9)
    assert load().drafter_name == "prompt_lookup"
    save(place / "mine" / "best", bare)  # a run's folder, one level further down
    lm = load()
    assert lm.drafter_name == "dart+prompt_lookup"
    assert load("dart").drafter_name == "dart"
    plain = bare.generate("the thing is", max_tokens=12).ids
    assert lm.generate("the thing is", max_tokens=12).ids == plain


def test_the_closest_of_several_is_taken(tmp_path: Path, bare: dartspec.LM) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tuned = save(a / "tuned", bare, weights_fingerprint="0" * 16, acceptance={"16": 3.0})
    assert registry.find(bare.target, None, [a]) == tuned  # of the model it was fine-tuned from
    low, high = save(a / "low", bare), save(a / "high", bare, acceptance={"8": 1.9, "59": 1.2})
    assert registry.find(bare.target, None, [a]) == high  # by M, at no more than 16 nodes
    other = save(b / "other", bare, acceptance={"16": 9.0})
    assert registry.find(bare.target, None, [a, b]) == high  # the folder named first
    assert registry.find(bare.target, None, [b, a]) == other
    os.utime(low / "model.safetensors", (2e9, 2e9))
    config = json.loads((low / "config.json").read_text())
    (low / "config.json").write_text(json.dumps({**config, "acceptance": {"16": 1.9}}))
    assert registry.find(bare.target, None, [a]) == low  # equal M: the younger
    assert registry.find(bare.target, "medusa", [a, b]) is None


def test_what_cannot_be_used_is_said(place: Path, bare: dartspec.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    (save(place / "no-weights", bare) / "model.safetensors").unlink()
    (place / "broken").mkdir()
    (place / "broken" / "config.json").write_text("{")
    (place / "a-model").mkdir()
    (place / "a-model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')  # passed by in silence
    with pytest.warns(UserWarning, match="passed by") as caught:
        assert list(registry.entries([place])) == []
    assert len(caught) == 2
    assert any("no-weights holds a drafter's config but no model.safetensors" in str(w.message) for w in caught)
    assert any("broken/config.json cannot be read" in str(w.message) for w in caught)
    monkeypatch.setenv("DARTSPEC_DRAFTERS", str(place / "nowhere"))
    with pytest.raises(DartspecError, match=r"DARTSPEC_DRAFTERS names .*nowhere, which is no folder"):
        registry.places()


class Hub:
    """Stands in for the hub: repositories by name, each a local folder."""

    def __init__(self, repositories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        self.asked: list[Any] = []
        self.repositories = repositories
        hub = self

        class Api:
            def list_models(self, *, filter: list[str], **_: Any) -> list[Any]:
                hub.asked.append(filter)
                return [SimpleNamespace(id=name) for name in hub.repositories]

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file: str(repositories[name] / file))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)

    def snapshot(self, name: str, revision: str | None = None, allow_patterns: Any = None) -> str:
        if name not in self.repositories:
            raise FileNotFoundError(f"404: {name}")
        assert "model.safetensors" in allow_patterns
        return str(self.repositories[name])


def test_the_hub_is_asked_where_it_is_named_and_only_there(
    tmp_path: Path, bare: dartspec.LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = save(tmp_path / "wrong", bare, tokenizer_fingerprint="0" * 16)
    right = save(tmp_path / "right", bare)
    hub = Hub({"someone/wrong": wrong, "someone/right": right}, monkeypatch)
    t = bare.target
    target = SimpleNamespace(
        name="owner/tiny",
        hidden_size=t.hidden_size,
        num_layers=t.num_layers,
        tokenizer_fingerprint=t.tokenizer_fingerprint,
        weights_fingerprint=t.weights_fingerprint,
    )
    monkeypatch.delenv("DARTSPEC_DRAFTERS", raising=False)
    assert registry.find(target, None, []) is None
    assert hub.asked == []
    monkeypatch.setenv("DARTSPEC_DRAFTERS", "hub")
    assert registry.places() == []
    assert registry.find(target, None, []) == right
    assert hub.asked == [["dartspec", "base_model:owner/tiny"]]
    local = save(tmp_path / "here" / "local", bare)
    assert registry.find(target, None, [tmp_path / "here"]) == local  # what is here comes first
    target.name = "a folder"
    assert registry.find(target, None, []) is None
    assert len(hub.asked) == 1


def test_a_hub_that_cannot_be_reached_is_said(bare: dartspec.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class Api:
        def list_models(self, **_: Any) -> Any:
            raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setenv("DARTSPEC_DRAFTERS", "hub")
    target = SimpleNamespace(name="owner/tiny", tokenizer_fingerprint="x")
    with pytest.warns(UserWarning, match=r"no drafter was looked for on the hub .*no network"):
        assert registry.find_on_hub(target) is None  # type: ignore[arg-type]


def test_drafters_lists_target_m_and_age(place: Path, bare: dartspec.LM) -> None:
    mine = save(place / "mine", bare, acceptance={"8": 1.25})
    os.utime(mine / "model.safetensors", (mine.stat().st_mtime - 3 * 86400,) * 2)
    result = CliRunner().invoke(app, ["drafters", "--json"])
    assert result.exit_code == 0, result.stderr
    listed = json.loads(result.stdout.splitlines()[-1])["drafters"]
    assert (listed[0]["target"], listed[0]["method"], listed[0]["M"]) == ("tiny", "dart", 1.25)
    assert 2.9 < listed[0]["age_days"] < 3.1
    assert listed[0]["folder"] == str(mine)
    assert any(d["target"] == "SmolLM2-135M-Instruct" for d in listed)  # the package's own
    table = CliRunner().invoke(app, ["drafters"]).stdout
    assert "tiny" in table
    assert "1.25" in table
    assert "3 days" in table
