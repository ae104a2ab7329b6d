"""Recorded forwards: padded, in buffers that stay, replayed; on the CPU by a tape of torch's operations.

A tape repeats what it was shown, operand by operand, so whatever Python decided while recording (a position, a length,
a token) would be wrong in the second round. Equality with the plain path is what is asked.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from dartspec.device import Recording, Run, Staged, TapeRecorder
from dartspec.engine import Request, generate
from dartspec.sampling import GumbelRows
from dartspec.target import attention, graphs
from dartspec.target.cache import LayerShape, SlotCache
from dartspec.target.graphs import Bucket
from dartspec.target.masks import MaskPlan, tree_tensors
from dartspec.target.target import FINAL, Session, Target
from dartspec.types import SamplingParams, Scores, TokenTree
from test_lossless import make, plain, whole

TAPS = (0, 1, 3, FINAL)
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5, 6, 0]


def tree(seed: int, n: int) -> TokenTree:
    tokens = torch.tensor([(9 * seed + 7 * j + 3) % 90 for j in range(n)], dtype=torch.int32)
    return TokenTree(tokens, torch.tensor(PARENTS[:n], dtype=torch.int32), torch.zeros(n))


def target(name: str = "llama", recorded: bool = True) -> Target:
    made = Target(tiny.model(name), name=name)
    made.recorder = TapeRecorder() if recorded else None
    return made


def recorded(session: Session) -> graphs.RecordedForwards:
    assert session._recorded is not None
    return session._recorded


def near(a: Tensor, b: Tensor) -> bool:
    """Float32 sums in another order, as in test_target."""
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def equal(ours: Sequence[Scores], theirs: Sequence[Scores]) -> bool:
    return all(near(a.logits, b.logits) and near(a.features, b.features) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "llama4_text", "deepseek_v3"]
)
def test_replays_equal_plain_forwards(name: str) -> None:
    """Ragged batches over several rounds; windows and chunks of 8 are crossed; a sequence leaves and another comes."""
    ours, theirs = (target(name, on).session(4, 64, TAPS) for on in (True, False))
    for session in (ours, theirs):
        for slot, n in enumerate((5, 13, 20)):
            session.prefill(slot, list(range(3, 3 + n)))
    sizes = [(8, 7, 6), (3, 8, 6), (6, 6, 6), (7, 8, 8)]
    for round_, ns in enumerate(sizes):
        trees = [tree(slot + round_, n) for slot, n in enumerate(ns)]
        assert equal(ours.score([0, 1, 2], trees), theirs.score([0, 1, 2], trees)), (name, round_)
        paths = [[0, 1], [0, 2, 5], [0]]
        for session in (ours, theirs):
            session.keep([0, 1, 2], paths)
    assert recorded(ours).buckets == [Bucket(4, 9, 128, True)]
    for session in (ours, theirs):
        session.free(0)
        session.prefill(7, [5, 6, 7])
    trees = [tree(5, 9), tree(6, 4)]
    assert equal(ours.score([7, 1], trees), theirs.score([7, 1], trees))  # the third, active too, is padding
    after = [tree(8, 6), tree(9, 6), tree(3, 2)]
    assert equal(ours.score([1, 2, 7], after), theirs.score([1, 2, 7], after))


def test_padding_never_touches_what_is_committed() -> None:
    """Every cache position of every sequence, before and after a forward in which half the batch is padding."""
    session = target().session(4, 40, TAPS)
    for slot, n in enumerate((5, 30, 12)):
        session.prefill(slot, list(range(3, 3 + n)))
    session.score([0, 1, 2], [tree(1, 9)] * 3)  # records
    before = [(layer.keys.clone(), layer.values.clone()) for layer in session._cache.layers]
    session.score([1], [tree(2, 6)])
    for layer, (keys, values) in zip(session._cache.layers, before, strict=True):
        for now, then in ((layer.keys, keys), (layer.values, values)):
            same = (now == then).all(dim=3).all(dim=1)  # (rows, positions)
            assert not bool(same[1, 30:36].any())  # the tree of six
            same[1, 30:36] = True
            same[:, session._cache.capacity :] = True  # the spare positions
            assert bool(same.all())


def test_keeping_many_is_keeping_each() -> None:
    """Paths that overlap themselves, that stay, and one of the root alone; one transfer for all."""
    ours, theirs = (target(recorded=on).session(3, 40, TAPS) for on in (True, False))
    for session in (ours, theirs):
        for slot, n in enumerate((5, 12, 9)):
            session.prefill(slot, list(range(3, 3 + n)))
        session.score([0, 1, 2], [tree(1, 9), tree(2, 8), tree(3, 8)])
        session.keep([2, 0, 1], [[0, 1, 3, 6], [0, 2, 5, 7], [0]])
    for a, b in zip(ours._cache.layers, theirs._cache.layers, strict=True):
        for row, length in enumerate(ours._lengths):
            assert near(a.keys[row, :, :length], b.keys[row, :, :length])
            assert near(a.values[row, :, :length], b.values[row, :, :length])
    assert ours._lengths == theirs._lengths == [9, 13, 13]


def test_masks_of_tensors_are_the_masks_of_lists() -> None:
    for name in ("llama", "mistral", "gemma3_text", "llama4_text", "gpt_oss"):
        config = tiny.model(name).config
        for additive in (None, torch.float32):
            plan = MaskPlan(config, additive)
            parents = [PARENTS[:8], PARENTS[:3], [-1]]
            starts = [9, 30, 17]
            mask, depth = tree_tensors(parents)
            want = plan.build(starts, mask, depth, torch.device("cpu"))
            valid = torch.arange(8) < torch.tensor([len(p) for p in parents])[:, None]
            mask = mask & valid[:, None] & valid[:, :, None]
            got = plan.build_tensors(torch.tensor(starts), depth, mask, valid, 64)
            kinds = want if isinstance(want, dict) else {"": want}
            for kind, w in kinds.items():
                g = got[kind] if kind else got
                hidden = False if additive is None else torch.finfo(torch.float32).min
                for b, p in enumerate(parents):
                    n = len(p)
                    assert torch.equal(g[b, :, :n, : w.shape[-1]], w[b, :, :n]), (name, kind)
                    assert bool((g[b, :, :n, w.shape[-1] :] == hidden).all())
                    assert bool((g[b, :, n:, 1:] == hidden).all())
                    assert not bool((g[b, :, n:, 0] == hidden).any())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_plain_decodings(temperature: float) -> None:
    """Every drafter's round, in batches of unequal prompts that join and leave, through recorded forwards."""
    prompts = [[5, 6, 7, 8, 5, 6, 7], [9], list(range(20, 43)), [11, 12] * 6]
    requests = [
        Request(p, SamplingParams(temperature=temperature, seed=i, max_tokens=9 + 5 * i)) for i, p in enumerate(prompts)
    ]
    want = plain(target(recorded=False), requests)
    t = target()
    for method in ("none", "oracle", "prompt_lookup", "dart"):
        drafter = make(method, t, whole(requests, want), 0.7)
        got: list[list[int]] = [[] for _ in requests]
        for chunk in generate(t, drafter, requests, batch=3, num_nodes=8):
            got[chunk.index] += chunk.ids
        assert [tuple(g) for g in got] == want, method


