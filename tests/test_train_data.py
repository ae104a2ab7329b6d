"""What training reads, which positions carry loss, and which ids the drafter may propose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dartspec.drafters._train import Predicted
from dartspec.errors import DartspecError
from dartspec.train.batch import Drawn, Sequences, draw_rows
from dartspec.train.config import TrainConfig
from dartspec.train.data import Example, choose_vocabulary, digest, loss_mask, read_examples, split_examples
from dartspec.train.features import States
from tiny_net import HIDDEN, View


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def read(path: Path, **options: Any) -> list[Example]:
    return read_examples([path], **{"max_tokens": 100, "vocab_size": 50, **options})


def test_the_first_answer_token_is_trained_and_no_prompt_token_is() -> None:  # case 23
    # prompt 0 1 2 3, answer 4 5 6: row j knows token j + 1, offset t predicts token j + 1 + t
    mask = loss_mask(Example.answered(range(7), 4), d=3)
    predicted = {(j, t): j + 1 + t for j in range(6) for t in (1, 2, 3)}
    assert mask.shape == (6, 3)
    for (j, t), token in predicted.items():
        assert bool(mask[j, t - 1]) == (4 <= token <= 6), (j, t)
    # the first answer token, 4, is offset 1 of row 2: the row whose known token is the prompt's last
    assert mask[:, 0].nonzero().flatten().tolist() == [2, 3, 4]
    # a mask that did not shift with the inputs would begin at row 4 and never train tokens 4 and 5
    assert bool(mask[2, 0])
    assert bool(mask[1, 1])


def test_rows_are_drawn_from_the_answer_only() -> None:
    example = Example.answered(tuple(range(30)), 20)
    generator = torch.Generator().manual_seed(0)
    first, anchors = draw_rows(example, num_first=100, num_anchors=100, generator=generator)
    assert first.tolist() == list(range(18, 28))
    assert anchors.tolist() == list(range(17, 27))
    few, groups = draw_rows(example, num_first=4, num_anchors=3, generator=generator)
    assert len(few) == 4
    assert len(groups) == 3
    assert set(few.tolist()) <= set(first.tolist())
    assert few.tolist() == sorted(set(few.tolist()))


def test_a_one_token_prompt_has_no_row_before_it() -> None:
    assert loss_mask(Example.answered((5, 6, 7), 1), d=2).tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("answers", [((3, 5), (8, 12)), ((0, 2), (4, 5), (6, 9)), ((2, 12),)])
def test_every_turn_of_the_assistant_carries_loss_and_nothing_else(answers: tuple[tuple[int, int], ...]) -> None:
    example, d = Example(tuple(range(100, 112)), answers), 4
    wanted = [[any(s <= j + 1 + t < e for s, e in answers) for t in range(1, d + 1)] for j in range(11)]
    assert loss_mask(example, d).tolist() == wanted
    # the batch reads the same mask, also behind another sequence, and at offsets that leave the sequence
    view = View()
    other = Example.answered((1, 2, 3, 4, 5), 2)
    states = [States(torch.zeros(n, 1, HIDDEN), torch.zeros(n, HIDDEN), torch.zeros(n)) for n in (5, 12)]
    none = torch.zeros(0, dtype=torch.int64)
    drawn = [Drawn(e, s, none, none) for e, s in zip((other, example), states, strict=True)]
    batch = Sequences(drawn, view, (1,), (1,), torch.float32)
    row, offset = torch.arange(11).repeat_interleave(d), torch.arange(1, d + 1).repeat(11)
    position, counts = batch.taught(Predicted(torch.zeros(len(row), HIDDEN), torch.zeros(1), row + 5, offset))
    assert counts.view(11, d).tolist() == wanted
    assert position.tolist() == [5 + min(j + t, 11) for j in range(11) for t in range(1, d + 1)]
    first, anchors = draw_rows(example, num_first=99, num_anchors=99, generator=torch.Generator())
    assert first.tolist() == [j for j in range(11) if wanted[j][0]]
    assert anchors.tolist() == [j for j in range(11) if wanted[j][1]]


def test_conversations_of_several_turns_are_read_and_cut(tmp_path: Path) -> None:
    loop = list(range(10, 26))
    records = [
        {"ids": list(range(1, 11)), "answers": [[2, 4], [6, 10]], "any": "thing"},
        {"ids": list(range(1, 11)), "answers": [[2, 3], [8, 10]]},  # one answer token before the length
        {"ids": [1, 2, *loop, *loop, *loop, 3, 4, 5], "answers": [[2, 50], [51, 53]]},
        {"ids": [1, 2], "answers": [[0, 2]]},  # nothing has two tokens before it
        {"ids": [1, 2, 3], "answers": [[0, 3]]},
    ]
    path = write(tmp_path / "a.jsonl", records)
    assert [(len(e.ids), e.answers) for e in read(path, max_tokens=8)] == [
        (8, ((2, 4), (6, 8))),
        (8, ((2, 8),)),
        (3, ((0, 3),)),
    ]
    third = read(path)[2]
    assert (third.ids, third.answers) == ((1, 2, *loop, *loop), ((2, 34),))  # the turn after the loop is gone too
    assert read(path, cut_loops=False)[2].answers == ((2, 50), (51, 53))
    assert read(path)[0].num_response == 6


def test_answers_are_cut_before_they_loop(tmp_path: Path) -> None:
    loop = list(range(10, 26))
    path = write(tmp_path / "a.jsonl", [{"prompt": [1, 2], "response": [5, 6, *loop, *loop, *loop, *loop]}])
    (cut,) = read(path)
    assert cut.ids == (1, 2, 5, 6, *loop, *loop)
    assert cut.num_prompt == 2
    (whole,) = read(path, cut_loops=False)
    assert len(whole.ids) == 2 + 2 + 64


def test_long_answers_are_cut_and_empty_ones_dropped(tmp_path: Path) -> None:
    records = [
        {"prompt": [1] * 6, "response": list(range(9))},
        {"prompt": [1], "response": []},
        {"prompt": [1], "response": [3]},
        {"prompt": [1] * 20, "response": [4, 5, 6]},
        {"id": "other keys are ignored", "prompt": [1], "response": [7, 8]},
    ]
    examples = read(write(tmp_path / "a.jsonl", records), max_tokens=10)
    assert [(e.ids, e.num_prompt) for e in examples] == [((1,) * 6 + (0, 1, 2, 3), 6), ((1, 7, 8), 1)]
    assert examples[0].num_response == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not a JSON object"),
        ("[1]", 'line 2: "prompt" must be a list of token ids'),
        ({"prompt": [1]}, 'line 2: "response" must be a list'),
        ({"prompt": [1], "response": "text"}, "found str"),
        ({"prompt": [1], "response": [1.5, 2]}, '"response" must be'),
        ({"prompt": [True], "response": [1, 2]}, '"prompt" must be'),
        ({"prompt": [-1], "response": [1, 2]}, '"prompt" must be'),
        ({"prompt": [], "response": [1, 2]}, "line 2: the prompt is empty"),
        ({"prompt": [1], "response": [1, 50]}, "token id 50, but the target has 50 ids"),
        ({"ids": [1, 2, 50], "answers": [[1, 3]]}, "token id 50, but the target has 50 ids"),
        ({"ids": "text"}, '"ids" must be a list of token ids'),
        ({"ids": [1, 2, 3]}, '"answers" must be .* found NoneType'),
        ({"ids": [1, 2, 3], "answers": []}, '"answers" is empty'),
        ({"ids": [1, 2, 3], "answers": [[1, 4]]}, r"within the 3 ids .* found \[1, 4\]"),
        ({"ids": [1, 2, 3], "answers": [[2, 2]]}, r"not empty, found \[2, 2\]"),
        ({"ids": [1, 2, 3], "answers": [[1, 3], [2, 3]]}, r"ascending, apart, .* found \[2, 3\]"),
        ({"ids": [1, 2, 3], "answers": [[0, 1.5]]}, "found"),
        ({"ids": [1, 2, 3], "answers": [1, 3]}, "found 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": [1], "response": [2, 3]}, line])
    with pytest.raises(DartspecError, match=message) as caught:
        read(path)
    assert "a.jsonl" in str(caught.value)


def test_missing_and_useless_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DartspecError, match="no such file"):
        read(tmp_path / "none.jsonl")
    for raw, said in ((b'{"prompt": [1]\xff', "line 1: not UTF-8"), (b"[" * 100_000, "line 1: not a JSON object")):
        (tmp_path / "b.jsonl").write_bytes(raw)
        with pytest.raises(DartspecError, match=said):
            read(tmp_path / "b.jsonl")
    with pytest.raises(DartspecError, match="no usable answer"):
        read(write(tmp_path / "a.jsonl", [{"prompt": [1], "response": [2]}]))


def test_the_last_answers_are_held_out() -> None:
    examples = [Example.answered((1, 2, i), 1) for i in range(50)]
    train, held = split_examples(examples, 0.1)
    assert held == examples[45:]
    assert train == examples[:45]
    assert len(split_examples(examples, 0.001)[1]) == 1
    with pytest.raises(DartspecError, match="too few"):
        split_examples(examples[:1], 0.5)


def test_the_vocabulary_is_the_most_frequent_answer_tokens() -> None:
    examples = [Example.answered((9, 9, 9, 9, 4, 4, 7, 7, 7, 3), 4), Example.answered((9, 4), 1)]
    chosen = choose_vocabulary(examples, 2, 12)
    assert chosen.ids.tolist() == [4, 7]  # 9 is frequent in prompts only
    assert chosen.coverage == pytest.approx(6 / 7)
    assert (torch.arange(2) + chosen.d2t).tolist() == [4, 7]
    forced = choose_vocabulary(examples, 2, 12, always=[2])
    assert forced.ids.tolist() == [2, 4]  # 4 and 7 are equally frequent: the lower id
    filled = choose_vocabulary(examples, 6, 12)
    assert filled.ids.tolist() == [0, 1, 3, 4, 7, 9]  # then what prompts have, then the lowest
    for size in (0, 13):
        with pytest.raises(DartspecError, match="must be between 1 and"):
            choose_vocabulary(examples, size, 12)


def test_the_digest_sees_order_and_boundary() -> None:
    a, b = Example.answered((1, 2, 3), 1), Example.answered((4, 5, 6), 1)
    digests = {digest([a, b]), digest([b, a]), digest([Example.answered((1, 2, 3), 2), b]), digest([a])}
    digests |= {digest([Example((1, 2, 3), spans), b]) for spans in (((1, 2),), ((0, 1), (1, 3)), ((0, 1), (2, 3)))}
    assert len(digests) == 7
    assert digest([a, b]) == digest([Example.answered((1, 2, 3), 1), b])


def test_the_config_refuses_what_it_does_not_know_or_cannot_use() -> None:
    good = {"target": "t", "data": ["a"], "out": "o"}
    config = TrainConfig.from_dict({**good, "betas": [0.8, 0.9], "taps": [1, 2]})
    assert config.betas == (0.8, 0.9)
    with pytest.raises(DartspecError, match="unknown key 'lr'"):
        TrainConfig.from_dict({**good, "lr": 1})
    with pytest.raises(DartspecError, match="data"):
        TrainConfig.from_dict({"target": "t", "out": "o"})
    for name, value in (
        ("d", 1),
        ("gamma", 0),
        ("gamma", 1.5),
        ("held_out", 0),
        ("steps", 0),
        ("clip", 0),
        ("num_anchors", 0),
        ("final_learning_rate", 1.0),
        ("target", ""),
    ):
        with pytest.raises(DartspecError):
            TrainConfig.from_dict({**good, name: value})
