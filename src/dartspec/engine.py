"""generate(): the loop. Propose, score, verify, keep, commit; nothing else loops.

Knows sequences of ids and, through `text`, what a token adds to the text. Every drafter runs in the same loop with the
same cache, sampler and stopping rule; plain decoding is the drafter `none`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dartspec.accounting import Metrics
from dartspec.errors import DartspecError
from dartspec.sampling import Sampler
from dartspec.target.target import Session, Target
from dartspec.text import StopStrings, Text
from dartspec.tree import check, depths
from dartspec.types import Committed, Drafter, RoundRecord, SamplingParams, Scores, TokenTree, Verdict
from dartspec.verify import verify


@dataclass(frozen=True)
class Request:
    """prompt: token ids, at least one. sample: index among several answers to one prompt; part of the noise."""

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    sample: int = 0


@dataclass
class Chunk:
    """What one round committed to one sequence.

    index: the request's. ids: new tokens. num_accepted: draft tokens among them, the first ones (`metrics` counts those
    that a stop cut off as well).
    text: the characters that became certain; a half character or a possible stop string is held back.
    log_probs: per token (log-probability, likeliest alternatives), when asked for.
    finish: None, or why the sequence ended with this chunk: "stop" or "length". `metrics` is then complete.
    """

    index: int
    ids: list[int]
    num_accepted: int
    text: str
    finish: str | None
    metrics: Metrics
    seed: int
    log_probs: list[tuple[float, list[tuple[int, float]]]] | None = None
    tree: TokenTree | None = None


def generate(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    text: Text | None = None,
    num_nodes: int | Callable[[int], int] = 16,
    batch: int = 8,
) -> Iterator[Chunk]:
    """Decodes every request, up to `batch` at a time; chunks come round by round, and end with `finish` set.

    num_nodes: draft tokens a tree may have, or a function of the number of sequences in the round.
    Raises DartspecError before any work when a prompt is empty or does not fit the model's context, and later when the
    drafter breaks its contract: another root, a malformed tree, too many nodes, ids that the model does not have.
    """
    if batch < 1:
        raise DartspecError(f"batch is {batch}; it must be 1 or more")
    sequences = [_Sequence(i, r, target, text) for i, r in enumerate(requests)]
    nodes = num_nodes if callable(num_nodes) else lambda _batch: num_nodes
    sizes = [nodes(b) for b in range(1, batch + 1)]
    most = max(sizes)
    if min(sizes) < 0:
        raise DartspecError(f"num_nodes is {min(sizes)}; it must be 0 (plain decoding) or more")
    capacity = max((s.limit for s in sequences), default=0) + most + 1
    session = target.session(min(batch, len(sequences)), capacity, drafter.taps)
    waiting, alive = sequences[::-1], list[_Sequence]()
    try:
        while waiting or alive:
            while waiting and len(alive) < batch:
                s = waiting.pop()
                drafter.reset([s.index])  # whatever a stream that nobody closed has left there
                yield s.prefill(session)
                if s.finish:
                    session.free(s.index)
                else:
                    alive.append(s)
            if not alive:
                return
            slots = [s.index for s in alive]
            clock = _Clock(target.device, drafter)
            room = [s.room(nodes(len(alive))) for s in alive]
            drafts = drafter.propose([s.news for s in alive], room)
            trees = [s.fit(t, b) for s, t, b in zip(alive, drafts, room, strict=True)]
            clock.drafted()
            scores = session.score(slots, trees)
            clock.verified()
            verdicts = [verify(r, t, s.sampler, s.ids) for r, t, s in zip(scores, trees, alive, strict=True)]
            session.keep(slots, [v.path for v in verdicts])
            chunks = [s.commit(r, t, v) for s, r, t, v in zip(alive, scores, trees, verdicts, strict=True)]
            clock.record(alive, chunks, [v.num_accepted for v in verdicts])
            for s in alive:
                if s.finish:
                    session.free(s.index)
                    drafter.reset([s.index])
            alive = [s for s in alive if not s.finish]
            yield from chunks
    finally:
        drafter.reset([s.index for s in alive])  # also when the caller stops listening half-way


class _Sequence:
    """One request in progress: its ids, its picks, its text, and where it stops. The only place that stops."""

    def __init__(self, index: int, request: Request, target: Target, text: Text | None) -> None:
        prompt, params = list(request.prompt), request.params
        if not prompt:
            raise DartspecError("the prompt is empty: give at least one token of text")
        if len(prompt) >= target.max_positions:
            raise DartspecError(
                f"the prompt has {len(prompt)} tokens; {target.name} has a context of {target.max_positions}:"
                " shorten the prompt"
            )
        bad = next((i for i in prompt if not 0 <= i < target.vocab_size), None)
        if bad is not None:
            raise DartspecError(f"the prompt has token id {bad}; {target.name} has ids 0 to {target.vocab_size - 1}")
        if params.stop and text is None:
            raise DartspecError("stop strings need a tokenizer: give one, or use stop_token_ids")
        self.index, self.num_prompt = index, len(prompt)
        self.limit = min(len(prompt) + params.max_tokens, target.max_positions)
        self.ids = prompt  # every committed token
        self._vocab_size = target.vocab_size
        self.sampler = Sampler(params, target.num_tokens, len(prompt), request.sample)
        self.metrics = Metrics(num_prompt_tokens=len(prompt))
        self.finish: str | None = None
        self.news: Committed
        self._history = torch.empty(self.limit, dtype=torch.int64)
        self._history[: len(prompt)] = torch.tensor(prompt)
        self._stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.eos_token_ids))
        self._decoder = text.stream() if text else None
        self._stops = StopStrings(params.stop)

    def room(self, num_nodes: int) -> int:
        """Nodes worth drafting: none when only one token is left to write."""
        return num_nodes if self.limit - len(self.ids) > 1 else 0

    def fit(self, tree: TokenTree, budget: int) -> TokenTree:
        """The tree without nodes that could never be kept: so deep that the length limit or the context cuts them.

        The text is right for every tree that hangs at the last committed token, so just that is made sure of.
        """
        check(tree)
        if tree.num_drafts > budget:
            raise DartspecError(f"the drafter proposed {tree.num_drafts} nodes; at most {budget} were asked for")
        root, last = int(tree.tokens[0]), self.ids[-1]
        if root != last:
            raise DartspecError(f"the drafter's tree has root {root}; it must be {last}, the last committed token")
        highest = int(tree.tokens.max())
        if highest >= self._vocab_size:
            raise DartspecError(f"the drafter proposed token {highest}; the target has ids 0 to {self._vocab_size - 1}")
        left = self.limit - len(self.ids)
        if len(tree.tokens) <= left:
            return tree  # no path is longer than the tree
        depth = depths(tree)
        kept = [i for i in range(len(tree.tokens)) if depth[i] < left]  # closed: a child is deeper than its parent
        place = {old: new for new, old in enumerate(kept)} | {-1: -1}
        parents = torch.tensor([place[int(tree.parents[i])] for i in kept], dtype=torch.int32)
        return TokenTree(tree.tokens[kept], parents, tree.scores[kept])

    def prefill(self, session: Session) -> Chunk:
        """Runs the prompt and picks the first token, which belongs to no round."""
        began = time.perf_counter()
        scores = session.prefill(self.index, self.ids)
        token = self.sampler.pick(scores.logits[-1], self.ids)
        self.metrics.prefill_ms = 1e3 * (time.perf_counter() - began)
        self.news = Committed(
            self.index, self._history, self.num_prompt, scores.features, perturb=self.sampler.perturbed
        )
        return self._append([token], scores.logits[-1:], 0, None)

    def commit(self, scores: Scores, tree: TokenTree, verdict: Verdict) -> Chunk:
        """Appends the accepted tokens and the bonus, up to the first stop."""
        tokens = [*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus]
        features = None if scores.features is None else scores.features[verdict.path]
        self.news = Committed(
            self.index, self._history, len(tokens), features, tree, verdict.picks, self.sampler.perturbed
        )
        return self._append(tokens, scores.logits[verdict.path], verdict.num_accepted, tree)

    def _append(self, tokens: list[int], logits: Tensor, num_accepted: int, tree: TokenTree | None) -> Chunk:
        """The one stopping rule: stop ids, then stop strings, then the length. Row i of `logits` is token i's."""
        began, pieces = len(self.ids), []
        for token in tokens:
            self._history[len(self.ids)] = token
            self.ids.append(token)
            if token in self._stop_ids:
                self.finish = "stop"
            if self._decoder is not None:
                released, stopped = self._stops.push(self._decoder.push([token]))
                pieces.append(released)
                if stopped:
                    self.finish = "stop"
            if self.finish is None and len(self.ids) == self.limit:
                self.finish = "length"
            if self.finish:
                break
        if self.finish and self._decoder is not None:
            rest, _ = self._stops.push(self._decoder.flush())
            pieces += [rest, self._stops.flush()]
        new = self.ids[began:]
        top = self.sampler.params.logprobs
        log_probs = None if top is None else [self.sampler.log_probs(logits[i], t, top) for i, t in enumerate(new)]
        self.metrics.num_new_tokens += len(new)
        # the drafter's view; a sequence that stopped is not asked again
        self.news = self.news._replace(history=self._history[: len(self.ids)])
        return Chunk(
            self.index,
            new,
            min(num_accepted, len(new)),
            "".join(pieces),
            self.finish,
            self.metrics,
            self.sampler.seed,
            log_probs,
            tree,
        )