def test_python_s_values_are_not_part_of_a_recording() -> None:
    """Negative control of the tape itself: what Python read is repeated, and reading a value is refused."""
    at = torch.tensor([3])
    kept = TapeRecorder().record(lambda: (at * 2 + 1,))
    at.fill_(10)
    kept.replay()
    assert kept.outputs[0].tolist() == [21]
    number = [3]
    frozen = TapeRecorder().record(lambda: (at + number[0],))
    number[0] = 100
    frozen.replay()
    assert frozen.outputs[0].tolist() == [13]
    with pytest.raises(RuntimeError, match="needs a value"):
        TapeRecorder().record(lambda: (at + int(at),))
    with pytest.raises(RuntimeError, match="needs a value"):
        TapeRecorder().record(lambda: (at.nonzero(),))


class Failing:
    """A recorder on which nothing can be recorded."""

    def record(self, run: Run) -> Recording:
        raise RuntimeError("operation not permitted when stream is capturing\nand more lines")


def test_where_recording_fails_one_sentence_says_so_and_the_plain_path_serves(caplog: pytest.LogCaptureFixture) -> None:
    t = target()
    t.recorder = Failing()
    session, other = t.session(1, 32, TAPS), target(recorded=False).session(1, 32, TAPS)
    for s in (session, other):
        s.prefill(0, [3, 4, 5])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert equal(session.score([0], [tree(1, 5)]), other.score([0], [tree(1, 5)]))
    assert len(caplog.records) == 1
    assert "operation not permitted" in caplog.text
    assert "more lines" not in caplog.text


def test_the_number_and_the_memory_of_recordings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_RECORDINGS", 2)
    session = target().session(1, 64)
    session.prefill(0, [3, 4, 5])
    for n in (1, 4, 9, 4):
        session.score([0], [tree(1, n)])
    assert [b.rows for b in recorded(session).buckets] == [9, 5]
    each = 9 * tiny.VOCAB * 4
    assert recorded(session).num_bytes == each + 5 * tiny.VOCAB * 4
    monkeypatch.setattr(graphs, "MOST_OUTPUT_BYTES", each - 1)
    small = target().session(1, 64)
    small.prefill(0, [3, 4, 5])
    want = small.score([0], [tree(1, 9)])[0].logits.clone()
    assert recorded(small).buckets == []
    assert near(small.score([0], [tree(1, 9)])[0].logits, want)  # too large: not recorded, and not tried again
    assert recorded(small).buckets == []


