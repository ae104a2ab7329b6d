"""The loop: what a drafter is told, where sequences stop, what is counted, what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny
from dartspec import drafters
from dartspec.engine import Chunk, Request, generate
from dartspec.errors import DartspecError
from dartspec.target.target import FINAL, Target
from dartspec.text import Text
from dartspec.tree import root_only
from dartspec.types import Committed, SamplingParams, TokenTree

PROMPT = [5, 6, 7, 8]


def target(name: str = "llama", eos: Iterable[int] = (), num_tokens: int | None = None, **changes: Any) -> Target:
    return Target(tiny.model(name, **changes), num_tokens, frozenset(eos), name=name)


def load(name: str, target: Target, **config: Any) -> Any:
    module = drafters.get(name)
    return module.load(module.Config(**config), target)


def chunks_of(
    target: Target, params: SamplingParams, drafter: Any = None, prompt: Sequence[int] = PROMPT, **options: Any
):
    return list(generate(target, drafter or load("none", target), [Request(prompt, params)], **options))


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    return [i for c in chunks for i in c.ids]


def knowing(target: Target, answer: Sequence[int], prompt: Sequence[int] = PROMPT, length: int = 6) -> Any:
    """An oracle that is always right: what is accepted is certain."""
    return load("oracle", target, texts=((*prompt, *answer),), rate=1.0, length=length, branches=1)


# -- what a drafter is told -------------------------------------------------------------------------------------------


class Recorder:
    """Drafts like another drafter and notes all that it was given."""

    def __init__(self, inner: Any, taps: tuple[int, ...]) -> None:
        self.taps, self._inner = taps, inner
        self.seen: list[Committed] = []
        self.resets: list[int] = []
        self.asked: list[tuple[int, ...]] = []

    def reset(self, slots: Sequence[int]) -> None:
        self.resets += slots

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        # copies: the engine may go on writing into what it lends
        self.seen += [c._replace(history=c.history.clone()) for c in new]
        self.asked.append(tuple(budget))
        return self._inner.propose(new, budget)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("batch", [1, 2])
def test_features_pair_with_the_tokens_they_predicted(name: str, batch: int) -> None:
    """Row i of `features` is the hidden state at the position before history[L - n_new + i], over several rounds."""
    t = target(name)
    taps = (0, 2, 3, FINAL)
    prompts = [PROMPT, [9, 3] * 5, list(range(30, 51))]
    params = SamplingParams(temperature=0.9, seed=6, max_tokens=14)
    requests = [Request(p, params, i) for i, p in enumerate(prompts)]
    answers: list[list[int]] = [[], [], []]
    for chunk in generate(t, load("none", t), requests):
        answers[chunk.index] += chunk.ids
    texts = tuple((*p, *a) for p, a in zip(prompts, answers, strict=True))
    recorder = Recorder(load("oracle", t, texts=texts, rate=0.7, length=4, branches=2), taps)
    list(generate(t, recorder, requests, batch=batch, num_nodes=9))
    with torch.inference_mode():
        states = [t.model(torch.tensor([text]), output_hidden_states=True).hidden_states for text in texts]
    told = dict.fromkeys(range(len(prompts)), 0)  # committed tokens that the drafter knows of
    sizes = set()
    for c in recorder.seen:
        history, length = c.history.tolist(), len(c.history)
        assert tuple(history) == texts[c.slot][:length]
        first = told[c.slot] == 0
        assert c.n_new == (length - 1 if first else length - told[c.slot])
        told[c.slot] = length
        assert c.features is not None
        assert c.features.shape == (c.n_new, len(taps), t.hidden_size)
        for j, tap in enumerate(taps):
            plain = states[c.slot][-1 if tap == FINAL else tap][0, length - c.n_new - 1 : length - 1]
            assert float((c.features[:, j] - plain).abs().max() / plain.abs().max()) < 1e-5
        if first:
            assert c.tree is None
            assert c.picks is None
        else:
            # the picks on the accepted path are the new tokens
            assert c.tree is not None
            assert c.picks is not None
            asked = [int(p) for p in c.picks if p >= 0]
            assert asked == history[length - c.n_new :]
            sizes.add(c.n_new)
    assert len(sizes) >= 3  # rounds that accepted nothing, some and all


def test_no_taps_no_features() -> None:
    t = target()
    recorder = Recorder(load("none", t), ())
    chunks_of(t, SamplingParams(max_tokens=4), recorder)
    assert all(c.features is None for c in recorder.seen)


def test_a_drafter_is_reset_when_a_sequence_ends_and_when_the_caller_leaves() -> None:
    t = target()
    recorder = Recorder(load("none", t), ())
    requests = [Request(PROMPT, SamplingParams(max_tokens=n)) for n in (3, 9, 6)]
    list(generate(t, recorder, requests, batch=2))
    assert sorted(recorder.resets) == [0, 0, 1, 1, 2, 2]  # when it begins and when it ends
    recorder = Recorder(load("none", t), ())
    stream = generate(t, recorder, requests, batch=2)
    for _ in range(5):
        next(stream)
    asked = {c.slot for c in recorder.seen}
    assert asked
    stream.close()
    assert all(recorder.resets.count(slot) == 2 for slot in asked)


def test_after_leaving_half_way_the_same_drafter_serves_the_next_request() -> None:
    t = target()
    drafter = load("prompt_lookup", t, min_ngram=1)
    prompt = [5, 6, 7] * 4
    want = ids_of(chunks_of(t, SamplingParams(max_tokens=12), prompt=prompt))
    stream = generate(t, drafter, [Request([9, 9, 9, 9, 9], SamplingParams(max_tokens=30))])
    for _ in range(4):
        next(stream)
    stream.close()
    assert ids_of(chunks_of(t, SamplingParams(max_tokens=12), drafter, prompt)) == want


def test_no_drafts_are_asked_for_the_last_token() -> None:
    t = target()
    answer = ids_of(chunks_of(t, SamplingParams(max_tokens=8)))
    recorder = Recorder(knowing(t, answer, length=2), ())
    chunks = chunks_of(t, SamplingParams(max_tokens=8), recorder, num_nodes=8)
    # 1 (prefill) + 3 + 3 + the last alone
    assert [len(c.ids) for c in chunks] == [1, 3, 3, 1]
    assert recorder.asked == [(8,), (8,)]  # and in the last round it is not called at all


# -- stopping ---------------------------------------------------------------------------------------------------------


def greedy_answer(t: Target, n: int = 24) -> list[int]:
    return ids_of(chunks_of(t, SamplingParams(max_tokens=n, ignore_eos=True)))


def first_new(answer: Sequence[int], at: int) -> int:
    """The first index from `at` on whose token did not occur before."""
    return next(i for i in range(at, len(answer)) if answer[i] not in answer[:i])


@pytest.mark.parametrize("cut", [2, 3, 4, 5, 6])
def test_end_of_text_inside_an_accepted_block_cuts_there(cut: int) -> None:
    """Case 9, wherever in the block it stands: the first accepted token, the last, or the bonus."""
    answer = greedy_answer(target())
    at = first_new(answer, cut)
    t = target(eos=[answer[at]])
    chunks = chunks_of(t, SamplingParams(max_tokens=24), knowing(t, answer, length=at), num_nodes=64)
    assert ids_of(chunks) == answer[: at + 1]
    assert [c.finish for c in chunks] == [None, "stop"]
    metrics = chunks[-1].metrics
    assert [r.num_committed for r in metrics.rounds] == [at]
    assert metrics.num_new_tokens == at + 1


def test_end_of_text_as_the_very_first_token() -> None:
    answer = greedy_answer(target())
    t = target(eos=[answer[0]])
    recorder = Recorder(load("none", t), ())
    chunks = chunks_of(t, SamplingParams(max_tokens=24), recorder)
    assert ids_of(chunks) == answer[:1]
    assert chunks[0].finish == "stop"
    assert chunks[0].metrics.num_rounds == 0
    assert not recorder.seen


def test_several_stop_ids_and_ignore_eos() -> None:
    answer = greedy_answer(target())
    a, b = first_new(answer, 3), first_new(answer, 5)
    b = b if b > a else first_new(answer, a + 1)
    t = target(eos=[answer[a], 95])
    drafter = knowing(t, answer)
    both = SamplingParams(max_tokens=24, stop_token_ids=(answer[b], 96))
    assert ids_of(chunks_of(t, both, drafter)) == answer[: a + 1]
    assert ids_of(chunks_of(t, SamplingParams(max_tokens=24, ignore_eos=True), drafter)) == answer
    only_ours = SamplingParams(max_tokens=24, stop_token_ids=(answer[b],), ignore_eos=True)
    assert ids_of(chunks_of(t, only_ours, drafter)) == answer[: b + 1]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
def test_max_tokens_cuts_a_block(n: int) -> None:
    t = target()
    answer = greedy_answer(t)
    chunks = chunks_of(t, SamplingParams(max_tokens=n), knowing(t, answer), num_nodes=20)
    assert ids_of(chunks) == answer[:n]
    assert chunks[-1].finish == "length"
    assert sum(r.num_committed for r in chunks[-1].metrics.rounds) == n - 1
    assert chunks[-1].metrics.num_new_tokens == n


def test_a_stop_at_the_length_limit_is_a_stop() -> None:
    """Case 10: the stop is looked at before the length."""
    answer = greedy_answer(target())
    at = first_new(answer, 3)
    t = target(eos=[answer[at]])
    chunks = chunks_of(t, SamplingParams(max_tokens=at + 1), knowing(t, answer))
    assert ids_of(chunks) == answer[: at + 1]
    assert chunks[-1].finish == "stop"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_context_is_used_to_its_last_position(name: str) -> None:
    """Learned positions (GPT-2) end with the table: neither a tree nor a text may look behind it."""
    t = target(name, n_positions=20, max_position_embeddings=20)
    assert t.max_positions == 20
    want = ids_of(chunks_of(t, SamplingParams(max_tokens=500)))
    assert len(PROMPT) + len(want) == 20
    if name == "llama":  # its weights do not depend on the context
        assert ids_of(chunks_of(target(name), SamplingParams(max_tokens=16))) == want
    for length in (1, 3, 6, 30):
        for branches in (0, 2):
            drafter = load("oracle", t, texts=((*PROMPT, *want),), rate=1.0, length=length, branches=branches)
            chunks = chunks_of(t, SamplingParams(max_tokens=500), drafter, num_nodes=40)
            assert ids_of(chunks) == want
            assert chunks[-1].finish == "length"
    # drafts that run on behind the end of the context
    drafter = load("oracle", t, texts=((*PROMPT, *want, *[3] * 40),), rate=1.0, length=30, branches=1)
    assert ids_of(chunks_of(t, SamplingParams(max_tokens=500), drafter, num_nodes=64)) == want
    last = [*PROMPT, *want][:19]
    assert ids_of(chunks_of(t, SamplingParams(max_tokens=500), drafter, prompt=last)) == [want[-1]]


# -- text -------------------------------------------------------------------------------------------------------------


def byte_text() -> Text:
    """Ids 0 to 96 as bytes; id 2 is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [c for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?" if c in alphabet]
    rest = [c for c in alphabet if c not in letters]
    vocab = {c: i for i, c in enumerate(["<a>", "<b>", "<eos>", *letters, *rest][: tiny.VOCAB])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<a>", "<b>", "<eos>"])
    return Text(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>"))


# favours letters, so that the text has characters to stop at
LETTERS = {i: 30.0 for i in range(3, 60)}


def test_a_stop_string_inside_an_accepted_block() -> None:
    t, text = target(), byte_text()
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, logit_bias=LETTERS)
    answer = ids_of(chunks_of(t, params))
    full = text.decode(answer)
    assert len(full) == 24
    for at, size in ((0, 1), (1, 2), (4, 3), (5, 1), (9, 4)):
        stop = full[at : at + size]
        end = full.index(stop) + size  # it may occur earlier
        wanted = SamplingParams(**{**vars(params), "stop": ("@@", stop)})
        for length in (2, 5, 12):
            chunks = chunks_of(t, wanted, knowing(t, answer, length=length), text=text, num_nodes=40)
            assert "".join(c.text for c in chunks) == full[: end - size]
            assert ids_of(chunks) == answer[:end]  # the tokens up to the stop's last one, none behind
            assert chunks[-1].finish == "stop"
            assert chunks[-1].metrics.num_new_tokens == end
            assert sum(r.num_committed for r in chunks[-1].metrics.rounds) == end - 1


def test_a_possible_stop_string_is_held_back_and_released_at_the_end() -> None:
    t, text = target(), byte_text()
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=3, logit_bias=LETTERS)
    answer = ids_of(chunks_of(t, params))
    full = text.decode(answer)
    chunks = chunks_of(t, SamplingParams(**{**vars(params), "stop": (full[-3:] + "@",)}), text=text)
    assert "".join(c.text for c in chunks) == full
    assert "".join(c.text for c in chunks[:-1]) == full[:-3]
    assert chunks[-1].finish == "length"


def test_text_is_the_same_in_every_split() -> None:
    """Characters of several bytes that rounds cut in the middle."""
    t, text = target(), byte_text()
    params = SamplingParams(max_tokens=24, temperature=2.0, seed=7)
    answer = ids_of(chunks_of(t, params))
    whole = text.decode(answer)
    for length in (1, 3, 7):
        chunks = chunks_of(t, params, knowing(t, answer, length=length), text=text, num_nodes=30)
        assert "".join(c.text for c in chunks) == whole


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(DartspecError, match="stop strings need a tokenizer"):
        chunks_of(target(), SamplingParams(stop=("a",)))


# -- counting ---------------------------------------------------------------------------------------------------------


def test_both_taus_and_the_prefills_token() -> None:
    """Case 11. Ten tokens: the prefill's one, then rounds of 4 + 4, then 1 because of the limit."""
    t = target()
    answer = greedy_answer(t, 10)
    chunks = chunks_of(t, SamplingParams(max_tokens=10), knowing(t, answer, length=3), num_nodes=12)
    metrics = chunks[-1].metrics
    assert [len(c.ids) for c in chunks] == [1, 4, 4, 1]
    assert [(r.num_accepted, r.num_committed) for r in metrics.rounds] == [(3, 4), (3, 4), (0, 1)]
    assert metrics.A == 2
    assert metrics.M == 3 == metrics.mean_acceptance_length
    assert metrics.acceptance_histogram == [1, 0, 0, 2]
    assert metrics.num_new_tokens == 10 == 1 + sum(r.num_committed for r in metrics.rounds)
    assert metrics.before(10).num_rounds == 3
    assert metrics.before(9).num_rounds == 2
    assert metrics.before(8).num_rounds == 1
    assert metrics.before(1).num_rounds == 0


def test_what_a_stop_cuts_is_not_in_m_but_was_accepted() -> None:
    """A counts what the walk accepted, M what was committed: a stop cuts M alone, as vLLM counts."""
    answer = greedy_answer(target())
    at = first_new(answer, 2)
    t = target(eos=[answer[at]])
    drafter = knowing(t, answer, length=at + 3)
    chunks = chunks_of(t, SamplingParams(max_tokens=24), drafter, num_nodes=40)
    (record,) = chunks[-1].metrics.rounds
    assert record.num_accepted == at + 3
    assert record.num_committed == at
    assert chunks[-1].num_accepted == at == len(chunks[-1].ids)  # for colouring: never more than the tokens shown
    assert chunks[-1].metrics.mean_acceptance_length == at + 4
    assert at == chunks[-1].metrics.M


def test_rounds_of_a_batch_share_their_times() -> None:
    t = target()
    requests = [Request(PROMPT, SamplingParams(max_tokens=4), i) for i in range(3)]
    last = {c.index: c for c in generate(t, load("none", t), requests, batch=3)}
    for i in range(3):
        assert [r.batch for r in last[i].metrics.rounds] == [3, 3, 3]
    for a, b in zip(last[0].metrics.rounds, last[1].metrics.rounds, strict=True):
        assert a == b
        assert a.round_ms > 0


def test_log_probs_are_the_plain_ones_whatever_was_drafted() -> None:
    t = target()
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=4, logprobs=3)
    plain = chunks_of(t, params)
    answer = ids_of(plain)
    drafted = chunks_of(t, params, knowing(t, answer, length=3))
    a, b = ([x for c in chunks for x in c.log_probs or ()] for chunks in (plain, drafted))
    assert len(a) == len(b) == 9
    with torch.inference_mode():
        rows = t.model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert x[0] == pytest.approx(y[0], abs=1e-4)
        assert x[0] == pytest.approx(float(rows[i, answer[i]]), abs=1e-4)
        assert [k for k, _ in x[1]] == [k for k, _ in y[1]] == rows[i].topk(3).indices.tolist()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "empty"), (list(range(3, 90)) * 3, "context of 256"), ([5, 97], "97"), ([-1], "-1")],
)
def test_bad_prompts_are_refused_before_any_work(prompt: list[int], words: str) -> None:
    t = target()
    recorder = Recorder(load("none", t), ())
    with pytest.raises(DartspecError, match=words):
        list(generate(t, recorder, [Request(PROMPT), Request(prompt)]))
    assert not recorder.seen


