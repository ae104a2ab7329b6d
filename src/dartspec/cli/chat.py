"""`dartspec chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from dartspec.cli import interrupt
from dartspec.cli import options as o
from dartspec.cli.generate import answer, as_dict
from dartspec.cli.terminal import Terminal, error_line
from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from dartspec.api import LM
    from dartspec.types import SamplingParams

HELP = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer"


def chat(
    model: o.ModelArgument = None,
    system: o.SystemOption = None,
    max_tokens: o.MaxTokensOption = None,
    temperature: o.TemperatureOption = None,
    top_k: o.TopKOption = None,
    top_p: o.TopPOption = None,
    min_p: o.MinPOption = None,
    repetition_penalty: o.RepetitionOption = None,
    presence_penalty: o.PresenceOption = None,
    frequency_penalty: o.FrequencyOption = None,
    logit_bias: o.BiasOption = None,
    seed: o.SeedOption = None,
    stop: o.StopOption = None,
    drafter: o.DrafterOption = "auto",
    index: o.IndexOption = "auto",
    nodes: o.NodesOption = "auto",
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: o.ThreadsOption = None,
    fast: o.FastOption = True,
    revision: o.RevisionOption = None,
    trust_remote_code: o.TrustOption = False,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Talk with the model; the conversation is kept.

    /reset forgets it, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer that runs. Tokens that the drafter had guessed
    are green; each turn ends with what speculation was worth. From a pipe every line is one turn.

    \b
    Examples:
      dartspec chat
      dartspec chat ./my-model -t 0.7 --system "Answer in one sentence."
      printf 'Hello\\nWhat did I just say?\\n' | dartspec chat --json
    """
    term = Terminal(json=json, no_color=no_color)
    params = o.sampling(
        bias=logit_bias,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop) if stop else None,
    )
    loading = o.Loading(model, drafter, index, nodes, dtype, device, threads, fast, revision, trust_remote_code)
    lm = loading.load(term)
    turns = converse(lm, params, term, system)
    term.emit({"turns": turns, "provenance": o.provenance(lm, seed)})


def converse(lm: LM, params: SamplingParams, term: Terminal, system: str | None) -> list[dict[str, Any]]:
    """The loop: read, answer, remember. Returns what each turn gave."""
    from dartspec.cli.verdict import PlainStep

    typing = sys.stdin.isatty()
    if typing:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() a history)
        term.note(HELP)
    step = PlainStep(lm)
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages, turns = list(opening), list[dict[str, Any]]()
    while True:
        try:
            line = input("> " if typing and not term.json else "").strip()
        except EOFError:
            if typing:
                term.say("")
            return turns
        except KeyboardInterrupt:
            if typing:
                term.say("")
            raise
        if line == "/quit":
            return turns
        if line == "/reset":
            messages = list(opening)
            term.note("the conversation is forgotten")
            continue
        if line.startswith("/") and " " not in line and line.count("/") == 1:
            term.note(f"unknown command {line}; {HELP}")
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        said, turn = _turn(lm, step, messages, params, term)
        if said is None:
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": said})
        if turn:
            turns.append({"prompt": line, **turn})


def _turn(
    lm: LM, step: Any, messages: list[dict[str, str]], params: SamplingParams, term: Terminal
) -> tuple[str | None, dict[str, Any]]:
    """One answer: its text (None when there was none) and its record."""
    heard: list[str] = []
    try:
        result, verdict = answer(lm, step, lm.encode(messages), params, term, heard=heard)
    except KeyboardInterrupt:
        interrupt.taken()
        term.note("stopped; what was written is kept in the conversation")
        return "".join(heard) or None, {}
    except DartspecError as error:
        if not sys.stdin.isatty():
            raise
        error_line(f"{error} (/reset forgets the conversation)")
        return None, {}
    if params.temperature > 0:
        term.note(f"seed {result.seed}")
    term.note(verdict)
    return result.text, {**as_dict(lm, result), "verdict": verdict}
