"""Exact probabilities of everything a verification rule can commit, summed over all cells of noise space.

With exponentials E_v = exp(-G_v), a pick under q is the token with the least E_v / q_v, and E / sum(E) is uniform on
the simplex. So the noise vectors of three tokens at which several distributions pick given tokens form a convex polygon
in a triangle, cut out by linear constraints, and its probability is an area ratio: exact in fractions. Each cell is
tried at one interior point, through the real code; what the code asks for decides which vectors are enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from typing import NamedTuple

import torch

from dartspec.types import TokenTree

V = 3
Weights = tuple[Fraction, Fraction, Fraction]  # of the three tokens; need not sum to 1
Point = tuple[Fraction, Fraction, Fraction]  # on the simplex
Law = Callable[[tuple[int, ...]], Weights]
"""Drafted or committed tokens behind the root -> weights of the next token, penalties and filters applied."""


class Cell(NamedTuple):
    probability: Fraction
    gumbel: torch.Tensor  # (V,) float32 at an interior point


TRIANGLE: list[Point] = [
    (Fraction(1), Fraction(0), Fraction(0)),
    (Fraction(0), Fraction(1), Fraction(0)),
    (Fraction(0), Fraction(0), Fraction(1)),
]


def clip(polygon: list[Point], a: int, b: int, q: Weights) -> list[Point]:
    """The part of a convex polygon where token a is picked before b under q: E_a q_b <= E_b q_a."""

    def side(p: Point) -> Fraction:
        return p[b] * q[a] - p[a] * q[b]

    kept: list[Point] = []
    for p, r in zip(polygon, [*polygon[1:], *polygon[:1]], strict=True):
        s, t = side(p), side(r)
        if s >= 0:
            kept.append(p)
        if s * t < 0:
            at = s / (s - t)
            kept.append(tuple(x + at * (y - x) for x, y in zip(p, r, strict=True)))  # type: ignore[arg-type]
    return kept


def area(polygon: list[Point]) -> Fraction:
    """Share of the whole triangle."""
    cross = sum(
        (p[0] * r[1] - p[1] * r[0] for p, r in zip(polygon, [*polygon[1:], *polygon[:1]], strict=True)), Fraction(0)
    )
    return abs(cross)


@cache
def cells(laws: frozenset[Weights]) -> tuple[Cell, ...]:
    """Every cell of the joint picks of these distributions. Their probabilities sum to 1 exactly."""
    polygons = [TRIANGLE]
    for q in laws:
        parts = []
        for polygon, a in product(polygons, (v for v in range(V) if q[v])):
            part = polygon
            for b in range(V):
                if b != a and part:
                    part = clip(part, a, b, q)
            if area(part):
                parts.append(part)
        polygons = parts
    found = []
    for polygon in polygons:
        centre = [float(sum((p[i] for p in polygon), Fraction(0)) / len(polygon)) for i in range(V)]
        found.append(Cell(area(polygon), torch.tensor([-math.log(x) for x in centre], dtype=torch.float32)))
    assert sum((c.probability for c in found), Fraction(0)) == 1
    return tuple(found)


def normalised(w: Weights) -> Weights:
    total = w[0] + w[1] + w[2]
    return w[0] / total, w[1] / total, w[2] / total


def expected(law: Law, length: int) -> dict[tuple[int, ...], Fraction]:
    """The target's own probability of every continuation of `length` tokens, zeros left out."""
    out: dict[tuple[int, ...], Fraction] = {}
    for text in product(range(V), repeat=length):
        p = Fraction(1)
        for i, token in enumerate(text):
            p *= normalised(law(text[:i]))[token]
        if p:
            out[text] = p
    return out


def enumerate_rule(
    commit: Callable[[Callable[[int, int], torch.Tensor]], tuple[int, ...]],
    cells_at: Callable[[int], tuple[Cell, ...]],
) -> dict[tuple[int, ...], Fraction]:
    """Exact probability of each result of `commit(noise)`.

    Each key that `commit` asks `noise` for is an independent vector; `cells_at(key)` are its cells, fine enough that
    the result is constant on each. Keys are discovered by running: all combinations of cells are gone through.
    """
    out: dict[tuple[int, ...], Fraction] = {}
    choice: list[int] = []
    while True:
        asked: dict[int, int] = {}  # key -> its place in `choice`

        def noise(key: int, size: int, asked: dict[int, int] = asked) -> torch.Tensor:
            assert size == V
            place = asked.setdefault(key, len(asked))
            if place == len(choice):
                choice.append(0)
            return cells_at(key)[choice[place]].gumbel

        result = commit(noise)
        keys = list(asked)
        p = Fraction(1)
        for key, place in asked.items():
            p *= cells_at(key)[choice[place]].probability
        out[result] = out.get(result, Fraction(0)) + p
        while choice and choice[-1] + 1 == len(cells_at(keys[len(choice) - 1])):
            choice.pop()
        if not choice:
            return out
        choice[-1] += 1


def trees(max_nodes: int) -> Iterator[TokenTree]:
    """Every tree of up to `max_nodes` nodes over the vocabulary, equal siblings included; the root is token 0."""
    for n in range(1, max_nodes + 1):
        for parents in product(*[range(i) for i in range(1, n)]):
            for tokens in product(range(V), repeat=n - 1):
                yield make_tree(tokens, parents)


def make_tree(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """tokens, parents: of the drafts; the root, token 0, is added."""
    return TokenTree(
        torch.tensor([0, *tokens], dtype=torch.int32),
        torch.tensor([-1, *parents], dtype=torch.int32),
        torch.zeros(len(tokens) + 1),
    )
