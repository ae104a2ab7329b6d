"""Drafting methods, one module each; the name of the method is the name of its module.

A module offers `Config` (a frozen dataclass) and `load(config, view) -> Drafter`; one that can be trained `start`,
`read` and `loss` too (`_train.py`). Nothing else in the package knows the names: to add a method, add a file
(docs/add-a-drafter.md).
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from dartspec.errors import DartspecError


def names() -> list[str]:
    """Every method that can be asked for; modules with a leading underscore are helpers."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def get(name: str) -> ModuleType:
    """The module of a method; `name` may be written with hyphens."""
    known = names()
    plain = name.replace("-", "_")
    if plain not in known:
        raise DartspecError(f"unknown drafter {name!r}; there are: {', '.join(known)}")
    return importlib.import_module(f"{__name__}.{plain}")
