"""The model card says what the folder holds and no more; `push` sends what belongs to a drafter."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import dartspec
import tiny_cli
from dartspec import DartspecError
from dartspec.cli.main import app
from dartspec.train.card import CARD, CURVES, push, write_card
from test_registry import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with a random drafter and a log of three updates."""
    lm = dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="none")
    provenance = {"data": ["answers.jsonl"], "trained_tokens": 12345, "step": 30}
    save(tmp_path / "run" / "best", lm, target="owner/tiny", provenance=provenance)
    lines: list[dict[str, Any]] = []
    for step in (10, 20, 30):
        at = {"step": step, "tokens": 411 * step}
        lines.append({**at, "loss": [4.0 - step / 10, 5.0], "lr": 1e-3})
        lines.append({"eval": {**at, "hit1": [step / 100, 0.1], "hit10": [0.5, 0.4], "chain": 0.25, "loss": [4, 5]}})
        lines.append({"m": {**at, "M": 1 + step / 100, "nodes": 8, "rounds": 9}})
    (tmp_path / "run" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "run" / "best"


JUDGED = {
    "sets": [
        {
            "set": "gsm8k",
            "M": {"0": {"16": [2.125, 2.0, 2.25]}},
            "chain": 0.75,
            "hit1": [0.625, 0.5],
            "hit10": [1, 0.9],
        },
        {"set": "all", "M": {"0": {"16": [2.125, 2.0, 2.25]}}, "chain": None, "hit1": None, "hit10": None},
    ],
    "provenance": {"command": "dartspec eval best", "commit": "abc", "cpu": "a cpu", "date": "2026-01-01"},
}


def test_a_card_holds_target_recipe_curve_and_figures(folder: Path) -> None:
    (folder / "eval.json").write_text(json.dumps(JUDGED))
    text = write_card(folder, license_="apache-2.0").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == "owner/tiny"
    assert head["license"] == "apache-2.0"
    assert {"dartspec", "speculative-decoding", "dart"} <= set(head["tags"])
    config = json.loads((folder / "config.json").read_text())
    for said in (
        config["tokenizer_fingerprint"],
        config["weights_fingerprint"],
        "12,345",
        "| gsm8k | 2.12 [2.00, 2.25] | 0.75 | 0.62 0.50 | 1.00 0.90 |",
        "| all | 2.12 [2.00, 2.25] | - | - | - |",
        "| 30 | 12,330 | 0.30 0.10 | 0.50 0.40 | 0.25 |",
        "`dartspec eval best`, commit abc, a cpu, 2026-01-01.",
        '"answers.jsonl"',
        f"![curves]({CURVES})",
    ):
        assert said in text
    png = (folder / CURVES).read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 2 * height > 200
    assert not list(folder.glob("*.tmp"))


def test_a_card_without_log_figures_or_hub_id_claims_none(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "target": "a-folder"}))
    (folder.parent / "log.jsonl").unlink()
    text = write_card(folder).read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert "base_model" not in head
    assert "license" not in head
    assert "What it gives" not in text
    assert "curves" not in text
    assert not (folder / CURVES).exists()
    assert (
        yaml.safe_load(write_card(folder, base_model="me/mine").read_text().split("---")[1])["base_model"] == "me/mine"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"log": Path("none.jsonl")}, "no such file"),
        ({"log": "answers"}, "not the log of a training run"),
        ({"base_model": "my model"}, "'my model' is not a hub id"),
        ({"base_model": "a/b\nlicense: mit"}, "is not a hub id"),
        ({"license_": "x\ny: z"}, "is not an id"),
    ],
)
def test_what_a_card_cannot_say_is_refused(folder: Path, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    if given.get("log") == "answers":
        given = {"log": tmp_path / "answers.jsonl"}
        given["log"].write_text('{"prompt": [1], "response": [2]}\n')
    with pytest.raises(DartspecError, match=said):
        write_card(folder, **given)
    assert not (folder / CARD).exists()


def test_without_matplotlib_it_says_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DartspecError, match=r"need the package matplotlib: pip install 'dartspec\[train\]'"):
        write_card(folder)


def test_push_to_a_folder_sends_what_belongs_to_a_drafter(folder: Path, tmp_path: Path) -> None:
    write_card(folder)
    (folder / "state.pt").write_bytes(b"an optimiser")
    (folder / "secret.txt").write_text("x")
    place = tmp_path / "there"
    result = CliRunner().invoke(app, ["push", str(folder), str(place), "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["place"] == str(place)
    assert sorted(p.name for p in place.iterdir()) == sorted(["config.json", "model.safetensors", CARD, CURVES])
    assert (place / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    lm = dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter=str(place))
    assert lm.drafter_name == "dart"
    other = tmp_path / "project"
    other.mkdir()
    (other / CARD).write_text("mine")
    with pytest.raises(DartspecError, match=r"holds a README\.md and no drafter"):
        push(folder, str(other))
    assert (other / CARD).read_text() == "mine"


def test_push_to_the_hub_makes_a_private_repository_and_uploads_the_same_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    write_card(folder)
    (folder / "state.pt").write_bytes(b"an optimiser")
    calls: list[tuple[str, Any]] = []

    class Api:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
            calls.append(("create", (name, private, exist_ok)))
            return f"hub/{name}"

        def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **_: Any) -> None:
            calls.append(("upload", (repo_id, folder_path, allow_patterns)))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert push(folder, "me/mine") == "hub/me/mine"
    files = sorted(["config.json", "model.safetensors", CARD, CURVES])
    assert calls == [("create", ("me/mine", True, True)), ("upload", ("me/mine", folder, files))]

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("401: log in first\nRequest id 7")

    def unreachable(*_: Any, **__: Any) -> None:
        raise type("ConnectError", (Exception,), {})("no such host")  # of the HTTP library, no OSError

    for fails, said in ((refuse, "401: log in first"), (unreachable, "no such host")):
        monkeypatch.setattr(Api, "create_repo", fails)
        with pytest.raises(DartspecError, match=rf"me/mine could not be written on the hub: {said}$"):
            push(folder, "me/mine")


def test_push_refuses_what_nobody_could_use(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DartspecError, match=r"has no README.md: write it first"):
        push(folder, str(tmp_path / "x"))
    write_card(folder)
    with pytest.raises(DartspecError, match="neither a folder"):
        push(folder, "just-a-name")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DartspecError, match="is a file"):
        push(folder, str(tmp_path / "file"))
    with pytest.raises(DartspecError, match="is no folder"):
        push(tmp_path / "none", str(tmp_path / "x"))
    config = (folder / "config.json").read_text()
    for damaged, said in (("{", "not JSON"), ("{}", "not of a drafter")):
        (folder / "config.json").write_text(damaged)
        with pytest.raises(DartspecError, match=said):
            push(folder, str(tmp_path / "x"))
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DartspecError, match=r"has no model.safetensors"):
        push(folder, str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_the_verb_writes_the_card(folder: Path) -> None:
    result = CliRunner().invoke(app, ["card", str(folder), "--base-model", "me/mine"])
    assert result.exit_code == 0, result.stderr
    assert "base_model: me/mine" in (folder / CARD).read_text()
