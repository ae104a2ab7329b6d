"""Lookahead decoding: the target itself guesses, in parallel, by Jacobi iteration (Fu et al., arXiv 2402.02057).

A window of `window` columns runs ahead of the text. Its N - 1 levels are the guesses of the last N - 1 rounds: a token
of level r hangs at that of level r - 1 in its column, and the oldest level is a chain from the root. The target's picks
at the newest level are the next guesses, and each column read downwards, the new pick last, is an n-gram for the pool.
The verification branch is the n-grams of the pool that begin with the root. Both branches are one token tree: what the
paper's mask says is just that each node sees its ancestors. Needs no weights, and pays with rows: (window + guesses) *
(N - 1) of them.

One thing is finer than in the paper: when several tokens were committed at once, the window moves on by as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dartspec.drafters._paths import join
from dartspec.errors import DartspecError
from dartspec.types import Committed, TargetView, TokenTree

FAR = -1e3  # the window ranks behind all guesses
MOST_GRAMS = 4096  # first tokens that a sequence's pool remembers


@dataclass(frozen=True)
class Config:
    """window: columns, W. ngram: tokens of an n-gram, N. guesses: n-grams verified at most, G.
    from_text: whether n-grams of prompt and answer enter the pool too."""

    window: int = 5
    ngram: int = 4
    guesses: int = 5
    from_text: bool = True

    def __post_init__(self) -> None:
        if self.window < 1 or self.ngram < 2 or self.guesses < 1:
            raise DartspecError(
                "lookahead needs a window and guesses of at least 1 and n-grams of at least 2, "
                f"found {self.window}, {self.guesses} and {self.ngram}"
            )


@dataclass
class _State:
    """One sequence: the levels, oldest first, each `window` tokens; the pool; how much of the text was read."""

    levels: list[list[int]]
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    length: int = 0
    num_columns: int = 0  # that were sent last
    first: int = 0  # position in the text from which n-grams are still to be read

    def add(self, gram: tuple[int, ...], most: int) -> None:
        """The newest stands last; the oldest of too many goes."""
        entry = self.pool.pop(gram[0], [])
        if gram[1:] in entry:
            entry.remove(gram[1:])
        entry.append(gram[1:])
        self.pool[gram[0]] = entry[-most:]
        if len(self.pool) > MOST_GRAMS:
            del self.pool[next(iter(self.pool))]


class Lookahead:
    """needs_picks: the engine asks the target at every node, not only on the walk."""

    taps: tuple[int, ...] = ()
    needs_picks = True

    def __init__(self, config: Config, num_tokens: int) -> None:
        self.config = config
        self._num_tokens = num_tokens
        self._states: dict[int, _State] = {}

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._states.pop(slot, None)

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        return [self._one(c, b) for c, b in zip(new, budget, strict=True)]

    def _one(self, one: Committed, budget: int) -> TokenTree:
        c, ids = self.config, one.history.tolist()
        state = self._states.get(one.slot)
        if state is None:
            # anything may stand in the first window; the text's own tokens are as good as any and the same every time
            text = [i for i in ids if i < self._num_tokens] or [0]
            levels = [[text[(r + col) % len(text)] for col in range(c.window)] for r in range(c.ngram - 1)]
            state = self._states[one.slot] = _State(levels)
        else:
            self._move_on(state, one, len(ids) - state.length)
        if c.from_text:
            for at in range(state.first, len(ids) - c.ngram + 1):
                if max(ids[at : at + c.ngram]) < self._num_tokens:
                    state.add(tuple(ids[at : at + c.ngram]), c.guesses)
            state.first = max(0, len(ids) - c.ngram + 1)
        state.length = len(ids)
        return self._tree(state, ids[-1], budget)

    def _move_on(self, state: _State, one: Committed, num_committed: int) -> None:
        """The last round's picks become the newest level; columns become n-grams; the window follows the text."""
        c, levels = self.config, state.levels
        new = list(levels[-1])  # where a pick is unknown, the guess stays
        if state.num_columns and one.tree is not None and one.picks is not None:
            node_of = {path: node for node, path in enumerate(_paths(one.tree))}
            for col in range(state.num_columns):
                node = node_of.get(_column(levels, col))
                pick = -1 if node is None else int(one.picks[node])
                if pick >= 0:
                    new[col] = pick
                    state.add((*(level[col] for level in levels), pick), c.guesses)
        moved = num_committed - 1
        levels = [*levels[1:], new]
        # level r - 1 now stands where level r stood, and the text one position further on for each token beyond one
        state.levels = [[level[min(col + moved, c.window - 1)] for col in range(c.window)] for level in levels]

    def _tree(self, state: _State, root: int, budget: int) -> TokenTree:
        c, depth = self.config, self.config.ngram - 1
        columns = min(c.window, budget * c.window // (c.window + c.guesses) // depth)
        state.num_columns = columns
        paths: list[tuple[Sequence[int], Sequence[float]]] = []
        for rank, gram in enumerate(reversed(state.pool.get(root, ()))):
            if rank < c.guesses:
                paths.append((gram, [-float(rank + k) for k in range(len(gram))]))
        window = [_column(state.levels, col) for col in range(columns)]
        places = {path[: i + 1] for path in window for i in range(len(path))}
        guesses = join(root, paths, max(0, budget - len(places)))
        kept = [(path, score) for path, score in _scored(guesses)]
        return join(root, [*kept, *((path, [FAR - k for k in range(len(path))]) for path in window)], budget)


def _column(levels: Sequence[Sequence[int]], col: int) -> tuple[int, ...]:
    """The path from the root to the newest token of a column: along the oldest level, then down."""
    return (*levels[0][: col + 1], *(level[col] for level in levels[1:]))


def _paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """Tokens down to each node, the root left out."""
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        out.append((*out[parent], token) if parent >= 0 else ())
    return out


def _scored(tree: TokenTree) -> list[tuple[tuple[int, ...], list[float]]]:
    """Every path of a tree with the scores along it."""
    out: list[tuple[tuple[int, ...], list[float]]] = []
    for token, parent, score in zip(*(part.tolist() for part in tree), strict=True):
        path, scores = out[parent] if parent >= 0 else ((), [])
        out.append(((*path, token), [*scores, score]) if parent >= 0 else ((), []))
    return out[1:]


def load(config: Config, view: TargetView) -> Lookahead:
    return Lookahead(config, view.num_tokens)
