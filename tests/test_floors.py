"""A file imports only from lower floors or from its own folder (docs: the table of floors in the design)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "dartspec"

FLOORS = {
    -1: ("errors", "files", "_core"),  # floor 0 too, but the nouns raise the one and may call the other
    0: ("types", "config", "device"),
    1: ("ngram", "tree", "sampling", "accounting", "text"),
    2: ("lattice", "verify", "budget", "calibration", "cost", "target"),
    3: ("drafters",),
    4: ("engine",),
    5: ("scheduler",),  # floor 4 too, but it drives the engine's round
    6: ("train", "bench", "serve", "interop"),
    7: ("api",),
    8: ("cli", "__init__"),  # floor 6 too, but both are faces of the api
    9: ("__main__",),
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import that can run, those inside functions too; not those for the type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            for branch in node.orelse:
                yield from imports(ast.Module(body=[branch], type_ignores=[]))
        else:
            yield from imports(node)


def package_units(package: Path) -> set[str]:
    return {p.stem if p.suffix == ".py" else p.name for p in package.iterdir() if p.suffix == ".py" or p.is_dir()}


def units_imported(node: ast.Import | ast.ImportFrom, module: tuple[str, ...], units: set[str]) -> Iterator[str]:
    """The parts of the package that an import names: files or folders right under it."""
    if isinstance(node, ast.Import):
        dotted = [alias.name.split(".") for alias in node.names]
    else:
        base = list(module[: -node.level]) if node.level else []
        base += node.module.split(".") if node.module else []
        dotted = [[*base, alias.name] for alias in node.names]
    for parts in dotted:
        if parts[0] != "dartspec" or parts[1:] == ["__version__"]:
            continue
        if len(parts) > 1 and (parts[1] in units or parts[1] == "_core"):
            yield parts[1]
        else:
            yield "__init__"  # a name of the package itself


def violations(package: Path) -> list[str]:
    found = []
    units = package_units(package)
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        own = relative.parts[0].removesuffix(".py")
        if own not in FLOOR:
            found.append(f"{relative} has no floor: give it one in {Path(__file__).name} and in the design")
            continue
        module = ("dartspec", *relative.with_suffix("").parts)
        for node in imports(ast.parse(path.read_text(encoding="utf-8"))):
            for unit in units_imported(node, module, units):
                if unit != own and FLOOR.get(unit, 99) >= FLOOR[own]:
                    found.append(
                        f"{relative}:{node.lineno} (floor {FLOOR[own]}) imports {unit} (floor {FLOOR.get(unit)})"
                    )
    return found


def test_no_file_imports_from_its_own_floor_or_above() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("where", "source", "caught"),
    [
        ("tree.py", "from dartspec.lattice import build_tree", True),
        ("tree.py", "def f():\n    import dartspec.engine", True),
        ("tree.py", "from dartspec import api", True),
        ("tree.py", "from . import engine", True),
        ("tree.py", "from .ngram import index", True),  # a neighbour on the same floor
        ("tree.py", "from dartspec import load", True),
        ("ngram/index.py", "from ..engine import generate", True),
        ("ngram/index.py", "from .corpus import read", False),
        ("ngram/index.py", "from dartspec import _core", False),
        ("lattice.py", "from dartspec.ngram.index import NgramIndex", False),
        ("tree.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dartspec.engine import X", False),
        ("tree.py", "import torch", False),
        ("tree.py", "from dartspec import __version__", False),
        ("types.py", "from dartspec.errors import DartspecError", False),
        ("errors.py", "from dartspec.types import TokenTree", True),
        ("surprise.py", "", True),
    ],
)
def test_the_check_catches_upward_imports(tmp_path: Path, where: str, source: str, caught: bool) -> None:
    for name in (
        "errors.py",
        "types.py",
        "tree.py",
        "lattice.py",
        "engine.py",
        "api.py",
        "ngram/index.py",
        "ngram/corpus.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    (tmp_path / where).write_text(source)
    assert bool(violations(tmp_path)) == caught
