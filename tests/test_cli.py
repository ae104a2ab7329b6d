"""The command line: every verb on tiny models, every refusal, colours, pipes and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import dartspec
import tiny_cli
from dartspec.__main__ import main
from dartspec.accounting import Metrics, SpeedUp
from dartspec.cli import chat as chat_verb
from dartspec.cli import demo as demo_verb
from dartspec.cli import interrupt, options
from dartspec.cli.main import Verbs, app
from dartspec.cli.painter import Painter
from dartspec.cli.terminal import Terminal
from dartspec.cli.train import finished
from dartspec.cli.verdict import PlainStep, after_answer, sentence
from dartspec.drafters import oracle, prompt_lookup
from dartspec.drafters.dart import Config, DartNet
from dartspec.errors import DartspecError
from dartspec.types import RoundRecord, SamplingParams

VERBS = (
    "demo",
    "generate",
    "chat",
    "data prepare",
    "data regenerate",
    "data info",
    "train",
    "eval",
    "drafters",
    "card",
    "push",
    "inspect",
    "convert",
    "doctor",
    "ngram build",
    "ngram info",
    "ngram verify",
    "ngram query",
    "ngram prune",
    "ngram merge",
    "ngram import",
    "bench run",
    "bench load",
    "bench compare",
    "bench report",
    "bench table",
    "bench endpoint",
    "bench capture",
    "bench replay",
)
# times are not asserted: on a busy machine any of these may come
VERDICT = re.compile(r"(\d+\.\dx: M \d+\.\d, a round costs|no gain: |M \d+\.\d, gain unknown: )")
EXACT = ("--dtype", "float32", "--nodes", "6")


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DARTSPEC_CACHE", str(tmp_path / "cache"))
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    yield
    options.forget()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_cli.save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DART drafter for the tiny model, with an index beside it."""
    return save_drafter(tmp_path_factory.mktemp("drafter"))


def save_drafter(place: Path, **changes: Any) -> Path:
    lm = dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="none")
    shape: dict[str, Any] = {
        "d": 4,
        "taps": (1, 2, 3),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "draft_vocab_size": lm.target.vocab_size,
        "vocab_size": lm.target.vocab_size,
        "target_hidden_size": 32,
        "num_target_layers": 4,
        "tokenizer_fingerprint": lm.text.fingerprint,
        "weights_fingerprint": lm.target.weights_fingerprint,
        "template_hash": lm.text.template_hash,
    }
    DartNet(Config(**{**shape, **changes})).save(place)
    return place


def run(*args: str, input: str | None = None) -> Any:
    """The command in this process: exit_code, stdout, stderr."""
    return CliRunner().invoke(app, list(args), input=input)


def last_json(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def memory(**params: Any) -> Any:
    return dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="none").generate(**params)


# -- help ------------------------------------------------------------------------------------------------------------


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom dartspec.cli.main import app\n"
        "try:\n    app(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_has_an_example_and_kebab_case_flags(verb: str) -> None:
    result = run(*verb.split(), "--help")
    assert result.exit_code == 0
    assert f"  dartspec {verb}" in result.stdout.split("Example")[1]
    flags = [w.rstrip(",") for w in result.stdout.split() if w.startswith("--")]
    assert flags
    assert not [f for f in flags if "_" in f]
    assert "--json" in flags


def test_version_and_unknown_options() -> None:
    assert run("--version").stdout == f"dartspec {dartspec.__version__}\n"
    for args in (["generate", "a", "--temprature", "1"], ["genrate"], ["generate", "a", "--top-k", "many"]):
        result = run(*args)
        assert result.exit_code == 2
        assert "Traceback" not in result.stderr
    assert "generate" in run("genrate").stderr  # says what was meant


def test_python_m_dartspec_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dartspec", "--version"], capture_output=True, text=True)
    assert done.stdout == f"dartspec {dartspec.__version__}\n"


# -- generate --------------------------------------------------------------------------------------------------------


def test_generate_streams_the_apis_text_and_ends_with_the_verdict(folder: str) -> None:
    result = run("generate", "the thing", "-m", folder, "-n", "20", "--drafter", "prompt-lookup", *EXACT)
    expected = memory(prompt=[{"role": "user", "content": "the thing"}], max_tokens=20).text
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected + "\n"
    lines = result.stderr.splitlines()
    assert lines[0] == f"loading {folder}"
    assert lines[1].startswith("memory: ")
    assert "drafter prompt-lookup" in lines[2]
    assert VERDICT.match(lines[-1])


def test_auto_says_in_one_line_what_it_chose(folder: str) -> None:
    result = run("generate", "a", "-m", folder, "-n", "4", *EXACT)
    chosen = [line for line in result.stderr.splitlines() if "drafter" in line]
    assert len(chosen) == 1
    assert "no drafter trained for this model was found" in chosen[0]


