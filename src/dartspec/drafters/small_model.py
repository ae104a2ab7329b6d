"""A smaller causal LM as drafter: speculative sampling (SPS), as a chain or as a tree of its likeliest tokens.

Sources: Leviathan et al., arXiv 2211.17192 (the chain); Miao et al., SpecInfer, arXiv 2305.09781 (static trees) and
Li et al., EAGLE-2, arXiv 2406.16858 (dynamic ones). The model is a `Target` like the one it drafts for, with a cache
of its own: each level of the tree is one forward over the new nodes alone, and what the target accepted is kept.

When sampling, a child is chosen by the small model's logits put through the target's own filters and noise
(`Committed.perturb`): at a node the small model picks what the target would pick were its logits these. Argmax drafts
would be just as lossless, and accepted less often.

A model with another tokenizer drafts text, which the target's tokenizer splits again (universal assisted generation,
Timor et al., arXiv 2502.05202): chains only, and its picks are greedy, for noise belongs to the target's ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dartspec.drafters._paths import as_tree
from dartspec.errors import DartspecError
from dartspec.target.target import Session, Target
from dartspec.tree import from_chain, root_only, truncate
from dartspec.types import Committed, TargetView, TokenTree

if TYPE_CHECKING:
    from dartspec.text import Text

TAIL = 32  # tokens before the end of the text whose split is checked against the target's
START_ROOM = 256  # positions of the first cache
CHUNK = 128  # tokens a forward, when the cache is far behind


@dataclass(frozen=True)
class Config:
    """The small model and the shape of its tree.

    model:  folder, hub id or GGUF file.
    length: levels drafted at most, one forward each.
    top_k:  children of a node; 1 is the chain.
    beam:   dynamic tree: nodes of a level that are expanded, the likeliest.
    widths: static tree: children of every node, level by level, instead of the three above; (4, 2, 1) has 4, 8, 8.
    """

    model: str
    length: int = 5
    top_k: int = 1
    beam: int = 4
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("length", "top_k", "beam"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 256:
                raise DartspecError(f"small_model: {name} is {value!r}; must be a whole number from 1 to 256")
        object.__setattr__(self, "widths", tuple(self.widths))
        if not all(type(w) is int and 1 <= w <= 256 for w in self.widths):
            raise DartspecError(f"small_model: widths is {self.widths!r}; must be whole numbers from 1 to 256")

    @property
    def levels(self) -> int:
        return len(self.widths) or self.length

    def children(self, level: int) -> int:
        return self.widths[level] if self.widths else self.top_k


class _Growth:
    """The tree of one sequence while it grows: every candidate, and which of them have been through the small model.

    `scored` lists the nodes that have, in the order of the cache: the tokens committed since, the root, then drafts.
    """

    def __init__(self, pending: list[int], num_drafts: int) -> None:
        self.tokens = [pending[-1]]
        self.parents = [-1]
        self.scores = [0.0]
        self.num_drafts = num_drafts
        self.row_tokens, self.row_parents = list(pending), list(range(-1, len(pending) - 1))
        self.row_of = {0: len(pending) - 1}  # candidate -> row of the cache's tree
        self.done = 0  # rows that the model has seen
        self.frontier = [0]  # candidates whose rows were scored last

    def path(self, node: int) -> list[int]:
        """Draft tokens down to the node, the root left out."""
        path = []
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def rows(self) -> TokenTree:
        """The cache's tree, as `Session.score` wants it."""
        return as_tree(self.row_tokens, self.row_parents, [0.0] * len(self.row_tokens))

    def add(self, parent: int, token: int, score: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)

    def choose(self, level: Sequence[int], beam: int, ends: frozenset[int]) -> None:
        """The nodes of the newest level to be expanded: the best, where a child can still enter the tree."""
        ranked = sorted(range(1, len(self.tokens)), key=lambda i: (-self.scores[i], i))
        hopeful = set(ranked[: self.num_drafts - 1])  # a child is behind its parent
        new = [i for i in ranked if i in hopeful and i in level and self.tokens[i] not in ends]
        self.frontier = sorted(new[:beam])
        for node in self.frontier:
            self.row_of[node] = len(self.row_tokens)
            self.row_tokens.append(self.tokens[node])
            self.row_parents.append(self.row_of[self.parents[node]])

    def accepted(self, tokens: Sequence[int]) -> list[int]:
        """Rows of the longest scored path that is now committed: `tokens` are what followed the root."""
        if not self.done:
            return []
        root = self.row_of[0]
        path = list(range(root + 1))
        for token in tokens:
            row = next(
                (
                    r
                    for r in range(root + 1, self.done)
                    if self.row_parents[r] == path[-1] and self.row_tokens[r] == token
                ),
                None,
            )
            if row is None:
                break
            path.append(row)
        return path


