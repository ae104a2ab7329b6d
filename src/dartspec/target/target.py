"""The target: a stock Hugging Face causal LM that scores token trees of several sequences in one forward.

Knows the model, its cache and its masks. Knows no text, no sampling, no drafter. Uses public seams only: a 4-D mask,
explicit position ids, a cache layer, forward hooks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dartspec.device import Recorder, default_recorder
from dartspec.errors import DartspecError
from dartspec.target.cache import ShapeRecorder, SlotCache
from dartspec.target.fast import FusedLayer, Straight, straight
from dartspec.target.graphs import RecordedForwards
from dartspec.target.masks import MaskPlan, tree_tensors
from dartspec.types import Scores, TokenTree

FINAL = -1
"""The tap of the last hidden state after the final norm, for heads that read what the target's own head reads."""

MOST_IDLE = 2  # closed sessions that a target keeps: plain decoding's and one drafter's
PREFILL_CHUNK = 512  # prompt positions a forward; bounds the mask and the activations


class Target:
    """One loaded model. `session()` opens room for sequences; the model itself holds no state.

    model:      any causal LM of transformers; neither its weights nor its attributes are changed.
    num_tokens: ids the tokenizer knows; ids beyond are padding rows of the head.
    name:       for messages.

    Raises DartspecError, in one sentence, for a model that cannot verify token trees. That is found out by doing it:
    the first thing a target does is to score a three-node tree and compare it with plain forwards.
    """

    def __init__(
        self,
        model: nn.Module,
        num_tokens: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        name: str = "target",
        tokenizer_fingerprint: str | None = None,
        weights_fingerprint: str | None = None,
    ) -> None:
        self.model = model.eval()
        self.num_threads = torch.get_num_threads()  # of the CPU kernels, the drafter's too
        self.turn = threading.Lock()  # sessions of several threads take turns, a forward each
        self.name = name
        self.eos_token_ids = eos_token_ids
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.weights_fingerprint = weights_fingerprint
        self.text: Any = None  # `text.Text` of its tokenizer where there is one; for drafters that read text
        config: Any = model.config
        self.config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        weight: Any = self._embedding.weight
        self.vocab_size, self.hidden_size = weight.shape
        self.num_tokens = min(num_tokens or self.vocab_size, self.vocab_size)
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.num_layers = int(self.config.num_hidden_layers)
        self.max_positions = int(getattr(self.config, "max_position_embeddings", 0) or 2**31)
        self._layers = _decoder_layers(model, self.num_layers)
        self._decoder = _decoder(model, self._layers)
        # an adapted model's own forward takes anything; what it wraps tells the names
        inner: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
        arguments = inspect.signature(inner.forward).parameters
        self._cache_name = "cache" if "cache" in arguments else "past_key_values"  # renamed in transformers 5.24
        self._trims_logits = "logits_to_keep" in arguments
        implementation = str(self.config._attn_implementation)
        if not implementation.startswith("dartspec") and ("flash" in implementation or "flex" in implementation):
            raise DartspecError(
                f"{name} runs attention {implementation!r}, which ignores a tree mask: load the model with"
                " attn_implementation='sdpa' or 'eager'"
            )
        self._masks = MaskPlan(self.config, self.dtype if implementation == "eager" else None)
        self._shapes = self._probe()
        # None: every forward is run operation by operation
        self.recorder: Recorder | None = default_recorder(self.device)
        self._idle: list[Session] = []  # closed sessions, whose recordings serve the next of their kind
        self.straight: Straight | None = None
        self.straight = self._shorter()

    # -- what a drafter may see (types.TargetView) -------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """(n,) int64 -> (n, H), rows of the input embedding."""
        return self._embedding(ids)  # type: ignore[no-any-return]

    def lm_head(self, hidden: Tensor) -> Tensor:
        """(n, H) final-normed states -> (n, V) logits, without the model's own scaling or soft cap."""
        return self._head(hidden)  # type: ignore[no-any-return]

    # ----------------------------------------------------------------------------------------------------------------

    def session(self, num_slots: int, capacity: int, taps: Sequence[int] = (), num_parked: int = 0) -> Session:
        """Room for `num_slots` sequences of at most `capacity` positions each, tree rows included, and for `num_parked`
        more that are only kept to be copied (`Session.park`)."""
        for tap in taps:
            if tap != FINAL and not 0 <= tap <= self.num_layers:
                raise DartspecError(f"tap {tap} asked of {self.name}, which has taps 0 to {self.num_layers}")
        if self.recorder is not None:
            with self.turn:
                alike = [s for s in self._idle if s.taps == tuple(taps)]
                self._idle = [s for s in self._idle if s not in alike]
            for old in alike:
                if old.has_room(num_slots, capacity) and not num_parked:
                    return old
        return Session(self, num_slots, capacity, tuple(taps), num_parked)

    @property
    def bytes_per_position(self) -> int:
        """Size of one position's keys and values in all layers."""
        return sum(s.num_heads * (s.key_width + s.value_width) * s.dtype.itemsize for s in self._shapes.values())

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, mask: Any, cache: Any, keep: int = 0) -> Tensor:
        """(B, N) ids at (B, N) positions under `mask` -> (B, keep or N, V) logits as the model makes them."""
        extra: dict[str, Any] = {self._cache_name: cache}
        if self._trims_logits:
            extra["logits_to_keep"] = keep
        out = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, return_dict=True, **extra
        )
        logits: Tensor = out.logits
        return logits if self._trims_logits or not keep else logits[:, -keep:]

    @contextmanager
    def recording(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Within this context each forward leaves its hidden states (B, N, H) in the dict. Hooks do not outlive it."""
        got: dict[int, Tensor] = {}
        handles = []

        def after(tap: int) -> Any:
            def hook(_module: nn.Module, _args: Any, out: Any) -> None:
                got[tap] = out[0] if isinstance(out, tuple) else getattr(out, "last_hidden_state", out)

            return hook

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            got[0] = args[0] if args else kwargs["hidden_states"]

        for tap in set(taps):
            if tap == 0:
                handles.append(self._layers[0].register_forward_pre_hook(before, with_kwargs=True))
            elif tap == FINAL:
                handles.append(self._decoder.register_forward_hook(after(tap)))
            else:
                handles.append(self._layers[tap - 1].register_forward_hook(after(tap)))
        try:
            yield got
        finally:
            for handle in handles:
                handle.remove()

    def _shorter(self) -> Straight | None:
        """The forward without the model's own code around our kernels, if it gives the very same bits."""
        if self.max_positions < 24 or not any(isinstance(m, FusedLayer) for m in self.model.modules()):
            return None
        session = Session(self, 2, 24, (*range(self.num_layers + 1), FINAL), 0)
        trees = [([5, 7, 9, 4, 6], [-1, 0, 0, 1, 1]), ([8, 3], [-1, 0])]

        def forward() -> list[Tensor]:
            for slot in list(session._slots):
                session.free(slot)
            read = [
                session.prefill(slot, [(11 * i + slot) % self.num_tokens for i in range(length)])
                for slot, length in enumerate((7, 4))
            ]
            tokens, parents = [[t % self.num_tokens for t in one] for one, _ in trees], [p for _, p in trees]
            results = [(s.logits, s.features) for s in read] + [session._forward(0, tokens, parents)]
            return [t for pair in results for t in pair if t is not None]

        found = straight(self.model, forward)
        if found is None:
            return None
        expected = forward()
        self.straight = found
        same = all(torch.equal(a, b) for a, b in zip(forward(), expected, strict=True))
        return found if same else None

    def _probe(self) -> dict[int, Any]:
        """Scores a root with two children, compares with chains, and notes what each layer's cache holds."""
        root, a, b = (t % self.num_tokens for t in (11, 7, 5))

        def logits(tokens: list[int], parents: list[int]) -> tuple[Tensor, dict[int, Any]]:
            cache = ShapeRecorder()
            mask, depth = tree_tensors([parents])
            ids = torch.tensor([tokens], device=self.device)
            built = self._masks.build([0], mask, depth, self.device)
            row = self.forward(ids, depth.to(self.device), built, cache)[0, -1]
            return row[: self.num_tokens].float(), cache.shapes

        cannot = f"{self.name} ({type(self.model).__name__}) cannot verify token trees"
        try:
            tree, shapes = logits([root, a, b], [-1, 0, 0])
            alone, _ = logits([root, b], [-1, 0])
            chain, _ = logits([root, a, b], [-1, 0, 1])
        except DartspecError:
            raise
        except Exception as error:
            raise DartspecError(f"{cannot}: its forward failed on one: {type(error).__name__}: {error}") from error
        if not shapes:
            raise DartspecError(f"{cannot}: it keeps no attention cache of the usual form")
        if not bool(torch.isfinite(tree).all()):
            raise DartspecError(f"{cannot} in {self.dtype}: its logits are not finite; load it with dtype bfloat16")
        missing = self.num_layers - len(shapes)
        if missing and not getattr(self.config, "num_kv_shared_layers", 0):
            raise DartspecError(f"{cannot}: {missing} of its {self.num_layers} layers keep no attention cache")
        # a sibling must not be seen: the tree's row has to be the short chain's, far nearer than the long chain's is
        wrong, scale = (tree - alone).abs().max(), (chain - alone).abs().max()
        if wrong > 0.25 * scale + 1e-6:
            raise DartspecError(
                f"{cannot}: its attention ignored the tree mask (a sibling changed the logits by {wrong:.2g})"
            )
        return shapes


class Session:
    """Sequences in progress: which slot lives in which cache row, and how long each one is.

    Active sequences occupy rows 0 to n - 1, so that a forward over all of them reads the cache without gathering.
    Parked ones lie behind all slots' rows and never move.
    """

    def __init__(
        self, target: Target, num_slots: int, capacity: int, taps: tuple[int, ...], num_parked: int = 0
    ) -> None:
        self.target = target
        self.taps = taps
        self._num_slots, self._num_parked = num_slots, num_parked
        self._parked: dict[int, int] = {}  # slot -> physical row
        self._recorded: RecordedForwards | None = None
        self._cache = self._new_cache(capacity)
        self._slots: list[int] = []  # slot of each active row
        self._lengths: list[int] = []  # committed positions of each active row

    def _new_cache(self, capacity: int) -> SlotCache:
        """A cache for all slots; where forwards are recorded, with a spare position and an even size (masks of a width
        that is no multiple of 8 are copied by torch's attention)."""
        target, recorder = self.target, self.target.recorder
        one_device = len({shape.device for shape in target._shapes.values()}) == 1
        if recorder is None or not one_device:
            return SlotCache(target._shapes, self._num_slots + self._num_parked, capacity)
        cache = SlotCache(target._shapes, self._num_slots + self._num_parked, capacity, spare=64 - capacity % 64)
        run, masks = self._run_model, target._masks
        self._recorded = RecordedForwards(run, masks, cache, target.device, bool(self.taps), recorder)
        return cache

    def has_room(self, num_slots: int, capacity: int) -> bool:
        return num_slots <= self._num_slots and capacity <= self._cache.capacity

    def close(self) -> None:
        """All sequences are gone. Where forwards are recorded, the target keeps the session for the next like it."""
        self._slots.clear()
        self._lengths.clear()
        self._parked.clear()
        if self._recorded is not None:
            with self.target.turn:
                self.target._idle = [*(s for s in self.target._idle if s is not self), self][-MOST_IDLE:]

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Makes room for at least so many sequences of so many positions; what is there stays. Grows by doubling."""
        have = self._cache.capacity
        if num_slots <= self._num_slots and capacity <= have:
            return
        assert not self._num_parked, "parked rows do not move"
        if num_slots > self._num_slots:
            self._num_slots = max(num_slots, 2 * self._num_slots)
        grown = self._new_cache(have if capacity <= have else max(capacity, 2 * have))
        grown.copy_from(self._cache)
        self._cache = grown

    def prefill(self, slot: int, ids: Sequence[int]) -> Scores:
        """Runs a prompt into a free slot. Logits of the last position only, (1, V); features of all, (P, n_taps, H)."""
        self.open(slot)
        return self.extend(slot, ids)

    def open(self, slot: int) -> None:
        """Takes a row for a new sequence."""
        if slot in self._slots or len(self._slots) == self._num_slots:
            raise DartspecError(f"slot {slot} is not free: {len(self._slots)} of {self._num_slots} are in use")
        self._slots.append(slot)
        self._lengths.append(0)

    def length(self, slot: int) -> int:
        """Committed positions of a sequence."""
        return self._lengths[self._slots.index(slot)]

    def copy(self, source: int, target: int, length: int) -> None:
        """Lets `target`, just opened, begin with the first `length` positions of `source`, in progress or parked. The
        caller sees to it that the source holds so many."""
        row = self._slots.index(target)
        self._cache.move_row(self._row(source), row, length)
        self._lengths[row] = length

    def park(self, slot: int, name: int) -> None:
        """Keeps a copy of a sequence under another number, in one of the `num_parked` rows."""
        free = set(range(self._num_slots, self._num_slots + self._num_parked)) - set(self._parked.values())
        if not free or name in self._parked or name in self._slots:
            raise DartspecError(
                f"slot {name} cannot be parked: {len(self._parked)} of {self._num_parked} rows are in use"
            )
        row = min(free)
        self._cache.move_row(self._row(slot), row, self.length(slot))
        self._parked[name] = row

    def unpark(self, name: int) -> None:
        """Forgets a parked copy."""
        del self._parked[name]

    def _row(self, slot: int) -> int:
        return self._parked[slot] if slot in self._parked else self._slots.index(slot)

    def extend(self, slot: int, ids: Sequence[int], features: bool = True) -> Scores:
        """Runs more of a prompt behind what the slot holds, and commits it. Logits of the last position only, (1, V);
        features of all new ones, (n, n_taps, H), unless they are not wanted."""
        row = self._slots.index(slot)
        got = []
        for at in range(0, len(ids), PREFILL_CHUNK):
            chunk = list(ids[at : at + PREFILL_CHUNK])
            parents = [list(range(-1, len(chunk) - 1))]
            logits, taps = self._forward(row, [chunk], parents, keep=1, features=features)
            self._lengths[row] += len(chunk)
            got.append(taps)
        joined = torch.cat([f[0] for f in got if f is not None]) if self.taps and features else None
        return Scores(logits[0], joined)

    def score(
        self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int] = (), features: bool = True
    ) -> list[Scores]:
        """One forward over one tree a sequence; `trees[i]` hangs at the end of `slots[i]`. Nothing is committed yet.
        Where forwards are recorded (`Target.recorder`), the scores hold until the next call.

        done: of each tree, the first nodes that earlier calls since the last `keep` have scored: only the rows behind
        them run and are returned, so that a tree can grow level by level. features: whether they are wanted.
        """
        if self._recorded is not None and not done:
            at = [self._slots.index(slot) for slot in slots]
            with self.target.turn:
                found = self._recorded.score(at, [self._lengths[row] for row in at], trees, features)
            if found is not None:
                return found
        order = sorted(range(len(slots)), key=lambda i: self._slots.index(slots[i]))
        rows = [self._slots.index(slots[i]) for i in order]
        result: dict[int, Scores] = {}
        for first, last in _runs(rows):
            batch = [order[j] for j in range(len(rows)) if first <= rows[j] < last]
            tokens = [trees[i].tokens.tolist() for i in batch]
            parents = [trees[i].parents.tolist() for i in batch]
            known = [done[i] for i in batch] if done else []
            logits, taps = self._forward(first, tokens, parents, done=known, features=features)
            for b, i in enumerate(batch):
                n = len(tokens[b]) - (known[b] if known else 0)
                result[i] = Scores(logits[b, :n], taps[b, :n] if taps is not None else None)
        return [result[i] for i in range(len(slots))]

    def keep(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Commits the accepted paths (node indices, root first) of the trees just scored; all other nodes are gone."""
        rows = [self._slots.index(slot) for slot in slots]
        if self._recorded is not None:
            self._cache.keep_all(rows, [self._lengths[row] for row in rows], paths)
        for row, path in zip(rows, paths, strict=True):
            if self._recorded is None:
                self._cache.keep(row, self._lengths[row], path)
            self._lengths[row] += len(path)

    def cut(self, slot: int, length: int) -> None:
        """Forgets all but a sequence's first `length` committed positions."""
        row = self._slots.index(slot)
        if not 0 <= length <= self._lengths[row]:
            raise DartspecError(f"slot {slot} holds {self._lengths[row]} positions and cannot be cut to {length}")
        self._lengths[row] = length

    def free(self, slot: int, last_stays: bool = False) -> None:
        """Ends a sequence. The last active row moves into its place. last_stays: the one before it does, and the last
        one stays the last: a sequence whose prompt is still being read should not part those that are decoded."""
        row, last = self._slots.index(slot), len(self._slots) - 1
        if last_stays and row < last - 1:
            self._move(last - 1, row)
            row = last - 1
        if row != last:
            self._move(last, row)
        self._slots.pop()
        self._lengths.pop()

    def _move(self, source: int, target: int) -> None:
        self._cache.move_row(source, target, self._lengths[source])
        self._slots[target], self._lengths[target] = self._slots[source], self._lengths[source]

    def _forward(
        self,
        first: int,
        tokens: list[list[int]],
        parents: list[list[int]],
        keep: int = 0,
        done: Sequence[int] = (),
        features: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """One forward over cache rows from `first` on: (B, keep or N, V) logits and (B, N, n_taps, H) features.

        done: first tokens of each sequence that get no row (see `score`).
        """
        target, starts = self.target, self._lengths[first : first + len(tokens)]
        done = done or [0] * len(tokens)
        n = max(len(t) - k for t, k in zip(tokens, done, strict=True))
        writes = [s + k for s, k in zip(starts, done, strict=True)]
        if max(writes) + n > self._cache.capacity:
            raise DartspecError(
                f"a sequence needs {max(writes) + n} positions, the session was opened with {self._cache.capacity}"
            )
        mask, depth = tree_tensors(parents, max(done) + n)
        ids = torch.tensor([t[k:] + [0] * (n - len(t) + k) for t, k in zip(tokens, done, strict=True)])
        ids = ids.to(target.device)
        rows = torch.stack([depth[b, k : k + n] for b, k in enumerate(done)])
        positions = (torch.tensor(starts)[:, None] + rows).to(target.device)
        self._cache.window.set(first, writes, n)
        built = target._masks.build(starts, mask, depth, target.device, done)
        with target.turn:  # hooks would record another thread's forward
            logits, *taps = self._run_model(ids, positions, built, features and bool(self.taps), keep)
        return logits, taps[0] if taps else None

    def _run_model(
        self, ids: Tensor, positions: Tensor, mask: Any, features: bool, keep: int = 0
    ) -> tuple[Tensor, ...]:
        """The target's forward into this session's cache: logits, and the taps where they are wanted."""
        target = self.target
        taps = self.taps if features else ()
        if target.straight is not None:
            done = target.straight(ids, positions, mask, self._cache, keep, taps, FINAL)
            if done is not None:
                return (done[0], torch.stack(done[1], dim=2)) if features else (done[0],)
        if not features:
            return (target.forward(ids, positions, mask, self._cache, keep),)
        with target.recording(self.taps) as got:
            logits = target.forward(ids, positions, mask, self._cache, keep)
        return logits, torch.stack([got[t].to(target.device) for t in self.taps], dim=2)


def _decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The first ModuleList as long as the layer count: the decoder's layers in every architecture tried."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise DartspecError(f"{type(model).__name__} has no list of {count} decoder layers to read hidden states from")


def _decoder(model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """The module that owns the layers and the final norm: its output is the last hidden state."""
    return next(m for m in model.modules() if any(child is layers for child in m.children()))


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending rows -> [first, last) of each unbroken run."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield rows[start], rows[i - 1] + 1
            start = i