def test_json_is_one_object_on_the_last_line_and_reaches_every_field(folder: str) -> None:
    result = run("generate", "a", "-m", folder, "-n", "8", "--drafter", "prompt_lookup", "--json", *EXACT)
    got = last_json(result)
    expected = memory(prompt=[{"role": "user", "content": "a"}], max_tokens=8)
    assert len(result.stdout.splitlines()) == 1
    assert (got["text"], got["ids"], got["finish_reason"]) == (expected.text, expected.ids, expected.finish_reason)
    assert got["metrics"]["num_new_tokens"] == len(expected.ids)
    assert got["provenance"]["dtype"] == "float32"
    assert got["provenance"]["nodes"] == 6
    assert got["verdict"]


def test_every_sampling_flag_reaches_the_sampler(folder: str) -> None:
    given = (
        "--temperature 0.9 --top-k 40 --top-p 0.95 --min-p 0.01 --repetition-penalty 1.1 --presence-penalty 0.2 "
        "--frequency-penalty 0.1 --logit-bias 70=2.5 --logit-bias 71=-3 --seed 9 --max-tokens 25 --stop-token-id 40 "
        "--stop ZZZ --ignore-eos --logprobs 1"
    )
    params = SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={70: 2.5, 71: -3.0},
        seed=9,
        max_tokens=25,
        stop=("ZZZ",),
        stop_token_ids=(40,),
        ignore_eos=True,
        logprobs=1,
    )
    # nothing is left out: a new field of SamplingParams must get its flag
    default = SamplingParams()
    left = [f for f in SamplingParams.__dataclass_fields__ if getattr(params, f) == getattr(default, f)]
    assert left == ["processors", "speculate"]  # a whole program's is --nodes
    got = last_json(run("generate", "on and on", "-m", folder, "--json", *given.split(), *EXACT))
    assert got["ids"] == memory(prompt=[{"role": "user", "content": "on and on"}], params=params).ids
    assert got["seed"] == 9
    first = got["log_probs"][0]
    assert set(first) == {"token", "id", "log_prob", "top"}
    assert len(first["top"]) == 1


def test_each_sampling_flag_changes_its_field_alone() -> None:
    for name, value in {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 4, "max_tokens": 9}.items():
        assert options.sampling(**{name: value}) == SamplingParams(**{name: value})
    assert options.sampling(bias=["5=-1.5"]) == SamplingParams(logit_bias={5: -1.5})
    assert options.sampling(temperature=None) == SamplingParams()


