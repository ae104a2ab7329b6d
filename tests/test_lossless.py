"""Losslessness as an equality: in float32 every drafter writes what plain decoding writes, token for token.

The contract suite: every module in `drafters/` is tested here by its name alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from dartspec import drafters
from dartspec.accounting import Metrics
from dartspec.budget import Fixed
from dartspec.engine import Request, generate
from dartspec.ngram import NgramIndex
from dartspec.target.target import Target
from dartspec.tree import root_only
from dartspec.types import Committed, Drafter, SamplingParams, TokenTree

ARCHITECTURES = [
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "phi3",
    "deepseek_v3",
    "qwen3_moe",
]
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9], list(range(20, 43)), [11, 12] * 6, [60, 3, 60]]
Text = tuple[int, ...]


def target(name: str = "llama", seed: int = 0, **changes: Any) -> Target:
    return Target(tiny.model(name, seed=seed, **changes), name=name)


def run(
    target: Target, drafter: Drafter, requests: Sequence[Request], **options: Any
) -> tuple[list[Text], list[Metrics]]:
    """The new ids of each request, and its metrics."""
    out: list[list[int]] = [[] for _ in requests]
    metrics = [Metrics() for _ in requests]
    for chunk in generate(target, drafter, requests, **options):
        out[chunk.index] += chunk.ids
        metrics[chunk.index] = chunk.metrics
    return [tuple(t) for t in out], metrics


def load(name: str, target: Target, **config: Any) -> Drafter:
    module = drafters.get(name)
    return module.load(module.Config(**config), target)


def plain(target: Target, requests: Sequence[Request]) -> list[Text]:
    """Plain decoding, one request at a time."""
    return [run(target, load("none", target), [r])[0][0] for r in requests]


def requests_for(params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    return [Request(p, params) for p in prompts]


# -- drafters by name ------------------------------------------------------------------------------------------------


def tiny_layer(target: Target) -> dict[str, Any]:
    """The shape of a drafter's layer, for any target."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "draft_vocab_size": 45,
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
    }


def randomised(net: Any, seed: int) -> Any:
    """Random weights; draft ids stand for the even ids."""
    torch.manual_seed(seed)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    net.d2t.copy_(torch.arange(len(net.d2t)))
    return net


def tiny_dart(target: Target) -> Drafter:
    """A DART layer with random weights: its guesses are poor, its hidden states and caches are real."""
    module = drafters.get("dart")
    net = randomised(module.DartNet(module.Config(**tiny_layer(target), d=5, taps=(1, 2, 3))), 3)
    drafter: Drafter = module.DartDrafter(net, target)
    return drafter


def tiny_small_model(target: Target) -> Drafter:
    """Another model with random weights over the same ids; its cache and its tree are real."""
    module = drafters.get("small_model")
    model = Target(tiny.model("llama", seed=1, vocab_size=target.vocab_size), name="small")
    drafter: Drafter = module.SmallModel(module.Config("tiny", length=3, top_k=2), model, target)
    return drafter


def tiny_eagle3(target: Target) -> Drafter:
    """One layer with random weights, drafting on from its own outputs."""
    module = drafters.get("eagle3")
    net = randomised(module.Eagle3Net(module.Config(**tiny_layer(target), d=4, taps=(1, 2, 3), top_k=3)), 4)
    drafter: Drafter = module.Eagle3Drafter(net, target)
    return drafter


def tiny_index(target: Target) -> Drafter:
    """Drafts from an index of texts like the prompts."""
    texts = [[*p, *p[::-1]] for p in PROMPTS]
    about: dict[str, Any] = {"vocab_size": target.vocab_size, "fingerprint": "", "name": "tiny", "description": "tiny"}
    module = drafters.get("index")
    drafter: Drafter = module.load(module.Config(), target, index=NgramIndex.build(texts, **about))
    return drafter


def tiny_mix(target: Target) -> Drafter:
    """The default parts: a random DART and copies from the text."""
    module = drafters.get("mix")
    drafter: Drafter = module.load(module.Config(), target, parts=[tiny_dart(target), load("prompt_lookup", target)])
    return drafter


def tiny_dflash(target: Target) -> Drafter:
    """Two layers with random weights, over a context of real features."""
    module = drafters.get("dflash")
    config = module.Config(**tiny_layer(target), d=4, taps=(1, 2, 3), num_layers=2, head_norm=True)
    drafter: Drafter = module.DFlashDrafter(randomised(module.DFlashNet(config), 5), target)
    return drafter


