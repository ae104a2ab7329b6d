"""`dartspec demo`: plain decoding and DART side by side, on the same prompts, in the same engine.

The two take turns prompt by prompt after a warm-up, so that a machine that slows down slows both. The screen is drawn
between rounds, where no clock runs: tokens/s are the engine's, not the screen's.
"""

from __future__ import annotations

import contextlib
import json as json_module
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text as RichText

from dartspec.cli import options as o
from dartspec.cli.terminal import ACCEPTED, Terminal, printable
from dartspec.errors import DartspecError

if TYPE_CHECKING:
    from dartspec.accounting import Metrics
    from dartspec.api import LM
    from dartspec.types import SamplingParams

MAX_TOKENS = 128
FRAMES_A_SECOND = 12
FEW_ULPS = 4.0  # gaps that the rounding of another batch shape explains (docs/losslessness.md)
STAGES = ("draft", "search", "verify", "other")


def demo(
    model: o.ModelArgument = None,
    drafter: o.DrafterOption = "auto",
    index: o.IndexOption = "auto",
    nodes: o.NodesOption = "auto",
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Ask this instead of ours; may be repeated.")
    ] = None,
    temperature: o.TemperatureOption = None,
    seed: o.SeedOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens a prompt.")] = MAX_TOKENS,
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: o.ThreadsOption = None,
    fast: o.FastOption = True,
    json: o.JsonOption = False,
    no_color: o.NoColorOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Plain decoding and DART side by side, live.

    Both answer the same prompts in the same engine, taking turns. Then: tokens a second, accepted (A) and committed (M)
    tokens a round, the time of every stage, the speed-up with its terms, and whether the texts are equal.

    \b
    Examples:
      dartspec demo
      dartspec demo --prompt "How do tides work?" -n 200
      dartspec demo --temperature 0.8 --seed 1       the same seed gives both the same text
      dartspec demo ./my-model --drafter ./my-drafter
      dartspec demo --json | tail -1 | jq .speed_up
    """
    term = Terminal(json=json, no_color=no_color)
    if seed is None and temperature:
        seed = secrets.randbits(32)  # one for both sides
    params = o.sampling(temperature=temperature, seed=seed, max_tokens=max_tokens)
    texts = prompt or [p["text"] for p in shipped_prompts()]
    if not all(t.strip() for t in texts):
        raise DartspecError("the prompt is empty: give at least one word")
    lm = o.Loading(model, drafter, index, nodes, dtype, device, threads, fast).load(term)
    outcome = compare(lm, texts, params, term)
    _report(outcome, term)
    term.emit({**outcome.to_dict(), "provenance": o.provenance(lm, seed)})


def shipped_prompts() -> list[dict[str, str]]:
    """The prompts in the package, our own words: [{"kind", "text"}]."""
    return list(json_module.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8")))


@dataclass
class Side:
    """One of the two: how it decodes, and what it has written."""

    title: str
    lm: LM
    metrics: list[Metrics] = field(default_factory=list)  # one a prompt
    ids: list[list[int]] = field(default_factory=list)
    shown: RichText = field(default_factory=RichText)
    current: Metrics | None = None

    def panel(self, width: int, height: int | None) -> Panel:
        """The answer so far; the last `height` lines of it where it is too long."""
        lines = self.shown.wrap(_WRAPPER, max(8, width - 4))
        text = RichText("\n").join(lines if height is None else lines[-height:])
        if height is not None:
            text.append("\n" * max(0, height - len(lines)))
        m = self.current
        speed = "" if m is None or not m.num_rounds else f"{m.tokens_per_s:.1f} tokens/s, M {m.M:.2f}"
        title = self.title if self.title == "plain" else f"{self.title} (green: drafted and accepted)"
        return Panel(text, title=title, subtitle=speed, title_align="left", subtitle_align="left")


@dataclass
class Outcome:
    """What the demo found."""

    sides: tuple[Side, Side]
    prompts: list[str]
    different: list[dict[str, Any]]  # one a prompt whose texts differ: its index and the first divergence
    params: SamplingParams

    @property
    def merged(self) -> tuple[Metrics, Metrics]:
        from dartspec.accounting import Metrics

        plain, dart = self.sides
        return Metrics.merged(plain.metrics), Metrics.merged(dart.metrics)

    def before_loops(self) -> tuple[int, Metrics, Metrics]:
        """How many answers repeat themselves, and both sides counted up to there: repeats are easy to draft."""
        from dartspec.accounting import Metrics, loop_start

        num, cut = 0, ([], [])  # type: ignore[var-annotated]
        for i in range(len(self.prompts)):
            starts = [loop_start(s.ids[i]) for s in self.sides]
            num += any(s is not None for s in starts)
            for side, start, metrics in zip(self.sides, starts, cut, strict=True):
                metrics.append(side.metrics[i] if start is None else side.metrics[i].before(start))
        return num, Metrics.merged(cut[0]), Metrics.merged(cut[1])

    def to_dict(self) -> dict[str, Any]:
        from dartspec.accounting import SpeedUp
        from dartspec.cli.verdict import sentence

        plain, dart = self.merged
        speed = SpeedUp.of(plain, dart)
        num, plain_cut, dart_cut = self.before_loops()
        return {
            "plain": plain.to_dict(),
            "dart": dart.to_dict(),
            "equal": not self.different,
            "different": self.different,
            "speed_up": _terms(speed),
            "before_loops": {"num_looping": num, "A": dart_cut.A, "M": dart_cut.M}
            | {"speed_up": _terms(SpeedUp.of(plain_cut, dart_cut))},
            "verdict": sentence(self.sides[1].lm, speed, dart),
            "drafter": self.sides[1].lm.drafter_note,
            "prompts": self.prompts,
            "params": {
                "temperature": self.params.temperature,
                "seed": self.params.seed,
                "max_tokens": self.params.max_tokens,
            },
        }


def _terms(speed: Any) -> dict[str, float]:
    names = ("speed_up", "bound", "M", "plain_ms", "round_ms", "verify_ms", "round_in_steps")
    return {name: round(float(getattr(speed, name)), 4) for name in names}


def compare(lm: LM, texts: Sequence[str], params: SamplingParams, term: Terminal) -> Outcome:
    """Runs both on every prompt, in turns, and compares the texts."""
    plain = Side("plain", lm.with_drafter("none", nodes=0))
    dart = Side("DART" if lm.drafter_name.startswith("dart") else lm.drafter_name, lm)
    prompts = [lm.encode([{"role": "user", "content": t}]) for t in texts]
    for side in (plain, dart):
        side.lm.generate(prompts[0], params=replace(params, max_tokens=min(8, params.max_tokens)))
    different = []
    for i, (text, ids) in enumerate(zip(texts, prompts, strict=True)):
        _one(text, ids, (plain, dart), params, term)
        if plain.ids[i] != dart.ids[i]:
            different.append({"prompt": i, **divergence(lm, params, ids, plain.ids[i], dart.ids[i])})
    return Outcome((plain, dart), list(texts), different, params)


def _one(text: str, ids: list[int], sides: tuple[Side, Side], params: SamplingParams, term: Terminal) -> None:
    """One prompt: plain, then DART, drawn as they write."""
    from dartspec.cli.painter import Painter
    from dartspec.engine import Request

    for side in sides:
        side.shown, side.current = RichText(), None
    console = term.out
    console.print(RichText(printable(text), style="bold"))
    height = max(3, min(16, console.height - 4))
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with live or contextlib.nullcontext():
        drawn = 0.0
        for side in sides:
            painter, written = Painter(side.lm.text), list[int]()
            for chunk in side.lm.run([Request(ids, params)], batch=1):
                for piece, accepted in painter.push(chunk):
                    side.shown.append(printable(piece), style=ACCEPTED if accepted else "")
                written += chunk.ids
                side.current = chunk.metrics
                if live is not None and time.monotonic() - drawn > 1 / FRAMES_A_SECOND:
                    live.update(_pair(sides, console.width, height), refresh=True)
                    drawn = time.monotonic()
            assert side.current is not None
            side.ids.append(written)
            side.metrics.append(side.current)
    console.print(_pair(sides, console.width, None))


def _pair(sides: tuple[Side, Side], width: int, height: int | None) -> Table:
    table = Table.grid(expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(*(side.panel(width // 2, height) for side in sides))
    return table


def divergence(lm: LM, params: SamplingParams, prompt: list[int], a: list[int], b: list[int]) -> dict[str, Any]:
    """Where two answers part, and by how little the target preferred the one over the other. JSON-ready."""
    from dartspec.bench.equality import first_divergence

    found = first_divergence(lm.target, params, prompt, a, b)
    assert found is not None
    tokens = [None if i is None else lm.text.decode([i], skip_special=False) for i in (found.token_a, found.token_b)]
    facts = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(found).items()}
    return {**facts, "text_a": tokens[0], "text_b": tokens[1]}


def _report(outcome: Outcome, term: Terminal) -> None:
    """The table, the speed-up with its terms, the comparison, and the one sentence."""
    from dartspec.accounting import SpeedUp
    from dartspec.cli.verdict import sentence

    merged = outcome.merged
    table = Table(title="milliseconds a round; A accepted and M committed tokens a round", title_justify="left")
    table.add_column("")
    for name in ("tokens/s", "A", "M", *STAGES, "round"):
        table.add_column(name, justify="right")
    for side, m in zip(outcome.sides, merged, strict=True):
        stages = m.to_dict()["ms_per_round"]
        cells = [f"{m.tokens_per_s:.1f}", f"{m.A:.2f}", f"{m.M:.2f}"]
        table.add_row(side.title, *cells, *(f"{stages[s]:.2f}" for s in STAGES), f"{m.ms_per_round:.2f}")
    term.out.print(table)
    speed = SpeedUp.of(*merged)
    term.say(str(speed))
    num, plain_cut, dart_cut = outcome.before_loops()
    if num:
        cut = SpeedUp.of(plain_cut, dart_cut)
        term.say(
            f"{num} of {len(outcome.prompts)} answers repeat themselves; "
            f"before that: {cut.speed_up:.2f}x, M {cut.M:.2f}"
        )
    if outcome.different:
        for d in outcome.different:
            term.say(parting(d))
    else:
        term.say(f"texts: equal, token for token ({sum(map(len, outcome.sides[0].ids))} tokens)")
    if outcome.params.temperature > 0:
        term.say(f"seed {outcome.params.seed}")
    term.say(sentence(outcome.sides[1].lm, speed, merged[1]), style="bold")


def parting(d: dict[str, Any]) -> str:
    """One line on where two texts part and whether rounding explains it."""
    where = f"prompt {d['prompt'] + 1}: texts part at token {d['index']}, {d['text_a']!r} and {d['text_b']!r}"
    ulps = d["gap_ulps"]
    if ulps is not None and ulps <= FEW_ULPS:
        return printable(f"{where}: their logits are {ulps:.1f} units in the last place apart, which rounding explains")
    return printable(f"{where}: a gap of {ulps} units in the last place, more than rounding explains; please report it")


def _wrapper() -> Any:
    from rich.console import Console

    return Console(file=None, force_terminal=False, width=200)


_WRAPPER = _wrapper()  # wrapping needs a console for its defaults only; nothing is ever printed to it