def test_prompts_from_argument_stdin_and_file_are_the_same(folder: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("the thing")
    common = ("-m", folder, "-n", "6", *EXACT)
    whole = run("generate", "the thing", *common).stdout
    assert run("generate", "-", *common, input="the thing").stdout == whole
    assert run("generate", "--file", str(tmp_path / "p.txt"), *common).stdout == whole


def test_raw_continues_the_text_and_system_enters_the_template(folder: str) -> None:
    common = ("-m", folder, "-n", "6", "--json", *EXACT)
    raw = last_json(run("generate", "the thing", "--raw", *common))
    assert raw["ids"] == memory(prompt="the thing", max_tokens=6).ids
    messages = [{"role": "system", "content": "in"}, {"role": "user", "content": "the thing"}]
    got = last_json(run("generate", "the thing", "--system", "in", *common))
    assert got["ids"] == memory(prompt=messages, max_tokens=6).ids


def test_the_seed_is_reported_and_gives_the_text_again(folder: str) -> None:
    common = ("-m", folder, "-n", "10", "-t", "1", *EXACT)
    first = run("generate", "a", *common)
    seed = next(line.split()[1] for line in first.stderr.splitlines() if line.startswith("seed "))
    assert run("generate", "a", "--seed", seed, *common).stdout == first.stdout


def test_log_probs_for_people(folder: str) -> None:
    result = run("generate", "a", "-m", folder, "-n", "5", "--ignore-eos", "--logprobs", "2", *EXACT)
    assert len([line for line in result.stderr.splitlines() if "|" in line]) == 5


def test_a_trained_drafter_is_taken_from_its_folder(folder: str, drafter: Path) -> None:
    got = last_json(run("generate", "the", "-m", folder, "-n", "12", "--drafter", str(drafter), "--json", *EXACT))
    assert got["ids"] == memory(prompt=[{"role": "user", "content": "the"}], max_tokens=12).ids
    assert "drafter dart from" in got["drafter"]
    assert got["metrics"]["ms_per_round"]["draft"] > 0


# -- chat ------------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_conversation_and_reset_forgets_it(folder: str) -> None:
    lines = "the thing\nand then?\n/reset\nthe thing\n\n/nonsense\n/quit\nnever read\n"
    result = run("chat", folder, "-n", "8", "--json", *EXACT, input=lines)
    turns = last_json(result)["turns"]
    assert [t["prompt"] for t in turns] == ["the thing", "and then?", "the thing"]
    history = [
        {"role": "user", "content": "the thing"},
        {"role": "assistant", "content": turns[0]["text"]},
        {"role": "user", "content": "and then?"},
    ]
    assert turns[1]["ids"] == memory(prompt=history, max_tokens=8).ids
    assert turns[2]["ids"] == turns[0]["ids"]
    assert "unknown command /nonsense" in result.stderr


def test_chat_for_people_streams_and_says_what_it_was_worth(folder: str) -> None:
    result = run("chat", folder, "-n", "8", *EXACT, input="the thing\n")
    assert result.exit_code == 0
    assert result.stdout == memory(prompt=[{"role": "user", "content": "the thing"}], max_tokens=8).text + "\n"
    assert VERDICT.match(result.stderr.splitlines()[-1])


class Interrupting(prompt_lookup.PromptLookup):
    """Ctrl-C in the third round of the first answer."""

    rounds = 0

    def propose(self, new: Any, budget: Any) -> Any:
        self.rounds += 1
        if self.rounds == 3:
            raise KeyboardInterrupt
        return super().propose(new, budget)


def test_ctrl_c_stops_the_answer_but_not_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="none")
    lm = lm.with_drafter(Interrupting(prompt_lookup.Config(), lm.target.num_tokens, lm.target.eos_token_ids))
    monkeypatch.setattr("sys.stdin", io.StringIO("the thing\nand then?\n"))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    turns = chat_verb.converse(lm, params, Terminal(), None)
    out, err = capsys.readouterr()
    assert [t["prompt"] for t in turns] == ["and then?"]
    assert "stopped; what was written is kept" in err
    partial = memory(prompt=[{"role": "user", "content": "the thing"}], params=params)
    said = out.splitlines()[0]
    assert said
    assert partial.text.startswith(said)
    history = [
        {"role": "user", "content": "the thing"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and then?"},
    ]
    assert turns[0]["ids"] == memory(prompt=history, params=params).ids


# -- demo ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [[], ["--temperature", "0.9", "--seed", "4"], ["--temperature", "0.9"]])
def test_demo_compares_both_on_the_same_prompts(folder: str, extra: list[str]) -> None:
    args = ("demo", folder, "-p", "on and on and on", "-p", "a", "-n", "20", "--json", *EXACT, *extra)
    result = run(*args)
    got = last_json(result)
    assert len(result.stdout.splitlines()) == 1
    assert got["equal"] is True
    assert got["different"] == []
    for side in ("plain", "dart"):
        assert {"tokens_per_s", "A", "M", "ms_per_round"} <= set(got[side])
        assert set(got[side]["ms_per_round"]) == {"draft", "search", "verify", "other"}
    assert got["plain"]["M"] == 1
    assert got["plain"]["num_new_tokens"] == got["dart"]["num_new_tokens"]
    s = got["speed_up"]
    assert s["speed_up"] == pytest.approx(s["M"] * s["plain_ms"] / s["round_ms"], rel=1e-2)
    assert got["provenance"]["seed"] == got["params"]["seed"]


def test_demo_for_people_shows_both_texts_the_table_and_the_terms(folder: str) -> None:
    result = run("demo", folder, "-p", "on and on", "-n", "12", *EXACT)
    assert result.exit_code == 0, result.stderr
    for words in ("plain", "prompt_lookup", "tokens/s", "verify", "S = M * T_AR / T_round", "bound", "texts: equal"):
        assert words in result.stdout
    assert VERDICT.match(result.stdout.splitlines()[-1])


def test_demo_says_where_texts_part(folder: str) -> None:
    lm = dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="prompt_lookup")
    outcome = demo_verb.compare(lm, ["a"], SamplingParams(max_tokens=6, ignore_eos=True), Terminal(json=True))
    prompt = lm.encode([{"role": "user", "content": "a"}])
    other = list(outcome.sides[0].ids[0])
    other[2] = (other[2] + 1) % 200
    parted = demo_verb.divergence(lm, outcome.params, prompt, outcome.sides[0].ids[0], other)
    assert parted["index"] == 2
    assert parted["token_b"] == other[2]
    assert parted["text_b"] == lm.text.decode([other[2]])
    far = {"prompt": 0, **parted, "gap_ulps": 1234.5}
    assert "more than rounding explains" in demo_verb.parting(far)
    assert "which rounding explains" in demo_verb.parting({**far, "gap_ulps": 0.5})


def test_the_shipped_prompts_are_mixed_and_our_own() -> None:
    prompts = demo_verb.shipped_prompts()
    assert {p["kind"] for p in prompts} == {"explanation", "code", "list", "arithmetic", "story"}
    assert all(20 < len(p["text"]) < 300 for p in prompts)


# -- ngram -----------------------------------------------------------------------------------------------------------


