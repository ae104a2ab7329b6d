"""Which trained drafters are at hand, and which of them is for a target: folders, the package's own, and the hub.

`$DARTSPEC_DRAFTERS` names folders, separated as in `$PATH`; what lies in them, up to two levels deep, is looked at.
The entry `hub` asks the Hugging Face hub too, for repositories that name the target as their `base_model`; nothing is
asked of the hub without it. A drafter is for a target when tokenizer, width and number of layers are equal.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dartspec.errors import DartspecError

VARIABLE = "DARTSPEC_DRAFTERS"
HUB = "hub"  # the entry that asks the hub
TAG = "dartspec"  # of repositories on the hub that hold a drafter of ours
FILES = ("config.json", "model.safetensors", "index.ngram", "calibration*.json", "eval.json", "README.md", "*.png")
NODES = 16  # the tree size by whose M drafters are compared


class Wanted(Protocol):
    """What of a target decides which drafter is its own; a `Target` is one."""

    @property
    def name(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def tokenizer_fingerprint(self) -> str | None: ...
    @property
    def weights_fingerprint(self) -> str | None: ...


@dataclass(frozen=True)
class Entry:
    """A drafter folder. values: its config.json. place: its place in the order of the folders looked through."""

    folder: Path
    values: dict[str, Any]
    place: int = 0

    @property
    def method(self) -> str:
        return str(self.values.get("method"))

    @property
    def target(self) -> str:
        return str(self.values.get("target") or "?")

    @property
    def M(self) -> float | None:  # noqa: N802  (the paper's letter)
        """Committed tokens a round in its record, with 16 nodes or the most that were measured below."""
        record: dict[str, float] = self.values.get("acceptance") or {}
        most = max((n for n in map(int, record) if n <= NODES), default=0)
        return float(record[str(most)]) if most else None

    @property
    def written(self) -> float:
        """When its weights were written, in seconds since 1970; a copy has its own time."""
        return (self.folder / "model.safetensors").stat().st_mtime

    @property
    def age_days(self) -> float:
        return max(0.0, time.time() - self.written) / 86400

    def is_for(self, target: Wanted) -> bool:
        """Trained for this target or for one it was fine-tuned from."""
        c = self.values
        sizes = c.get("target_hidden_size"), c.get("num_target_layers")
        same = c.get("tokenizer_fingerprint") == target.tokenizer_fingerprint is not None
        return same and sizes == (target.hidden_size, target.num_layers)


def places() -> list[Path]:
    """The folders of `$DARTSPEC_DRAFTERS`; one that is not there is refused."""
    found = []
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        if name == HUB:
            continue
        path = Path(name).expanduser()
        if not path.is_dir():
            raise DartspecError(f"{VARIABLE} names {name}, which is no folder: create it or take it out")
        found.append(path)
    return found


def asks_hub() -> bool:
    return HUB in os.environ.get(VARIABLE, "").split(os.pathsep)


def entries(folders: Sequence[Path]) -> Iterator[Entry]:
    """Our drafters in these folders, up to two levels deep. Other checkpoints are passed by; a config of ours that
    cannot be read, or without weights, is warned of."""
    seen: set[Path] = set()
    for place, folder in enumerate(folders):
        for depth in ("", "*/", "*/*/"):
            for path in sorted(folder.glob(f"{depth}config.json")):
                if path.resolve() in seen:
                    continue
                seen.add(path.resolve())
                if (values := _ours(path)) is not None:
                    yield Entry(path.parent, values, place)


def _ours(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read and is passed by: {error}", stacklevel=3)
        return None
    if not isinstance(values, dict) or "method" not in values or "num_target_layers" not in values:
        return None
    if not (path.parent / "model.safetensors").is_file():
        warnings.warn(f"{path.parent} holds a drafter's config but no model.safetensors: passed by", stacklevel=3)
        return None
    return values


def find(target: Wanted, method: str | None, folders: Sequence[Path]) -> Path | None:
    """The folder of the target's drafter, of this method where one is named.

    Of several: one trained for these very weights before one for a model they were tuned from, then the folder named
    first, then the larger M in its record, then the younger. The hub comes last, and only where it was asked for.
    """
    fits = [e for e in entries(folders) if e.is_for(target) and method in (None, e.method)]

    def rank(e: Entry) -> tuple[bool, int, float, float]:
        own = e.values.get("weights_fingerprint") == target.weights_fingerprint
        return not own, e.place, -(e.M or 0.0), -e.written

    if fits:
        return min(fits, key=rank).folder
    return find_on_hub(target, method) if asks_hub() and is_hub_id(target.name) else None


# -- the hub ---------------------------------------------------------------------------------------------------------


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name) is not None


def find_on_hub(target: Wanted, method: str | None = None) -> Path | None:
    """A drafter that names the target as its `base_model` on the hub and fits it, downloaded; None without one, and,
    with a warning, where the hub cannot be reached."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        found = list(HfApi().list_models(filter=[TAG, f"base_model:{target.name}"], sort="downloads", limit=20))
        for repository in found:
            path = Path(hf_hub_download(repository.id, "config.json"))
            values = json.loads(path.read_text(encoding="utf-8"))
            if Entry(path.parent, values).is_for(target) and method in (None, values.get("method")):
                return from_hub(repository.id)
    except DartspecError:
        raise
    except Exception as error:  # no network, no name, a server's fault: the library raises a dozen kinds
        warnings.warn(f"no drafter was looked for on the hub ({type(error).__name__}: {error})", stacklevel=3)
    return None


def from_hub(name: str, revision: str | None = None) -> Path:
    """The local folder of a drafter on the hub, downloaded where it is not in the cache. Weights and JSON only."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # as above
        first = str(error).strip().split("\n")[0]
        raise DartspecError(f"no drafter {name} could be had from the hub: {first}") from error
    if not (folder / "config.json").is_file():
        raise DartspecError(f"{name} on the hub holds no drafter: it has no config.json")
    return folder
