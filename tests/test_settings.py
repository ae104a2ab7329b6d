"""`NAME,key=value,...`: what may be set, what it changes, and what is refused. The text is the same whatever is set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dartspec
import tiny_cli
from dartspec import LM, DartspecError, drafters
from dartspec.bench.measure import Method
from dartspec.drafters import _settings
from dartspec.drafters._checkpoint import FINAL
from dartspec.lattice import SearchConfig
from dartspec.ngram.live import LiveText
from dartspec.tree import depths
from dartspec.types import Committed, TokenTree

MESSAGES = [{"role": "user", "content": "What is on the other thing in the thing?"}]
TRAINED = ("dart", "dflash", "eagle3", "hydra", "medusa")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTSPEC_CACHE", str(tmp_path / "cache"))


def memory(drafter: Any = "none", **options: Any) -> LM:
    return dartspec.load(tiny_cli.model(num_hidden_layers=4), tiny_cli.tokenizer(), drafter=drafter, **options)


def trained(method: str, lm: LM, folder: Path) -> Path:
    """A folder of random weights that look at three positions."""
    module, t = drafters.get(method), lm.target
    heads = method in ("hydra", "medusa")
    shape: dict[str, Any] = {
        "d": 3,
        "taps": (FINAL,) if heads else (1, 2, 3),
        "hidden_size": t.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "draft_vocab_size": t.vocab_size,
        "vocab_size": t.vocab_size,
        "target_hidden_size": t.hidden_size,
        "num_target_layers": t.num_layers,
    }
    net_class = next(v for k, v in vars(module).items() if k.endswith("Net") and k != "DraftNet")
    net = net_class(module.Config(**{k: v for k, v in shape.items() if k in module.Config.__dataclass_fields__}))
    torch.manual_seed(0)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    net.save(folder)
    return folder


class Watched:
    """A drafter whose trees are kept."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.taps = inner, inner.taps
        self.trees: list[TokenTree] = []

    def reset(self, slots: Any) -> None:
        self.inner.reset(slots)

    def propose(self, new: list[Committed], budget: list[int]) -> list[TokenTree]:
        made: list[TokenTree] = self.inner.propose(new, budget)
        self.trees += made
        return made


def trees_of(lm: LM, spec: str, want: list[int]) -> list[TokenTree]:
    watched = Watched(lm.with_drafter(spec, nodes=12).drafter)
    assert lm.with_drafter(watched, nodes=12).generate(MESSAGES, max_tokens=16).ids == want
    return watched.trees


@pytest.mark.parametrize("method", TRAINED)
def test_a_trained_drafter_takes_its_settings(method: str, tmp_path: Path) -> None:
    lm = memory()
    folder = trained(method, lm, tmp_path / method)
    want = lm.generate(MESSAGES, max_tokens=16).ids
    deepest = {d: max(int(depths(t).max()) for t in trees_of(lm, f"{folder},d={d},top_k=1", want)) for d in (1, 2)}
    assert deepest == {1: 1, 2: 2}
    chains = trees_of(lm, f"{folder},top_k=1", want)
    assert all(t.parents.tolist() == list(range(-1, len(t.parents) - 1)) for t in chains)
    assert max(len(t.parents) for t in chains) == 4
    assert lm.with_drafter(f"{folder},d=2,top_k=3").drafter_name == f"{method},d=2,top_k=3"
    if method == "eagle3":
        assert max(int(depths(t).max()) for t in trees_of(lm, f"{folder},d=5,top_k=1", want)) == 5
    else:
        with pytest.raises(DartspecError, match="d is 4; it was trained for 3"):
            lm.with_drafter(f"{folder},d=4")
    with pytest.raises(DartspecError, match=f"{method} has no setting 'hidden_size'; there are: d"):
        lm.with_drafter(f"{folder},hidden_size=8")


def _config(drafter: Any) -> Any:
    return getattr(drafter, "config", None) or drafter._config


