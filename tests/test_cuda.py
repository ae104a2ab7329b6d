"""What only a GPU can show; skipped elsewhere. The same code runs on the CPU in other tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from dartspec import drafters
from dartspec.device import CudaRecorder, TapeRecorder, _pack, _unpack, fetch, send
from dartspec.engine import Request, generate
from dartspec.sampling import GumbelRows, Sampler, gumbel, noise_words, uniform, uniform_rows, uniform_torch
from dartspec.target.target import Target
from dartspec.types import SamplingParams, Scores, TokenTree
from dartspec.verify import Together, verify

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


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


@pytest.mark.cuda
@needs_gpu
def test_noise_on_the_gpu_is_the_core_s() -> None:
    there = uniform(11, 2, 99, 49152, torch.device("cuda")).cpu()
    assert torch.equal(there, uniform(11, 2, 99, 49152))


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
def test_same_text_with_and_without_drafts_on_the_gpu(name: str, temperature: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    target = Target(tiny.model(name).to("cuda"))
    requests = [
        Request([3 + i, 4, 5] * (i + 2), SamplingParams(temperature=temperature, seed=i, max_tokens=40))
        for i in range(4)
    ]

    def texts(method: str) -> list[list[int]]:
        module = drafters.get(method)
        out: list[list[int]] = [[] for _ in requests]
        for chunk in generate(target, module.load(module.Config(), target), requests, num_nodes=12, batch=3):
            out[chunk.index] += chunk.ids
        return out

    assert texts("prompt_lookup") == texts("none")


@pytest.mark.cuda
@needs_gpu
def test_verdicts_on_the_gpu_are_the_cpu_s() -> None:
    logits = torch.randn(3, 50)
    tree = TokenTree(
        torch.tensor([4, 1, 2], dtype=torch.int32), torch.tensor([-1, 0, 1], dtype=torch.int32), torch.zeros(3)
    )
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5), 50, 1)
    device = torch.device("cuda")
    here = verify(Scores(logits, None), tree, sampler, [9, 4])
    for recorder in (None, CudaRecorder(device)):
        (there,) = Together(50, device, recorder).verify([Scores(logits.cuda(), None)], [tree], [sampler], [2])
        assert there is not None
        assert (there.path, there.bonus) == (here.path, here.bonus)
