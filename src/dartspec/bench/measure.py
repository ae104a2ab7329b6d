"""One measurement: some requests decoded together by one method, and what was counted. Every harness verb uses it.

The text before the first loop is counted apart (`cut`), the whole text beside it (`uncut`): method, section 1.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dartspec.accounting import Metrics, loop_start
from dartspec.engine import Chunk, Request
from dartspec.errors import DartspecError
from dartspec.types import TokenTree

if TYPE_CHECKING:
    from dartspec.api import LM

PLAIN = "none"  # the drafter that is plain decoding
STAGES = ("draft_ms", "search_ms", "verify_ms", "other_ms")
FEWEST_IN_BIN = 20  # of a reliability diagram
RAPL = Path("/sys/class/powercap")
SUMS = ("rounds", "drafted", "accepted", "committed", *STAGES)


@dataclass(frozen=True)
class Method:
    """A way to decode: a drafter with its tree size and index.

    drafter: a method's name, a folder of trained weights, or "none" for plain decoding.
    nodes:   draft tokens a tree may have, or "auto". index: "auto", None, or a file.
    """

    drafter: str
    nodes: int | str = "auto"
    index: str | None = "auto"

    @classmethod
    def parse(cls, text: str, sizes: Sequence[int | str] = ("auto",)) -> list[Method]:
        """`NAME[,SETTING=VALUE...][@NODES][,index=FILE|none]`, NODES at the end of any part; one method for each of
        `sizes` where it is not given. The drafter knows its settings."""
        parts, own = text.split(","), ""
        for i, part in enumerate(parts):
            before, at, size = part.rpartition("@")
            if at and "/" not in size and not part.startswith("index="):
                if own or "@" in before.rpartition("/")[2]:
                    raise DartspecError(f"method {text!r} has two numbers of nodes; expected one, such as dart@8")
                parts[i], own = before, size
        name, *options = parts
        index: str | None = "auto"
        for option in options:
            key, _, value = option.partition("=")
            if not key or not value:
                raise DartspecError(f"method {text!r} has the option {option!r}; expected index=FILE or NAME,key=value")
            if key == "index":
                index = None if value == "none" else value
            else:
                name += f",{option}"  # a setting of the drafter
        if not name:
            raise DartspecError(f"method {text!r} has no name; expected NAME[@NODES][,index=FILE], such as dart@8")
        if name == PLAIN:
            return [cls(PLAIN, 0)]
        return [cls(name, n, index) for n in ([parse_size(own)] if own else sizes)]

    @property
    def label(self) -> str:
        if self.drafter == PLAIN:
            return "plain"
        index = {"auto": "", None: ",index=none"}.get(self.index, f",index={Path(str(self.index)).name}")
        return f"{Path(self.drafter).name}@{self.nodes}{index}"

    def of(self, lm: LM) -> LM:
        """This method on the same loaded target."""
        return lm.with_drafter(self.drafter, nodes=self.nodes, index=self.index)


def parse_size(text: str) -> int | str:
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise DartspecError(f"nodes is {text!r}; it must be auto or a whole number")


def measure(
    lm: LM, requests: Sequence[Request], *, trace: bool = False, texts: bool = False
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Decodes the requests as one batch; each one's new ids, and its record (JSON-ready).

    A record's `wall_ms`, `decode_wall_ms` and `cpu_ms` are the batch's, divided by its size: `wall_ms` all of it,
    `decode_wall_ms` all after the last prefill, by the clock on the wall and not by adding rounds up; `cpu_ms` the
    processor's time, all threads; `joules`, where the system tells, the processor's energy. trace: each round's tree,
    walk and times too. texts: the text, and tokens by round.
    """
    chunks: list[list[Chunk]] = [[] for _ in requests]
    began, cpu, energy = time.perf_counter(), time.process_time(), energy_joules()
    prefilled = began
    for chunk in lm.run(requests, batch=len(requests)):
        if not chunks[chunk.index]:
            prefilled = time.perf_counter()
        chunks[chunk.index].append(chunk)
    ended = time.perf_counter()
    shares = {
        "wall_ms": 1e3 * (ended - began),
        "decode_wall_ms": 1e3 * (ended - prefilled),
        "cpu_ms": 1e3 * (time.process_time() - cpu),
    }
    shares = {name: round(ms / len(requests), 3) for name, ms in shares.items()}
    after = energy_joules()
    if energy is not None and after is not None and after > energy:  # the counter begins anew now and then
        shares["joules"] = round((after - energy) / len(requests), 4)
    answers = [[i for c in own for i in c.ids] for own in chunks]
    records = []
    for ids, own in zip(answers, chunks, strict=True):
        m, loop = own[-1].metrics, loop_start(ids)
        records.append(
            {
                "num_prompt_tokens": m.num_prompt_tokens,
                "num_new_tokens": len(ids),
                "finish": own[-1].finish,
                "digest": hashlib.sha256(repr(ids).encode()).hexdigest()[:16],
                "loop": loop,
                "prefill_ms": round(m.prefill_ms, 3),
                **shares,
                "cut": sums(m if loop is None else m.before(loop)),
                "uncut": sums(m),
                **({"trace": _trace(lm, own)} if trace else {}),
                **(
                    {"text": lm.text.decode(ids), "accept_lengths": [r.num_committed for r in m.rounds]}
                    if texts
                    else {}
                ),
            }
        )
    return answers, records