def test_an_index_is_built_described_and_asked(folder: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("in the thing in the thing in the end")
    (tmp_path / "more.jsonl").write_text('{"text": "in the thing"}\n')
    out = str(tmp_path / "my.ngram")
    built = last_json(
        run("ngram", "build", str(tmp_path / "text"), str(tmp_path / "more.jsonl"), "-m", folder, "-o", out, "--json")
    )
    assert built["num_documents"] == 2
    facts = last_json(run("ngram", "info", out, "--verify", "--json"))
    assert facts["num_nodes"] == built["num_nodes"]
    assert facts["verified"] is True
    assert facts["fingerprint"] == dartspec.load(tiny_cli.model(), tiny_cli.tokenizer()).text.fingerprint
    found = last_json(run("ngram", "query", out, "in the", "-m", folder, "--json"))["continuations"]
    assert found[0]["token"] == " "
    ranks = [e["probability"] for e in found]
    assert ranks == sorted(ranks, reverse=True)
    told = run("ngram", "query", out, "in the", "-m", folder)
    assert "' '" in told.stdout
    assert "seen after" in told.stdout
    assert "' the'" in told.stdout
    assert "longest gram" in run("ngram", "info", out).stdout
    assert "every section is whole" in run("ngram", "verify", out).stdout


def test_indexes_are_pruned_and_merged_and_answers_weigh(folder: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("in the thing in the end")
    (tmp_path / "answers.jsonl").write_text('{"response": [3, 4, 5]}\n')
    corpus, answers, both, twin = (str(tmp_path / name) for name in ("a.ngram", "b.ngram", "c.ngram", "d.ngram"))
    text = str(tmp_path / "a.txt")
    own = str(tmp_path / "answers.jsonl")
    common = ("-m", folder, "--exact", "--json")
    built = last_json(run("ngram", "build", text, "-o", corpus, *common))
    assert built["num_documents"] == 1
    assert built["peak_memory_bytes"] > 0
    last_json(run("ngram", "build", "--answers", own, "--answers-weight", "1", "-o", answers, *common))
    last_json(
        run("ngram", "build", text, "--answers", own, "--answers-weight", "3", "-o", twin, *common, "--memory", "4G")
    )
    merged = last_json(
        run(
            "ngram",
            "merge",
            corpus,
            answers,
            "-w",
            "1",
            "-w",
            "3",
            "-o",
            both,
            "--exact",
            "--json",
            "--description",
            "x",
        )
    )
    for key in ("num_tokens", "num_nodes_by_level"):
        assert merged[key] == last_json(run("ngram", "info", twin, "--json"))[key]
    pruned = last_json(run("ngram", "prune", both, "--min-count", "3", "-o", both, "--json"))
    assert 6 <= pruned["num_nodes"] < pruned["num_nodes_before"]
    one_sentence(run("ngram", "merge", corpus, answers, "-w", "2", "-o", both), "1 --weight for 2 parts")
    one_sentence(run("ngram", "build", "-o", both, "-m", folder), "nothing to count")
    one_sentence(run("ngram", "build", text, "-o", str(tmp_path), "-m", folder), "is a folder")
    one_sentence(run("ngram", "build", text, "-o", both, "-m", folder, "--memory", "9M"), "--memory is 9M")
    one_sentence(run("ngram", "import", text, "-o", both, "-m", folder), "no trie")


def test_an_interrupted_or_refused_build_leaves_the_old_index(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "my.ngram"
    out.write_bytes(b"precious")
    (tmp_path / "bad.jsonl").write_text('{"text": "in the thing"}\nnot json\n')
    result = run("ngram", "build", str(tmp_path / "bad.jsonl"), "-m", folder, "-o", str(out))
    assert result.exit_code == 2
    assert "line 2 is not JSON" in result.stderr
    assert out.read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "my.ngram"]


# -- train and doctor ------------------------------------------------------------------------------------------------


def test_train_makes_a_drafter_that_generate_takes(folder: str, tmp_path: Path) -> None:
    text = dartspec.load(tiny_cli.model(), tiny_cli.tokenizer()).text
    rows = [
        {"prompt": text.encode(f"say {i} the"), "response": text.encode(f" thing number {i} in the end")}
        for i in range(40)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = {
        "target": folder,
        "data": [str(tmp_path / "data.jsonl")],
        "out": str(tmp_path / "run"),
        "taps": [1, 2, 3],
        "d": 3,
        "draft_vocab_size": 64,
        "steps": 9999,
        "held_out": 0.1,
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    args = ("train", str(tmp_path / "run.json"), "--set", "steps=3", "--set", "eval-every=3", "--dtype", "float32")
    tried = last_json(run(*args, "--dry-run", "--json"))
    assert tried["config"]["steps"] == 3
    assert not (tmp_path / "run").exists()
    made = last_json(run(*args, "--json"))
    # a run that Ctrl-C stopped saves and returns; what tells it apart is the evaluation of the last step
    assert finished(tmp_path / "run", 3)
    assert not finished(tmp_path / "run", 4)
    assert not finished(tmp_path, 3)
    got = last_json(run("generate", "a", "-m", folder, "-n", "6", "--drafter", made["drafter"], "--json", *EXACT))
    assert got["ids"] == memory(prompt=[{"role": "user", "content": "a"}], max_tokens=6).ids


def test_doctor_tells_what_there_is_and_what_a_model_would_get(folder: str) -> None:
    facts = last_json(run("doctor", folder, "--json"))
    assert facts["packages"]["torch"]
    assert facts["dtype"] in ("float32", "bfloat16")
    assert facts["dtype_why"]
    assert {"none", "prompt_lookup", "dart"} <= set(facts["drafters"])
    assert facts["model"]["refused"] is None
    assert facts["model"]["needed_bytes"] > 0
    assert "prompt_lookup" in facts["model"]["drafter"]
    told = run("doctor", folder)
    assert "can be served" in told.stdout
    assert "CPU flags" in told.stdout


def test_doctor_measures_again(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTSPEC_CACHE", str(tmp_path))
    facts = last_json(run("doctor", folder, "--measure", "--json"))
    (kept,) = tmp_path.glob("cost-*.json")
    assert json.loads(kept.read_text()) == {"0": 0.0, **facts["times"]["ms_by_rows"]}
    kept.write_text('{"1": 1e9}')
    told = run("doctor", folder, "--measure").stdout
    assert "a node pays" in told
    assert "1 rows 1000000000.0 ms" not in told
    assert json.loads(kept.read_text())["1"] < 1e6


def test_doctor_changes_nothing_without_a_model(tmp_path: Path) -> None:
    assert run("doctor").exit_code == 0
    assert not (tmp_path / "cache").exists()


# -- bad input: one sentence, exit code 2, no traceback --------------------------------------------------------------


def broken(folder: str, place: Path, change: Callable[[Path], None]) -> str:
    shutil.copytree(folder, place)
    change(place)
    return str(place)


def cut_weights(place: Path) -> None:
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop_a_weight(place: Path) -> None:
    file = place / "model.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header = {k.replace("layers.1.mlp.up_proj", "layers.1.mlp.up_prox"): v for k, v in header.items()}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def make_recurrent(place: Path) -> None:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "layer_types": ["linear_attention"] * 4}))


BAD_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (cut_weights, "is cut off or damaged"),
    "missing weight": (drop_a_weight, "up_proj"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "holds no weights"),
    "no config": (lambda p: (p / "config.json").unlink(), "holds no config.json"),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), "no tokenizer could be loaded"),
    "half a config": (lambda p: (p / "config.json").write_text("{"), "cannot be read"),  # type: ignore[dict-item]
    "recurrent": (make_recurrent, "recurrent state"),
}


def one_sentence(result: Any, words: str) -> None:
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr)
    errors = [line for line in result.stderr.splitlines() if line.startswith("dartspec: ")]
    assert len(errors) == 1
    assert result.stderr.splitlines()[-1] == errors[0]
    assert words in errors[0]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_model_that_cannot_be_served_is_refused(folder: str, tmp_path: Path, kind: str) -> None:
    change, words = BAD_MODELS[kind]
    place = broken(folder, tmp_path / "broken", change)
    one_sentence(run("generate", "a", "-m", place, "--dtype", "float32"), words)
    if kind not in ("missing weight", "no tokenizer"):  # these take reading the weights or the tokenizer
        one_sentence(run("doctor", place), words)


def test_an_unservable_architecture_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "bloom"
    shutil.copytree(tiny_cli.save(tmp_path / "model"), place)
    config = {"model_type": "bloom", "vocab_size": 264, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    (place / "config.json").write_text(json.dumps(config))
    for args in (
        ("generate", "a", "-m", str(place)),
        ("doctor", str(place)),
        ("demo", str(place)),
        ("chat", str(place)),
    ):
        one_sentence(run(*args), "ALiBi")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("",), "the prompt is empty"),
        (("  \n",), "the prompt is empty"),
        ((), "a prompt or --file is needed, found neither"),
        (("a", "--file", "x.txt"), "found both"),
        (("--file", "/nowhere/x.txt"), "cannot be read"),
        (("the " * 300,), "has a context of 256"),
        (("a", "--max-tokens", "0"), "max_tokens is 0"),
        (("a", "--temperature", "-0.5"), "temperature is -0.5"),
        (("a", "--temperature", "nan"), "temperature is nan"),
        (("a", "--top-p", "0"), "top_p is 0"),
        (("a", "--top-p", "1.2"), "top_p is 1.2"),
        (("a", "--top-k", "-1"), "top_k is -1"),
        (("a", "--min-p", "2"), "min_p is 2"),
        (("a", "--repetition-penalty", "0"), "repetition_penalty is 0"),
        (("a", "--logprobs", "101"), "logprobs is 101"),
        (("a", "--seed", "-1"), "seed is -1"),
        (("a", "--stop", ""), "without empty strings"),
        (("a", "--logit-bias", "x=1"), "is not ID=NUMBER"),
        (("a", "--nodes", "many"), "nodes is 'many'"),
        (("a", "--nodes", "-3"), "nodes is -3"),
        (("a", "--drafter", "dartz"), "unknown drafter 'dartz'; there are: dart"),
        (("a", "--drafter", "dart"), "no dart drafter for"),
        (("a", "--drafter", "/nowhere/drafter"), "is no drafter"),
        (("a", "--dtype", "float64"), "dtype 'float64' is not one of"),
        (("a", "--device", "abacus"), "device 'abacus' is not known"),
    ],
)
def test_bad_requests_are_refused(folder: str, args: tuple[str, ...], words: str) -> None:
    one_sentence(run("generate", *args, "-m", folder), words)