class SmallModel:
    """Drafts for any number of sequences; each level is one forward over all of them.

    model: the small model. view: the target. translator: where their tokenizers differ.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, model: Target, view: TargetView, translator: Translator | None = None) -> None:
        self.config, self.model, self.view = config, model, view
        self._translator = translator
        self._session: Session = model.session(1, START_ROOM)
        self._read: dict[int, list[int]] = {}  # per slot: the ids that the cache holds for good
        self._last: dict[int, _Growth] = {}

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._read.pop(slot, None) is not None:
                del self._last[slot]
                self._session.free(slot)
                for other in self._last.values():
                    other.done = 0  # another row moved into its place, with what was kept and no more

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        histories = [one.history.tolist() for one in new]
        ours = histories if self._translator is None else [self._translator.to_small(h) for h in histories]
        growths: dict[int, _Growth] = {}
        for i, (one, ids) in enumerate(zip(new, ours, strict=True)):
            if len(ids) > 1 and len(ids) + self.config.levels < self.model.max_positions:
                growths[i] = self._begin(one.slot, ids, budget[i])
            else:
                self.reset([one.slot])  # beyond what the small model reads: the target writes alone
        growing = [i for i in growths if budget[i] > 0 and ours[i][-1] not in self.model.eos_token_ids]
        for level in range(self.config.levels):
            rows = self._score([(new[i].slot, growths[i]) for i in growing])
            for i, logits in zip(growing, rows, strict=True):
                self._expand(growths[i], logits, level, new[i], histories[i])
            growing = [i for i in growing if growths[i].frontier]
            if not growing:
                break
        return [self._finish(growths.get(i), history, budget[i], ours[i]) for i, history in enumerate(histories)]

    def _begin(self, slot: int, ids: list[int], budget: int) -> _Growth:
        """Brings the cache up to date with what was committed; the rest, the root included, waits for a forward."""
        read = self._read.get(slot)
        if read is None:
            self._session.reserve(len(self._read) + 1, len(ids))
            self._session.prefill(slot, ids[:-1])
            self._read[slot] = read = ids[:-1]
        else:
            last = self._last[slot]
            path: list[int] = []
            known = [*read, *last.row_tokens[: last.row_of[0] + 1]]
            if self._translator is None or ids[: len(known)] == known:
                # but the root, which waits even where it was drafted: a controller may have cut it off the tree
                path = last.accepted(ids[len(known) : -1])
            else:  # the text goes on in a way that splits its end anew
                same = next((k for k, (a, b) in enumerate(zip(read, ids[:-1], strict=False)) if a != b), None)
                del read[min(len(read), len(ids) - 1) if same is None else same :]
                self._session.cut(slot, len(read))
            self._session.keep([slot], [path])
            read += ids[len(read) : len(read) + len(path)]
            while len(ids) - len(read) > CHUNK:  # behind, because nothing was drafted for a while
                chunk = from_chain(ids[len(read) : len(read) + CHUNK])
                self._session.reserve(len(self._read), len(read) + CHUNK)
                self._session.score([slot], [chunk])
                self._session.keep([slot], [range(CHUNK)])
                read += chunk.tokens.tolist()
        self._last[slot] = growth = _Growth(ids[len(read) :], budget)
        return growth

    def _score(self, growths: Sequence[tuple[int, _Growth]]) -> list[Tensor]:
        """One forward over the rows that the model has not seen: the logits of each frontier node, in its order."""
        if not growths:
            return []
        writes = max(len(self._read[slot]) + g.done for slot, g in growths)
        num_rows = max(len(g.row_tokens) - g.done for _, g in growths)
        self._session.reserve(len(self._read), writes + num_rows)
        scores = self._session.score(
            [s for s, _ in growths], [g.rows() for _, g in growths], [g.done for _, g in growths]
        )
        out = []
        for (_, g), s in zip(growths, scores, strict=True):
            out.append(s.logits[len(s.logits) - len(g.frontier) :])
            g.done = len(g.row_tokens)
        return out

    def _expand(self, g: _Growth, logits: Tensor, level: int, one: Committed, history: list[int]) -> None:
        """Adds the children of the frontier, and chooses the next one unless this was the last level."""
        first = len(g.tokens)
        for node, row in zip(g.frontier, logits, strict=True):
            values = self._values(row, one, history, g.path(node))
            log_probs = values.float().log_softmax(-1)
            best = log_probs.topk(min(self.config.children(level), len(log_probs)))
            for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if score > -1e30:  # neither ruled out nor NaN
                    g.add(node, token, g.scores[node] + score)
        g.frontier = []
        if level + 1 < self.config.levels:
            beam = len(g.tokens) if self.config.widths else self.config.beam
            g.choose(range(first, len(g.tokens)), beam, self.model.eos_token_ids | self.view.eos_token_ids)

    def _values(self, row: Tensor, one: Committed, history: list[int], path: list[int]) -> Tensor:
        """What the small model's pick is the argmax of."""
        if self._translator is not None:
            return row[: self.model.num_tokens]
        row = row[: self.view.num_tokens]
        if len(row) < self.view.num_tokens:  # fewer padding rows than the target counts ids
            row = torch.nn.functional.pad(row, (0, self.view.num_tokens - len(row)), value=-torch.inf)
        return row if one.perturb is None else one.perturb(row, history, path)

    def _finish(self, g: _Growth | None, history: list[int], budget: int, ours: list[int]) -> TokenTree:
        if g is None:
            return root_only(history[-1])
        if self._translator is not None:
            return self._translator.to_target(history, ours, g.path(len(g.tokens) - 1), budget)
        return truncate(as_tree(g.tokens, g.parents, g.scores), budget)


