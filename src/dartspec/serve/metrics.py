"""What /metrics says, in Prometheus' text form: vLLM's names where it has one, so that its dashboards read this server;
ours begin with `dartspec:`. The list with meanings is in docs/metrics.md.

Counted from the event loop alone.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dartspec.accounting import Metrics

Labels = tuple[tuple[str, str], ...]

# vLLM's buckets
_SHORT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_FEW = (1, 2, 5, 10, 20)


@dataclass
class Family:
    """One name. buckets: upper bounds of a histogram; otherwise a counter or a gauge."""

    name: str
    kind: str
    help: str
    buckets: tuple[float, ...] = ()
    values: dict[Labels, list[float]] = field(default_factory=dict)  # one number, or counts by bucket, sum, count

    def add(self, amount: float = 1.0, **labels: str) -> None:
        self.values.setdefault(tuple(labels.items()), [0.0])[0] += amount

    def set(self, value: float, **labels: str) -> None:
        self.values[tuple(labels.items())] = [value]

    def observe(self, value: float) -> None:
        cells = self.values.setdefault((), [0.0] * (len(self.buckets) + 2))
        at = bisect.bisect_left(self.buckets, value)
        if at < len(self.buckets):
            cells[at] += 1
        cells[-2] += value
        cells[-1] += 1

    def lines(self, common: Labels) -> Iterable[str]:
        exposed = f"{self.name}_total" if self.kind == "counter" else self.name
        yield f"# HELP {exposed} {self.help}"
        yield f"# TYPE {exposed} {self.kind}"
        for labels, cells in self.values.items():
            if not self.buckets:
                yield f"{exposed}{_labels(common + labels)} {_number(cells[0])}"
                continue
            total = 0.0
            for bound, count in zip(self.buckets, cells, strict=False):
                total += count
                yield f"{exposed}_bucket{_labels((*common, *labels, ('le', _number(bound))))} {_number(total)}"
            yield f"{exposed}_bucket{_labels((*common, *labels, ('le', '+Inf')))} {_number(cells[-1])}"
            yield f"{exposed}_sum{_labels(common + labels)} {_number(cells[-2])}"
            yield f"{exposed}_count{_labels(common + labels)} {_number(cells[-1])}"


class Board:
    """All families, and how they are told of a request."""

    def __init__(self) -> None:
        self.families: list[Family] = []
        g, c, h = self._gauge, self._counter, self._histogram
        self.running = g("vllm:num_requests_running", "Sequences that have a slot.")
        self.waiting = g("vllm:num_requests_waiting", "Sequences that wait for one.")
        self.swapped = g("vllm:num_requests_swapped", "Sequences moved out of memory; never done here.")
        self.cache = g("vllm:kv_cache_usage_perc", "Share of the slots in use, 1 is all.")
        self.cache_old = g("vllm:gpu_cache_usage_perc", "The same under vLLM's older name.")
        self.preempted = c("vllm:num_preemptions", "Sequences put off; never done here.")
        self.prompt_tokens = c("vllm:prompt_tokens", "Tokens of prompts that got a slot.")
        self.new_tokens = c("vllm:generation_tokens", "Tokens written.")
        self.prefix_queries = c("vllm:prefix_cache_queries", "Prompt tokens looked up among kept texts.")
        self.prefix_hits = c("vllm:prefix_cache_hits", "Of these, tokens that were copied.")
        self.success = c("vllm:request_success", "Answers by why they ended: stop, length, abort, error.")
        self.first = h("vllm:time_to_first_token_seconds", "From the request to its first token.", _SHORT)
        self.gap = h("vllm:inter_token_latency_seconds", "Time a token, round by round.", _GAP)
        self.gap_old = h("vllm:time_per_output_token_seconds", "The same under vLLM's older name.", _GAP)
        self.mean_gap = h("vllm:request_time_per_output_token_seconds", "Mean time a token of each answer.", _GAP)
        self.whole = h("vllm:e2e_request_latency_seconds", "From the request to its end.", _LONG)
        self.queued = h("vllm:request_queue_time_seconds", "Waiting for a slot.", _LONG)
        self.prefill = h("vllm:request_prefill_time_seconds", "From the slot to the first token.", _LONG)
        self.decode = h("vllm:request_decode_time_seconds", "From the first token to the last.", _LONG)
        self.inference = h("vllm:request_inference_time_seconds", "From the slot to the last token.", _LONG)
        self.prompt_size = h("vllm:request_prompt_tokens", "Tokens of each prompt.", _TOKENS)
        self.answer_size = h("vllm:request_generation_tokens", "Tokens of each answer.", _TOKENS)
        self.longest = h("vllm:request_max_num_generation_tokens", "Of each request, its longest answer.", _TOKENS)
        self.asked_size = h("vllm:request_params_max_tokens", "max_tokens of each request.", _TOKENS)
        self.asked_n = h("vllm:request_params_n", "n of each request.", _FEW)
        self.rounds = c("vllm:spec_decode_num_drafts", "Rounds that verified drafts.")
        self.drafted = c("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted = c("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.by_position = c("vllm:spec_decode_num_accepted_tokens_per_pos", "Rounds that accepted so many or more.")
        self.committed = c("dartspec:committed_tokens", "Tokens that rounds committed, by drafter; over rounds, M.")
        self.all_rounds = c("dartspec:rounds", "Rounds of sequences, with drafts or without, by drafter.")
        self.stage = c("dartspec:stage_seconds", "Time of rounds by stage; shared rounds are divided.")
        self.downgraded = c("dartspec:downgraded_sequences", "Sequences that went on without drafts after a failure.")
        self.refused = c("dartspec:requests_refused", "Requests refused, by code.")
        self.requests = c("dartspec:http_requests", "HTTP requests by status.")
        self.cancelled = c("dartspec:requests_cancelled", "Requests cut short, by reason: gone, timeout, shutdown.")
        self.lanes = g("dartspec:lanes", "Drafters that have slots of their own now.")
        self.plain = g("dartspec:plain_tokens_per_second", "Plain decoding alone, measured at start.")
        self.reloads = c("dartspec:reloads", "Reloads of drafter and index, by result.")
        self.lost = c("dartspec:index_lost_pages", "Pages of an index that was cut off while it was open.")
        self.swapped.set(0)
        for family in (self.preempted, self.prompt_tokens, self.new_tokens, self.prefix_queries, self.prefix_hits):
            family.add(0)
        for family in (self.rounds, self.drafted, self.accepted, self.downgraded):
            family.add(0)

    def _gauge(self, name: str, help: str) -> Family:
        return self._add(Family(name, "gauge", help))

    def _counter(self, name: str, help: str) -> Family:
        return self._add(Family(name, "counter", help))

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Family:
        return self._add(Family(name, "histogram", help, tuple(map(float, buckets))))

    def _add(self, family: Family) -> Family:
        self.families.append(family)
        return family

    def speculation(self, drafter: str, metrics: Metrics) -> None:
        """The rounds of an answer that has ended."""
        with_drafts = [r for r in metrics.rounds if r.num_drafted]
        self.rounds.add(len(with_drafts))
        self.drafted.add(sum(r.num_drafted for r in with_drafts))
        self.accepted.add(sum(r.num_accepted for r in with_drafts))
        for position, count in enumerate(metrics.accepted_by_position):
            self.by_position.add(count, position=str(position))
        self.all_rounds.add(metrics.num_rounds, drafter=drafter)
        self.committed.add(sum(r.num_committed for r in metrics.rounds), drafter=drafter)
        stages: Mapping[str, float] = {
            "prefill": metrics.prefill_ms,
            "draft": metrics.draft_ms,
            "search": metrics.search_ms,
            "verify": metrics.verify_ms,
            "pick": metrics.pick_ms,
            "rest": metrics.other_ms - metrics.pick_ms,
        }
        for stage, ms in stages.items():
            self.stage.add(ms / 1e3, stage=stage)

    def page(self, model: str, look: Callable[[], None]) -> str:
        """The whole page. look: brings the gauges up to date."""
        look()
        common: Labels = (("model_name", model), ("engine", "0"))
        return "\n".join(line for f in self.families for line in f.lines(common)) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else str(int(value)) if value == int(value) else repr(value)
