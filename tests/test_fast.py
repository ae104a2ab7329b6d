"""`accelerate`: tiny random models of many kinds stay the same model, become row-invariant, and can be put back."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from dartspec import _core
from dartspec.target import attention, fast

needs_kernel = pytest.mark.skipif(not _core.kernels_supported(), reason="this CPU has no AVX512_BF16")

COMMON: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "attn_implementation": "dartspec",
}
# config class -> (changes to COMMON, attentions fused, MLPs fused, layers fused); a layer needs both and two norms
MODELS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "LlamaConfig": ({}, 3, 3, 3),
    "MistralConfig": ({"sliding_window": None}, 3, 3, 3),
    "Qwen2Config": ({}, 3, 3, 3),
    "Qwen3Config": ({"head_dim": 32}, 3, 3, 3),
    "GemmaConfig": ({"head_dim": 32}, 3, 3, 3),
    "Gemma2Config": ({"head_dim": 32, "query_pre_attn_scalar": 32}, 3, 3, 0),
    "Gemma3TextConfig": ({"head_dim": 32, "query_pre_attn_scalar": 32}, 3, 3, 0),
    "Olmo2Config": ({}, 0, 3, 0),
    "Phi3Config": ({"pad_token_id": 0}, 0, 0, 0),
    "GraniteConfig": ({"residual_multiplier": 0.5}, 3, 3, 0),
    "StableLmConfig": ({}, 3, 3, 0),
    "Qwen3MoeConfig": (
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        3,
        0,
        0,
    ),
}


def tiny(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    attention.register()
    config = getattr(transformers, name)(**{**COMMON, **MODELS.get(name, ({},))[0], **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases that matter
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


def ids(length: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(83, (1, length), generator=torch.Generator().manual_seed(seed))


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


@needs_kernel
@pytest.mark.parametrize("name", MODELS)
def test_the_model_stays_the_same_and_becomes_row_invariant(name):
    _, attentions, mlps, layers = MODELS[name]
    model, other = tiny(name), ids(40, seed=2)
    exact = tiny(name).float()
    expected, exact_logits = logits(model, other), logits(exact, other)
    linears = sum(type(m) is nn.Linear for m in model.modules())
    report = fast.accelerate(model, ids(), num_threads=1)
    assert report.used, report.reason
    assert (report.num_attentions, report.num_mlps, report.num_layers) == (attentions, mlps, layers)
    assert report.num_linears == linears
    assert not any(type(m) is nn.Linear for m in model.modules())
    assert report.row_invariant
    got = logits(model, other)
    # no further from the float32 model than bf16 is anyway
    error, usual = (fast._relative_error(x, exact_logits) for x in (got, expected))
    assert error < 1.5 * usual + 1e-3
    for n in (1, 7, 33):
        assert torch.equal(logits(model, other[:, :n]), got[:, :n])
    assert torch.equal(
        logits(model, torch.cat([other, ids(40, seed=3)])), torch.cat([got, logits(model, ids(40, seed=3))])
    )


@needs_kernel
@pytest.mark.parametrize("name", ["LlamaConfig", "Gemma2Config", "Qwen3MoeConfig"])
def test_threads_do_not_matter(name):
    one, two = tiny(name), tiny(name)
    assert fast.accelerate(one, ids(), num_threads=1).used
    assert fast.accelerate(two, ids(), num_threads=2).used
    assert torch.equal(logits(one, ids(60)), logits(two, ids(60)))


def tree(length: int) -> tuple[Tensor, Tensor, Tensor, list[list[int]]]:
    """A tree after `length` tokens: tokens (1, 7), position ids, mask (1, 1, 7, length + 7), the path to each node."""
    parents = [-1, 0, 0, 1, 1, 2, 4]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append(([] if parent < 0 else paths[parent]) + [node])
    mask = torch.zeros(1, 1, 7, length + 7, dtype=torch.bool)
    mask[..., :length] = True
    for node, path in enumerate(paths):
        mask[0, 0, node, [length + i for i in path]] = True
    positions = torch.tensor([[length + len(path) - 1 for path in paths]])
    return ids(7, seed=9), positions, mask, paths


@needs_kernel
@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config", "GemmaConfig", "GraniteConfig"])
def test_a_tree_node_has_the_bits_of_plain_decoding(name):
    """The promise that speculation stands on, in bf16: every node of a tree in one forward against its path, token by
    token, with a growing cache."""
    model = tiny(name)
    assert fast.accelerate(model, ids(), num_threads=1).used
    prompt = ids(70, seed=4)
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def prefilled() -> Any:
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(input_ids=prompt, **{cache_name: cache})
        return cache

    tokens, positions, mask, paths = tree(70)
    with torch.no_grad():
        together = model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, **{cache_name: prefilled()}
        ).logits[0]
        for node, path in enumerate(paths):
            cache = prefilled()
            for i in path:
                alone = model(input_ids=tokens[:, i : i + 1], **{cache_name: cache}).logits[0, -1]
            assert torch.equal(alone, together[node]), node


@needs_kernel
def test_siblings_are_merged_and_tied_weights_kept():
    model = tiny("LlamaConfig", tie_word_embeddings=True)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert embedding.data_ptr() == head.data_ptr()
    before = embedding.clone()
    report = fast.accelerate(model, ids(), num_threads=1)
    assert (report.num_linears, report.num_products, report.num_norms) == (3 * 7 + 1, 3 * 4 + 1, 7)
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert torch.equal(model.lm_head.weight, before)  # unpacked


@needs_kernel
def test_without_our_attention_siblings_share_one_product():
    model, plain = (tiny("LlamaConfig", attn_implementation="sdpa") for _ in range(2))
    report = fast.accelerate(model, ids(), num_threads=1)
    assert report.used
    assert report.num_attentions == 0
    assert report.num_products == 3 * 4 + 1  # q k v together, o, gate and up together, down; the head
    q, k = model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj
    assert isinstance(q, fast.PackedLinear)
    x = torch.randn(1, 3, 64).bfloat16()
    together = q(x), k(x)
    assert torch.equal(q.weight, plain.model.layers[0].self_attn.q_proj.weight)
    assert torch.equal(together[0], q(x.clone()))
    assert torch.equal(together[1], k(x.clone()))


@needs_kernel
def test_freed_weights_are_gone_and_undo_brings_them_back(monkeypatch):
    model = tiny("Qwen2Config")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules = [type(m) for m in model.modules()]
    expected = logits(model, ids(30))
    monkeypatch.setattr(fast, "_MODEL_TOLERANCE", -1.0)
    report = fast.accelerate(model, ids(), num_threads=1)
    assert not report.used
    assert "differ" in report.reason
    assert [type(m) for m in model.modules()] == modules
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model, ids(30)), expected)


@needs_kernel
@pytest.mark.parametrize("fault", [RuntimeError("no such shape"), KeyboardInterrupt()])
def test_a_failing_forward_puts_everything_back(monkeypatch, fault):
    model = tiny("LlamaConfig")
    modules, expected = [type(m) for m in model.modules()], logits(model, ids(30))

    def fail(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(fast.FusedLayer, "forward", fail)
    if isinstance(fault, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            fast.accelerate(model, ids(), num_threads=1)
    else:
        report = fast.accelerate(model, ids(), num_threads=1)
        assert not report.used
        assert "no such shape" in report.reason
    assert [type(m) for m in model.modules()] == modules
    assert torch.equal(logits(model, ids(30)), expected)


@needs_kernel
def test_a_module_that_only_looks_like_a_gated_mlp_is_left_alone():
    model = tiny("LlamaConfig")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()
    expected = logits(model, ids(30))
    report = fast.accelerate(model, ids(), num_threads=1)
    assert report.used
    assert report.num_mlps == report.num_layers == 0
    assert fast._relative_error(logits(model, ids(30)), expected) < 0.03


@needs_kernel
def test_modules_with_hooks_are_left_alone():
    model = tiny("LlamaConfig")
    calls: list[int] = []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    report = fast.accelerate(model, ids(), num_threads=1)
    assert report.num_layers == 2
    calls.clear()
    logits(model, ids())
    assert calls == [1]


@needs_kernel
def test_layers_keep_their_attributes_and_can_be_hooked():
    model = tiny("Qwen3Config")
    assert fast.accelerate(model, ids(), num_threads=1).num_layers == 3
    layer = model.model.layers[0]
    assert layer.hidden_size == 64
    assert isinstance(layer.self_attn, fast.FusedAttention)
    with pytest.raises(AttributeError):
        _ = layer.nothing_of_the_kind
    outputs: list[Tensor] = []
    model.model.layers[2].register_forward_hook(lambda _m, _a, out: outputs.append(out))
    logits(model, ids())
    assert outputs[0].shape == (1, 11, 64)


class _Session:
    """Trees of two sequences scored by a `Target`, hidden states of every layer tapped."""

    def __init__(self, model: nn.Module) -> None:
        from dartspec.target.target import Target
        from dartspec.tree import merge_paths

        target = Target(model)
        self.session = target.session(2, 60, tuple(range(1, target.num_layers + 1)))
        for slot, length in ((0, 9), (1, 14)):
            self.session.prefill(slot, list(range(3, 3 + length)))
        self.trees = [merge_paths(5, [[6, 7], [6, 8, 9]], 9), merge_paths(4, [[10], [11, 12]], 9)]

    def scores(self) -> list[Tensor]:
        made = self.session.score([0, 1], self.trees)
        self.session.keep([0, 1], [[0, 1], [0]])
        return [t for s in made for t in (s.logits, s.features)]


@needs_kernel
@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config", "GemmaConfig"])
def test_one_call_for_all_layers_gives_the_bits_of_one_call_each(name):
    got = []
    for stacked in (True, False):
        model = tiny(name)
        fast.accelerate(model, ids(), 2)
        layers = [m for m in model.modules() if isinstance(m, fast.FusedLayer)]
        assert all(layer.stack is layers[0].stack is not None for layer in layers)
        if not stacked:
            for layer in layers:
                layer.stack = None
        session = _Session(model)
        got.append([*session.scores(), *session.scores()])
        assert all((layer.stack is not None) == stacked for layer in layers)
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


@needs_kernel
@pytest.mark.parametrize(("name", "goes"), [("LlamaConfig", True), ("Qwen3Config", True), ("GraniteConfig", False)])
def test_a_forward_without_the_models_own_code_gives_its_bits(name, goes):
    from dartspec.target.target import FINAL, Target

    got = []
    for short in (True, False):
        model = tiny(name)
        fast.accelerate(model, ids(), 1)
        target = Target(model)
        assert (target.straight is not None) == goes
        if not short:
            target.straight = None
        session = target.session(2, 40, (0, 1, 3, FINAL))
        read = [session.prefill(slot, list(range(3, 12 + slot))) for slot in (0, 1)]
        from dartspec.tree import merge_paths

        trees = [merge_paths(5, [[6, 7], [6, 8, 9]], 9), merge_paths(4, [[10], [11, 12]], 9)]
        got.append([t for s in (*read, *session.score([0, 1], trees)) for t in (s.logits, s.features)])
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


@needs_kernel
def test_a_hook_on_any_part_brings_the_models_own_forward_back():
    from dartspec.target.target import Target

    model = tiny("LlamaConfig")
    fast.accelerate(model, ids(), 1)
    target = Target(model)
    assert target.straight is not None
    heard = []
    model.model.norm.register_forward_hook(lambda *_: heard.append(1))
    session = target.session(1, 40)
    session.prefill(0, [3, 4, 5])
    assert heard


@needs_kernel
def test_a_hook_that_changes_a_layers_output_is_heard():
    def double(_module, _args, out):
        return out * 2

    got = []
    for stacked in (True, False):
        model = tiny("LlamaConfig")
        fast.accelerate(model, ids(), 1)
        layers = [m for m in model.modules() if isinstance(m, fast.FusedLayer)]
        layers[1].register_forward_hook(double)
        if not stacked:
            for layer in layers:
                layer.stack = None
        got.append(_Session(model).scores())
        assert layers[0].stack is None
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


def test_says_why_it_is_not_used(monkeypatch):
    assert "float32, not bfloat16" in fast.accelerate(tiny("LlamaConfig").float(), ids(), 1).reason or (
        not _core.kernels_supported()
    )
    assert not fast.accelerate(tiny("LlamaConfig").float(), ids(), 1).used
    monkeypatch.setattr(fast._core, "kernels_supported", lambda: False)
    model = tiny("LlamaConfig")
    report = fast.accelerate(model, ids(), num_threads=1)
    assert not report.used
    assert "AVX512_BF16" in report.reason
    assert sum(type(m) is nn.Linear for m in model.modules()) == 22


@needs_kernel
def test_training_mode_and_models_of_other_layers_are_refused():
    assert "training" in fast.accelerate(tiny("LlamaConfig").train(), ids(), 1).reason
    assert "no plain linear" in fast.accelerate(nn.Sequential(nn.LayerNorm(3)).eval(), ids(), 1).reason


@needs_kernel
def test_gpt2_keeps_its_layers_and_gets_a_packed_head():
    attention.register()
    config = transformers.GPT2Config(vocab_size=83, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    config._attn_implementation = "dartspec"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    expected = logits(model, ids(20))
    report = fast.accelerate(model, ids(), num_threads=1)
    assert report.used
    assert (report.num_linears, report.num_attentions, report.num_norms) == (1, 0, 0)
    assert fast._relative_error(logits(model, ids(20)), expected) < 0.02


@needs_kernel
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_that_begin_alike_are_read_once_and_answered_as_alone(temperature, monkeypatch):
    from dartspec.drafters import none, prompt_lookup
    from dartspec.engine import Request, generate
    from dartspec.target.target import Session, Target
    from dartspec.types import SamplingParams

    model = tiny("LlamaConfig")
    fast.accelerate(model, ids(), 1)
    target = Target(model)
    shared = list(range(3, 23))
    prompts = [[*shared, 30 + i, 40 - i] for i in range(4)] + [shared[:20], [9, *shared], shared[:5]]
    requests = [
        Request(p, SamplingParams(temperature=temperature, seed=i, max_tokens=8, ignore_eos=True))
        for i, p in enumerate(prompts)
    ]
    read = []
    extend = Session.extend
    monkeypatch.setattr(
        Session, "extend", lambda s, slot, new, *a, **k: read.append(len(new)) or extend(s, slot, new, *a, **k)
    )

    def answers(batch, drafter):
        got = {}
        for chunk in generate(target, drafter, requests, batch=batch, num_nodes=4):
            got.setdefault(chunk.index, []).extend(chunk.ids)
        return got

    alone = answers(1, none.Plain())
    assert read == [len(p) for p in prompts]
    read.clear()
    assert answers(7, none.Plain()) == alone
    assert read == [22, 2, 2, 2, 1, 21, 5]
    assert answers(7, prompt_lookup.load(prompt_lookup.Config(), target)) == alone