def test_no_requests_no_chunks() -> None:
    t = target()
    assert list(generate(t, load("none", t), [])) == []


@pytest.mark.parametrize("options", [{"batch": 0}, {"num_nodes": -1}])
def test_sizes_that_would_do_nothing_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(DartspecError, match=r"batch|num_nodes"):
        chunks_of(target(), SamplingParams(max_tokens=3), **options)


class Broken:
    """A drafter that breaks the contract in one way."""

    taps: tuple[int, ...] = ()

    def __init__(self, tokens: list[int] | None, parents: list[int]) -> None:
        self._tokens, self._parents = tokens, parents

    def reset(self, slots: Sequence[int]) -> None:
        pass

    def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
        root = int(new[0].history[-1])
        if self._tokens is None:
            return []
        tokens = [root + self._tokens[0], *self._tokens[1:]]
        return [
            TokenTree(
                torch.tensor(tokens, dtype=torch.int32),
                torch.tensor(self._parents, dtype=torch.int32),
                torch.zeros(len(tokens)),
            )
        ]


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ([1, 5], [-1, 0], "root"),  # another root would be scored and the text would change
        ([0, 5, 6], [-1, 2, 0], "parent"),
        ([0, 5, 97], [-1, 0, 0], "97"),
        ([0, 5, 6, 7, 8, 9], [-1, 0, 0, 0, 0, 0], "4"),
        ([0, -3], [-1, 0], "-3"),
    ],
)
def test_a_drafter_that_breaks_the_contract_is_told_so(tokens: list[int], parents: list[int], words: str) -> None:
    with pytest.raises(DartspecError, match=words):
        chunks_of(target(), SamplingParams(max_tokens=9), Broken(tokens, parents), num_nodes=4)


def test_a_drafter_that_forgets_a_sequence_is_noticed() -> None:
    with pytest.raises((DartspecError, ValueError)):
        chunks_of(target(), SamplingParams(max_tokens=9), Broken(None, []))


def test_root_only_trees_are_plain_decoding() -> None:
    t = target()

    class Shy(Broken):
        def propose(self, new: Sequence[Committed], budget: Sequence[int]) -> list[TokenTree]:
            return [root_only(int(c.history[-1])) for c in new]

    chunks = chunks_of(t, SamplingParams(max_tokens=5), Shy(None, []))
    assert ids_of(chunks) == greedy_answer(t, 5)
    assert chunks[-1].metrics.M == 1
