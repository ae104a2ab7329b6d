"""A method's settings as text, `NAME,key=value,...`: how it drafts, apart from its weights. Knows no method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from dartspec.errors import DartspecError


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(":"))


KINDS: Mapping[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number", int),
    float: ("a number", float),
    bool: ("true or false", _flag),
    str: ("a word", str),
    tuple[int, ...]: ("whole numbers joined by colons", _numbers),
    float | None: ("a number", float),
}


def split(text: str) -> tuple[str, dict[str, str]]:
    """The name or folder, and what is set."""
    name, *parts = text.split(",")
    given: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not name or not equals or not key or not value:
            raise DartspecError(f"drafter {text!r} is not NAME,key=value,... such as eagle3,d=6,top_k=8")
        if key in given:
            raise DartspecError(f"drafter {text!r} sets {key} twice")
        given[key] = value
    return name, given


def needs_weights(kind: type) -> bool:
    """Whether a config class says nothing without weights: some of its fields have no default."""
    return any(f.default is MISSING and f.default_factory is MISSING for f in fields(kind))


def settable(kind: type) -> dict[str, Any]:
    """The settings of a config class and their types: those that it names in `settings`, or else every field that has a
    default and can be written as text."""
    hints = get_type_hints(kind)
    named = getattr(kind, "settings", None)
    own = [f.name for f in fields(kind) if f.default is not MISSING] if named is None else named
    return {name: hints[name] for name in own if hints[name] in KINDS}


def read(given: Mapping[str, str], *kinds: type, method: str) -> list[dict[str, Any]]:
    """What is given, as fields of each of the config classes. Unknown keys and values of another type are refused."""
    known = [settable(kind) for kind in kinds]
    out: list[dict[str, Any]] = [{} for _ in kinds]
    for key, text in given.items():
        place = next((i for i, names in enumerate(known) if key in names), None)
        if place is None:
            there = ", ".join(name for names in known for name in names) or "none"
            raise DartspecError(f"{method} has no setting {key!r}; there are: {there}")
        what, of = KINDS[known[place][key]]
        try:
            out[place][key] = of(text)
        except (ValueError, KeyError):
            raise DartspecError(f"{method}: {key} is {text!r}; it must be {what}") from None
    return out
