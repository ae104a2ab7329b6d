"""The counter-based noise: published vectors, the plain twin, and what the sampler relies on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dartspec import _core
from reference import noise

# Random123's known-answer vectors for philox4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def uniform(seed: int, sample: int, position: int, size: int) -> torch.Tensor:
    out = np.full(size, np.nan, dtype=np.float32)
    _core.philox_uniform(seed=seed, sample=sample, position=position, out=out)
    return torch.from_numpy(out)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert tuple(_core.philox4x32_10(counter=counter, key=key)) == expected
    assert tuple(noise.philox4x32_10(torch.tensor([counter]), key)[0].tolist()) == expected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**32 - 1),
    size=st.integers(0, 300),
)
def test_equals_the_twin_bit_for_bit(seed, sample, position, size):
    got, expected = uniform(seed, sample, position, size), noise.uniform(seed, sample, position, size)
    assert torch.equal(got, expected)


def test_every_word_layout_of_a_full_vocabulary():
    block = uniform(7, 11, 13, 49_152)
    assert torch.equal(block, noise.uniform(7, 11, 13, 49_152))
    v = 12_345
    word = _core.philox4x32_10((v // 4, 13, 11, 0), (7, 0))[v % 4]
    assert block[v].item() == np.float32((word + 0.5) * 2.0**-32)


def test_the_prefix_does_not_depend_on_the_length():
    assert torch.equal(uniform(1, 2, 3, 1000)[:77], uniform(1, 2, 3, 77))


def test_range_and_gumbel_are_finite():
    w = torch.cat([uniform(s, 0, 0, 49_152) for s in range(50)])
    assert w.min() > 0
    assert w.max() <= 1 - 2.0**-24
    assert torch.isfinite(-torch.log(-torch.log1p(-w))).all()


def test_moments_of_the_uniform():
    w = torch.cat([uniform(s, 0, 0, 49_152) for s in range(20)]).double()  # about 1e6 values: sigma of the mean 2.9e-4
    assert abs(w.mean() - 0.5) < 2e-3
    assert abs(w.var() - 1 / 12) < 1e-3


@pytest.mark.parametrize("other", [(2, 0, 0), (1, 1, 0), (1, 0, 1), (1 + 2**32, 0, 0), (1, 2**32, 0)])
def test_each_argument_changes_the_stream(other):
    assert (uniform(1, 0, 0, 1000) != uniform(*other, 1000)).float().mean() > 0.99


def test_refuses_another_type_of_output():
    with pytest.raises(TypeError):
        _core.philox_uniform(1, 2, 3, np.empty(8, dtype=np.float64))
