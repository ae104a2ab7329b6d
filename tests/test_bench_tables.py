"""The tables of README.md and docs/numbers.md are those of the committed results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_tables", ROOT / "benchmarks" / "write_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_say_what_the_results_say(tables: ModuleType) -> None:
    for path, results in tables.PAGES:
        assert path.read_text() == tables.written(path, results), f"{path.name}: run python benchmarks/write_tables.py"


def test_every_table_of_the_pages_has_its_result(tables: ModuleType) -> None:
    marks = {m for path, _ in tables.PAGES for m in tables.marks(path.read_text())}
    assert marks <= set(tables.TABLES)
    assert "table-t0" in marks
    assert all((tables.RESULTS / f"{tables.FROM.get(m, m)}.json").exists() for m in marks)


def test_a_figure_changed_by_hand_is_noticed(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "numbers.md"
    page.write_text((ROOT / "docs" / "numbers.md").read_text().replace("| **all** | ", "| **all** | 1", 1))
    assert tables.written(page, "results") != page.read_text()
    monkeypatch.setattr(tables, "PAGES", ((page, "results"),))
    monkeypatch.setattr("sys.argv", ["write_tables.py", "--check"])
    assert tables.main() == 1
    monkeypatch.setattr("sys.argv", ["write_tables.py"])
    assert tables.main() == 0
    assert page.read_text() == (ROOT / "docs" / "numbers.md").read_text()


def test_results_name_their_command_and_commit() -> None:
    for path in (ROOT / "docs" / "results").glob("*.json"):
        p: dict[str, Any] = json.loads(path.read_text())["provenance"]
        assert {"command", "commit", "torch", "cpu", "threads", "date"} <= set(p), path.name
