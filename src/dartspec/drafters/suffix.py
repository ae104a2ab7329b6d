"""Suffix speculation: what followed the same words in everything that this process has written, likeliest first.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975): the longest suffixes of the text that occurred before, in this
text or in earlier ones, and a tree of their continuations in which a node's score is the share of the occurrences that
go on that way. The longer a match, the more is speculated. The paper keeps suffix trees; here an index of short n-grams
finds the same places and the few continuations of one round are counted when they are asked for.

Memory is bounded: texts are kept in two generations, and when the young one is full the old one goes. They are kept for
as long as the process lives, and what one text repeats from another comes faster: where users must not learn from
timing what others asked, use `prompt_lookup`, which knows one text alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dartspec.drafters._paths import as_tree
from dartspec.errors import DartspecError
from dartspec.tree import root_only, truncate
from dartspec.types import Committed, TargetView, TokenTree

SEED = 2  # tokens of the n-grams that are indexed: the shortest match
MOST_PLACES = 256  # occurrences that are looked at in each text's index, the newest
MOST_MATCHED = 64  # tokens that a match is followed back


@dataclass(frozen=True)
class Config:
    """most_tokens: of all texts that are remembered, about 100 bytes each. reach: tokens speculated for each token that
    matched. length: depth at most. least: share of occurrences below which nothing is drafted."""

    most_tokens: int = 200_000
    reach: float = 2.0
    length: int = 16
    least: float = 0.05

    def __post_init__(self) -> None:
        if self.most_tokens < 2 or self.reach <= 0 or self.length < 1 or not 0 <= self.least < 1:
            raise DartspecError(
                "suffix needs most_tokens of at least 2, reach above 0, length of at least 1 and least in [0, 1), "
                f"found {self.most_tokens}, {self.reach}, {self.length} and {self.least}"
            )


@dataclass
class _Texts:
    """Some texts end to end, and where each short n-gram ended. None between two texts: nothing matches it."""

    ids: list[int | None] = field(default_factory=list)
    places: dict[tuple[int | None, ...], list[int]] = field(default_factory=dict)

    def add(self, token: int | None) -> None:
        """Enters the n-gram before the token, whose continuation is now known."""
        gram = tuple(self.ids[-SEED:])
        if token is not None and len(gram) == SEED and None not in gram:
            self.places.setdefault(gram, []).append(len(self.ids))
        self.ids.append(token)

    def matches(self, suffix: Sequence[int]) -> list[tuple[int, int]]:
        """(tokens that agree, place behind them) of the newest occurrences of the text's end."""
        out = []
        for place in self.places.get(tuple(suffix[-SEED:]), ())[-MOST_PLACES:]:
            n = SEED
            while n < min(place, len(suffix), MOST_MATCHED) and self.ids[place - n - 1] == suffix[-n - 1]:
                n += 1
            out.append((n, place))
        return out


class Suffix:
    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, num_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self.config = config
        self._num_tokens, self._eos = num_tokens, eos_token_ids
        self._young, self._old = _Texts(), _Texts()
        self._current: dict[int, _Texts] = {}

    def reset(self, slots: Sequence[int]) -> None:
        """A sequence that ends is remembered."""
        for slot in slots:
            text = self._current.pop(slot, None)
            if text is None:
                continue
            if len(self._young.ids) + len(text.ids) + 1 > self.config.most_tokens // 2:
                self._young, self._old = _Texts(), self._young
            for token in [*text.ids[-(self.config.most_tokens // 2 - 1) :], None]:
                self._young.add(token)

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        return [self._one(c, b) for c, b in zip(new, budget, strict=True)]

    def _one(self, one: Committed, budget: int) -> TokenTree:
        text = self._current.setdefault(one.slot, _Texts())
        for token in one.history[len(text.ids) :].tolist():
            text.add(token)
        ids = one.history.tolist()
        if len(ids) < SEED or budget == 0 or ids[-1] in self._eos:
            return root_only(ids[-1])
        found = [(n, texts, place) for texts in (text, self._young, self._old) for n, place in texts.matches(ids)]
        best: tuple[float, TokenTree] = (0.0, root_only(ids[-1]))
        # each length of match has a tree of its own; longer ones are fewer places and surer. As in the paper, the one
        # with the highest sum of scores is taken, which is the number of tokens it expects to be right
        for n in sorted({n for n, _, _ in found}, reverse=True):
            places = [(texts, place) for m, texts, place in found if m >= n]
            tree = self._tree(ids[-1], places, min(self.config.length, int(self.config.reach * n)), budget)
            expected = float(tree.scores[1:].exp().sum())
            if expected > best[0] + 1e-6:
                best = expected, tree
        return best[1]

    def _tree(self, root: int, places: Sequence[tuple[_Texts, int]], length: int, budget: int) -> TokenTree:
        """The continuations of these places as a tree; a node's score is the logarithm of its share of them."""
        tokens, parents, counts = [root], [-1], [len(places)]
        node_of: dict[tuple[int, int], int] = {}
        for texts, place in places:
            at = 0
            for token in texts.ids[place : place + length]:
                if token is None or token >= self._num_tokens:
                    break
                node = node_of.get((at, token))
                if node is None:
                    node = node_of[at, token] = len(tokens)
                    tokens.append(token)
                    parents.append(at)
                    counts.append(0)
                counts[node] += 1
                at = node
                if token in self._eos:
                    break
        least = self.config.least * len(places)
        kept = [i for i, count in enumerate(counts) if count >= least]  # closed: a parent counts no less
        place_of = {old: new for new, old in enumerate(kept)} | {-1: -1}
        # a single occurrence is no certainty: one more, that went on otherwise, is assumed
        share = [math.log(counts[i] / (len(places) + 1)) if i else 0.0 for i in kept]
        return truncate(as_tree([tokens[i] for i in kept], [place_of[parents[i]] for i in kept], share), budget)


def load(config: Config, view: TargetView) -> Suffix:
    return Suffix(config, view.num_tokens, view.eos_token_ids)
