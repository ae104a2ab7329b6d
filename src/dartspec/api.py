"""The public face: `load` a model, `generate`, `stream`."""

from __future__ import annotations

import copy
import inspect
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dartspec import drafters
from dartspec.accounting import Metrics
from dartspec.budget import Adaptive, Calibration, CostModel, Fixed, Times, best_threads, cached_times, interpolate
from dartspec.drafters import _settings
from dartspec.engine import Chunk, Request, generate
from dartspec.errors import DartspecError
from dartspec.target.load import LoadedModel, MemoryPlan, as_target, cache_dir, from_memory, load_model
from dartspec.target.target import Target
from dartspec.text import Text
from dartspec.types import Controller, Drafter, Processor, RoundRecord, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
ASSETS = Path(__file__).parent / "assets"
PROBE_TOKENS = 8  # ids of the forward that our CPU kernels are tried on
MOST_THREADS = 1024  # a typing error of more would have the system refuse them, and end the program
WATCHED_ROUNDS = 400  # rounds with drafts between two looks at what is accepted
FAR_BELOW = 0.5  # of the accepted tokens in the drafter's record: a warning
SMALL = 32 << 20  # bytes of weights below which the number of threads is not worth a measurement


@dataclass
class Result:
    """One answer.

    ids: new tokens, an end-of-text token included. accepted: for each, whether it had been drafted.
    finish_reason: "stop" or "length". seed: the one used, so that the text can be had again.
    log_probs: per token (log-probability, likeliest alternatives) when `logprobs` was asked for.
    """

    text: str
    ids: list[int]
    accepted: list[bool]
    finish_reason: str
    metrics: Metrics
    seed: int
    num_prompt_tokens: int
    log_probs: list[tuple[float, list[tuple[int, float]]]] | None = None


@dataclass
class Stream:
    """An answer as it is written: iterate over it for chunks; `result` once it has ended."""

    _chunks: Iterator[Chunk]
    _num_prompt_tokens: int
    _seen: list[Chunk] = field(default_factory=list)

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            self._seen.append(chunk)
            yield chunk

    def close(self) -> None:
        """Stops the answer where it is and makes the drafter forget it, at once."""
        if (close := getattr(self._chunks, "close", None)) is not None:
            close()

    @property
    def result(self) -> Result:
        if not self._seen or not self._seen[-1].finish:
            raise DartspecError("the stream has not ended: iterate over it first")
        return _result(self._seen, self._num_prompt_tokens)


