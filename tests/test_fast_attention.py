"""Attention over a cache: right against float64, and one row's bits whatever lies beside it or between its keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dartspec import _core
from dartspec.errors import DartspecError
from dartspec.target import attention

needs_kernel = pytest.mark.skipif(not _core.kernels_supported(), reason="this CPU has no AVX512_BF16")
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float32: 5e-6}


def reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """float64, heads repeated, unseen values set to zero; rows that see nothing give zeros."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.double() for x in (query, key, value))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def random_case(
    dim: int, *, batch: int = 1, heads: int = 6, kv_heads: int = 2, prefix: int = 70, nodes: int = 19, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows are the nodes of a random tree after a prefix; returns float32 q, k, v and the mask (B, 1, N, K)."""
    g = torch.Generator().manual_seed(seed)
    keys = prefix + nodes
    q = torch.randn(batch, heads, nodes, dim, generator=g)
    k = torch.randn(batch, kv_heads, keys, dim, generator=g)
    v = torch.randn(batch, kv_heads, keys, dim, generator=g)
    mask = torch.zeros(batch, 1, nodes, keys, dtype=torch.bool)
    mask[..., :prefix] = True
    for b in range(batch):
        for node in range(nodes):
            if node:
                parent = int(torch.randint(node, (1,), generator=g))
                mask[b, 0, node] = mask[b, 0, parent]
            mask[b, 0, node, prefix + node] = True
    return q, k, v, mask


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [16, 24, 33, 64, 80, 128, 192])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_equals_the_float64_formula(dtype, dim, softcap):
    q, k, v, mask = random_case(dim, batch=2, seed=dim)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    got = attention.attend(q, k, v, mask, scale=0.2, softcap=softcap)
    expected = reference(q, k, v, mask, 0.2, softcap)
    assert got.is_contiguous()
    assert (got.double() - expected).abs().max() < TOLERANCE[dtype]


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("nodes", "prefix"), [(1, 0), (1, 1), (1, 500), (2, 63), (7, 64), (60, 1030), (130, 3)])
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_sizes(dtype, nodes, prefix, kv_heads):
    q, k, v, mask = random_case(32, kv_heads=kv_heads, nodes=nodes, prefix=prefix, seed=nodes)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    got = attention.attend(q, k, v, mask)
    assert (got.double() - reference(q, k, v, mask, 32**-0.5)).abs().max() < TOLERANCE[dtype]


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_row_alone_with_its_keys_moved_together_gives_the_same_bits(dtype, dim, softcap):
    """What speculation needs: a tree's node equals plain decoding of its path."""
    q, k, v, mask = random_case(dim, batch=2, prefix=101, nodes=40, seed=dim)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    together = attention.attend(q, k, v, mask, softcap=softcap, num_threads=2)
    for b in range(2):
        for n in range(40):
            seen = mask[b, 0, n].nonzero()[:, 0]
            compact_k, compact_v = k[b : b + 1, :, seen], v[b : b + 1, :, seen]
            everything = torch.ones(1, 1, 1, len(seen), dtype=torch.bool)
            alone = attention.attend(
                q[b : b + 1, :, n : n + 1], compact_k, compact_v, everything, softcap=softcap, num_threads=1
            )
            assert torch.equal(alone[0, 0], together[b, n]), (b, n)


@needs_kernel
def test_unseen_slots_may_hold_anything_and_lie_anywhere():
    q, k, v, mask = random_case(64, seed=5)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    expected = attention.attend(q, k, v, mask)
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(1))[: k.shape[2]].sort().values
    wide_k, wide_v = (torch.full((1, 2, 300, 64), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    wide_mask = torch.zeros(1, 1, mask.shape[2], 300, dtype=torch.bool)
    wide_k[:, :, slots], wide_v[:, :, slots], wide_mask[..., slots] = k, v, mask
    assert torch.equal(attention.attend(q, wide_k, wide_v, wide_mask), expected)


@needs_kernel
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 39])
def test_the_rows_beside_it_do_not_matter(rows):
    q, k, v, mask = random_case(80, nodes=40, prefix=200, seed=rows)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    all_rows = attention.attend(q, k, v, mask)
    some = attention.attend(q[:, :, :rows], k, v, mask[:, :, :rows])
    assert torch.equal(some, all_rows[:, :rows])
    batch = [x.expand(3, *x.shape[1:]).contiguous() for x in (q, k, v, mask)]
    assert torch.equal(attention.attend(*batch), all_rows.expand(3, *all_rows.shape[1:]))


@needs_kernel
def test_masks_by_head_broadcast_and_strided_inputs():
    q, k, v, mask = random_case(64, batch=2, nodes=5)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    by_head = mask.expand(2, 6, -1, -1).clone()
    by_head[:, ::2, :, 3] = False
    assert (attention.attend(q, k, v, by_head).double() - reference(q, k, v, by_head, 0.125)).abs().max() < 2.0**-7
    assert torch.equal(attention.attend(q, k, v, mask[:1]), attention.attend(q, k, v, mask[:1].expand(2, -1, -1, -1)))
    wide = torch.zeros(2, 2, 200, 64, dtype=torch.bfloat16)  # a cache longer than what is in use
    wide[:, :, : k.shape[2]] = k
    transposed_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    expected = attention.attend(q, k, v, mask)
    assert torch.equal(attention.attend(transposed_q, wide[:, :, : k.shape[2]], v, mask), expected)
    long_mask = torch.cat([mask, torch.ones(2, 1, 5, 9, dtype=torch.bool)], -1)
    assert torch.equal(attention.attend(q, k, v, long_mask), expected)


