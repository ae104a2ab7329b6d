"""One sentence on what speculation was worth, from measured terms.

`1.6x: M 2.4, a round costs 1.5 steps`, or `no gain: ...` with the term that is to blame. Nothing here is estimated: M
and the round come from the answer's own rounds, the step from plain decoding in the same engine: from the answer's own
rounds without drafts where it has enough of them, else from a few plain steps behind the answer (`PlainStep`).
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from dartspec.accounting import Metrics, SpeedUp
from dartspec.budget.cost import interpolate

if TYPE_CHECKING:
    from dartspec.api import LM
    from dartspec.types import SamplingParams

GAIN = 1.05  # below this, timing noise and gain cannot be told apart
DOUBT = 0.95  # a round of fewer plain steps than this cannot be: one of the two was disturbed
FEW = 1.3  # committed tokens a round below which the guesses, not the costs, are to blame
CONTEXT_STEP = 256  # plain steps are measured once for each stretch of this many positions
CONTEXT_MOST = 1024  # and on at most this much of the text, so that measuring stays cheap
STEPS = 5


class PlainStep:
    """Measures what a plain step costs, once for each stretch of context length, and remembers it.

    The same engine decodes `STEPS` + 1 tokens with the drafter `none` behind the last tokens of the text (at most
    `CONTEXT_MOST` of them) under the same sampling rule; the first round warms up, the median of the others counts.
    """

    def __init__(self, lm: LM) -> None:
        self._lm = lm
        self._plain = lm.with_drafter("none", nodes=0)
        self._known: dict[int, float] = {}

    def ms(self, ids: list[int], params: SamplingParams) -> float:
        """Milliseconds of one plain step behind `ids`."""
        place = min(len(ids), CONTEXT_MOST) // CONTEXT_STEP
        if place not in self._known:
            few = replace(params, max_tokens=STEPS + 2, stop=(), ignore_eos=True, stop_token_ids=(), logprobs=None)
            room = self._lm.target.max_positions - few.max_tokens - 1
            rounds = self._plain.generate(ids[-max(1, min(room, CONTEXT_MOST)) :], params=few).metrics.rounds
            times = [r.round_ms for r in rounds[1:] or rounds]
            if not times:
                return 0.0
            self._known[place] = statistics.median(times)
        return self._known[place]


def after_answer(lm: LM, step: PlainStep, ids: list[int], metrics: Metrics, params: SamplingParams, raw: bool) -> str:
    """The sentence after an answer; `ids` are prompt and answer. Measures a plain step where it must."""
    if not metrics.num_rounds:
        return "nothing to measure: the answer took no round"
    if lm.drafter_name == "none":
        return f"plain decoding: {metrics.tokens_per_s:.1f} tokens/s, {metrics.ms_per_token:.1f} ms a step"
    # a round without drafts is a plain step, timed in the very answer
    own = [r.round_ms for r in metrics.rounds if not r.num_drafted]
    plain_ms = statistics.median(own) if len(own) >= STEPS else step.ms(ids, params)
    speed = SpeedUp(metrics.M, plain_ms, metrics.ms_per_round, metrics.verify_ms / metrics.num_rounds)
    return sentence(lm, speed, metrics, raw) + _beside_training(lm, metrics)


def sentence(lm: LM, speed: SpeedUp, metrics: Metrics, raw: bool = False) -> str:
    """The gain and its two terms, or why there is none, or that the times contradict each other."""
    drafted = any(r.num_drafted for r in metrics.rounds)
    if drafted and speed.round_in_steps < DOUBT:
        return (
            f"M {speed.M:.1f}, gain unknown: a round took {speed.round_ms:.1f} ms and a plain step "
            f"{speed.plain_ms:.1f} ms, so something else keeps this machine busy"
        )
    if speed.speed_up >= GAIN:
        return f"{speed.speed_up:.1f}x: M {speed.M:.1f}, a round costs {speed.round_in_steps:.1f} steps"
    if not drafted or lm.nodes == 0:
        return "no gain: no tree is worth its cost on this machine, so nothing was drafted"
    if speed.M < FEW:
        return f"no gain: M {speed.M:.1f} ({_why_few(lm, raw)})"
    rows = _rows(metrics)
    verify = speed.verify_ms / speed.plain_ms if speed.plain_ms else 0.0
    if verify >= 0.75 * speed.round_in_steps:
        kind = "CPU" if lm.target.device.type == "cpu" else "GPU"
        return f"no gain: {rows:.0f} rows cost {verify:.1f} steps on this {kind}"
    return (
        f"no gain: M {speed.M:.1f}, a round costs {speed.round_in_steps:.1f} steps, "
        f"{speed.round_in_steps - verify:.1f} of them beside the model"
    )


def _beside_training(lm: LM, metrics: Metrics) -> str:
    """For a model whose weights are not those that the drafter was trained for: what M was there."""
    config = lm.trained
    record = {int(n): float(m) for n, m in (getattr(config, "acceptance", None) or {}).items()}
    if not record or not _other_weights(lm):
        return ""
    nodes = lm.nodes if isinstance(lm.nodes, int) else round(_rows(metrics)) - 1
    there = interpolate({0: 1.0, **record}, nodes)
    return f"; M was {there:.1f} on the weights the drafter was trained for"


def _other_weights(lm: LM) -> bool:
    trained = getattr(lm.trained, "weights_fingerprint", None)
    return trained is not None and trained != lm.target.weights_fingerprint


def _rows(metrics: Metrics) -> float:
    """Mean rows of a verifying forward, the root among them."""
    return 1 + sum(r.num_drafted for r in metrics.rounds) / max(1, metrics.num_rounds)


def _why_few(lm: LM, raw: bool) -> str:
    config = lm.trained
    trained = getattr(config, "template_hash", None)
    if trained is not None and (raw or trained != lm.text.template_hash):
        return "no chat template, the drafter was trained with one" if raw else "template differs from training"
    if _other_weights(lm):
        return "the model's weights are not those the drafter was trained for"
    if lm.drafter_name == "prompt_lookup":
        return "this text repeats little, so there is little to copy"
    return "the drafter guesses this text badly"
