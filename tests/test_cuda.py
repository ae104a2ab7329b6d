"""What runs on a GPU, on the CPU too where that can: recorded forwards, noise in torch integers, all rows at once."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from dartspec.device import CudaRecorder, TapeRecorder, _pack, _unpack, fetch, send, take_rows
from dartspec.engine import Request, generate
from dartspec.sampling import GumbelRows, Sampler, gumbel, noise_words, uniform, uniform_rows, uniform_torch
from dartspec.target.target import Target
from dartspec.types import Drafter, SamplingParams, Scores, TokenTree
from dartspec.verify import Together, verify
from test_lossless import make

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_gpu])]


def test_noise_in_torch_integers_is_the_core_s() -> None:
    for seed, sample, position in ((0, 0, 0), (2**63 + 5, 3, 17), (2**64 - 1, 2**33, 2**20)):
        assert torch.equal(
            uniform(seed, sample, position, 1003), uniform_torch(seed, sample, position, 1003, torch.device("cpu"))
        )


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)),
        min_size=1,
        max_size=9,
    ),
    size=st.integers(1, 300),
)
def test_rows_of_noise_are_the_core_s_bit_for_bit(names: list[tuple[int, int, int]], size: int) -> None:
    rows = uniform_rows(torch.tensor([noise_words(*name) for name in names]), size)
    for row, name in zip(rows, names, strict=True):
        assert torch.equal(row, uniform(*name, size))


def test_recorded_noise_is_the_sampler_s_bit_for_bit() -> None:
    """Replayed with other counters and other numbers of rows; the logarithms too, for they are torch's own in both."""
    noise = GumbelRows(1003, torch.device("cpu"), TapeRecorder())
    for n in (1, 3, 4, 2, 9):
        names = [(2**63 + n, i, 5 * i + n) for i in range(n)]
        rows = noise([noise_words(*name) for name in names])
        for row, name in zip(rows, names, strict=False):
            assert torch.equal(row, gumbel(*name, 1003))


def test_transfers_bring_back_what_was_sent() -> None:
    arrays = {"a": np.arange(5), "b": np.ones((2, 3), dtype=np.bool_), "c": np.array([[0.5]], dtype=np.float32)}
    sent = send(arrays, torch.device("cpu"))
    for name, array in arrays.items():
        assert torch.equal(sent[name], torch.from_numpy(array))
    numbers = torch.randn(3, 4).t(), torch.arange(6, dtype=torch.int32).view(2, 3), torch.zeros(0, dtype=torch.int32)
    for got, want in zip(_unpack(_pack(numbers), numbers), numbers, strict=True):
        assert torch.equal(got, want)
    assert fetch(numbers[1])[0] is numbers[1]  # nothing to do on the CPU


@pytest.mark.parametrize("device", DEVICES)
def test_rows_taken_are_copies(device: str) -> None:
    """What a recording wrote is written over by the next; a drafter keeps what it was told."""
    source = torch.arange(12.0).view(4, 3).to(device)
    taken = take_rows(source, [0, 2])
    source.zero_()
    assert taken.tolist() == [[0, 1, 2], [6, 7, 8]]


@pytest.mark.cuda
@needs_gpu
def test_noise_on_the_gpu_is_the_core_s() -> None:
    there = uniform(11, 2, 99, 49152, torch.device("cuda")).cpu()
    assert torch.equal(there, uniform(11, 2, 99, 49152))