class Translator:
    """Between the ids of two tokenizers, through the text."""

    def __init__(self, target: Text, small: Text) -> None:
        self._target, self._small = target, small

    def to_small(self, history: Sequence[int]) -> list[int]:
        """The committed text as the small model splits it."""
        return self._small.encode(self._target.decode(history, skip_special=False))

    def to_target(self, history: list[int], ours: list[int], drafts: list[int], budget: int) -> TokenTree:
        """The drafted text as a chain of the target's ids, split as it would be behind the end of the text."""
        before = self._small.decode(ours, skip_special=False)
        text = self._small.decode([*ours, *drafts], skip_special=False)[len(before) :]
        tail = history[-TAIL:]
        joined = self._target.encode(self._target.decode(tail, skip_special=False) + text)
        ids = joined[len(tail) :] if joined[: len(tail)] == tail else self._target.encode(text)
        return from_chain([history[-1], *ids[:budget]])


def load(source: Config | Path | str, view: TargetView) -> SmallModel:
    """The small model of a config, or of a folder with the default tree, in the target's dtype and on its device."""
    from dartspec.target.fast import accelerate
    from dartspec.target.load import as_target, load_model
    from dartspec.text import Text

    config = source if isinstance(source, Config) else Config(str(source))
    loaded = load_model(config.model, dtype=view.dtype, device=view.device)
    probe = (torch.arange(8) * 31 + 3)[None] % loaded.model.get_input_embeddings().weight.shape[0]
    accelerate(loaded.model, probe, torch.get_num_threads())  # the same kernels as the target's, where they apply
    model = as_target(loaded)
    theirs = getattr(view, "tokenizer_fingerprint", None)
    if theirs is None or theirs == model.tokenizer_fingerprint:
        return SmallModel(config, model, view)
    text: Text | None = getattr(view, "text", None)
    differ = f"{config.model} has tokenizer {model.tokenizer_fingerprint}, the target {theirs}"
    if text is None:
        raise DartspecError(f"{differ}, and brings none to translate with: load the target with its tokenizer")
    if config.top_k > 1 or config.widths:
        raise DartspecError(f"{differ}: text is drafted as a chain only; leave out top_k and widths")
    return SmallModel(config, model, view, Translator(text, Text(loaded.tokenizer)))
