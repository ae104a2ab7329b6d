"""The kernels that drafters alone use: 8-bit heads, likeliest tokens, a round of DART in one call."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tiny
from dartspec import _core
from dartspec.drafters import dart
from dartspec.drafters._nn import Head
from dartspec.target.target import Target
from dartspec.types import Committed

pytestmark = pytest.mark.skipif(not _core.draft_kernels_supported(), reason="this CPU has no AVX512_BF16 and VNNI")


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    n, size = logits.shape
    log_probs, index = torch.empty(n, k), torch.empty(n, k, dtype=torch.int32)
    _core.top_log_probs(logits.data_ptr(), n, size, k, log_probs.data_ptr(), index.data_ptr())
    return log_probs, index


@given(seed=st.integers(0, 10_000), size=st.integers(1, 400), k=st.integers(1, 30), levels=st.sampled_from([3, 1000]))
def test_the_likeliest_are_those_of_a_sort_with_ties_to_the_lowest_index(
    seed: int, size: int, k: int, levels: int
) -> None:
    k = min(k, size)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (3, size), generator=generator).float() / 50
    log_probs, index = likeliest(logits, k)
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(index.long(), order.indices[:, :k])
    expected = torch.log_softmax(logits.double(), -1).gather(1, order.indices[:, :k])
    assert torch.allclose(log_probs.double(), expected, atol=2e-6)


def test_a_row_that_is_not_finite_makes_no_candidate() -> None:
    logits = torch.randn(5, 200)
    logits[0, 150], logits[1, 3], logits[2, :] = math.nan, math.inf, -math.inf
    logits[3, 7] = -math.inf  # one forbidden entry harms nobody
    log_probs, index = likeliest(logits, 9)
    assert (log_probs[:3] == -math.inf).all()
    assert log_probs[3:].isfinite().all()
    assert ((index >= 0) & (index < 200)).all()
    with pytest.raises(ValueError, match=r"k must be"):
        likeliest(logits, 201)


@pytest.mark.parametrize(("out", "size", "rows"), [(1, 1, 1), (33, 7, 3), (96, 64, 13), (1000, 130, 25)])
@pytest.mark.parametrize("threads", [1, 3])
def test_eight_bit_products_are_within_their_rounding(out: int, size: int, rows: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(out)
    weight = torch.randn(out, size, generator=generator).bfloat16()
    x = torch.randn(rows, size, generator=generator).bfloat16()
    y = torch.empty(rows, out)
    made = _core.Int8Linear(weight.data_ptr(), out, size)
    made.apply(x.data_ptr(), rows, size, y.data_ptr(), threads)
    exact = x.double() @ weight.double().T
    # rounding to 127ths of a row's largest: uniform errors of both factors, summed over the inputs
    steps = (x.double().abs().amax(1, keepdim=True) / 127, weight.double().abs().amax(1, keepdim=True) / 127)
    bound = steps[0] / 2 * weight.double().abs().sum(1) + steps[1].T / 2 * x.double().abs().sum(1, keepdim=True)
    assert ((y.double() - exact).abs() <= bound * 1.01 + 1e-6).all()
    if size > 50:
        assert float((y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()) < 0.02
    alone = torch.empty(1, out)
    made.apply(x[-1:].data_ptr(), 1, size, alone.data_ptr(), threads)
    assert torch.equal(alone[0], y[-1])
    x[0, 0] = math.nan
    made.apply(x.data_ptr(), rows, size, y.data_ptr(), threads)
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()


def test_an_eight_bit_head_finds_nearly_the_tokens_of_the_exact_one() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(3000, 192, generator=generator).bfloat16()
    x = torch.randn(8, 192, generator=generator).bfloat16()
    forbidden = torch.zeros(3000, dtype=torch.bool)
    forbidden[::7] = True
    small, exact = Head(weight, forbidden, True, 1), Head(weight, forbidden, False, 1)
    a, b = small.likeliest(x, 25), exact.likeliest(x, 25)
    common = [len(set(p.tolist()) & set(q.tolist())) for p, q in zip(a[1], b[1], strict=True)]
    assert sum(common) / len(common) > 22
    assert not forbidden[a[1].long()].any()
    assert (a[0][:, 0] - b[0][:, 0]).abs().max() < 0.5


@pytest.mark.parametrize("mask", ["pair", "official"])
@pytest.mark.parametrize("twice", [False, True])
def test_a_round_in_one_call_has_the_bits_of_the_round_in_many(mask: str, twice: bool) -> None:
    target = Target(tiny.model("llama", torch.bfloat16), tiny.VOCAB, frozenset({2}))
    torch.manual_seed(1)
    config = dart.Config(
        d=5,
        taps=(1, 2, 3),
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        draft_vocab_size=tiny.VOCAB,
        vocab_size=tiny.VOCAB,
        target_hidden_size=32,
        num_target_layers=4,
        mask=mask,
        final_norm_twice=twice,
    )
    net = dart.DartNet(config)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    drafter = dart.DartDrafter(net, target)
    history, features = torch.randint(3, tiny.VOCAB, (200,)), torch.randn(200, 3, 32).bfloat16()
    layer, at = drafter._layer, 0
    assert layer is not None
    for n in (3, 1, 40, 2, 33, 1, 50, 7):
        new = Committed(0, history[: at + n + 1], n, features[at : at + n])
        at += n
        alone = drafter.lattice([new])
        drafter._layer = None
        many = drafter.lattice([new._replace(slot=1)])
        drafter._layer = layer
        assert torch.equal(alone[0], many[0])
        assert torch.equal(alone[1], many[1])
        assert torch.equal(drafter._prefixes[0].keys[:, :at], drafter._prefixes[1].keys[:, :at])
        assert torch.equal(drafter._prefixes[0].values[:, :at], drafter._prefixes[1].values[:, :at])