def test_bad_sources_are_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "odd.gguf").write_bytes(b"not a gguf at all")
    (tmp_path / "x.ngram").write_bytes(b"no index")
    for model, words in {
        "/nowhere/model": "is neither a folder, a GGUF file nor a hub id",
        "nobody/nothing-at-all": "not in the local cache",
        str(tmp_path / "notes.gguf"): "cut off or damaged",
        str(tmp_path / "odd.gguf"): "is not a GGUF file",
    }.items():
        one_sentence(run("generate", "a", "-m", model), words)
    one_sentence(run("ngram", "info", str(tmp_path / "x.ngram")), str(tmp_path / "x.ngram"))
    one_sentence(run("ngram", "info", str(tmp_path / "none.ngram")), "none.ngram")
    one_sentence(run("ngram", "build", str(tmp_path / "none"), "-m", folder, "-o", "x"), "does not exist")
    one_sentence(run("ngram", "build", str(tmp_path), "-m", folder, "-o", str(tmp_path / "x")), "holds no .txt")
    (tmp_path / "a.txt").write_text("in the end")
    to = str(tmp_path / "nowhere" / "x.ngram")
    one_sentence(run("ngram", "build", str(tmp_path / "a.txt"), "-m", folder, "-o", to), "nowhere does not exist")
    one_sentence(run("demo", folder, "-p", " "), "the prompt is empty")
    one_sentence(run("chat", folder, "-n", "4", input="the " * 300 + "\n"), "has a context of 256")