class LM:
    """A target with its tokenizer and a drafter. Made by `load`; may be used for any number of requests, one at a time.

    An LM serves one thread, because its drafter remembers what it answers. Several threads each take their own
    `lm.with_drafter(...)` (the model's forwards then take turns), or their own `load`.

    drafter_note: one line on which drafter was chosen and why. nodes: draft tokens a tree may have, or "auto".
    fast_note: one line on our CPU kernels: used, or why not. calibration: how likely the drafter's guesses are right.
    trained: the configuration of the trained drafter, or None: what it was trained for, and its record.
    """

    def __init__(self, target: Target, text: Text, chosen: Chosen, nodes: int | str, fast_note: str) -> None:
        self.target, self.text, self.nodes = target, text, nodes
        self.drafter, self.drafter_name, self.drafter_note = chosen.drafter, chosen.name, chosen.note
        self.fast_note = fast_note
        self.calibration, self.trained = chosen.calibration, chosen.trained
        self.below_record = False  # whether far fewer drafts were accepted than in training; warned of once
        self._watched: list[RoundRecord] = []
        self._controller: Controller | None = Fixed(nodes) if isinstance(nodes, int) else None
        if chosen.name == "none":
            self._controller = Fixed(0)

    @property
    def controller(self) -> Controller:
        """What says how many nodes a round verifies. With nodes="auto", made at first use: this machine's times are
        measured then, once, and remembered."""
        if self._controller is None:
            self._controller = Adaptive(CostModel(self.times()), self.calibration)
        return self._controller

    def times(self, *, again: bool = False) -> Times:
        """Milliseconds of the target's forward on this machine: remembered, or measured now."""
        return cached_times(self.target, cache_dir(), self._machine, again=again)

    @property
    def is_measured(self) -> bool:
        """Whether `times` are remembered; otherwise the first answer with nodes="auto" waits for them."""
        return (cache_dir() / f"cost-{self._machine}.json").exists()

    @property
    def _machine(self) -> str:
        """What measured times depend on."""
        t = self.target
        return f"{t.weights_fingerprint}-{t.dtype}-{t.device.type}-{t.num_threads}".replace(".", "")

    # -- generating --------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **params: Any) -> Result:
        """One answer to one prompt.

        prompt: text to continue, messages (`[{"role": "user", "content": ...}]`, through the chat template), or ids.
        params: the fields of `SamplingParams` (temperature, top_p, seed, max_tokens, stop, ...), or `params=` one.
        """
        if params.get("n", 1) != 1:
            raise DartspecError(f"generate gives one answer, n is {params['n']!r}: use generate_batch([prompt], n=...)")
        return self.generate_batch([prompt], **params)[0]

    def generate_batch(self, prompts: Sequence[Prompt], *, batch: int = 8, n: int = 1, **params: Any) -> list[Result]:
        """Answers to several prompts, `batch` sequences at a time; `n` answers each, in order prompt by prompt.

        Each answer is the one its prompt gets alone, whatever its neighbours.
        """
        if isinstance(prompts, str):
            raise DartspecError("prompts is one string; generate_batch wants a list of prompts")
        if not isinstance(n, int) or n < 1:
            raise DartspecError(f"n is {n!r}; it must be 1 or more")
        sampling = _params(params)
        requests = [Request(self.encode(p), sampling, k) for p in prompts for k in range(n)]
        chunks: list[list[Chunk]] = [[] for _ in requests]
        for chunk in self.run(requests, batch=batch):
            chunks[chunk.index].append(chunk)
        return [_result(c, len(r.prompt)) for c, r in zip(chunks, requests, strict=True)]

    def stream(self, prompt: Prompt, **params: Any) -> Stream:
        """One answer, chunk by chunk; `chunk.text` holds whole characters."""
        request = Request(self.encode(prompt), _params(params))
        return Stream(self.run([request], batch=1), len(request.prompt))

    def run(self, requests: Sequence[Request], *, batch: int = 8) -> Iterator[Chunk]:
        """The engine's chunks for these requests, with this model's drafter and controller."""
        made = generate(
            self.target, self.drafter, requests, text=self.text, num_nodes=self.controller, batch=max(1, batch)
        )
        try:
            for chunk in made:
                if chunk.finish:
                    self._watch(chunk.metrics)
                yield chunk
        finally:
            made.close()  # type: ignore[attr-defined]  # at once, also when the caller stops listening

    def _watch(self, metrics: Metrics) -> None:
        """Warns once where far fewer drafts are accepted than when the drafter was trained."""
        record: Mapping[str, float] = getattr(self.trained, "acceptance", None) or {}
        self._watched += [r for r in metrics.rounds if r.num_drafted]
        if not record or self.below_record:
            self._watched.clear()
        if len(self._watched) < WATCHED_ROUNDS:
            return
        n = len(self._watched)
        nodes = round(sum(r.num_drafted for r in self._watched) / n)
        M = sum(r.num_accepted for r in self._watched) / n + 1
        there = interpolate({0: 1.0, **{int(k): m for k, m in record.items()}}, nodes)
        self._watched.clear()
        if FAR_BELOW * (there - 1) > M - 1:
            self.below_record = True
            warnings.warn(
                f"M is {M:.1f} over {n} rounds; with {nodes} nodes it was {there:.1f} when the drafter was trained: "
                "the text may be of another kind or language, the model fine-tuned since, the prompts without its chat "
                "template, or the n-gram index missing",
                stacklevel=2,
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt in any of its forms."""
        if isinstance(prompt, str):
            if not prompt:
                raise DartspecError("the prompt is empty: give at least one character")
            return self.text.encode_prompt(prompt)
        if isinstance(prompt, Tensor):
            prompt = prompt.tolist()
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Sequence):
            raise _no_prompt(type(prompt).__name__)
        if prompt and isinstance(prompt[0], Mapping):
            return self.text.encode_chat(prompt)  # type: ignore[arg-type]
        try:
            return [operator.index(i) for i in prompt]  # type: ignore[arg-type]
        except TypeError:
            wrong = next(i for i in prompt if not hasattr(i, "__index__"))
            raise _no_prompt(f"{type(prompt).__name__} holding a {type(wrong).__name__}") from None

    # -- other drafters on the same target ---------------------------------------------------------------------------

    def with_drafter(self, drafter: str | Path | Drafter, *, nodes: int | str | None = None, index: Any = "auto") -> LM:
        """The same loaded target with another drafter; nothing is loaded twice. nodes: None keeps this one's."""
        chosen = _resolve(drafter, self.target, index)
        return LM(self.target, self.text, chosen, _nodes(self.nodes if nodes is None else nodes), self.fast_note)

    # -- transformers' generate ----------------------------------------------------------------------------------------

    def custom_generate(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """For `model.generate(ids, custom_generate=lm.custom_generate, ...)`: transformers prepares, we decode.

        Its logits processors and warpers run on every node's own path, its end-of-text ids and lengths apply, and
        `torch.manual_seed` seeds the noise. Beam search, scores and further stopping criteria are refused. Ids beyond
        the tokenizer's are never written, which transformers itself does not ensure.
        """
        c = generation_config
        for name, plain in (("num_beams", 1), ("num_return_sequences", 1), ("return_dict_in_generate", False)):
            if (found := getattr(c, name, None) or plain) != plain:
                raise DartspecError(f"custom_generate cannot do {name}={found}; leave it at {plain}")
        known = {"MaxLengthCriteria", "EosTokenCriteria"}
        other = [type(s).__name__ for s in stopping_criteria or () if type(s).__name__ not in known]
        if other:
            raise DartspecError(f"custom_generate cannot apply {other[0]}; use max_new_tokens and eos_token_id")
        eos = getattr(c, "_eos_token_tensor", None)
        seed = int(torch.randint(2**62, ()))
        params = SamplingParams(
            temperature=1.0 if c.do_sample else 0.0,
            seed=seed,
            max_tokens=int(c.max_length) - input_ids.shape[1],
            stop_token_ids=() if eos is None else tuple(int(i) for i in eos.flatten()),
            ignore_eos=True,
        )
        # not a named argument: transformers would pass it twice
        attention_mask = model_kwargs.get("attention_mask")
        padded = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        requests = []
        for i, (ids, mask) in enumerate(zip(input_ids, padded, strict=True)):
            processors = tuple(_on_row(p, i, ids[~mask.bool()]) for p in logits_processor or ())
            requests.append(Request(ids[mask.bool()].tolist(), replace(params, processors=processors), i))
        answers: list[list[int]] = [[] for _ in requests]
        for chunk in generate(self.target, self.drafter, requests, num_nodes=self.controller, batch=len(requests)):
            answers[chunk.index] += chunk.ids
        longest = max(map(len, answers))
        pad = getattr(c, "_pad_token_tensor", None)
        filler = int(pad) if pad is not None else params.stop_token_ids[0] if params.stop_token_ids else 0
        tail = [a + [filler] * (longest - len(a)) for a in answers]
        return torch.cat([input_ids, torch.tensor(tail, device=input_ids.device, dtype=input_ids.dtype)], dim=1)


def load(
    model: str | Path | Any = None,
    tokenizer: Any = None,
    *,
    drafter: str | Path | Drafter = "auto",
    index: str | Path | None = "auto",
    nodes: int | str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    threads: int | None = None,
    fast: bool = True,
    remeasure: bool = False,
    on_plan: Callable[[MemoryPlan], None] | None = None,
) -> LM:
    """Loads a target and a drafter for it.

    model:   a folder, a hub id, a GGUF file, None for the embedded default, or a model in memory with its `tokenizer`
             (adapted, quantised, split over devices: taken as it is and left as it is).
    drafter: a method ("dart", "prompt_lookup", "none", ...), a folder of trained weights, a `Drafter`, or "auto": the
             drafter shipped or found for this target, else copies from the text. Names and folders take settings,
             "dart,d=4,top_k=10", and several may be joined by "+".
    index:   "auto" for the one beside the drafter, a file, or None for no n-gram index.
    nodes:   draft tokens a tree may have, or "auto": as many as pay, chosen round by round from times that are measured
             once on this machine and remembered; none where plain decoding is faster.
    threads: CPU threads; None leaves OMP_NUM_THREADS its say, else the best number is measured once and remembered.
    fast: use our CPU kernels where they apply (bfloat16).
    remeasure: measure the number of threads and this machine's times even where they are remembered.
    on_plan: called with the memory needed and free before anything large is read.

    Raises DartspecError in one sentence for whatever cannot be found, read, served or fitted.
    """
    if threads is not None:
        if not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
            raise DartspecError(f"threads is {threads!r}; it must be a whole number from 1 to {MOST_THREADS}")
        torch.set_num_threads(threads)
    if device is not None:
        device = checked_device(device)
    if tokenizer is not None or isinstance(model, torch.nn.Module):
        if tokenizer is None:
            raise DartspecError("a model in memory needs its tokenizer: load(model, tokenizer)")
        loaded = from_memory(model, tokenizer)
    elif model is not None and not isinstance(model, str | Path):
        raise DartspecError(f"model is a {type(model).__name__}; it must be a folder, a hub id or a transformers model")
    elif model == "":
        raise DartspecError("model is an empty string: give a folder or hub id, or leave it out for the default model")
    else:
        loaded = load_model(
            model,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            on_plan=on_plan,
        )
    text = Text(loaded.tokenizer)
    note = _speed_up(loaded) if fast else "own kernels: off"
    target = as_target(loaded)
    if threads is None and loaded.owned:
        _settle_threads(target, remeasure)
    chosen = _resolve(drafter, target, index)
    lm = LM(target, text, chosen, _nodes(nodes), note)
    if remeasure:
        lm.times(again=True)
    return lm


def _no_prompt(found: str) -> DartspecError:
    return DartspecError(f"the prompt is a {found}; it must be text, a list of messages, or a list of token ids")


def checked_device(wanted: str | torch.device) -> torch.device:
    """The device meant, or one sentence where torch does not know it or the machine does not have it."""
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise DartspecError(f"device {wanted!r} is not known: it must be cpu, cuda, cuda:1, ...") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DartspecError(f"device {device} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _params(params: dict[str, Any]) -> SamplingParams:
    """`params=SamplingParams(...)`, or its fields as keywords."""
    given = params.pop("params", None)
    if given is not None:
        if params:
            raise DartspecError(f"give params= or {sorted(params)[0]}=, not both")
        if not isinstance(given, SamplingParams):
            raise DartspecError(f"params is a {type(given).__name__}; it must be a SamplingParams")
        return given
    known = SamplingParams.__dataclass_fields__
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise DartspecError(f"unknown parameter {unknown[0]!r}; there are: {', '.join(known)}")
    return SamplingParams(**params)


def _on_row(processor: Processor, row: int, padding: Tensor) -> Processor:
    """A logits processor of transformers as it acts on one row of its left-padded batch: it sees the padding too."""
    lengths = getattr(processor, "prompt_ignore_length", None)  # RepetitionPenaltyLogitsProcessor holds one a row
    if isinstance(lengths, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = lengths[row : row + 1]  # type: ignore[attr-defined]
    if not len(padding):
        return processor
    return lambda ids, logits: processor(torch.cat([padding[None].to(ids), ids], dim=1), logits)


def _result(chunks: Sequence[Chunk], num_prompt_tokens: int) -> Result:
    last = chunks[-1]
    log_probs = None
    if last.log_probs is not None:
        log_probs = [entry for c in chunks for entry in c.log_probs or ()]
    return Result(
        text="".join(c.text for c in chunks),
        ids=[i for c in chunks for i in c.ids],
        accepted=[k < c.num_accepted for c in chunks for k in range(len(c.ids))],
        finish_reason=last.finish or "",
        metrics=last.metrics,
        seed=last.seed,
        num_prompt_tokens=num_prompt_tokens,
        log_probs=log_probs,
    )


def _speed_up(loaded: LoadedModel) -> str:
    """Our CPU kernels, for models that we loaded ourselves; a caller's model is left as it is."""
    if not loaded.owned:
        return "own kernels: not used on a model in memory"
    from dartspec.target.fast import accelerate

    num_ids = loaded.model.get_input_embeddings().weight.shape[0]
    probe = (torch.arange(PROBE_TOKENS) * 31 + 3)[None] % num_ids
    return accelerate(loaded.model, probe, torch.get_num_threads()).reason


def _settle_threads(target: Target, again: bool) -> None:
    """The best number of CPU threads for this model, where nobody has said one."""
    from dartspec.target.fast import set_num_threads

    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    if target.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ or weights < SMALL:
        return

    def use(count: int) -> None:
        torch.set_num_threads(count)
        set_num_threads(target.model, count)
        target.num_threads = count

    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    key = f"{target.weights_fingerprint}-{target.dtype}".replace(".", "")
    best_threads(target, use, most, cache_dir(), key, again=again)


class Chosen(NamedTuple):
    """A drafter, its name, a line on why it was chosen, and what is known of its guesses."""

    drafter: Drafter
    name: str
    note: str
    calibration: Calibration
    trained: Any = None  # the configuration of its trained part, if it has one: what it was trained for, its record


def _resolve(wanted: str | Path | Drafter, target: Target, index: str | Path | None, *, part: bool = False) -> Chosen:
    """part: one of several drafters, which need not all read the index."""
    if not isinstance(wanted, str | Path):
        if not callable(getattr(wanted, "propose", None)):
            raise DartspecError(
                f"drafter is a {type(wanted).__name__}; it must be a name, a trained drafter's folder, or a Drafter"
            )
        name = type(wanted).__name__
        _no_index(index, name)
        return Chosen(wanted, name, f"drafter {name}, as given", Calibration())
    if wanted == "auto":
        if (found := _shipped(target)) is not None:
            return _with_copies(_trained(found, target, index, ", trained for this model"), found, target)
        _no_index(index, "prompt_lookup")
        made = drafters.get("prompt_lookup")
        note = "drafter prompt_lookup (copies from the text): no drafter trained for this model was found"
        return Chosen(made.load(made.Config(), target), "prompt_lookup", note, Calibration())
    if (Path(wanted) / "config.json").exists():
        return _trained(Path(wanted), target, index, f" from {wanted}", part)
    if "+" in str(wanted):  # several, united
        module, parts = drafters.get("mix"), str(wanted).split("+")
        config = module.Config(parts=tuple(parts))
    else:
        name, settings = _settings.split(str(wanted))
        if (Path(name) / "config.json").exists():
            return _trained(Path(name), target, index, f" from {name}", part, settings)
        if os.sep in name:
            raise DartspecError(f"{name} is no drafter: it has no config.json; give a trained drafter's folder")
        if name == "auto":
            raise DartspecError(f"drafter {wanted!r} sets what has no name: name the method, such as dart,d=4")
        module = drafters.get(name)
        if _settings.needs_weights(module.Config):
            found = _shipped(target, module.__name__.rpartition(".")[2])
            if found is None:
                raise DartspecError(
                    f"no {name} drafter for {target.name} was found: train one (`dartspec train`) and give its folder"
                )
            return _trained(found, target, index, ", trained for this model", part, settings)
        (own,) = _settings.read(settings, module.Config, method=name)
        config = module.Config(**own)
    options: dict[str, Any] = {}
    takes = inspect.signature(module.load).parameters
    if "parts" in takes:
        options["parts"] = [_resolve(name, target, index, part=True).drafter for name in config.parts]
    elif "index" in takes:
        shipped = _shipped(target)
        beside = None if shipped is None else shipped / "index.ngram"
        options["index"] = (beside if beside and beside.exists() else None) if index == "auto" else index
    elif not part:
        _no_index(index, str(wanted))
    return Chosen(module.load(config, target, **options), str(wanted), f"drafter {wanted}", Calibration())


def _with_copies(trained: Chosen, folder: Path, target: Target) -> Chosen:
    """A trained drafter and copies from the text in one tree: what has been said before needs no guess, and may lie
    outside the draft vocabulary."""
    mix, copies = drafters.get("mix"), drafters.get("prompt_lookup")
    name = f"{trained.name}+prompt_lookup"
    parts = [trained.drafter, copies.load(copies.Config(), target)]
    made = mix.load(mix.Config(parts=(trained.name, "prompt_lookup")), target, parts=parts)
    note = f"{trained.note}, with copies from the text"
    return trained._replace(drafter=made, name=name, note=note, calibration=Calibration.load(folder, name))


def _no_index(index: str | Path | None, name: str) -> None:
    """Refuse an index that was asked for by name where nothing would read it."""
    if index not in (None, "auto"):
        raise DartspecError(f"index {index} would not be used: the drafter {name} reads none; leave it out")


def _shipped(target: Target, method: str | None = None) -> Path | None:
    """The folder of the drafter that was trained for this target, or for one it was fine-tuned from: of the folders in
    `$DARTSPEC_DRAFTERS`, else of the package."""
    from dartspec.interop import registry

    return registry.find(target, method, [*registry.places(), ASSETS])


def _trained(
    folder: Path,
    target: Target,
    index: str | Path | None,
    why: str,
    part: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Chosen:
    """The drafter of a folder: ours, another program's checkpoint, or a smaller model."""
    from dartspec.interop import checkpoints

    method = checkpoints.inspect(folder).method
    options: dict[str, Any] = {}
    if "index" in inspect.signature(drafters.get(method).load).parameters:
        beside = folder / "index.ngram"
        options["index"] = (beside if beside.exists() else None) if index == "auto" else index
    elif not part:
        _no_index(index, method)
    made = checkpoints.load(folder, target, settings, **options)
    name = ",".join([method, *(f"{key}={value}" for key, value in (settings or {}).items())])
    return Chosen(made, name, f"drafter {name}{why}", Calibration.load(folder, method), getattr(made, "config", None))


def _nodes(wanted: int | str) -> int | str:
    """The tree size as asked, or "auto"."""
    if wanted != "auto" and (not isinstance(wanted, int) or isinstance(wanted, bool) or not 0 <= wanted <= 512):
        raise DartspecError(f"nodes is {wanted!r}; it must be 'auto' or in [0, 512]")
    return wanted
