"""`bench capture` and `bench replay`: guesses recorded once, then any tree, index or weights without the model.

The text depends on prompt and seed alone, and a drafter's guesses at a position on the text before it alone. So what
another tree would have committed, round by round, follows from the recorded guesses and the recorded text: the
engine's A and M, at every temperature. In float32 they are equal round for round (a test); in bfloat16 guesses may
differ in the last place from those of a run in which several rows were read at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dartspec.accounting import Metrics, loop_start
from dartspec.bench.suites import Prompt
from dartspec.engine import Request
from dartspec.errors import DartspecError
from dartspec.files import written_aside
from dartspec.lattice import MOST_CONTEXT, SearchConfig, build_tree
from dartspec.ngram.index import NgramIndex
from dartspec.ngram.live import LiveText
from dartspec.tree import depths, root_only
from dartspec.types import Committed, RoundRecord, SamplingParams, TokenTree

if TYPE_CHECKING:
    from dartspec import _core
    from dartspec.api import LM

FORMAT = "dartspec capture 1"
LONGEST_CHAIN = 7  # servers that verify chains draft no more
WORTH = 0.05  # tokens a round that one more draft must add: it is another row of the target's forward


@dataclass(frozen=True)
class Text:
    """One recorded answer.

    prompt, ids: its token ids and those of the answer. limit: tokens that the answer could have had at most.
    log_probs:   (n, d, k) float32, the drafter's guesses with ids[i] as the root, for i = 0 ... n - 1; n is one or two
                 less than the answer is long: nothing is drafted where at most one token is left to write.
    tokens:      (n, d, k) int32.
    """

    id: str
    suite: str
    temperature: float
    seed: int
    prompt: list[int]
    ids: list[int]
    limit: int
    log_probs: Tensor
    tokens: Tensor


@dataclass
class Capture:
    """Recorded answers of one target and drafter. facts: which, and from where (provenance)."""

    texts: list[Text]
    eos_ids: frozenset[int]
    fingerprint: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def search(self) -> SearchConfig:
        """The drafter's own."""
        try:
            return SearchConfig(**self.facts.get("search", {}))
        except TypeError:
            raise DartspecError(
                "the capture's search has numbers that this version does not know: record it again"
            ) from None

    def save(self, path: Path) -> None:
        """One safetensors file, written aside and renamed."""
        keep = ("id", "suite", "temperature", "seed", "prompt", "ids", "limit")
        head = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "eos_ids": json.dumps(sorted(self.eos_ids)),
            "facts": json.dumps(self.facts),
            "texts": json.dumps([{k: getattr(t, k) for k in keep} | {"n": len(t.tokens)} for t in self.texts]),
        }
        some = [t for t in self.texts if len(t.tokens)]
        if not some:
            raise DartspecError("no answer has a position with a guess: allow more tokens, or give other prompts")
        tensors = {name: torch.cat([getattr(t, name) for t in some]) for name in ("log_probs", "tokens")}
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            save_file(tensors, aside, metadata=head)

    @classmethod
    def load(cls, path: Path) -> Capture:
        """Raises DartspecError when the file is missing, damaged or of another kind."""
        if not path.is_file():
            raise DartspecError(f"{path} is not there: make it with dartspec bench capture")
        try:
            with safe_open(path, "pt") as file:
                head = file.metadata() or {}
                if head.get("format") != FORMAT:
                    raise DartspecError(f"{path} has the format {head.get('format')!r}, expected {FORMAT!r}")
                log_probs, tokens = file.get_tensor("log_probs"), file.get_tensor("tokens")
        except SafetensorError as error:
            raise DartspecError(f"{path} is no capture, or damaged: {error}") from error
        texts, at = [], 0
        for entry in json.loads(head["texts"]):
            span = slice(at, at := at + entry.pop("n"))
            texts.append(Text(**entry, log_probs=log_probs[span], tokens=tokens[span]))
        return cls(texts, frozenset(json.loads(head["eos_ids"])), head["fingerprint"], json.loads(head["facts"]))


