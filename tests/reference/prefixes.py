"""How a drawn row weighs in the loss, by loops: each stands for as many prefixes of its sequence as it was drawn from,
and an offset is averaged over the valid positions of all prefixes (method, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

from dartspec.train.data import Example


def carries(e: Example, j: int, t: int) -> bool:
    """Whether row j at offset t predicts a token of an answer; a row has later offsets where it has the second."""
    answer = {i for start, end in e.answers for i in range(start, end)}
    return j + 1 < len(e.ids) and j + 1 + t in answer and (t == 1 or j + 3 in answer)


def num_prefixes(e: Example, t: int) -> int:
    return sum(carries(e, j, t) for j in range(len(e.ids)))


def row_weight(e: Example, rows: Sequence[int], t: int, all_examples: Sequence[Example]) -> float:
    """Of a row among `rows`, drawn for offset t: over all the positions that carry loss there."""
    t0 = min(t, 2)
    drawn = sum(carries(e, j, t0) for j in rows)
    return num_prefixes(e, t0) / drawn / sum(num_prefixes(one, t) for one in all_examples)
