"""Drafters with weights in bfloat16, on the core's kernels where the machine has them, against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import test_dflash
import test_eagle3
import test_heads
from dartspec.drafters import dflash, eagle3, hydra, medusa
from dartspec.types import Committed
from test_eagle3 import scored_paths
from tiny_net import HIDDEN, VOCAB, View


def nets() -> dict[str, tuple[Any, Any]]:
    return {
        "eagle3": (eagle3.Eagle3Drafter, test_eagle3.random_net(test_eagle3.config(top_k=4))),
        "dflash": (dflash.DFlashDrafter, test_dflash.random_net(test_dflash.config())),
        "medusa": (medusa.MedusaDrafter, test_heads.random_net(medusa.MedusaNet, test_heads.medusa_config())),
        "hydra": (hydra.HydraDrafter, test_heads.random_net(hydra.HydraNet, test_heads.hydra_config())),
        "hydra++": (
            hydra.HydraDrafter,
            test_heads.random_net(hydra.HydraNet, test_heads.hydra_config(prefix=True, num_blocks=2)),
        ),
    }


@pytest.mark.parametrize("name", nets())
def test_bfloat16_agrees_with_float32_on_rounded_weights(name: str) -> None:
    """A path's score is the sum of its levels' log-probabilities; nearly all paths are in both trees."""
    kind, net = nets()[name]
    net = net.to(torch.bfloat16)
    half, single = View(torch.bfloat16), View()
    single.table = half.table.float()
    taps = len(net.config.taps)
    shared = total = 0
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, VOCAB, (40,), generator=g)
        features = torch.randn(39, taps, HIDDEN, generator=g).to(torch.bfloat16)
        news = Committed(0, ids, 39, features)
        low = scored_paths(kind(net, half).propose([news], [20])[0])
        high = scored_paths(kind(net, single).propose([news._replace(features=features.float())], [20])[0])
        both = low.keys() & high.keys()
        shared, total = shared + len(both), total + len(high)
        assert max(abs(low[p] - high[p]) / len(p) for p in both) < 0.25
    assert shared > 0.8 * total