@needs_kernel
@pytest.mark.parametrize(("rows", "keys"), [(9, 9), (100, 100), (3, 70)])
def test_causal_without_a_mask(rows, keys):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 16, generator=g) for h, n in ((4, rows), (2, keys), (2, keys)))
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)[None, None]
    got = attention.attend(q, k, v, None, causal=True)
    assert torch.equal(got, attention.attend(q, k, v, mask))
    assert (got.double() - reference(q, k, v, mask, 0.25)).abs().max() < 5e-6


@needs_kernel
def test_a_row_that_sees_nothing_gives_zeros():
    q, k, v, mask = random_case(16, nodes=4)
    mask[:, :, 2] = False
    got = attention.attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask)
    assert not got[:, 2].any()
    assert got[:, [0, 1, 3]].all()


@needs_kernel
def test_extreme_scores_stay_finite():
    q, k, v, mask = random_case(64, nodes=3)
    got = attention.attend((q * 200).bfloat16(), (k * 200).bfloat16(), v.bfloat16(), mask)
    expected = reference((q * 200).bfloat16(), (k * 200).bfloat16(), v.bfloat16(), mask, 0.125)
    assert (got.double() - expected).abs().max() < 2e-2


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", ["bool", "by_head", "additive", "causal", "none"])
def test_without_the_kernel_it_is_the_same_function(monkeypatch, softcap, kind):
    monkeypatch.setattr(attention, "_kernel_takes", lambda *_: False)
    q, k, v, mask = random_case(32, batch=2, prefix=7, nodes=5)
    if kind == "by_head":
        mask = mask.expand(2, 6, -1, -1).clone()
        mask[:, ::2, :, 3] = False
    if kind == "causal":
        mask = torch.ones(5, 12, dtype=torch.bool).tril(7)[None, None]
    if kind == "none":
        mask = torch.ones(1, 1, 5, 12, dtype=torch.bool)
    given = {"additive": torch.where(mask, 0.0, -torch.inf), "causal": None, "none": None}.get(kind, mask)
    got = attention.attend(q, k, v, given, softcap=softcap, causal=kind == "causal")
    assert (got.double() - reference(q, k, v, mask, 32**-0.5, softcap)).abs().max() < 5e-6
    assert got.is_contiguous()


def test_the_registered_function_equals_sdpa_in_a_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(50, (2, 11))
    with torch.no_grad():
        expected = model(ids).logits
        padded = torch.ones_like(ids)
        padded[0, :3] = 0
        expected_padded = model(ids, attention_mask=padded).logits
        model.set_attn_implementation(attention.register())
        assert model.config._attn_implementation == "dartspec"
        assert (model(ids).logits - expected).abs().max() < 1e-5
        assert (model(ids, attention_mask=padded).logits - expected_padded)[:, 3:].abs().max() < 1e-5


def test_refuses_what_it_does_not_do():
    q, k, v, mask = random_case(16, nodes=2)
    module = SimpleNamespace(is_causal=True)
    with pytest.raises(DartspecError, match="s_aux"):
        attention.attention_forward(module, q, k, v, mask, s_aux=torch.zeros(6))
    with pytest.raises(DartspecError, match="dropout"):
        attention.attention_forward(module, q, k, v, mask, dropout=0.1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("way", attention.WAYS)
@pytest.mark.parametrize("by_head", [False, True])
def test_every_way_of_torch_gives_the_same(monkeypatch: pytest.MonkeyPatch, way: str, by_head: bool) -> None:
    """On cache views, with boolean and additive masks, one for all heads or one each; none repeats a head."""
    monkeypatch.setattr(attention, "_kernel_takes", lambda *_: False)
    q, k, v, mask = random_case(16, batch=2)
    room = torch.full((2, 4, 2, 120, 16), torch.nan)  # the views of a cache: strided, with other layers between
    room[:, 1, :, : k.shape[2]], room[:, 2, :, : k.shape[2]] = k, v
    k, v = room[:, 1, :, : k.shape[2]], room[:, 2, :, : k.shape[2]]
    if by_head:
        mask = mask.repeat(1, 6, 1, 1)
        mask[:, 3, :, 5:9] = False
    want = reference(q, k, v, mask, 0.2).float()
    assert torch.allclose(attention.attend(q, k, v, mask, scale=0.2, way=way), want, atol=2e-6)
    additive = torch.zeros(mask.shape).masked_fill_(~mask, -1e9)
    assert torch.allclose(attention.attend(q, k, v, additive, scale=0.2, way=way), want, atol=2e-6)
    causal = torch.ones(19, k.shape[2], dtype=torch.bool).tril(k.shape[2] - 19)[None, None]
    want = reference(q, k, v, causal, 0.2).float()
    assert torch.allclose(attention.attend(q, k, v, None, scale=0.2, causal=True, way=way), want, atol=2e-6)


def test_a_model_runs_in_every_way() -> None:
    """Registered under a name of its own; a target's probe then scores a tree with it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import tiny
    from dartspec.target.target import Target

    rows = []
    for way in (None, "gqa", "strides"):
        torch.manual_seed(1)
        config = AutoConfig.for_model("llama", **tiny.COMMON)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register(way)).eval()
        rows.append(Target(model).session(1, 8).prefill(0, [3, 4, 5]).logits)
    assert all(torch.allclose(row, rows[0], atol=1e-5) for row in rows[1:])
    with pytest.raises(DartspecError, match="no way 'fold'"):
        attention.register("fold")
