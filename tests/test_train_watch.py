"""What a run says while it goes on: the log that survives a kill, TensorBoard's files, the table."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dartspec.cli.terminal import Terminal
from dartspec.cli.train import _watching
from dartspec.errors import DartspecError
from dartspec.train.watch import Log, View, duration, lines, read_log, scalars

TRAIN: dict[str, Any] = {
    "step": 50,
    "tokens": 12_000,
    "lr": 1e-3,
    "loss": [3.5, 5.25],
    "tokens_per_s": 1234,
    "seconds_left": 5400,
    "time": 7,
}
EVAL: dict[str, Any] = {"step": 40, "tokens": 9_000, "hit1": [0.5, 0.25], "hit10": [0.75, 0.6], "loss": [3.0, 4.0]}
M: dict[str, Any] = {
    "step": 30,
    "tokens": 7_000,
    "M": 2.25,
    "rounds": 80,
    "nodes": 16,
    "best": True,
    "by_prompt": [[9, 4]],
}


def test_the_log_is_read_as_it_was_written_and_goes_on_where_the_run_does(tmp_path: Path) -> None:
    log = Log(tmp_path, 0)
    written = [("m", M), ("eval", EVAL), ("train", TRAIN), ("train", {**TRAIN, "step": 100}), ("final", EVAL)]
    for kind, record in written:
        log(kind, record)
    path = tmp_path / "log.jsonl"
    assert read_log(path) == written
    with path.open("a") as file:
        file.write('{"step": 15')  # killed in the middle of a line
    assert read_log(path) == written
    again = Log(tmp_path, 60)  # what was saved is older than what was logged; and it is not the end any more
    assert read_log(path) == written[:3]
    again("train", {**TRAIN, "step": 70})
    assert [r["step"] for _, r in read_log(path)] == [30, 40, 50, 70]
    path.write_text("{\n" + path.read_text())
    with pytest.raises(DartspecError, match=r"log.jsonl, line 1: not a JSON object"):
        read_log(path)
    assert read_log(tmp_path / "none") == []


def test_tensorboard_holds_every_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(tmp_path, 0, tensorboard=True)
    for kind, record in (("m", M), ("eval", EVAL), ("train", TRAIN)):
        log(kind, record)
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {tag: [(e.step, round(e.value, 4)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found["train/loss/1"] == [(50, 3.5)]
    assert found["train/loss/2"] == [(50, 5.25)]
    assert found["train/lr"] == [(50, 0.001)]
    assert found["eval/hit1/2"] == [(40, 0.25)]
    assert found["eval/hit10/1"] == [(40, 0.75)]
    assert found["m/M"] == [(30, 2.25)]
    assert set(found) == {n for k, r in (("m", M), ("eval", EVAL), ("train", TRAIN)) for n, _ in scalars(k, r)}


def test_tensorboard_is_asked_for_and_not_imported_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorboard" or n.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    Log(tmp_path, 0).close()
    with pytest.raises(DartspecError, match=r"needs the package tensorboard: pip install 'dartspec\[train\]'"):
        Log(tmp_path, 0, tensorboard=True)
    code = "import sys, dartspec.cli.main, dartspec.train.run as r; print(*(m in sys.modules for m in %r))"
    heavy = ["tensorboard", "accelerate", "torch.utils.tensorboard"]
    found = subprocess.run([sys.executable, "-c", code % (heavy,)], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"] * 3


def test_the_table_shows_the_last_of_each_kind() -> None:
    view = View(200)

    def shown() -> str:
        console = Console(width=160)
        with console.capture() as capture:
            console.print(view)
        return capture.get()

    assert "0 of 200 updates" in shown()
    for kind, record in (("train", TRAIN), ("eval", EVAL), ("m", M), ("m", {**M, "step": 60, "M": 2.0, "best": False})):
        view(kind, record)
    table = shown()
    for part in (
        "50 of 200 updates, 0.01 M tokens, learning rate 1.00e-03, 1,234 tokens/s, 1 h 30 min left",
        "held-out figures of update 40, M 2.000 at update 60, best 2.250 at update 30",
    ):
        assert part in " ".join(table.split())
    rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in table.splitlines() if line.startswith("│")}
    numbers = {name: [float(x) for x in row] for name, row in rows.items()}
    assert numbers == {
        "loss": [3.5, 5.25],
        "held-out loss": [3.0, 4.0],
        "hit@1": [0.5, 0.25],
        "hit@10": [0.75, 0.6],
    }


def test_on_a_terminal_the_table_stays_in_place() -> None:
    term = Terminal()
    term.out = Console(file=io.StringIO(), force_terminal=True, width=120)
    with _watching(term, 200, True) as watch:
        assert watch is not None
        watch("train", TRAIN)
        term.say("resuming")
    written = term.out.file.getvalue()  # type: ignore[attr-defined]
    assert "50 of 200 updates" in written
    assert "resuming" in written
    assert "\x1b[1A" in written  # it goes back up to paint over itself
    for unwanted in (_watching(term, 200, False), _watching(Terminal(json=True), 200, True)):
        with unwanted as watch:
            assert watch is None


def test_lines_for_a_file() -> None:
    said: list[str] = []
    watch = lines(said.append)
    for kind, record in (("train", TRAIN), ("m", M), ("eval", EVAL), ("final", EVAL)):
        watch(kind, record)
    assert said == [
        "step 30  M 2.250 over 80 rounds (16 nodes)  best so far",
        "step 40  0.01 M tokens  hit@1 0.500 0.250  hit@10 0.750 0.600  loss 3.000",
        "the weights of step 40, kept: hit@1 0.500 0.250  hit@10 0.750 0.600  loss 3.000",
    ]
    assert json.dumps([duration(x) for x in (40, 90, 3600, 5400)]) == '["40 s", "2 min", "1 h 00 min", "1 h 30 min"]'
