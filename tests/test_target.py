"""The target's contract, over every architecture: a tree's node scores as a plain forward over its path does."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from dartspec.errors import DartspecError
from dartspec.target.target import FINAL, Target
from dartspec.types import Scores, TokenTree

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
TAPS = (0, 1, 3, FINAL)
TOLERANCE = 1e-5  # relative to the largest value of the row, float32


def tree(seed: int, n: int) -> TokenTree:
    tokens = torch.tensor([(9 * seed + 7 * j + 3) % 90 for j in range(n)], dtype=torch.int32)
    return TokenTree(tokens, torch.tensor(PARENTS[:n], dtype=torch.int32), torch.zeros(n))


def path_to(t: TokenTree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(int(t.tokens[node]))
        node = int(t.parents[node])
    return path[::-1]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@torch.inference_mode()
def check_round(model, texts, trees, scores) -> None:
    for text, t, s in zip(texts, trees, scores, strict=True):
        for node in range(len(t.tokens)):
            plain = model(torch.tensor([text + path_to(t, node)]), output_hidden_states=True)
            assert relative(s.logits[node], plain.logits[0, -1]) <= TOLERANCE
            for i, tap in enumerate(TAPS):
                assert relative(s.features[node, i], plain.hidden_states[tap][0, -1]) <= TOLERANCE


@pytest.mark.parametrize("name", tiny.SERVED)
def test_every_node_equals_a_plain_forward(name: str) -> None:
    """In a ragged batch, after keep, after a sequence left, and across a window's edge (windows are 8 here)."""
    if not tiny.has(name):
        pytest.skip(f"this transformers does not know {name}")
    model = tiny.model(name)
    session = Target(model, name=name).session(3, 64, TAPS)
    texts = [list(range(3, 3 + n)) for n in (5, 13, 20)]
    for slot, text in enumerate(texts):
        scores = session.prefill(slot, text)
        assert scores.logits.shape[0] == 1
        assert scores.features.shape[:2] == (len(text), len(TAPS))
    trees = [tree(slot, 8 - slot) for slot in range(3)]
    for paths in ([0, 1, 4], [0, 2, 5], [0, 1, 3]), ([0], [0, 1], [0, 2]):
        check_round(model, texts, trees, session.score([0, 1, 2], trees))
        session.keep([0, 1, 2], paths)
        for text, t, path in zip(texts, trees, paths, strict=True):
            text += t.tokens[path].tolist()
    session.free(0)  # the last row moves into its place
    check_round(model, texts[1:], trees[1:], session.score([1, 2], trees[1:]))
    session.prefill(7, [5, 6, 7])
    check_round(model, [[5, 6, 7], texts[2]], trees[1:], session.score([7, 2], trees[1:]))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "llama4_text", "gpt2"])
def test_a_tree_may_grow_level_by_level(name: str) -> None:
    """Only the new rows run, in a ragged batch, and they score as all at once; more room may be made at any time."""
    model = tiny.model(name)
    session = Target(model, name=name).session(1, 6, TAPS)
    texts = [list(range(3, 3 + n)) for n in (5, 13)]
    for slot, text in enumerate(texts):
        session.reserve(slot + 1, len(text) + 8)
        session.prefill(slot, text)
    trees = [tree(slot, 8 - slot) for slot in range(2)]
    grown: list[list[Scores]] = [[], []]
    done = [0, 0]
    for sizes in ([1, 2], [5, 3], [8, 7]):
        parts = [TokenTree(*(part[:n] for part in t)) for t, n in zip(trees, sizes, strict=True)]
        for one, s in zip(grown, session.score([0, 1], parts, done), strict=True):
            one.append(s)
        done = sizes
    joined = [Scores(*(torch.cat(part) for part in zip(*one, strict=True))) for one in grown]
    check_round(model, texts, trees, joined)
    session.reserve(2, 40)
    session.keep([0, 1], [[0, 1, 4], [0, 2, 5]])
    for text, t, path in zip(texts, trees, ([0, 1, 4], [0, 2, 5]), strict=True):
        text += t.tokens[path].tolist()
    check_round(model, texts, trees, session.score([0, 1], trees))


def test_a_long_prompt_in_chunks_equals_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dartspec.target.target.PREFILL_CHUNK", 7)
    model = tiny.model("gemma3_text")
    text = [(5 * i) % 90 + 3 for i in range(40)]
    scores = Target(model).session(1, 64, TAPS).prefill(0, text)
    with torch.inference_mode():
        plain = model(torch.tensor([text]), output_hidden_states=True)
    assert relative(scores.logits[0], plain.logits[0, -1]) <= TOLERANCE
    for i, tap in enumerate(TAPS):
        assert relative(scores.features[:, i], plain.hidden_states[tap][0]) <= TOLERANCE


def test_hooks_do_not_outlive_a_forward() -> None:
    model = tiny.model("llama", seed=9)  # its own: transformers leaves hooks on a model asked for hidden states
    session = Target(model).session(1, 32, TAPS)
    session.prefill(0, [3, 4, 5])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def refused(name: str, **changes: object) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**tiny.COMMON, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(DartspecError) as error:
        Target(model, name=name)
    return str(error.value)


def test_recurrent_state_is_refused() -> None:
    assert "linear_attention" in refused(
        "qwen3_next",
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    assert "token tree" in refused("mamba")


def test_positions_counted_by_the_model_itself_are_refused() -> None:
    """Bloom's ALiBi takes distances from the mask's shape: a tree's siblings would be far apart."""
    assert "token trees" in refused("bloom", n_head=4, n_layer=4)


def test_an_ignored_mask_is_noticed() -> None:
    """Negative control: an attention that drops the mask must not pass the probe (case 13)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def deaf(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, is_causal=True, **kwargs)

    AttentionInterface.register("deaf", deaf)
    AttentionMaskInterface.register("deaf", sdpa_mask)
    config = AutoConfig.for_model("llama", **tiny.COMMON)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="deaf")
    with pytest.raises(DartspecError, match="ignored the tree mask"):
        Target(model)


def test_flash_attention_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **tiny.COMMON))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(DartspecError, match="flash_attention_2"):
        Target(model)


def test_a_sequence_beyond_its_capacity_is_refused() -> None:
    session = Target(tiny.model("llama")).session(1, 8)
    with pytest.raises(DartspecError, match="opened with 8"):
        session.prefill(0, list(range(3, 12)))
