"""What training reads, which positions carry loss, and which ids the drafter may propose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dartspec.errors import DartspecError
from dartspec.train.batch import draw_rows
from dartspec.train.config import TrainConfig
from dartspec.train.data import Example, choose_vocabulary, digest, loss_mask, read_examples, split_examples


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def read(path: Path, **options: Any) -> list[Example]:
    return read_examples([path], **{"max_tokens": 100, "vocab_size": 50, **options})


def test_the_first_answer_token_is_trained_and_no_prompt_token_is() -> None:  # case 23
    # prompt 0 1 2 3, answer 4 5 6: row j knows token j + 1, offset t predicts token j + 1 + t
    mask = loss_mask(num_tokens=7, num_prompt=4, d=3)
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
    example = Example(tuple(range(30)), 20)
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
    assert loss_mask(num_tokens=3, num_prompt=1, d=2).tolist() == [[True, False], [False, False]]


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
    with pytest.raises(DartspecError, match="no usable answer"):
        read(write(tmp_path / "a.jsonl", [{"prompt": [1], "response": [2]}]))


def test_the_last_answers_are_held_out() -> None:
    examples = [Example((1, 2, i), 1) for i in range(50)]
    train, held = split_examples(examples, 0.1)
    assert held == examples[45:]
    assert train == examples[:45]
    assert len(split_examples(examples, 0.001)[1]) == 1
    with pytest.raises(DartspecError, match="too few"):
        split_examples(examples[:1], 0.5)


def test_the_vocabulary_is_the_most_frequent_answer_tokens() -> None:
    examples = [Example((9, 9, 9, 9, 4, 4, 7, 7, 7, 3), 4), Example((9, 4), 1)]
    chosen = choose_vocabulary(examples, 2, 12)
    assert chosen.ids.tolist() == [4, 7]  # 9 is frequent in prompts only
    assert chosen.coverage == pytest.approx(6 / 7)
    assert (torch.arange(2) + chosen.d2t).tolist() == [4, 7]
    forced = choose_vocabulary(examples, 2, 12, always=[2])
    assert forced.ids.tolist() == [2, 4]  # 4 and 7 are equally frequent: the lower id
    filled = choose_vocabulary(examples, 6, 12)
    assert filled.ids.tolist() == [0, 1, 2, 3, 4, 7]
    for size in (0, 13):
        with pytest.raises(DartspecError, match="must be between 1 and"):
            choose_vocabulary(examples, size, 12)


def test_the_digest_sees_order_and_boundary() -> None:
    a, b = Example((1, 2, 3), 1), Example((4, 5, 6), 1)
    digests = {digest([a, b]), digest([b, a]), digest([Example((1, 2, 3), 2), b]), digest([a])}
    assert len(digests) == 4
    assert digest([a, b]) == digest([Example((1, 2, 3), 1), b])


def test_the_config_refuses_what_it_does_not_know_or_cannot_use(tmp_path: Path) -> None:
    good = {"target": "t", "data": ["a"], "out": "o"}
    config = TrainConfig.from_dict({**good, "betas": [0.8, 0.9], "taps": [1, 2]})
    assert config.betas == (0.8, 0.9)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(config.to_dict()))
    assert TrainConfig.from_json(path) == config
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
    with pytest.raises(DartspecError, match="no such training config"):
        TrainConfig.from_json(tmp_path / "none.json")
    path.write_text("[]")
    with pytest.raises(DartspecError, match="a JSON object was expected"):
        TrainConfig.from_json(path)