def test_a_drafter_for_another_target_is_refused(folder: str, tmp_path: Path) -> None:
    cases = {
        "trained for a target with a hidden size of 64": {"target_hidden_size": 64},
        "layers numbering 12": {"num_target_layers": 12},
        "drafter trained with tokenizer 00000000": {"tokenizer_fingerprint": "00000000"},
    }
    for i, (words, changes) in enumerate(cases.items()):
        place = save_drafter(tmp_path / str(i), **changes)
        one_sentence(run("generate", "a", "-m", folder, "--drafter", str(place)), words)
    place = save_drafter(tmp_path / "cut")
    cut_weights(place)
    one_sentence(run("generate", "a", "-m", folder, "--drafter", str(place)), "safetensors")
    (place / "config.json").write_text('{"method": "da')
    one_sentence(run("generate", "a", "-m", folder, "--drafter", str(place)), "not JSON")


def test_a_fine_tuned_target_gets_a_warning_not_a_refusal(folder: str, tmp_path: Path) -> None:
    place = save_drafter(tmp_path / "other", weights_fingerprint="00000000", acceptance={"4": 2.0, "8": 3.0})
    result = run("generate", "a", "-m", folder, "-n", "6", "--drafter", str(place), *EXACT)
    assert result.exit_code == 0
    assert "note: drafter trained for weights 00000000" in result.stderr
    # six nodes: half-way between the record's four and eight
    assert result.stderr.splitlines()[-1].endswith("; M was 2.5 on the weights the drafter was trained for")


def test_an_index_of_another_tokenizer_is_refused(folder: str, drafter: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_cli.tokenizer(1).save_pretrained(other)
    (tmp_path / "a.txt").write_text("in the end")
    index = str(tmp_path / "other.ngram")
    assert run("ngram", "build", str(tmp_path / "a.txt"), "-m", str(other), "-o", index).exit_code == 0
    one_sentence(run("ngram", "query", index, "in", "-m", folder), "is for tokenizer")
    args = ("generate", "a", "-m", folder, "--drafter", str(drafter), "--index", index)
    one_sentence(run(*args), "rebuild with `dartspec ngram build`")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "training needs a target (--target), at least one data file (--data) and an output folder (--out)"),
        (("/nowhere.json",), "cannot be read"),
        (("--set", "steps"), "is not KEY=VALUE"),
        (("--set", "target=./nowhere", "--set", "data=b", "--set", "out=c"), "nowhere"),
        (("--set", "target=a", "--set", "data=b", "--set", "out=c", "--set", "stepz=1"), "unknown key 'stepz'"),
        (("--set", "target=a", "--set", "data=b", "--set", "out=c", "--set", "d=1"), "d = 1 is out of range"),
    ],
)
def test_bad_training_configs_are_refused(args: tuple[str, ...], words: str) -> None:
    one_sentence(run("train", *args), words)