def tiny_target(name: str, device: str) -> Target:
    """Random weights in float32 with recorded forwards: CUDA graphs, or a tape on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    made = Target(copy.deepcopy(tiny.model(name)).to(device), name=name)
    made.recorder = TapeRecorder() if device == "cpu" else CudaRecorder(torch.device(device))
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
def test_same_text_with_and_without_drafts(name: str, device: str) -> None:
    """Greedy, sampled, filtered and penalised requests in one batch that changes."""
    target = tiny_target(name, device)
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.8, "top_k": 30}, {"frequency_penalty": 0.5}]
    requests = [
        Request([3 + i, 4, 5] * (i + 2), SamplingParams(**kinds[i % 4], seed=i, max_tokens=12 + 3 * i))
        for i in range(5)
    ]

    def texts(drafter: Drafter) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in requests]
        for chunk in generate(target, drafter, requests, num_nodes=8, batch=3):
            out[chunk.index] += chunk.ids
        return out

    want = texts(make("none", target))
    for method in ("prompt_lookup", "dart"):
        assert texts(make(method, target)) == want
    if device == "cpu" or name != "qwen3_moe":  # experts may want their numbers of rows on the host
        assert [s._recorded.failure for s in target._idle if s._recorded] == [None] * len(target._idle)
        assert all(s._recorded.buckets for s in target._idle if s._recorded)


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_scores_are_those_of_plain_forwards(device: str) -> None:
    ours, theirs = tiny_target("llama", device), tiny_target("llama", device)
    theirs.recorder = None
    sessions = [t.session(3, 64, (1, 3)) for t in (ours, theirs)]
    for session in sessions:
        for slot in range(3):
            session.prefill(slot, list(range(3, 9 + 7 * slot)))
    for n in (9, 4, 9, 6):
        parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5, 0][:n], dtype=torch.int32)
        trees = [
            TokenTree(torch.arange(5 + b, 5 + b + n, dtype=torch.int32), parents, torch.zeros(n)) for b in range(3)
        ]
        scored = [session.score([2, 0, 1], [trees[2], trees[0], trees[1]]) for session in sessions]
        for a, b in zip(*scored, strict=True):
            assert (a.logits - b.logits).abs().max() <= 1e-5 * b.logits.abs().max()
            assert (a.features - b.features).abs().max() <= 1e-5 * b.features.abs().max()
        for session in sessions:
            session.keep([2, 0, 1], [[0, 2], [0, 1, 3], [0]])


@pytest.mark.cuda
@needs_gpu
def test_gumbel_values_differ_from_the_cpu_s_by_rounding_alone() -> None:
    device = torch.device("cuda")
    names = [(7, 0, 5), (2**64 - 1, 3, 9)]
    for recorder in (None, CudaRecorder(device)):
        there = GumbelRows(49152, device, recorder)([noise_words(*name) for name in names]).cpu()
        for row, name in zip(there, names, strict=False):
            assert (row - gumbel(*name, 49152)).abs().max() <= 4e-6


@pytest.mark.cuda
@needs_gpu
def test_a_model_that_waits_for_the_device_falls_back() -> None:
    target = tiny_target("llama", "cuda")
    inner = target.forward

    def waiting(*args: object) -> torch.Tensor:
        out = inner(*args)
        out.sum().item()
        return out

    target.forward = waiting
    session = target.session(1, 32)
    session.prefill(0, [3, 4, 5])
    tree = TokenTree(torch.tensor([4], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32), torch.zeros(1))
    assert session.score([0], [tree])[0].logits.isfinite().all()
    assert session._recorded.failure is not None
    assert session.score([0], [tree])[0].logits.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_verdicts_are_the_cpu_s(device: str, dtype: torch.dtype, temperature: float) -> None:
    """In bfloat16 ties are common, and go to the lowest id."""
    logits = (4 * torch.randn(3, 5000)).to(dtype)
    logits[0, [1, 4000]] = logits[1, [2, 17]] = 30.0
    tree = TokenTree(
        torch.tensor([4, 1, 2], dtype=torch.int32), torch.tensor([-1, 0, 1], dtype=torch.int32), torch.zeros(3)
    )
    sampler = Sampler(SamplingParams(temperature=temperature, top_p=0.95, top_k=40, seed=5), 4990, 1)
    here = verify(Scores(logits, None), tree, sampler, [9, 4])
    place = torch.device(device)
    for recorder in (None, TapeRecorder() if device == "cpu" else CudaRecorder(place)):
        (there,) = Together(4990, place, recorder).verify([Scores(logits.to(place), None)], [tree], [sampler], [2])
        assert there is not None
        assert (there.path, there.bonus) == (here.path, here.bonus)
