"""Prompt sets: those in the package by name, and users' own JSONL files by path. Knows text; knows no model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dartspec.errors import DartspecError

FOLDER = Path(__file__).parent / "prompts"
GROUPS = {  # what the names of several sets may be called together; see prompts/SOURCES.md for where each is from
    "code": ("humaneval", "mbpp"),
    "math": ("gsm8k", "math500", "math_reasoning"),
    "prose": ("mt_bench", "qa"),
    "own": ("code_edit", "tool_call", "chat", "german", "spanish", "chinese", "identifiers"),
}
LONG = "long8k"  # passages of the set rag, one behind the other, and a question
LONG_CHARACTERS = 28_000  # about 7,000 tokens of English
NUM_LONG = 8


@dataclass(frozen=True)
class Prompt:
    """turns: what the user says, one answer after each. ids: the prompt as token ids instead, for one turn."""

    id: str
    suite: str
    turns: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()


def shipped() -> list[str]:
    """Names of the public sets in the package: `all` of a suite."""
    return sorted(p.stem for p in FOLDER.glob("*.jsonl"))


def _long() -> list[Prompt]:
    """Prompts of about 7,000 tokens, for targets with a context of 8,192 and more."""
    texts = [p.turns[0] for p in read(FOLDER / "rag.jsonl")]
    made = []
    for i in range(NUM_LONG):
        taken = (texts[(7 * i + k) % len(texts)] for k in range(len(texts)))
        whole = ""
        for text in taken:
            if len(whole) + len(text) > LONG_CHARACTERS:
                break
            whole += text + "\n\n"
        turn = f"{whole}Which of the passages above is the longest, and what is it about? Sum it up in five sentences."
        made.append(Prompt(f"{LONG}/{i + 1}", LONG, (turn,)))
    return made


def load_suites(names: list[str], per_set: int | None = None) -> dict[str, list[Prompt]]:
    """Prompts by set, in the files' order, at most `per_set` of each.

    names: sets of the package, groups of them (`code`, `math`, `prose`, `own`), `all` public ones, `long8k`, JSONL
           files, or folders of such files.
    """
    paths: dict[str, Path] = {}
    for name in names:
        for path in [Path(LONG)] if name == LONG else _files(name):
            if paths.setdefault(path.stem, path) != path:
                raise DartspecError(
                    f"two prompt sets are called {path.stem}: {paths[path.stem]} and {path}; rename one"
                )
    return {name: _long()[:per_set] if name == LONG else read(path, per_set) for name, path in paths.items()}


def _files(name: str) -> list[Path]:
    if name == "all":
        return [FOLDER / f"{n}.jsonl" for n in shipped()]
    if name in GROUPS:
        return [_path(n) for n in GROUPS[name]]
    if name in (*shipped(), *GROUPS["own"]):
        return [_path(name)]
    path = Path(name)
    if path.is_dir() and (found := sorted(path.glob("*.jsonl"))):
        return found
    if path.is_file():
        return [path]
    raise DartspecError(
        f"no prompt set {name!r}: give a JSONL file, or all, {', '.join(GROUPS)}, {LONG}, "
        f"{', '.join((*shipped(), *GROUPS['own']))}"
    )


def _path(name: str) -> Path:
    """The file of a set in the package."""
    return (FOLDER / "own" if name in GROUPS["own"] else FOLDER) / f"{name}.jsonl"


def read(path: Path, most: int | None = None) -> list[Prompt]:
    """The prompts of one file: a JSON object a line with `turns`, `prompt`, OpenAI `messages` (its user turns) or
    `ids`; `id` is optional."""
    prompts: list[Prompt] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if most is not None and len(prompts) == most:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DartspecError(f"{path}, line {number} is not JSON: {error}") from error
            turns, ids = turns_of(row)
            if not turns and not ids:
                raise DartspecError(
                    f"{path}, line {number} has no prompt: expected an object with turns (a list of texts), prompt "
                    "(a text), messages or ids (token ids)"
                )
            prompts.append(Prompt(str(row.get("id", f"{path.stem}/{number}")), path.stem, turns, ids))
    if not prompts:
        raise DartspecError(f"{path} holds no prompt: expected one JSON object a line")
    if len({p.id for p in prompts}) < len(prompts):
        raise DartspecError(f"{path} has two prompts with one id: every id must be its own")
    return prompts


def turns_of(row: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """What a record of a prompt set holds, user turns or token ids; both empty where it is none."""
    if not isinstance(row, dict):
        return (), ()
    if isinstance(ids := row.get("ids"), list) and all(isinstance(i, int) for i in ids):
        return (), tuple(ids)
    turns = row.get("turns", row.get("prompt"))
    if turns is None and isinstance(messages := row.get("messages"), list):
        turns = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    turns = [turns] if isinstance(turns, str) else turns
    if isinstance(turns, list) and all(isinstance(t, str) and t.strip() for t in turns):
        return tuple(turns), ()
    return (), ()
