"""Everything that a training run depends on, in one frozen record that is saved beside its weights.

A key is one line of `TrainConfig`: its default, its range and what `dartspec train --help` says of it. Files and flags
name the same keys; what no key is called is refused.
"""

# ruff: noqa: RUF009  (`key` makes a `dataclasses.field`, which the linter cannot see)

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from dartspec.errors import DartspecError

OBJECTIVES = ("kl", "one_hot", "acceptance")  # what they mean: `train.batch.TrainBatch`


def key(default: Any, about: str, *, least: float | None = None, flag: str = "", **limits: float) -> Any:
    """A key of the config. least: the smallest value that is legal. limits: `above`, `most`, `below`.

    flag: its name on the command line, where that is not its own.
    """
    metadata = {"about": about, "limits": {"least": least, **limits}, "flag": flag}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, on what, how, and where it goes; see `about` of each key."""

    target: str = key("", "model to train a drafter for: folder, hub id or GGUF file")
    data: tuple[str, ...] = key((), "JSONL file of token ids, answers of that very target; may be repeated")
    out: str = key("", "folder of the run")
    method: str = key("dart", "which drafter to train; one with weights")
    options: dict[str, Any] = key({}, "that method's own settings")
    target_name: str = key("", "what the drafter calls its target; empty: the name it is loaded by")
    revision: str = key("", "branch, tag or commit of a hub model")
    dtype: str = key("", "the target's: float32, bfloat16 or float16; empty: bfloat16 where the machine computes in it")
    device: str = key("", "cpu, cuda, cuda:1, ...; empty: a GPU where there is one")
    cache: str = key("", "folder for the target's states, written once; empty: they are computed when they are needed")
    init: str = key("", "folder of a drafter to start from; empty: the target's own weights", flag="init-from")
    low_rank: int = key(0, "train a change of this rank to init's matrices, not the matrices; 0: all of them", least=0)
    taps: tuple[int, ...] = key((), "hidden states that the drafter reads; empty: the method's own choice")
    cache_taps: tuple[int, ...] = key((), "hidden states that the cache keeps besides the last; empty: the taps")
    d: int = key(8, "positions that are predicted", least=2)
    draft_vocab_size: int = key(12288, "ids that the drafter may propose, the most frequent ones", least=2)
    vocabulary_data: tuple[str, ...] = key(
        (), "more answers that these are counted in, those of earlier stages for instance"
    )
    intermediate_size: int = key(0, "width of the drafter's MLP; 0: the target's", least=0)
    gamma: float = key(0.6, "weight gamma^(t-1) of offset t", above=0, most=1)
    max_tokens: int = key(2048, "tokens a sequence; longer ones are cut", least=4)
    held_out: float = key(0.02, "share of the data, its end, that is never trained on", above=0, below=1)
    steps: int = key(20000, "updates in the whole run; the cosine ends there. May be raised later", least=1)
    sequences_per_step: int = key(2, "sequences an update, over all processes", least=1)
    sequences_per_batch: int = key(0, "sequences a forward; an update accumulates over them. 0: all at once", least=0)
    num_first: int = key(96, "rows a sequence whose offset 1 is trained", least=1)
    num_anchors: int = key(16, "rows a sequence that a group of masks follows", least=1)
    prefix_share: float = key(0.0, "share of a sequence's rows in place of those two numbers; 1: all", least=0, most=1)
    objective: str = key("kl", "kl (the target's distributions), one_hot (its tokens) or acceptance (kl, weighted)")
    learning_rate: float = key(1e-3, "its highest value, after the warm-up", above=0)
    final_learning_rate: float = key(2e-5, "its last value, where the cosine ends", least=0)
    warmup_steps: int = key(100, "updates in which it rises from 0", least=0)
    betas: tuple[float, float] = key((0.9, 0.999), "AdamW's", least=0, below=1)
    weight_decay: float = key(0.01, "of matrices; norms and masks have none", least=0)
    clip: float = key(0.5, "norm that the gradient is cut to", above=0)
    ema: float = key(
        0.0, "decay of a running mean of the weights, which is what is saved then; 0: none", least=0, below=1
    )
    bf16: bool = key(True, "compute in bfloat16; the weights that are trained stay float32")
    checkpointing: bool = key(False, "compute activations twice instead of keeping them: less memory, more time")
    parallel: str = key("ddp", "with several processes: ddp (each holds the drafter) or fsdp2 (each holds a part)")
    seed: int = key(0, "of the order of the data, the rows drawn and the random weights")
    threads: int = key(1, "CPU threads", least=1, most=1024)  # a typing error of more ends the program
    chunk_rows: int = key(256, "rows whose logits live at once", least=1)
    chunk_vocabulary: int = key(0, "draft ids whose logits live at once, at half as much work again; 0: all", least=0)
    save_every_s: float = key(180.0, "seconds between two saves", least=0)
    log_every: int = key(50, "updates between two lines of the log", least=1)
    eval_every: int = key(1000, "updates between two evaluations on held-out data", least=1)
    eval_stride: int = key(4, "every how many answer positions are evaluated", least=1)
    m_every: int = key(2000, "updates between two measurements of M; the best weights are kept. 0: never", least=0)
    m_prompts: int = key(16, "held-out prompts that M is measured on", least=1)
    m_tokens: int = key(96, "new tokens a prompt, greedy, loops cut", least=2)
    m_nodes: int = key(16, "draft tokens a tree while M is measured", least=1)
    tensorboard: bool = key(False, "write TensorBoard's event files to OUT/tensorboard")

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            object.__setattr__(self, name, _read(name, hint, getattr(self, name)))
        object.__setattr__(self, "method", self.method.replace("-", "_"))
        if not self.target or not self.data or not self.out:
            raise DartspecError(
                "training needs a target (--target), at least one data file (--data) and an output folder (--out)"
            )
        for f in fields(self):
            value = getattr(self, f.name)
            for one in value if f.name == "betas" else (value,):
                if problem := _outside(one, f.metadata["limits"]):
                    raise DartspecError(f"training config: {f.name} = {value!r} is out of range: it must be {problem}")
        if self.final_learning_rate > self.learning_rate:
            raise DartspecError(
                f"training config: final_learning_rate = {self.final_learning_rate!r} is out of range: it must be at "
                f"most learning_rate = {self.learning_rate!r}"
            )
        if len(self.betas) != 2:
            raise DartspecError(f"training config: betas = {list(self.betas)}: two numbers were expected")
        if self.objective not in OBJECTIVES:
            raise DartspecError(
                f"training config: objective = {self.objective!r}: it must be one of {', '.join(OBJECTIVES)}"
            )
        if self.parallel not in ("ddp", "fsdp2"):
            raise DartspecError(f"training config: parallel = {self.parallel!r}: it must be ddp or fsdp2")
        if self.low_rank and (not self.init or self.ema or self.parallel == "fsdp2"):
            raise DartspecError(
                f"training config: low_rank = {self.low_rank} needs init, the drafter whose matrices it changes, and "
                "neither ema nor fsdp2"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        check_names(values)
        return cls(**values)

    @classmethod
    def from_file(cls, path: Path) -> TrainConfig:
        return cls.from_dict(read_values(path))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_names(values: Mapping[str, Any], where: str = "training config") -> None:
    """Refuses the first name that no key has, with the nearest one that there is."""
    known = [f.name for f in fields(TrainConfig)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise DartspecError(f"{where}: unknown key {name!r}; {hint}")


def read_values(path: Path) -> dict[str, Any]:
    """The keys of a YAML file, or of a JSON file by its suffix. Names are checked, and that none stands there twice;
    values are not."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DartspecError(f"the training config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DartspecError(f"the training config {path} is not UTF-8 text ({error.reason})") from error
    if path.suffix == ".json":
        try:
            values = json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            raise DartspecError(f"the training config {path} is not JSON: {error}") from error
    else:
        import yaml

        class Loader(yaml.SafeLoader):  # type: ignore[misc]
            def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
                return _once([(self.construct_object(k, True), self.construct_object(v, True)) for k, v in node.value])

        Loader.add_constructor("tag:yaml.org,2002:map", lambda loader, node: loader.construct_mapping(node))
        try:
            values = yaml.load(text, Loader)
        except yaml.YAMLError as error:
            raise DartspecError(f"the training config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise DartspecError(f"the training config {path} holds a {type(values).__name__}, expected KEY: VALUE lines")
    check_names(values, f"the training config {path}")
    return values


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, value in pairs:
        if name in found:
            raise DartspecError(f"training config: {name!r} stands there twice; keep one of the two")
        found[name] = value
    return found


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(TrainConfig)


def _read(name: str, hint: Any, value: Any) -> Any:
    """A value of a file or a flag as the type of its key; YAML reads 1e-3 as text, and flags are text."""
    wrong = DartspecError(f"training config: {name} = {value!r}: expected {_wanted(hint)}, found {_found(value)}")
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        if isinstance(value, str):
            value = [value] if inner is str else value.replace(",", " ").split()
        if not isinstance(value, list | tuple):
            raise wrong
        return tuple(_read(name, inner, one) for one in value)
    if get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise wrong
        return dict(value)
    if hint is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise wrong
        return value
    if hint is str:
        if not isinstance(value, str):
            raise wrong
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong
    try:
        number = float(value)
    except ValueError:
        raise wrong from None
    if not math.isfinite(number) or (hint is int and number != int(number)):
        raise wrong
    return int(value if isinstance(value, int) else number) if hint is int else number


def _wanted(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if get_origin(hint) is tuple:
        return {int: "a list of whole numbers", float: "a list of numbers", str: "a list of text"}[get_args(hint)[0]]
    return names.get(hint, "a mapping of names to values")


def _found(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def _outside(value: Any, limits: Mapping[str, float | None]) -> str:
    """What a number must be, where it is not."""
    least, above, most, below = (limits.get(k) for k in ("least", "above", "most", "below"))
    if least is not None and value < least:
        return f"at least {least:g}"
    if above is not None and value <= above:
        return f"more than {above:g}"
    if most is not None and value > most:
        return f"at most {most:g}"
    if below is not None and value >= below:
        return f"less than {below:g}"
    return ""


# Keys that may differ when a run is resumed: none of them changes what an update computes, but for `steps`, which
# stretches what is left of the cosine.
RESUMABLE = frozenset(
    {
        "steps",
        "out",
        "cache",
        "cache_taps",
        "threads",
        "save_every_s",
        "log_every",
        "eval_every",
        "m_every",
        "tensorboard",
        "target",
        "target_name",
        "revision",
        "data",
        "vocabulary_data",
        "device",
        "parallel",
    }
)
