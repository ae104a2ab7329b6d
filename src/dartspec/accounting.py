"""What is counted and how: A, M, tau, stage times, speed-up. The only file that defines a metric (method, section 1).

The token of the prefill belongs to no round; tokens that a stop cut off are not counted in M; a speed-up is a ratio of
sums, never a mean of ratios.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dartspec.types import RoundRecord


def loop_start(ids: Sequence[int], n: int = 16) -> int | None:
    """Index where the first loop begins: the start of the first n-gram that was seen twice before, or None.

    Small greedy models repeat themselves, and repeated text is easy to draft: all goals count only `ids[:loop_start]`.
    """
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(ids) - n + 1):
        gram = tuple(ids[i : i + n])
        count = seen.get(gram, 0)
        if count == 2:
            return i
        seen[gram] = count + 1
    return None


@dataclass
class Metrics:
    """The rounds of one or more requests and what follows from them."""

    rounds: list[RoundRecord] = field(default_factory=list)
    prefill_ms: float = 0.0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0  # generated tokens, the prefill's token included
    lossy: bool = False  # whether a rule was asked for that may change the text

    @classmethod
    def merged(cls, parts: Iterable[Metrics]) -> Metrics:
        """The sums over several requests. With batches, times of shared rounds are divided by their batch size."""
        whole = cls()
        for part in parts:
            whole.rounds += part.rounds
            whole.prefill_ms += part.prefill_ms
            whole.num_prompt_tokens += part.num_prompt_tokens
            whole.num_new_tokens += part.num_new_tokens
            whole.lossy |= part.lossy
        return whole

    def before(self, num_tokens: int) -> Metrics:
        """The same request, counting only rounds that end within its first `num_tokens` tokens (loops cut)."""
        kept, total = [], 1
        for r in self.rounds:
            total += r.num_committed
            if total > num_tokens:
                break
            kept.append(r)
        num_new = 1 + sum(r.num_committed for r in kept)
        return Metrics(kept, self.prefill_ms, self.num_prompt_tokens, num_new)

    # -- tokens a round ------------------------------------------------------------------------------------------

    @property
    def num_rounds(self) -> int:
        return len(self.rounds)

    num_spec_steps = num_rounds  # vLLM's name

    @property
    def A(self) -> float:  # noqa: N802  (the paper's letter)
        """Accepted draft tokens a round."""
        return _ratio(sum(r.num_accepted for r in self.rounds), self.num_rounds)

    @property
    def M(self) -> float:  # noqa: N802
        """Committed tokens a round: accepted + bonus, less what a stop cut off. This is our tau."""
        return _ratio(sum(r.num_committed for r in self.rounds), self.num_rounds)

    @property
    def mean_acceptance_length(self) -> float:
        """vLLM's: 1 + accepted drafts a round, whatever a stop cut off later."""
        return 1 + self.A

    @property
    def draft_acceptance_rate(self) -> float:
        """vLLM's: accepted draft tokens over drafted ones. Low for a tree, where most nodes are alternatives."""
        return _ratio(sum(r.num_accepted for r in self.rounds), sum(r.num_drafted for r in self.rounds))

    @property
    def acceptance_histogram(self) -> list[int]:
        """Entry i: rounds that accepted exactly i draft tokens."""
        counts = [0] * (1 + max((r.num_accepted for r in self.rounds), default=0))
        for r in self.rounds:
            counts[r.num_accepted] += 1
        return counts

    @property
    def accepted_by_position(self) -> list[int]:
        """Entry i: rounds that accepted more than i draft tokens (vLLM's counts by position)."""
        counts = self.acceptance_histogram
        return [sum(counts[i + 1 :]) for i in range(len(counts) - 1)]

    # -- time ----------------------------------------------------------------------------------------------------

    def _sum_ms(self, name: str) -> float:
        return float(sum(getattr(r, name) / r.batch for r in self.rounds))

    @property
    def draft_ms(self) -> float:
        return self._sum_ms("draft_ms")

    @property
    def search_ms(self) -> float:
        return self._sum_ms("search_ms")

    @property
    def verify_ms(self) -> float:
        return self._sum_ms("verify_ms")

    @property
    def other_ms(self) -> float:
        return self._sum_ms("other_ms")

    @property
    def pick_ms(self) -> float:
        """Of `other_ms`, picking the tokens."""
        return self._sum_ms("pick_ms")

    @property
    def decode_ms(self) -> float:
        """All rounds, without the prefill."""
        return self.draft_ms + self.search_ms + self.verify_ms + self.other_ms

    @property
    def ms_per_round(self) -> float:
        return _ratio(self.decode_ms, self.num_rounds)

    @property
    def ms_per_token(self) -> float:
        """Milliseconds a committed token; for plain decoding this is T_AR."""
        return _ratio(self.decode_ms, sum(r.num_committed for r in self.rounds))

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens a second of decoding (prefill and its token apart)."""
        return _ratio(1000.0, self.ms_per_token)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the figures under our names and vLLM's, stage times in milliseconds a round."""
        n = max(self.num_rounds, 1)
        return {
            **({"lossy": True} if self.lossy else {}),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "A": round(self.A, 4),
            "M": round(self.M, 4),
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "draft_acceptance_rate": round(self.draft_acceptance_rate, 4),
            "acceptance_histogram": self.acceptance_histogram,
            "num_spec_steps": self.num_rounds,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_new_tokens": self.num_new_tokens,
            "prefill_ms": round(self.prefill_ms, 2),
            "ms_per_round": {
                "draft": round(self.draft_ms / n, 3),
                "search": round(self.search_ms / n, 3),
                "verify": round(self.verify_ms / n, 3),
                "other": round(self.other_ms / n, 3),
            },
        }


@dataclass(frozen=True)
class SpeedUp:
    """S = M * T_AR / T_round with its terms, and the bound M * T_AR / T_V that no drafter with this M can pass."""

    M: float
    plain_ms: float  # T_AR, a plain step
    round_ms: float  # T_round = T_D + T_S + T_V + other
    verify_ms: float  # T_V

    @classmethod
    def of(cls, plain: Metrics, spec: Metrics) -> SpeedUp:
        return cls(spec.M, plain.ms_per_token, spec.ms_per_round, _ratio(spec.verify_ms, spec.num_rounds))

    @property
    def speed_up(self) -> float:
        return _ratio(self.M * self.plain_ms, self.round_ms)

    @property
    def bound(self) -> float:
        return _ratio(self.M * self.plain_ms, self.verify_ms)

    @property
    def round_in_steps(self) -> float:
        """What a round costs, in plain steps."""
        return _ratio(self.round_ms, self.plain_ms)

    def __str__(self) -> str:
        return (
            f"S = M * T_AR / T_round = {self.M:.2f} * {self.plain_ms:.1f} ms / {self.round_ms:.1f} ms"
            f" = {self.speed_up:.2f}x (bound M * T_AR / T_V = {self.bound:.2f}x)"
        )


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def with_interval(estimate: Sequence[float], unit: str = "") -> str:
    """A figure with its interval, where there is one: one unit has none."""
    value, low, high = estimate
    return f"{value:.2f}{unit}" + (f" [{low:.2f}, {high:.2f}]" if low < high else "")