def test_debug_lets_the_traceback_through(folder: str) -> None:
    result = run("generate", "a", "-m", folder, "--top-p", "2", "--debug")
    assert isinstance(result.exception, DartspecError)


def test_what_goes_wrong_in_a_verb_is_one_line_and_a_code() -> None:
    def program(error: BaseException) -> Any:
        made = typer.Typer(cls=Verbs)

        @made.callback()
        def top() -> None: ...

        @made.command("fail")
        def fail() -> None:
            raise error

        return CliRunner().invoke(made, ["fail"])

    for error, code, words in (
        (DartspecError("no such\nthing"), 2, "dartspec: no such thing\n"),
        (PermissionError(13, "Permission denied", "x"), 2, "dartspec: [Errno 13] Permission denied: 'x'\n"),
        (KeyboardInterrupt(), 130, "dartspec: stopped\n"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "dartspec: not enough memory: Default"),
        (ZeroDivisionError("by zero"), 1, "dartspec: internal error, ZeroDivisionError: by zero (--debug"),
    ):
        result = program(error)
        assert result.exit_code == code
        assert result.stderr.startswith(words)
        assert len(result.stderr.splitlines()) == 1


# -- Ctrl-C and closed pipes in a real process -------------------------------------------------------------------------


def start(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dartspec", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # where the tests run as a script's background job, Ctrl-C is ignored, and a child would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with so long a context that an answer does not end by itself in a test's time."""
    return str(tiny_cli.save(tmp_path_factory.mktemp("long"), max_position_embeddings=60000))


def test_ctrl_c_is_one_line_and_130(long_folder: str) -> None:
    args = ("-n", "50000", "--ignore-eos", "--drafter", "none", "--nodes", "0", "--dtype", "float32")
    process = start("generate", "a", "-m", long_folder, *args)
    assert process.stdout is not None
    assert process.stdout.read(1)  # it writes
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "dartspec: stopped"
    assert b"Traceback" not in err


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C as the command hears it, in this process."""
    before = {s: signal.signal(s, signal.SIG_DFL) for s in (signal.SIGINT, signal.SIGALRM)}
    monkeypatch.setattr(interrupt, "PATIENCE_S", 0.5)
    interrupt.listen()
    yield
    interrupt.taken()
    for which, handler in before.items():
        signal.signal(which, handler)


@pytest.mark.parametrize("becomes", [None, OSError("half imported"), RuntimeError("half imported")])
def test_ctrl_c_that_a_library_swallows_still_ends_the_command(
    listening: None, monkeypatch: pytest.MonkeyPatch, becomes: Exception | None
) -> None:
    def swallow(*_: Any, **__: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            if becomes is not None:
                raise becomes from None
        threading.Event().wait(60)  # as if nothing had been asked

    monkeypatch.setattr("dartspec.api.load", swallow)
    result = run("generate", "a")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "dartspec: stopped"
    assert "internal error" not in result.stderr
    assert not interrupt.asked()


def test_ctrl_c_before_a_verb_runs_is_one_line_and_130(
    listening: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dartspec", "doctor"])
    monkeypatch.setattr(Verbs, "make_context", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    assert capsys.readouterr().err == "dartspec: stopped\n"


def test_an_ignored_ctrl_c_stays_ignored(listening: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt.listen()
    signal.raise_signal(signal.SIGINT)
    assert not interrupt.asked()


def test_a_closed_pipe_is_quiet(long_folder: str) -> None:
    args = ("-n", "50000", "--ignore-eos", "--drafter", "none", "--nodes", "0", "--dtype", "float32")
    process = start("generate", "a", "-m", long_folder, *args)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert b"Traceback" not in err
    assert b"Broken" not in err


# -- colours and the sentence ------------------------------------------------------------------------------------------


def test_accepted_tokens_are_coloured_unless_asked_not_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    pieces = [("own ", False), ("drafted\x1b]0;title\x07\n", True)]

    def written(**settings: Any) -> str:
        Terminal(**settings).write(pieces)
        return capsys.readouterr().out

    assert written() == "own drafted\x1b]0;title\x07\n"  # a pipe gets the text as it is
    monkeypatch.setenv("FORCE_COLOR", "1")
    # on a terminal nothing that a model writes may steer it
    assert written() == "own \x1b[32mdrafted]0;title\n\x1b[0m"
    assert written(no_color=True) == "own drafted]0;title\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert written() == "own drafted]0;title\n"


@pytest.mark.parametrize("params", [{}, {"stop": ("e",)}, {"temperature": 1.0, "seed": 2}])
def test_the_painter_shows_the_text_and_what_was_accepted(params: dict[str, Any]) -> None:
    lm = dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="none")
    prompt = lm.encode("the thing")
    whole = {"max_tokens": 40, "ignore_eos": True, **params}
    known = lm.generate(prompt, **whole)
    lm = lm.with_drafter(oracle.load(oracle.Config(texts=((*prompt, *known.ids),), rate=0.8), lm.target), nodes=6)
    painter = Painter(lm.text)
    stream = lm.stream(prompt, **whole)
    pieces = []
    for chunk in stream:
        new = painter.push(chunk)
        assert "".join(text for text, _ in new) == chunk.text
        pieces += new
    assert "".join(text for text, _ in pieces) == known.text
    drafted = sum(len(text) for text, accepted in pieces if accepted)
    expected = [a for a, i in zip(stream.result.accepted, known.ids, strict=True) if len(lm.text.decode([i])) == 1]
    assert bool(drafted) == any(expected)


def rounds(num: int, drafted: int, committed: int, verify_ms: float, other_ms: float = 0.0) -> Metrics:
    record = RoundRecord(drafted, committed - 1, committed, 1.0, 0.0, verify_ms, other_ms)
    return Metrics([record] * num, num_new_tokens=1 + num * committed)


def said(lm: Any, plain_ms: float, metrics: Metrics, raw: bool = False) -> str:
    speed = SpeedUp(metrics.M, plain_ms, metrics.ms_per_round, metrics.verify_ms / metrics.num_rounds)
    return sentence(lm, speed, metrics, raw)


def test_the_sentence_names_the_gain_or_the_term_to_blame(drafter: Path, tmp_path: Path) -> None:
    lm = dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter=drafter)
    assert said(lm, 10, rounds(4, 15, 3, 17)) == "1.7x: M 3.0, a round costs 1.8 steps"
    assert said(lm, 10, rounds(4, 15, 2, 29)) == "no gain: 16 rows cost 2.9 steps on this CPU"
    assert said(lm, 10, rounds(4, 15, 2, 11, 12)) == (
        "no gain: M 2.0, a round costs 2.4 steps, 1.3 of them beside the model"
    )
    assert said(lm, 10, rounds(4, 15, 2, 5)).startswith(
        "M 2.0, gain unknown: a round took 6.0 ms and a plain step 10.0"
    )
    badly = rounds(4, 15, 1, 11)
    assert said(lm, 10, badly) == "no gain: M 1.0 (the drafter guesses this text badly)"
    assert said(lm, 10, badly, raw=True) == "no gain: M 1.0 (no chat template, the drafter was trained with one)"
    other = save_drafter(tmp_path / "template", template_hash="0000")
    assert said(lm.with_drafter(other), 10, badly) == "no gain: M 1.0 (template differs from training)"
    copies = lm.with_drafter("prompt_lookup")
    assert said(copies, 10, badly) == "no gain: M 1.0 (this text repeats little, so there is little to copy)"
    assert said(lm.with_drafter(drafter, nodes=0), 10, badly).startswith("no gain: no tree is worth its cost")


def test_the_plain_step_is_measured_once_a_stretch_of_context() -> None:
    lm = dartspec.load(tiny_cli.model(max_position_embeddings=2000), tiny_cli.tokenizer(), drafter="prompt_lookup")
    step, params = PlainStep(lm), SamplingParams(temperature=1.0, seed=1, stop=("x",), max_tokens=1)
    first = step.ms([5] * 20, params)
    assert first > 0
    assert step.ms([6] * 200, params) == first
    assert step.ms([6] * 300, params) > 0
    assert list(step._known) == [0, 1]
    # rounds that drafted nothing are plain steps already
    own = rounds(5, 0, 1, 9)
    own.rounds += rounds(5, 15, 4, 19).rounds
    assert after_answer(lm, step, [1], own, params, False) == "1.7x: M 2.5, a round costs 1.5 steps"
    result = lm.generate("the", max_tokens=1)
    assert after_answer(lm, step, [1], result.metrics, params, False) == "nothing to measure: the answer took no round"


def test_the_plain_step_fits_into_a_full_context() -> None:
    lm = dartspec.load(tiny_cli.model(), tiny_cli.tokenizer(), drafter="prompt_lookup")
    result = lm.generate("the", max_tokens=10_000, ignore_eos=True)
    assert result.num_prompt_tokens + len(result.ids) == lm.target.max_positions
    assert PlainStep(lm).ms([3] * lm.target.max_positions, SamplingParams()) > 0