def test_a_lattice_search_takes_its_numbers(tmp_path: Path) -> None:
    lm = memory()
    folder = trained("dart", lm, tmp_path / "dart")
    made: Any = lm.with_drafter(f"{folder},beam=3,ngram_weight=0.25,softmax_over_kept=false").drafter
    assert made.search == SearchConfig(beam=3, ngram_weight=0.25, softmax_over_kept=False)
    config = json.loads((folder / "config.json").read_text())
    own = {"logit_decay": 0.6, "running_text": True, "beam": 4}
    (folder / "config.json").write_text(json.dumps(config | {"search": own}))
    kept: Any = lm.with_drafter(str(folder)).drafter
    assert kept.search == SearchConfig(**own)
    assert isinstance(kept.text, LiveText)
    assert kept.search.changes() == own
    over: Any = lm.with_drafter(f"{folder},beam=3,running_text=false").drafter
    assert over.search == SearchConfig(logit_decay=0.6, beam=3)
    assert over.text is None
    for bad, said in (
        ({"colour": 1}, "search has no 'colour'; there are: top_k"),
        ([1], r"search is \[1\]"),
        ({"beam": 0}, "beam is 0"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"search": bad}))
        with pytest.raises(DartspecError, match=said):
            lm.with_drafter(str(folder))
    flat: Any = lm.with_drafter(f"{trained('dflash', lm, tmp_path / 'dflash')},tree=chain").drafter
    assert flat.config.tree == "chain"


def test_methods_without_weights_small_models_and_parts_take_theirs(tmp_path: Path) -> None:
    lm = memory()
    want = lm.generate(MESSAGES, max_tokens=16).ids
    small = tiny_cli.save(tmp_path / "small", seed=1)
    for spec, expected in (
        ("prompt_lookup,max_ngram=2,length=3", {"max_ngram": 2, "length": 3}),
        ("lookahead,window=2,from_text=false", {"window": 2, "from_text": False}),
        ("suffix,least=0.5", {"least": 0.5}),
        (f"{small},length=2,top_k=2", {"length": 2, "top_k": 2}),
        (f"{small},widths=3:1", {"widths": (3, 1)}),
    ):
        made: Any = lm.with_drafter(spec, nodes=6)
        assert {k: getattr(_config(made.drafter), k) for k in expected} == expected
        assert made.generate(MESSAGES, max_tokens=16).ids == want
    mixed: Any = lm.with_drafter(f"{trained('medusa', lm, tmp_path / 'm')},d=2+prompt_lookup,length=3", nodes=8)
    heads, copies = mixed.drafter.parts
    assert (heads.config.d, _config(copies).length) == (2, 3)
    assert mixed.generate(MESSAGES, max_tokens=16).ids == want


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("prompt_lookup,depth=3", "prompt_lookup has no setting 'depth'; there are: max_ngram, min_ngram"),
        ("prompt_lookup,length=three", "prompt_lookup: length is 'three'; it must be a whole number"),
        ("prompt_lookup,length=0", "length of at least 1"),
        ("prompt_lookup,length", "is not NAME,key=value"),
        ("prompt_lookup,length=2,length=3", "sets length twice"),
        ("lookahead,from_text=yes", "from_text is 'yes'; it must be true or false"),
        ("suffix,least=a", "least is 'a'; it must be a number"),
        ("auto,d=3", "name the method"),
        ("none,d=3", "none has no setting 'd'; there are: none"),
        ("mix,parts=dart", "mix has no setting 'parts'"),
    ],
)
def test_what_cannot_be_set_is_refused(spec: str, words: str) -> None:
    with pytest.raises(DartspecError, match=words):
        memory(spec)


def test_bench_takes_the_same_text() -> None:
    (method,) = Method.parse("runs/eagle3/latest@16,d=6,index=none,top_k=4")
    assert (method.drafter, method.nodes, method.index) == ("runs/eagle3/latest,d=6,top_k=4", 16, None)
    assert method.label == "latest,d=6,top_k=4@16,index=none"
    with pytest.raises(DartspecError, match="NAME,key=value"):
        Method.parse("dart@8,d")
    (united,) = Method.parse("dart,d=4+prompt_lookup,length=6@8,index=none")
    assert (united.drafter, united.nodes, united.index) == ("dart,d=4+prompt_lookup,length=6", 8, None)
    for twice in ("dart@8,d=4@16", "dart@8@16"):
        with pytest.raises(DartspecError, match="two numbers of nodes"):
            Method.parse(twice)
    assert Method.parse("dart@8,index=a@b.ngram")[0] == Method("dart", 8, "a@b.ngram")
    assert Method.parse("runs/x@y/latest@4")[0] == Method("runs/x@y/latest", 4)


def test_every_setting_can_be_written_as_text() -> None:
    """A field of a type that is not known would be left out of what can be set, silently."""
    for name in drafters.names():
        kind = drafters.get(name).Config
        assert set(getattr(kind, "settings", ())) <= set(_settings.settable(kind)), name