class _Recorder:
    """Drafts nothing and notes the guesses that the drafter would have had at every position."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.taps: tuple[int, ...] = drafter.taps
        self.guesses: list[tuple[Tensor, Tensor]] = []

    def reset(self, slots: Sequence[int]) -> None:
        self._drafter.reset(slots)

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        log_probs, tokens = self._drafter.lattice(new)
        self.guesses.append((log_probs[0].clone(), tokens[0].clone()))
        return [root_only(int(new[0].history[-1]))]


def capture(
    lm: LM, prompts: Sequence[Prompt], params: SamplingParams, advance: Callable[[], None] = lambda: None
) -> Iterator[Text]:
    """Decodes each prompt plainly and records the guesses of the LM's drafter at each position.

    Raises DartspecError for drafters that guess no lattice (they guess token after token, or copy).
    """
    if not hasattr(lm.drafter, "lattice"):
        raise DartspecError(
            f"the drafter {lm.drafter_name} has no lattice to record: it does not guess all positions at once"
        )
    recorder = _Recorder(lm.drafter)
    plain = lm.with_drafter(recorder, nodes=1)
    for prompt in prompts:
        recorder.guesses = []
        ids = lm.encode([{"role": "user", "content": prompt.turns[0]}]) if prompt.turns else list(prompt.ids)
        answer = [i for chunk in plain.run([Request(ids, params)], batch=1) for i in chunk.ids]
        limit = min(params.max_tokens, lm.target.max_positions - len(ids))
        guesses = list(zip(*recorder.guesses, strict=True))
        yield Text(
            prompt.id,
            prompt.suite,
            params.temperature,
            params.seed or 0,
            ids,
            answer,
            limit,
            *(torch.stack(g) for g in guesses or ((torch.empty(0),),) * 2),
        )
        advance()


class Replay:
    """One index and one search over recorded texts. The tree of a position is built once, at the largest size asked
    for: its first n nodes are the tree of size n.

    horizon: guesses of the first so many positions alone, as a drafter with a smaller d makes them (a mask sees only
             the masks before it); None takes all.
    """

    def __init__(
        self,
        data: Capture,
        index: NgramIndex | None,
        search: SearchConfig,
        most_nodes: int,
        *,
        horizon: int | None = None,
    ) -> None:
        deepest = max((t.tokens.shape[1] for t in data.texts if t.tokens.dim() == 3), default=0)
        if horizon is not None and not 1 <= horizon <= max(deepest, 1):
            raise DartspecError(f"horizon is {horizon}, the capture holds guesses of {deepest} positions")
        widest = min((t.tokens.shape[-1] for t in data.texts if t.tokens.dim() == 3), default=search.top_k)
        if search.top_k > widest:
            raise DartspecError(f"top_k is {search.top_k}, the capture holds {widest} candidates a position")
        if index is not None and index.fingerprint != data.fingerprint:
            raise DartspecError(
                f"the index was built for tokenizer {index.fingerprint}, the capture is of {data.fingerprint}: "
                "rebuild it with `dartspec ngram build`"
            )
        self.data, self.index, self.search, self.most_nodes = data, index, search, most_nodes
        self.horizon = horizon
        self._trees: dict[tuple[int, int], tuple[dict[tuple[int, int], int], list[int]]] = {}

    def rounds(self, number: int, num_nodes: int) -> Metrics:
        """What the engine's rounds over text `number` would have counted with trees of `num_nodes`; no times."""
        if num_nodes > self.most_nodes:
            raise DartspecError(f"num_nodes is {num_nodes}; this replay builds trees of {self.most_nodes} at most")
        text = self.data.texts[number]
        ids, found, at = text.ids, Metrics(num_prompt_tokens=len(text.prompt), num_new_tokens=len(text.ids)), 0
        while at + 1 < len(ids):
            left = text.limit - at - 1  # tokens that may still be written
            drafted = accepted = 0
            if left > 1 and num_nodes:
                children, depth = self._tree(number, at)
                # the engine takes off what is too deep ever to be kept
                drafted = sum(d < left for d in depth[1 : num_nodes + 1])
                node = 0
                while accepted + 1 < left and at + accepted + 1 < len(ids):
                    node = children.get((node, ids[at + accepted + 1]), -1)
                    if not 0 < node <= num_nodes:
                        break
                    accepted += 1
            committed = min(accepted + 1, len(ids) - at - 1)
            found.rounds.append(RoundRecord(drafted, accepted, committed, 0.0, 0.0, 0.0, 0.0))
            at += committed
        return found

    def _tree(self, number: int, at: int) -> tuple[dict[tuple[int, int], int], list[int]]:
        """Children by (parent, token) and depths of the largest tree at a position."""
        if (number, at) not in self._trees:
            if self.search.running_text:  # the counts grow with the text, so its positions come in order
                counts = LiveText()
                text = self.data.texts[number]
                for i in range(len(text.tokens)):
                    history = [*text.prompt, *text.ids[: i + 1]]
                    self._trees[number, i] = self._built(text, i, counts.counts(number, history, len(text.prompt)))
            else:
                self._trees[number, at] = self._built(self.data.texts[number], at, None)
        return self._trees[number, at]

    def _built(
        self, text: Text, at: int, counts: _core.LiveCounts | None
    ) -> tuple[dict[tuple[int, int], int], list[int]]:
        context = [*text.prompt[-MOST_CONTEXT:], *text.ids[max(0, at + 1 - MOST_CONTEXT) : at + 1]][-MOST_CONTEXT:]
        tree = build_tree(
            text.ids[at],
            text.log_probs[at, : self.horizon],
            text.tokens[at, : self.horizon],
            context,
            self.most_nodes,
            self.index,
            self.search,
            self.data.eos_ids,
            counts,
        )
        edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        return {edge: i for i, edge in enumerate(edges)}, depths(tree).tolist()


