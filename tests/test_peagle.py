"""Our drafter as a folder of `speculators`: read back it is the same drafter, and its masks are exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tiny_cli
from dartspec.bench.lattices import best_chain
from dartspec.cli.main import app
from dartspec.drafters.dart import Config, DartDrafter, DartNet
from dartspec.errors import DartspecError
from dartspec.interop.checkpoints import inspect, load, problem
from dartspec.interop.peagle import export_peagle, unused_token
from dartspec.target.target import Target
from dartspec.text import Text
from dartspec.types import Committed


def made(vocab: int, **changes: Any) -> DartNet:
    fields: dict[str, Any] = {
        "d": 4,
        "taps": (2, 3, 4),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "draft_vocab_size": 40,
        "vocab_size": vocab,
        "target_hidden_size": 32,
        "num_target_layers": 7,
    }
    net = DartNet(Config(**{**fields, **changes}))
    torch.manual_seed(2)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    net.d2t.copy_(torch.arange(40) * 2)
    return net


def target() -> Target:
    text = Text(tiny_cli.tokenizer())
    return Target(tiny_cli.model(num_hidden_layers=7), text.num_tokens)


def write(net: DartNet, t: Target, out: Path, **changes: Any) -> None:
    about = {"model": "org/model", "architecture": "LlamaForCausalLM", "mask_token_id": t.vocab_size - 1, "steps": 4}
    export_peagle(net, t.model.get_input_embeddings().weight, out, **{**about, **changes})  # type: ignore[arg-type,operator]


def test_read_back_it_drafts_the_same(tmp_path: Path) -> None:
    t = target()
    net = made(t.vocab_size)
    write(net, t, tmp_path)
    checkpoint = inspect(tmp_path)
    assert (checkpoint.layout.name, checkpoint.method) == ("speculators-peagle", "dart")
    assert problem(checkpoint, t) is None
    one = Committed(0, torch.arange(5, 12), 6, torch.randn(6, 3, 32))
    a, b = DartDrafter(net, t), load(tmp_path, t)
    assert isinstance(b, DartDrafter)
    for x, y in zip(a.lattice([one]), b.lattice([one]), strict=True):
        assert torch.equal(x, y)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/model",
        "architectures": ["LlamaForCausalLM"],
    }


def test_what_peagle_cannot_say_is_refused(tmp_path: Path) -> None:
    t = target()
    with pytest.raises(DartspecError, match="a mask of the form 'official' with the final norm applied twice"):
        write(made(t.vocab_size, mask="official", final_norm_twice=True), t, tmp_path)
    with pytest.raises(DartspecError, match="embedding has shape"):
        write(made(t.vocab_size + 1), t, tmp_path)
    for wrong in ({"steps": 5}, {"steps": 0}, {"mask_token_id": t.vocab_size}):
        with pytest.raises(DartspecError, match="predicts 4 positions"):
            write(made(t.vocab_size), t, tmp_path, **wrong)
    assert not list(tmp_path.iterdir())


def test_the_masks_token_is_one_that_no_text_holds() -> None:
    text = Text(tiny_cli.tokenizer())
    assert unused_token(text, text.num_tokens + 2) == text.num_tokens + 1
    pad = tiny_cli.tokenizer().pad_token_id
    assert unused_token(text, text.num_tokens) == pad  # the other two are in the template, and one of them ends it


def test_convert_writes_it_and_says_how_to_serve_it(tmp_path: Path) -> None:
    model = tiny_cli.save(tmp_path / "model", num_hidden_layers=7, max_position_embeddings=4096)
    made(target().vocab_size).save(tmp_path / "ours")
    arguments = ["convert", tmp_path / "ours", tmp_path / "out", "--model", model, "--to", "peagle", "--json"]
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["serve"] == f"vllm serve {tmp_path / 'out'}"
    curve = [facts["M_as_a_chain"][str(k)] for k in (1, 2, 3, 4)]
    assert 1 <= curve[0] <= curve[3] < 5
    assert facts["steps"] == best_chain(dict(enumerate(curve, 1)))
    assert inspect(tmp_path / "out").layout.name == "speculators-peagle"
    done = CliRunner().invoke(app, [str(a) for a in [*arguments, "--steps", 3]])
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 3
    done = CliRunner().invoke(app, [str(a) for a in [*arguments, "--steps", 9]])
    assert done.exit_code == 2
    done = CliRunner().invoke(app, [str(a) for a in [*arguments[:-2], "onnx"]])
    assert done.exit_code == 2
