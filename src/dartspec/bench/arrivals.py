"""When requests come, for `bench latency`: Poisson, bursts, or a recorded trace. Knows times; knows no model.

Open loop: a request comes at its time whether or not the ones before it were answered, as users do. A closed loop,
which sends the next request when one is done, slows down with the server and hides its queue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dartspec.bench.suites import Prompt, turns_of
from dartspec.errors import DartspecError

BURST = 8  # requests of a burst where none is said


def arrivals(kind: str, rate: float, num: int, seed: int = 0) -> list[float]:
    """`num` times in seconds from the start, `rate` requests a second on average.

    kind: "poisson", or "bursts[:SIZE]": bursts of SIZE requests at once, the bursts a Poisson process. The same seed
          gives the same pattern at every rate, only faster or slower.
    """
    if not (np.isfinite(rate) and rate > 0):
        raise DartspecError(f"rate is {rate}; it must be a number of requests a second, above 0")
    if seed < 0:
        raise DartspecError(f"seed is {seed}; it must be 0 or more")
    if num < 1:
        raise DartspecError(f"requests is {num}; it must be 1 or more")
    name, _, size = kind.partition(":")
    if name not in ("poisson", "bursts") or (size and (name == "poisson" or not size.isdecimal() or int(size) < 1)):
        raise DartspecError(f"arrivals is {kind!r}; it must be poisson, bursts, bursts:SIZE, or a file of a trace")
    together = int(size or BURST) if name == "bursts" else 1
    gaps = np.random.default_rng(seed).exponential(together, -(-num // together))
    return [float(t) for t in np.repeat(gaps.cumsum() / rate, together)[:num]]


def read_trace(path: Path) -> tuple[list[float], list[Prompt]]:
    """A recorded trace: times in seconds from its first request, and its prompts where it has them (else none).

    A JSON object a line, in order of time: `at` in seconds from any origin, and `prompt`, `turns`, `messages` or `ids`
    as in a prompt set, in all lines or in none.
    """
    times: list[float] = []
    prompts: list[Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DartspecError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
            at = float(row["at"])
            if not np.isfinite(at):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DartspecError(f"{path}, line {number} has no time: expected an object with at (seconds)") from error
        if times and at < times[-1]:
            raise DartspecError(f"{path}, line {number} is of {at:g} s, the line before of {times[-1]:g} s: sort them")
        turns, ids = turns_of(row)
        if not (turns or ids) and (given := [k for k in ("prompt", "turns", "messages", "ids") if k in row]):
            raise DartspecError(
                f"{path}, line {number}: {given[0]} holds no text or token ids: give some or leave it out"
            )
        if turns or ids:
            prompts.append(Prompt(str(row.get("id", f"{path.stem}/{number}")), path.stem, turns, ids))
        times.append(at)
        if len(prompts) not in (0, len(times)):
            raise DartspecError(f"{path}, line {number}: some requests have a prompt and some have none")
    if not times:
        raise DartspecError(f"{path} holds no request: expected one JSON object a line")
    return [t - times[0] for t in times], prompts


def stretched(times: Sequence[float], rate: float) -> list[float]:
    """The same pattern at another mean rate."""
    if not (np.isfinite(rate) and rate > 0):
        raise DartspecError(f"rate is {rate}; it must be a number of requests a second, above 0")
    if times[-1] <= 0:
        raise DartspecError("all requests of the trace come at once, so it has no rate to change: leave --rate out")
    factor = mean_rate(times) / rate
    return [t * factor for t in times]


def mean_rate(times: Sequence[float]) -> float:
    """Requests a second, over the gaps between them; 0 for one request or where all come at once."""
    return (len(times) - 1) / times[-1] if times[-1] > 0 else 0.0
