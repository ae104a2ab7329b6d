"""`dartspec generate`: one answer, streamed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dartspec.cli import options as o
from dartspec.cli.terminal import Terminal, printable

if TYPE_CHECKING:
    from dartspec.api import LM, Result
    from dartspec.cli.verdict import PlainStep
    from dartspec.types import SamplingParams


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; - reads stdin.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")] = None,
    model: o.ModelOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without chat template.")] = False,
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
    stop_token_id: o.StopIdOption = None,
    ignore_eos: o.IgnoreEosOption = False,
    logprobs: o.LogprobsOption = None,
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
    """Answer one prompt and stream the text.

    The prompt goes through the model's chat template; --raw continues it as plain text. Tokens that the drafter
    had guessed are green. The last line says what speculation was worth.

    \b
    Examples:
      dartspec generate "Explain tides to a child"
      dartspec generate --model ./my-model -t 0.8 --seed 7 "Write a haiku"
      dartspec generate --raw -n 64 "def fibonacci(n):"
      cat letter.txt | dartspec generate - --stop "Yours"
      dartspec generate --json "What is 12 * 12?" | tail -1 | jq .metrics.M
    """
    term = Terminal(json=json, no_color=no_color)
    text = o.read_prompt(prompt, file)
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
        stop_token_ids=tuple(stop_token_id) if stop_token_id else None,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    loading = o.Loading(model, drafter, index, nodes, dtype, device, threads, fast, revision, trust_remote_code)
    lm = loading.load(term)
    from dartspec.cli.verdict import PlainStep

    step = PlainStep(lm)
    ids = lm.encode(text) if raw else lm.encode(chat_messages(text, system))
    result, verdict = answer(lm, step, ids, params, term, raw=raw)
    if result.log_probs is not None:
        _show_log_probs(lm, result, term)
    if params.temperature > 0:
        term.note(f"seed {result.seed}")
    term.note(verdict)
    term.emit({**as_dict(lm, result), "verdict": verdict, "provenance": o.provenance(lm, result.seed)})


def chat_messages(text: str, system: str | None) -> list[dict[str, str]]:
    """One question as a conversation."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": text}]


def answer(
    lm: LM,
    step: PlainStep,
    ids: list[int],
    params: SamplingParams,
    term: Terminal,
    *,
    raw: bool = False,
    heard: list[str] | None = None,
) -> tuple[Result, str]:
    """Streams one answer and measures what it was worth: the result and the sentence.

    Ctrl-C passes through; `heard` then holds the text written before it.
    """
    from dartspec.cli.painter import Painter
    from dartspec.cli.verdict import after_answer

    painter = Painter(lm.text)
    stream = lm.stream(ids, params=params)
    try:
        for chunk in stream:
            if heard is not None:
                heard.append(chunk.text)
            if not term.json:
                term.write(painter.push(chunk))
    except BaseException:
        stream.close()  # now, not when it is collected: the drafter must forget the answer first
        if not term.json:
            term.write([("\n", False)])
        raise
    if not term.json:
        term.write([("\n", False)])
    result = stream.result
    return result, after_answer(lm, step, [*ids, *result.ids], result.metrics, params, raw)


def as_dict(lm: LM, result: Result) -> dict[str, Any]:
    """JSON-ready: what was written and what it took."""
    made: dict[str, Any] = {
        "text": result.text,
        "ids": result.ids,
        "accepted": result.accepted,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "num_prompt_tokens": result.num_prompt_tokens,
        "drafter": lm.drafter_note,
        "metrics": result.metrics.to_dict(),
    }
    if result.log_probs is not None:
        made["log_probs"] = [
            {
                "token": lm.text.decode([token], skip_special=False),
                "id": token,
                "log_prob": _finite(log_prob),
                "top": [
                    {"token": lm.text.decode([i], skip_special=False), "id": i, "log_prob": _finite(p)} for i, p in top
                ],
            }
            for token, (log_prob, top) in zip(result.ids, result.log_probs, strict=True)
        ]
    return made


def _finite(value: float) -> float | None:
    """JSON has no infinity: a token that a filter removed has None."""
    return value if math.isfinite(value) else None


def _show_log_probs(lm: LM, result: Result, term: Terminal) -> None:
    assert result.log_probs is not None
    for token, (log_prob, top) in zip(result.ids, result.log_probs, strict=True):
        others = "  ".join(f"{lm.text.decode([i], skip_special=False)!r} {p:.3f}" for i, p in top)
        term.note(printable(f"{log_prob:9.3f}  {lm.text.decode([token], skip_special=False)!r}  | {others}"))