def tiny_medusa(target: Target) -> Drafter:
    """Random heads on the target's last state."""
    module = drafters.get("medusa")
    shape = {k: v for k, v in tiny_layer(target).items() if k in module.Config.__dataclass_fields__}
    net = randomised(module.MedusaNet(module.Config(**shape, d=3, taps=(-1,))), 6)
    drafter: Drafter = module.MedusaDrafter(net, target)
    return drafter


def tiny_hydra(target: Target) -> Drafter:
    """Random heads that see the path, and a layer over the last states in front."""
    module = drafters.get("hydra")
    config = module.Config(**tiny_layer(target), d=3, taps=(-1,), num_blocks=2, prefix=True, top_k=3)
    drafter: Drafter = module.HydraDrafter(randomised(module.HydraNet(config), 7), target)
    return drafter


# methods with weights or parts: how to make a tiny one
TINY = {
    "dflash": tiny_dflash,
    "hydra": tiny_hydra,
    "medusa": tiny_medusa,
    "dart": tiny_dart,
    "eagle3": tiny_eagle3,
    "index": tiny_index,
    "mix": tiny_mix,
    "small_model": tiny_small_model,
}


def make(name: str, target: Target, texts: Sequence[Text] = (), rate: float = 1.0) -> Drafter:
    """A drafter of this name for the contract suite; `texts` (prompt and answer) are for the oracle."""
    if name in TINY:
        return TINY[name](target)
    if name == "oracle":
        return load(name, target, texts=tuple(texts), rate=rate, length=5, branches=2)
    try:
        return load(name, target)
    except TypeError:
        pytest.fail(f"drafter {name} has a Config without defaults: add how to make a tiny one to TINY")


def whole(requests: Sequence[Request], answers: Sequence[Text]) -> list[Text]:
    return [(*r.prompt, *a) for r, a in zip(requests, answers, strict=True)]


GREEDY = SamplingParams(max_tokens=24)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_is_plain_decodings(name: str) -> None:
    """Every drafter, each architecture; the texts cross a window's edge (windows are 8)."""
    t = target(name)
    requests = requests_for(GREEDY, PROMPTS[:3])
    want = plain(t, requests)
    assert all(len(w) == 24 for w in want)
    for method in drafters.names():
        for rate in (0.0, 0.5, 1.0) if method == "oracle" else (1.0,):
            drafter = make(method, t, whole(requests, want), rate)
            got, metrics = run(t, drafter, requests, batch=2, num_nodes=12)
            assert got == want, (name, method, rate)
            merged = Metrics.merged(metrics)
            if method == "oracle":  # nothing, some, all: the oracle makes what is accepted certain
                assert (merged.A == 0) == (rate == 0)
                assert (merged.A > 2) == (rate == 1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "deepseek_v3"])
def test_plain_decoding_is_transformers_greedy(name: str) -> None:
    """The reference itself is checked: `none` writes what `model.generate(do_sample=False)` writes."""
    t = target(name)
    for prompt in PROMPTS[:3]:
        ids = torch.tensor([prompt])
        theirs = t.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert plain(t, [Request(prompt, SamplingParams(max_tokens=16))])[0] == tuple(theirs[0, len(prompt) :].tolist())


# -- sampling --------------------------------------------------------------------------------------------------------


def no_repeat(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A user's processor that reads the history: no token twice in a row, and every third one is even."""
    out = logits.clone()
    out[0, ids[0, -1]] = -torch.inf
    if ids.shape[1] % 3 == 0:
        out[0, 1::2] = -torch.inf
    return out


SAMPLED = {
    "t07": SamplingParams(temperature=0.7, seed=11),
    "t1": SamplingParams(temperature=1.0, seed=12),
    "t15": SamplingParams(temperature=1.5, seed=13),
    "filters": SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02, seed=14),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, seed=15
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={4: 3.0, 8: 3.0, 30: -100.0}, seed=16),
    "processors": SamplingParams(temperature=1.0, top_p=0.95, processors=(no_repeat,), seed=17),
    "greedy penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5),
    "greedy processors": SamplingParams(processors=(no_repeat,), logit_bias={6: 2.0}),
}


@pytest.mark.parametrize("params", SAMPLED.values(), ids=SAMPLED)
def test_same_seed_same_text_for_every_drafter(params: SamplingParams) -> None:
    """Alone, and in batches of unequal prompts with sequences joining and leaving; whatever the tree's size."""
    t = target("llama")
    lengths = [20, 7, 16, 3, 12]  # they leave at different rounds, others join in their rows
    requests = [
        Request(p, SamplingParams(**{**vars(params), "max_tokens": n}), sample=i)
        for i, (p, n) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]
    want = plain(t, requests)
    assert len(set(want)) == len(want)
    texts = whole(requests, want)
    for method in drafters.names():
        for batch, nodes in ((1, 16), (3, 5)):
            got, _ = run(t, make(method, t, texts, 0.7), requests, batch=batch, num_nodes=nodes)
            assert got == want, (method, batch, nodes)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt2", "qwen3_moe"])