def test_trees_beyond_the_largest_bucket_take_the_plain_path() -> None:
    chain = TokenTree(torch.arange(3, 73, dtype=torch.int32), torch.arange(-1, 69, dtype=torch.int32), torch.zeros(70))
    ours, theirs = (target(recorded=on).session(1, 128, TAPS) for on in (True, False))
    for session in (ours, theirs):
        session.prefill(0, [3, 4, 5])
    assert equal(ours.score([0], [chain]), theirs.score([0], [chain]))
    assert recorded(ours).buckets == []


def test_a_closed_session_serves_the_next_with_its_recordings() -> None:
    t = target()
    first = t.session(2, 60, TAPS)
    first.prefill(0, [3, 4, 5])
    first.score([0], [tree(1, 5)])
    first.close()
    assert t.session(2, 60, (1,)) is not first  # other taps
    again = t.session(1, 50, TAPS)
    assert again is first
    assert len(recorded(again).buckets) == 1
    assert t.session(1, 50, TAPS) is not first  # in use
    again.prefill(0, [8, 9])
    other = target(recorded=False).session(1, 50, TAPS)
    other.prefill(0, [8, 9])
    assert equal(again.score([0], [tree(2, 4)]), other.score([0], [tree(2, 4)]))
    again.close()
    assert t.session(2, 500, TAPS) is not first  # too small: its memory goes
    assert t._idle == []


def test_a_session_that_grows_records_anew() -> None:
    ours, theirs = (target(recorded=on).session(1, 16, TAPS) for on in (True, False))
    for session in (ours, theirs):
        session.prefill(0, [3, 4, 5])
        session.score([0], [tree(1, 5)])
        session.reserve(3, 80)
        session.prefill(1, [6] * 30)
    trees = [tree(2, 7), tree(3, 4)]
    assert equal(ours.score([0, 1], trees), theirs.score([0, 1], trees))
    assert recorded(ours).buckets == [Bucket(2, 9, recorded(ours).buckets[0].keys, True)]


def test_staged_tensors_arrive_whole() -> None:
    staged = Staged(
        torch.device("cpu"), {"a": ((3,), torch.int64), "b": ((2, 5), torch.bool), "c": ((2,), torch.float32)}
    )
    staged.host["a"][:] = torch.tensor([1, -2, 3])
    staged.host["b"][1, 4] = True
    staged.host["c"][:] = torch.tensor([0.5, -1.0])
    assert not bool(staged.device["a"].any())
    staged.wait()
    staged.send()
    for name, view in staged.device.items():
        assert torch.equal(view, staged.host[name])


# -- on another device -------------------------------------------------------------------------------------------------


class NoHost(TorchDispatchMode):
    """Raises where an operation reads or makes a tensor on the CPU."""

    num_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.num_operations += 1
        for t in tree_flatten((args, kwargs, out))[0]:
            assert not isinstance(t, Tensor) or t.device.type != "cpu", f"{func} has a tensor on the CPU"
        return out


META = torch.device("meta")


@pytest.mark.parametrize("way", [None, "gqa", "strides"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
def test_a_recorded_forward_never_touches_the_host(name: str, way: str | None) -> None:
    """Tensors without memory stand for a GPU's: a number from the CPU, which no CUDA graph allows, would show."""
    config = AutoConfig.for_model(name, **{**tiny.COMMON, **tiny.SERVED[name]})
    with META:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.register(way), dtype=torch.bfloat16
        ).eval()
    shapes = {i: LayerShape(2, 8, 8, torch.bfloat16, META) for i in range(4)}
    cache = SlotCache(shapes, 4, 63, spare=1)

    def forward(ids: Tensor, positions: Tensor, mask: object, features: bool) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            out = model(
                input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **{cache_name(model): cache}
            )
        return (out.logits,)

    forwards = graphs.RecordedForwards(forward, MaskPlan(config, None), cache, META, False, TapeRecorder())
    fields = {"ids": (2, 9), "depth": (2, 9), "start": (2,), "count": (2,)}
    given = {n: torch.zeros(shape, dtype=torch.int64, device=META) for n, shape in fields.items()}
    given["tree"] = torch.zeros(2, 9, 9, dtype=torch.bool, device=META)
    with NoHost() as watch:
        (logits,) = forwards._run(Bucket(2, 9, 64, False), given)
    assert (logits.shape, logits.device) == ((2, 9, tiny.VOCAB), META)
    assert watch.num_operations > 200


def cache_name(model: object) -> str:
    """Renamed in transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def test_recorded_noise_never_touches_the_host() -> None:
    with NoHost():
        rows = GumbelRows(50, META)._run(torch.zeros(3, 5, dtype=torch.int64, device=META))
    assert rows.shape == (3, 50)
    with pytest.raises(AssertionError, match="on the CPU"), NoHost():  # negative control
        torch.zeros(3, device=META) + torch.tensor(1.0)
