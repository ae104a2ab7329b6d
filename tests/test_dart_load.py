"""Loading a DART drafter: what is refused, by name and in one sentence; what is only warned of."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dartspec.drafters import dart
from dartspec.drafters.dart import Config, DartNet
from dartspec.errors import DartspecError
from dartspec.types import Committed
from test_dart_net import config, random_net, training_log_probs
from tiny_net import VOCAB, View, text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_net(config(tokenizer_fingerprint="3f2a", weights_fingerprint="aa01")).save(tmp_path)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def view(**changes: Any) -> View:
    return View(**{"tokenizer_fingerprint": "3f2a", "weights_fingerprint": "aa01", **changes})


def test_a_saved_drafter_loads_and_drafts_the_same(folder: Path) -> None:
    ids, features = text(15)
    drafter = dart.load(folder, view())
    assert drafter.taps == (1, 2, 4)
    rounded = random_net(config()).to(torch.bfloat16).float()
    log_probs, _ = drafter.lattice([Committed(0, ids, 14, features)])
    wanted = training_log_probs(rounded, View(), ids, features).topk(25).values
    torch.testing.assert_close(log_probs[0], wanted, rtol=1e-5, atol=1e-5)
    assert (dart.load(str(folder), view()).taps) == (1, 2, 4)


def test_weights_are_stored_in_bfloat16_and_nothing_is_left_aside(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert {t.dtype for n, t in tensors.items() if n != "d2t"} == {torch.bfloat16}
    assert tensors["d2t"].dtype == torch.int64
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_official_names_and_the_redundant_table_are_read(tmp_path: Path) -> None:
    c = config(mask="official", final_norm_twice=True)
    net = random_net(c)
    net.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    renamed["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    save_file(renamed, tmp_path / "model.safetensors")
    again = DartNet.from_folder(tmp_path)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


def test_a_whole_vocabulary_needs_no_table(tmp_path: Path) -> None:
    c = config(draft_vocab_size=VOCAB)
    random_net(c).save(tmp_path)
    edit(tmp_path, lambda t: t.pop("d2t"))
    assert DartNet.from_folder(tmp_path).target_ids().tolist() == list(range(VOCAB))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), r"weight lm_head\.weight is missing"),  # case 20
        (lambda t: t.pop("mask_features"), "weight mask_features is missing"),
        (lambda t: t.pop("d2t"), "weight d2t is missing"),
        (lambda t: t.update(extra=torch.zeros(3)), "unexpected weight extra"),
        (
            lambda t: t.update({"fc.weight": torch.zeros(24, 24)}),
            r"fc\.weight has shape \[24, 24\], config\.json asks for \[24, 72\]",
        ),
        (lambda t: t.update(d2t=torch.full((37,), 50)), "d2t maps draft ids"),
        (lambda t: t.update(d2t=-torch.arange(37)), "d2t maps draft ids"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(folder: Path, change: Any, message: str) -> None:
    edit(folder, change)
    with pytest.raises(DartspecError, match=message) as caught:
        dart.load(folder, view())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_truncated_file_is_refused(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    with pytest.raises(DartspecError, match="not a whole safetensors file"):
        dart.load(folder, view())


def test_a_folder_without_its_files_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(DartspecError, match=r"model\.safetensors: no such file"):
        dart.load(folder, view())
    (folder / "config.json").unlink()
    with pytest.raises(DartspecError, match=r"config\.json: no such file"):
        dart.load(folder, view())


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_a_config_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DartspecError, match=r"config\.json: "):
        dart.load(folder, view())


def test_a_bare_config_is_refused() -> None:
    with pytest.raises(DartspecError, match="no weights: give the folder"):
        dart.load(config(), View())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 6}, "layers numbering 4, this target has 6"),
        ({"hidden_size": 32}, "a hidden size of 24, this target has 32"),
        ({"vocab_size": 64}, "a vocabulary of 61, this target has 64"),
        ({"tokenizer_fingerprint": "91bc"}, "tokenizer 3f2a, the target uses 91bc"),  # case 21
    ],
)
def test_another_target_is_refused_with_both_values(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DartspecError, match=message):
        dart.load(folder, view(**changes))


def test_other_weights_are_warned_of_once_and_equal_ones_are_not(folder: Path) -> None:
    with pytest.warns(UserWarning, match="weights aa01, the target has bb02") as seen:
        dart.load(folder, view(weights_fingerprint="bb02"))
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dart.load(folder, view())
        dart.load(folder, View())  # a view that has no fingerprints is not asked for them


def test_a_width_of_its_own_is_refused(tmp_path: Path) -> None:
    random_net(config(hidden_size=32)).save(tmp_path)
    with pytest.raises(DartspecError, match="drafter of width 32 on a target of width 24"):
        dart.load(tmp_path, View())


def test_provenance_is_written_beside_the_weights(tmp_path: Path) -> None:
    random_net(config()).save(tmp_path, {"steps": 3})
    assert json.loads((tmp_path / "config.json").read_text())["provenance"] == {"steps": 3}
    assert Config.from_json(tmp_path / "config.json").provenance == {"steps": 3}


def test_saved_weights_are_read_by_whoever_may_read_the_configuration(tmp_path: Path) -> None:
    random_net(config()).save(tmp_path)
    modes = {oct((tmp_path / name).stat().st_mode & 0o777) for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1


def test_saving_over_a_drafter_replaces_it_whole(tmp_path: Path) -> None:
    random_net(config(), seed=1).save(tmp_path)
    random_net(config(), seed=2).save(tmp_path)
    wanted = random_net(config(), seed=2).to(torch.bfloat16)
    got = DartNet.from_folder(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(got.parameters(), wanted.parameters(), strict=True))


def test_an_index_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    from dartspec.ngram import NgramIndex

    index = NgramIndex.build(
        [torch.tensor([1, 5, 6, 7, 5, 6]).numpy()],
        order=3,
        vocab_size=VOCAB,
        fingerprint="91bc",
        name="other",
        description="six tokens",
    )
    index.save(tmp_path / "other.ngram")
    with pytest.raises(DartspecError, match="91bc"):
        dart.load(folder, view(), index=tmp_path / "other.ngram")