def test_same_seed_same_text_on_other_architectures(name: str) -> None:
    t = target(name)
    requests = requests_for(SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=5, max_tokens=16))
    want = plain(t, requests)
    texts = whole(requests, want)
    for method in ("oracle", "dart"):
        assert run(t, make(method, t, texts, 0.7), requests, batch=2, num_nodes=9)[0] == want


def test_neighbours_and_their_order_change_nothing() -> None:
    """Case 5: a request's seed holds in a batch, whoever sits beside it."""
    t = target("llama")
    requests = [
        Request(p, SamplingParams(temperature=1.0, seed=40 + i, max_tokens=9 + 4 * i)) for i, p in enumerate(PROMPTS)
    ]
    want = plain(t, requests)
    texts = whole(requests, want)
    for order in ([4, 2, 0, 1, 3], [3, 1, 4], [2, 2, 2]):
        for rate in (0.0, 0.6, 1.0):
            got, _ = run(t, make("oracle", t, texts, rate), [requests[i] for i in order], batch=2, num_nodes=7)
            assert got == [want[i] for i in order]


def test_samples_of_one_prompt_differ_and_repeat() -> None:
    t = target("llama")
    requests = [Request(PROMPTS[0], SamplingParams(temperature=1.0, seed=3, max_tokens=12), sample=k) for k in range(4)]
    first, again = (run(t, make(m, t), requests, batch=4)[0] for m in ("none", "dart"))
    assert first == again
    assert len(set(first)) == 4


def test_the_number_of_nodes_may_follow_the_batch() -> None:
    t = target("llama")
    requests = requests_for(SamplingParams(temperature=0.8, seed=2, max_tokens=14))
    want = plain(t, requests)
    drafter = make("oracle", t, whole(requests, want), 0.8)

    class Shy(Fixed):
        def ask(self, slots: Sequence[int], room: Sequence[int]) -> list[int]:
            return list(room) if len(slots) < 2 else [0] * len(slots)

    assert run(t, drafter, requests, batch=3, num_nodes=Shy(12))[0] == want


# -- arbitrary trees -------------------------------------------------------------------------------------------------


class Scripted:
    """Answers each round with the next tree of a list, hung under whatever the root is; root-only afterwards."""

    taps: tuple[int, ...] = ()

    def __init__(self, trees: Sequence[tuple[list[int], list[int]]]) -> None:
        self._trees = list(trees)

    def reset(self, slots: Sequence[int]) -> None:
        pass

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        out = []
        for c in new:
            root = int(c.history[-1])
            tokens, parents = self._trees.pop(0) if self._trees and budget[0] else ([], [])
            if tokens:
                n = len(tokens) + 1
                out.append(
                    TokenTree(
                        torch.tensor([root, *tokens], dtype=torch.int32),
                        torch.tensor([-1, *parents], dtype=torch.int32),
                        torch.zeros(n),
                    )
                )
            else:
                out.append(root_only(root))
        return out


@st.composite
def scripts(draw: st.DrawFn, answer: Text) -> list[tuple[list[int], list[int]]]:
    """Trees for several rounds: any shape; tokens likely from the answer, so that walks go deep, or wrong."""
    token = st.one_of(st.sampled_from(answer), st.integers(0, tiny.VOCAB - 1))
    made = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(0, 10))
        made.append(([draw(token) for _ in range(n)], [draw(st.integers(0, i)) for i in range(n)]))
    return made


RANDOM_TREE_PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=1.0, top_k=9, repetition_penalty=1.2, seed=8),
]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), which=st.sampled_from([0, 1]), name=st.sampled_from(["llama", "gemma3_text"]))
def test_no_tree_changes_the_text(data: st.DataObject, which: int, name: str) -> None:
    request = Request([9, 8, 7], RANDOM_TREE_PARAMS[which])
    t = cached_target(name)
    want = cached_plain(name, which)
    got, metrics = run(t, Scripted(data.draw(scripts(want))), [request], num_nodes=10)
    assert got == [want]
    assert sum(r.num_committed for r in metrics[0].rounds) == len(want) - 1


@cache
def cached_target(name: str) -> Target:
    return target(name)


@cache
def cached_plain(name: str, which: int) -> Text:
    return plain(cached_target(name), [Request([9, 8, 7], RANDOM_TREE_PARAMS[which])])[0]