class _Clock:
    """The stage times of one round. On a GPU each reading waits for the device."""

    def __init__(self, device: torch.device, drafter: Drafter) -> None:
        self._device, self._drafter = device, drafter
        self._searched = self._search_ms()
        self._began = self._drafted = self._verified = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return 1e3 * time.perf_counter()

    def _search_ms(self) -> float:
        return float(getattr(self._drafter, "search_ms", 0.0))

    def drafted(self) -> None:
        self._drafted = self._now()

    def verified(self) -> None:
        self._verified = self._now()

    def record(self, sequences: Sequence[_Sequence], chunks: Sequence[Chunk], accepted: Sequence[int]) -> None:
        """Adds the round to each sequence's metrics; `other` is what neither drafter nor target took.

        accepted: draft tokens walked, those that a stop cut off from the chunk included.
        """
        now, search = self._now(), self._search_ms() - self._searched
        for sequence, chunk, num_accepted in zip(sequences, chunks, accepted, strict=True):
            assert chunk.tree is not None
            sequence.metrics.rounds.append(
                RoundRecord(
                    num_drafted=chunk.tree.num_drafts,
                    num_accepted=num_accepted,
                    num_committed=len(chunk.ids),
                    draft_ms=self._drafted - self._began - search,
                    search_ms=search,
                    verify_ms=self._verified - self._drafted,
                    other_ms=now - self._verified,
                    batch=len(sequences),
                )
            )
