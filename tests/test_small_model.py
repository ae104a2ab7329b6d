"""A smaller model as drafter: what it proposes is what it would write itself, whatever was accepted before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny
from dartspec.accounting import Metrics
from dartspec.drafters import none, small_model
from dartspec.drafters.small_model import Config, SmallModel, Translator
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.sampling import Sampler
from dartspec.target.target import Target
from dartspec.text import Text
from dartspec.tree import check
from dartspec.types import Committed, Drafter, SamplingParams, TokenTree

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 11], list(range(20, 43))]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"length": 4},
    "dynamic": {"length": 4, "top_k": 3, "beam": 2},
    "static": {"widths": (3, 2, 1)},
}


def target(**changes: Any) -> Target:
    return Target(tiny.model("llama", **changes), name="target")


def small(view: Target, model: Target, **shape: Any) -> SmallModel:
    return SmallModel(Config("tiny", **shape), model, view)


def run(t: Target, drafter: Drafter, requests: Sequence[Request], **options: Any) -> tuple[list[list[int]], Metrics]:
    out: list[list[int]] = [[] for _ in requests]
    metrics: dict[int, Metrics] = {}
    for chunk in generate(t, drafter, requests, **options):
        out[chunk.index] += chunk.ids
        metrics[chunk.index] = chunk.metrics
    return out, Metrics.merged(list(metrics.values()))


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        out.append((*out[parent], token) if parent >= 0 else ())
    return out[1:]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_as_its_own_small_model_is_accepted_whole(shape: dict[str, Any], temperature: float) -> None:
    """Gumbel coupling: with equal logits the draws are equal, so every level is accepted, when sampling too."""
    t = target()
    requests = [Request(p, SamplingParams(temperature=temperature, top_p=0.95, seed=4, max_tokens=21)) for p in PROMPTS]
    want, _ = run(t, none.Plain(), requests)
    got, metrics = run(t, small(t, t, **shape), requests, batch=2, num_nodes=30)
    assert got == want
    levels = Config("tiny", **shape).levels
    if "beam" in shape:  # a level's best nodes may leave out the path of picks
        assert metrics.A > 1.5
    else:
        wanted = sum(-(-(len(w) - 1) // (levels + 1)) for w in want)
        assert len(metrics.rounds) == wanted  # each round but the last of a text commits levels + 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_another_model_changes_no_text_and_its_drafts_are_its_own(shape: dict[str, Any], temperature: float) -> None:
    """The cache that grows, keeps and is cut drafts what a fresh one does; sequences join and leave."""
    t, m = target(), target(seed=1, num_hidden_layers=2)
    drafter = small(t, m, **shape)

    class Fresh:
        """Compares each proposal with that of a drafter which has never seen the sequence."""

        taps: tuple[int, ...] = ()
        asked = 0

        def reset(self, slots: Sequence[int]) -> None:
            drafter.reset(slots)

        def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
            made = drafter.propose(new, budget)
            for one, size, tree in zip(new, budget, made, strict=True):
                check(tree)
                (again,) = small(t, m, **shape).propose([one], [size])
                assert set(paths(tree)) == set(paths(again))
                self.asked += 1
            return made

    fresh = Fresh()
    requests = [
        Request(p, SamplingParams(temperature=temperature, seed=2, max_tokens=n))
        for p, n in zip([*PROMPTS, [3, 4]], (12, 5, 9, 14), strict=True)
    ]
    want, _ = run(t, none.Plain(), requests)
    assert run(t, fresh, requests, batch=2, num_nodes=9)[0] == want
    assert fresh.asked > 15


def test_a_chain_is_the_small_models_own_greedy_text() -> None:
    t, m = target(), target(seed=1)
    ids = [5, 6, 7, 8, 5]
    (tree,) = small(t, m, length=6).propose([Committed(0, torch.tensor(ids), 4, None)], [10])
    text = list(ids)
    with torch.inference_mode():
        for _ in range(6):
            text.append(int(m.model(torch.tensor([text])).logits[0, -1].argmax()))
    assert tree.tokens.tolist() == text[4:]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_dynamic_tree_holds_the_best_nodes_of_all_that_a_full_search_has(temperature: float) -> None:
    """Against exhaustive enumeration with a beam as wide as the tree: pruning by budget loses nothing."""
    t, m = target(), target(seed=1)
    ids = [5, 6, 7, 8, 5]
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=30, seed=9), t.num_tokens, 4)
    found: dict[tuple[int, ...], float] = {}
    with torch.inference_mode():
        level: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        for _ in range(3):
            after = []
            for path, score in level:
                row = m.model(torch.tensor([[*ids, *path]])).logits[0, -1]
                best = sampler.perturbed(row, ids, path).log_softmax(-1).topk(3)
                after += [
                    ((*path, v), score + s) for s, v in zip(best.values.tolist(), best.indices.tolist(), strict=True)
                ]
            found.update(after)
            level = after
    one = Committed(0, torch.tensor(ids), 4, None, perturb=sampler.perturbed)
    for size in (1, 4, 10, 25):
        (tree,) = small(t, m, length=3, top_k=3, beam=99).propose([one], [size])
        assert set(paths(tree)) == set(sorted(found, key=lambda p: -found[p])[:size])


def test_nothing_is_drafted_behind_an_end_of_text_or_beyond_the_small_models_context() -> None:
    t = target()
    m = Target(tiny.model("llama", seed=1), eos_token_ids=frozenset(range(0, 97, 2)))
    (tree,) = small(t, m, length=6, top_k=4).propose([Committed(0, torch.tensor([5, 7, 9]), 2, None)], [40])
    inner = {int(i) for i in tree.parents if i > 0}
    assert all(int(tree.tokens[i]) % 2 for i in inner)
    short = target(seed=1, max_position_embeddings=16)
    request = Request([5, 6, 7], SamplingParams(max_tokens=30))
    want, _ = run(t, none.Plain(), [request])
    got, metrics = run(t, small(t, short, length=4), [request])
    assert got == want
    assert metrics.rounds[0].num_drafted > 0
    assert metrics.rounds[-2].num_drafted == 0


def test_a_drafter_left_behind_catches_up() -> None:
    """Rounds without budget leave the text unread; the next proposal is that of a fresh drafter."""
    t, m = target(), target(seed=1)
    drafter = small(t, m, length=3)
    ids = [(7 * i) % 90 + 3 for i in range(200)]
    for end in (5, 6, 7):
        drafter.propose([Committed(0, torch.tensor(ids[:end]), 1, None)], [0])
    (tree,) = drafter.propose([Committed(0, torch.tensor(ids), 193, None)], [3])
    (fresh,) = small(t, m, length=3).propose([Committed(0, torch.tensor(ids), 199, None)], [3])
    assert tree.tokens.tolist() == fresh.tokens.tolist()


def test_shapes_that_cannot_be_are_refused() -> None:
    for wrong in ({"length": 0}, {"top_k": -1}, {"beam": 1.5}, {"widths": (3, 0)}):
        with pytest.raises(DartspecError, match="small_model: "):
            Config("tiny", **wrong)  # type: ignore[arg-type]


# -- another tokenizer ---------------------------------------------------------------------------------------------


def words(tokens: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> Text:
    """A tokenizer of characters, and of pairs where there are merges."""
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, list(merges)))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    made.decoder = decoders.Fuse()
    return Text(PreTrainedTokenizerFast(tokenizer_object=made))


LETTERS = [*"abcdefgh ", "ab", "cd"]
PAIRS = [*"hgfedcba ", "bc", "de", "ab", "abc"]


def test_another_tokenizers_model_drafts_text() -> None:
    """The target splits letters its way, the small model another; the text is plain decoding's, and drafts are kept."""
    theirs = words(LETTERS, [("a", "b"), ("c", "d")])
    ours = words(PAIRS, [("b", "c"), ("d", "e"), ("a", "b"), ("a", "bc")])
    t = Target(tiny.model("llama", vocab_size=len(LETTERS)), name="target")
    m = Target(tiny.model("llama", vocab_size=len(PAIRS), seed=1), name="small")
    drafter = SmallModel(Config("tiny", length=4), m, t, Translator(theirs, ours))
    requests = [
        Request(theirs.encode(text), SamplingParams(temperature=heat, seed=3, max_tokens=40))
        for text in ("abcd abc", "gh cde fg")
        for heat in (0.0, 1.0)
    ]
    want, _ = run(t, none.Plain(), requests)
    got, metrics = run(t, drafter, requests, batch=2)
    assert got == want
    assert metrics.A > 0
    # what it drafts is its own greedy text, split by the target
    ids = theirs.encode("abcd abc")
    (tree,) = drafter.propose([Committed(99, torch.tensor(ids), len(ids) - 1, None)], [9])
    text = ours.encode(theirs.decode(ids))
    with torch.inference_mode():
        for _ in range(4):
            text.append(int(m.model(torch.tensor([text])).logits[0, -1].argmax()))
    drafted = theirs.decode(tree.tokens.tolist()[1:])
    assert ours.decode(text) == theirs.decode(ids) + drafted


def test_it_is_found_by_the_folder_and_refuses_trees_across_tokenizers(tmp_path: Any) -> None:
    text = words(LETTERS)
    model = tiny.model("llama", vocab_size=len(LETTERS), seed=1)
    model.save_pretrained(tmp_path)
    text.tokenizer.save_pretrained(tmp_path)
    t = Target(tiny.model("llama", vocab_size=len(LETTERS)), tokenizer_fingerprint=text.fingerprint)
    request = Request([1, 2, 3], SamplingParams(max_tokens=9))
    drafter = small_model.load(tmp_path, t)
    assert run(t, drafter, [request])[0] == run(t, none.Plain(), [request])[0]
    other = Target(tiny.model("llama", vocab_size=len(LETTERS)), tokenizer_fingerprint="another")
    with pytest.raises(DartspecError, match=r"tokenizer .* the target another, and brings none"):
        small_model.load(tmp_path, other)
    other.text = words(PAIRS)
    with pytest.raises(DartspecError, match="as a chain only"):
        small_model.load(Config(str(tmp_path), top_k=3), other)
    assert small_model.load(tmp_path, other).taps == ()
