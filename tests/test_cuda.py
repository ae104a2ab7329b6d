"""What only a GPU can show; skipped elsewhere. The same code runs on the CPU in other tests."""

from __future__ import annotations

import pytest
import torch

import tiny
from dartspec import drafters
from dartspec.engine import Request, generate
from dartspec.sampling import Sampler, uniform, uniform_torch
from dartspec.target.target import Target
from dartspec.types import SamplingParams, Scores, TokenTree
from dartspec.verify import verify

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_all_rows_at_once_pick_what_row_by_row_picks() -> None:
    """The accelerator's path, on the CPU: the same picks, so the same walk."""
    logits = torch.randn(6, 50)
    history, paths = [7, 8, 4], [[], [1], [2], [1, 3], [1, 1], [2, 2]]
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=5, top_p=0.9), 48, 2)
        rows = sampler.pick_rows(logits, [len(history) + len(p) for p in paths])
        assert rows == [sampler.pick(logits[i], history, paths[i]) for i in range(6)]


def test_noise_in_torch_integers_is_the_core_s() -> None:
    for seed, sample, position in ((0, 0, 0), (2**63 + 5, 3, 17), (2**64 - 1, 2**33, 2**20)):
        assert torch.equal(
            uniform(seed, sample, position, 1003), uniform_torch(seed, sample, position, 1003, torch.device("cpu"))
        )


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
    there = verify(Scores(logits.cuda(), None), tree, sampler, [9, 4])
    here = verify(Scores(logits, None), tree, sampler, [9, 4])
    assert (there.path, there.bonus) == (here.path, here.bonus)