def replay(
    data: Capture,
    indices: Mapping[str, NgramIndex | None],
    searches: Mapping[str, SearchConfig],
    sizes: Sequence[int],
    *,
    horizons: Sequence[int | None] = (None,),
) -> Iterator[dict[str, Any]]:
    """A row for each index, search, horizon and tree size: A and M with loops cut, M uncut, and both by text.

    `rounds` and `committed` are the sums of each text in the capture's order, for intervals between settings.
    """
    cuts = [loop_start(t.ids) for t in data.texts]
    for (name, index), (how, search), horizon in product(indices.items(), searches.items(), horizons):
        one = Replay(data, index, search, max(sizes), horizon=horizon)
        for n in sizes:
            whole = [one.rounds(i, n) for i in range(len(data.texts))]
            cut = [m if c is None else m.before(c) for m, c in zip(whole, cuts, strict=True)]
            total = Metrics.merged(cut)
            yield {
                "index": name,
                "search": how,
                "nodes": n,
                **({"horizon": horizon} if horizon is not None else {}),
                "A": round(total.A, 4),
                "M": round(total.M, 4),
                "uncut_M": round(Metrics.merged(whole).M, 4),
                "settings": asdict(search),
                "rounds": [m.num_rounds for m in cut],
                "committed": [sum(r.num_committed for r in m.rounds) for m in cut],
            }


def chain_curve(data: Capture) -> dict[int, float]:
    """M of the drafter's first choices as a chain of 1 to 7 tokens, without index or tree: what servers verify that
    know no trees. Loops are cut."""
    deepest = max((t.tokens.shape[1] for t in data.texts if t.tokens.dim() == 3), default=0)
    lengths = range(1, min(LONGEST_CHAIN, deepest) + 1)
    return {r["nodes"]: r["M"] for r in replay(data, {"none": None}, {"chain": SearchConfig(top_k=1, beam=1)}, lengths)}


def best_chain(curve: Mapping[int, float]) -> int:
    """The longest chain whose last draft still adds a twentieth of a token."""
    return max((k for k in curve if k > 1 and curve[k] - curve[k - 1] >= WORTH), default=1)


def recorded(
    lm: LM, prompts: Sequence[Prompt], params: SamplingParams, facts: Mapping[str, Any] | None = None
) -> Capture:
    """The capture of these prompts, in memory."""
    texts = list(capture(lm, prompts, params))
    return Capture(texts, frozenset(lm.target.eos_token_ids), lm.text.fingerprint, facts or {})