def energy_joules() -> float | None:
    """What all processor packages have used since some moment, neighbours included, as Linux counts it (RAPL); None
    where it cannot be read (virtual machines, and most systems without root)."""
    try:
        read = [int((zone / "energy_uj").read_text()) for zone in RAPL.glob("intel-rapl:[0-9]")]
    except (OSError, ValueError):
        return None
    return sum(read) / 1e6 if read else None


def sums(m: Metrics) -> dict[str, Any]:
    """What every figure is made of: counts and stage milliseconds over the rounds, and rounds by accepted drafts."""
    return {
        "rounds": m.num_rounds,
        "drafted": sum(r.num_drafted for r in m.rounds),
        "accepted": sum(r.num_accepted for r in m.rounds),
        "committed": sum(r.num_committed for r in m.rounds),
        **{stage: round(getattr(m, stage), 3) for stage in STAGES},
        "histogram": m.acceptance_histogram if m.rounds else [],
    }


def add_sums(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sums over several records."""
    histogram = [0] * max((len(p["histogram"]) for p in parts), default=0)
    for part in parts:
        for i, count in enumerate(part["histogram"]):
            histogram[i] += count
    return {**{name: sum(p[name] for p in parts) for name in SUMS}, "histogram": histogram}


def acceptance_by_position(histogram: Sequence[int]) -> list[float]:
    """Entry i: the share of rounds that accepted the draft at position i + 1, and so all before it."""
    rounds = sum(histogram)
    return [round(sum(histogram[i:]) / rounds, 4) for i in range(1, len(histogram))]


def reliability_of(lm: LM) -> list[list[float]]:
    """What a controller that predicts acceptance promised and what came, [mean probability, share accepted, nodes] for
    each bin of probability with enough nodes; empty for fixed sizes."""
    told = getattr(getattr(lm, "controller", None), "reliability", None)
    return [[round(p, 4), round(share, 4), n] for p, share, n in (told() if told else ()) if n >= FEWEST_IN_BIN]


def _trace(lm: LM, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """An answer round by round, for the report: each tree as texts and parents, the nodes walked, the bonus."""

    def texts(ids: Sequence[int]) -> list[str]:
        return [lm.text.decode([i], skip_special=False) for i in ids]

    rounds = []
    for chunk, record in zip(chunks[1:], chunks[-1].metrics.rounds, strict=True):
        assert chunk.tree is not None
        rounds.append(
            {
                "tokens": texts(chunk.tree.tokens.tolist()),
                "parents": chunk.tree.parents.tolist(),
                "path": _walked(chunk.tree, chunk.ids[: chunk.num_accepted]),
                "bonus": "".join(texts(chunk.ids[chunk.num_accepted :])),
                "ms": [round(getattr(record, stage), 2) for stage in STAGES],
            }
        )
    return {"first": "".join(texts(chunks[0].ids)), "rounds": rounds}


def _walked(tree: TokenTree, ids: Sequence[int]) -> list[int]:
    """The nodes of a path from the root, by its tokens; the root first."""
    path = [0]
    children = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    for token in ids:
        path.append(children[path[-1], token])
    return path
