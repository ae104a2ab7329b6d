"""Files that are there whole or not at all: written aside, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """The path to write to; what was written takes the place of `path` at the end of the block, and survives a loss of
    power from then on. Others may read it where they may read what this process writes (safetensors is stricter)."""
    aside = path.with_name(path.name + ".tmp")
    aside.unlink(missing_ok=True)
    aside.touch()
    mode = aside.stat().st_mode
    try:
        yield aside
        aside.chmod(mode)
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    with written_aside(path) as aside:
        aside.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
