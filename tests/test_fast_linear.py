"""The packed bf16 product: right to one rounding, and the same bits however many rows and threads."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dartspec import _core

pytestmark = pytest.mark.skipif(not _core.kernels_supported(), reason="this CPU has no AVX512_BF16")


def pack(*layers: tuple[Tensor, Tensor | None]) -> _core.PackedLinear:
    parts = [(w.data_ptr(), w.shape[0], w.stride(0), 0 if b is None else b.data_ptr()) for w, b in layers]
    return _core.PackedLinear(parts, layers[0][0].shape[1])


def apply(packed: _core.PackedLinear, x: Tensor, dtype: torch.dtype = torch.bfloat16, threads: int = 1) -> Tensor:
    y = torch.full((len(x), packed.out_features), float("nan"), dtype=dtype)
    f32 = dtype == torch.float32
    packed.apply(x.data_ptr(), len(x), x.stride(0), y.data_ptr(), y.stride(0), f32, num_threads=threads)
    return y


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


SIZES = [(1, 1), (15, 3), (16, 2), (17, 33), (48, 64), (64, 577), (96, 128), (200, 31), (576, 1536), (1000, 4099)]


@pytest.mark.parametrize(("out", "inputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_float64_product(out, inputs, rows, bias):
    w, x, b = random(out, inputs), random(rows, inputs, seed=1), random(out, seed=2) if bias else None
    expected = F.linear(x.double(), w.double(), None if b is None else b.double())
    exact = apply(pack((w, b)), x, torch.float32)
    scale = F.linear(x.double().abs(), w.double().abs()) + 1  # what rounding of the sum is relative to
    assert ((exact.double() - expected).abs() <= 2.0**-20 * scale).all()
    assert torch.equal(apply(pack((w, b)), x), exact.bfloat16())


@pytest.mark.parametrize(("out", "inputs"), [(200, 31), (576, 576), (130, 2500)])
def test_a_row_does_not_depend_on_the_others_nor_on_threads(out, inputs):
    packed, x = pack((random(out, inputs), random(out, seed=3))), random(70, inputs, seed=1)
    alone = torch.cat([apply(packed, x[i : i + 1], torch.float32) for i in range(70)])
    assert alone.isfinite().all()
    for rows in range(1, 71):
        assert torch.equal(apply(packed, x[:rows], torch.float32), alone[:rows]), rows
        assert torch.equal(apply(packed, x[70 - rows :], torch.float32, threads=2), alone[70 - rows :]), rows


def test_merged_layers_equal_their_parts():
    layers = [(random(n, 96, seed=n), random(n, seed=n + 1) if n != 50 else None) for n in (40, 50, 33)]
    x = random(5, 96)
    parts = [apply(pack(layer), x) for layer in layers]
    assert torch.equal(apply(pack(*layers), x), torch.cat(parts, dim=1))


def test_strided_rows_in_and_out_leave_the_rest_alone():
    w, wide = random(40, 24), random(6, 100, seed=1)
    x = wide[:, 10:34]
    y = torch.zeros(6, 64, dtype=torch.bfloat16)
    pack((w, None)).apply(x.data_ptr(), 6, x.stride(0), y[:, 8:].data_ptr(), y.stride(0), False, 1)
    assert torch.equal(y[:, 8:48], apply(pack((w, None)), x.contiguous()))
    assert not y[:, :8].any()
    assert not y[:, 48:].any()


def test_the_last_odd_input_never_meets_its_neighbour():
    w, wide = random(16, 7), random(3, 8, seed=1)
    wide[:, 7] = float("nan")
    x = wide[:, :7]
    assert torch.equal(apply(pack((w, None)), x), apply(pack((w, None)), x.contiguous()))


def gelu(x: Tensor) -> Tensor:
    return x * torch.special.erfc(-x / 2**0.5) / 2  # without torch's cancellation in the tail


def gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


ACTIVATIONS = {0: F.silu, 1: gelu_tanh, 2: gelu, 3: F.relu}


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(("out", "inputs", "bias"), [(50, 64, False), (128, 96, True), (16, 5, True)])
def test_gated_pair_rounds_as_separate_operations_do(activation, out, inputs, bias):
    gate, up = random(out, inputs), random(out, inputs, seed=1)
    b = [random(out, seed=s) if bias else None for s in (2, 3)]
    x = (random(33, inputs, seed=4) * inputs**-0.5).bfloat16()  # gates of about one
    parts = [
        (w.data_ptr(), out, w.stride(0), 0 if v is None else v.data_ptr()) for w, v in zip((gate, up), b, strict=True)
    ]
    got = apply(_core.PackedLinear.gated(parts, inputs, activation), x)
    g, u = apply(pack((gate, b[0])), x), apply(pack((up, b[1])), x)
    expected = ACTIVATIONS[activation](g.double()).bfloat16() * u
    assert (got != expected).float().mean() < 5e-3  # a float32 result next to the middle of two bf16 numbers
    assert torch.allclose(got.float(), expected.float(), rtol=2.0**-6, atol=0)
    alone = torch.cat([apply(_core.PackedLinear.gated(parts, inputs, activation), x[i : i + 1]) for i in range(33)])
    assert torch.equal(got, alone)


def test_threads_at_once_from_python():
    from concurrent.futures import ThreadPoolExecutor

    packed, x = pack((random(512, 256), None)), random(9, 256, seed=1)
    expected = apply(packed, x)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: apply(packed, x, threads=2), range(400)))
    assert all(torch.equal(y, expected) for y in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own():
    packed, x = pack((random(512, 256), None)), random(9, 256, seed=1)
    expected = apply(packed, x, threads=2)  # the pool's thread runs in this process
    child = os.fork()
    if child == 0:
        same = all(torch.equal(apply(packed, x, threads=2), expected) for _ in range(50))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
