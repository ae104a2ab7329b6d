"""The target answers prompts itself: training answers (and index text) in the target's own words.

    python -m dartspec.train.regenerate prompts/*.jsonl --out answers.jsonl --temperatures 0,0.7

Prompts are lines of {"id", "turns": [user turn, ...]}; the first turn is asked. One line an answer comes out, as
soon as it ends: {"id", "temperature", "prompt": ids, "response": ids}. Started again with the same output, it goes
on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import torch

from dartspec.drafters import none
from dartspec.engine import Request, generate
from dartspec.errors import DartspecError
from dartspec.target.fast import accelerate
from dartspec.target.load import as_target, load_model
from dartspec.target.target import Target
from dartspec.text import Text
from dartspec.types import SamplingParams


def read_prompts(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(id, first user turn) of every line; a line of another form is named and refused."""
    for path in paths:
        if not path.is_file():
            raise DartspecError(f"{path}: no such file; give JSONL files of prompts")
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    yield str(row["id"]), str(row["turns"][0])
                except (ValueError, KeyError, IndexError, TypeError) as error:
                    raise DartspecError(
                        f'{path}, line {number} is no prompt ({error}); expected {{"id": ..., "turns": ["..."]}}'
                    ) from error


def done_ids(path: Path) -> set[str]:
    """Ids answered already. A last line cut off by a kill is dropped from the file."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    try:
        ids = {str(json.loads(line)["id"]) for line in data[:whole].splitlines()}
    except (ValueError, KeyError, TypeError) as error:
        raise DartspecError(f"{path} holds something other than answers ({error}); give another --out") from error
    if whole < len(data):
        with open(path, "r+b") as file:
            file.truncate(whole)
    return ids


def regenerate(
    target: Target,
    text: Text,
    prompts: Sequence[tuple[str, str]],
    out: Path,
    *,
    temperatures: Sequence[float] = (0.0, 0.7),
    batch: int = 48,
    max_tokens: int = 208,
    max_prompt: int = 176,
    log: TextIO = sys.stderr,
) -> int:
    """Answers all prompts not yet in `out`; returns how many answers were added.

    An id's temperature and seed follow from the id, so a resumed run writes what an unbroken one would have written.
    Prompts longer than `max_prompt` tokens are left out and counted.
    """
    done = done_ids(out)
    ids, requests, num_long = [], [], 0
    for name, turn in prompts:
        if name in done:
            continue
        prompt = text.encode_chat([{"role": "user", "content": turn}])
        if len(prompt) > max_prompt:
            num_long += 1
            continue
        draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        temperature = temperatures[draw % len(temperatures)]
        params = SamplingParams(temperature=temperature, seed=draw, max_tokens=max_tokens)
        ids.append(name)
        requests.append(Request(prompt, params))
    print(f"{len(requests)} prompts to answer, {len(done)} answered already, {num_long} too long", file=log)
    answers: dict[int, list[int]] = {}
    num_tokens = num_answers = 0
    began = shown = time.monotonic()
    with open(out, "a", encoding="utf-8") as file:
        for chunk in generate(target, none.Plain(), requests, batch=batch, num_nodes=0):
            answers.setdefault(chunk.index, []).extend(chunk.ids)
            if not chunk.finish:
                continue
            request, response = requests[chunk.index], answers.pop(chunk.index)
            row = {
                "id": ids[chunk.index],
                "temperature": request.params.temperature,
                "prompt": list(request.prompt),
                "response": response,
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()
            num_answers, num_tokens = num_answers + 1, num_tokens + len(response)
            now = time.monotonic()
            if now - shown > 10 or num_answers == len(requests):
                shown, rate = now, num_tokens / (now - began)
                left = (len(requests) - num_answers) * (num_tokens / num_answers) / rate
                print(
                    f"{num_answers}/{len(requests)} answers, {num_tokens} tokens, {rate:.0f} tokens/s,"
                    f" {left / 60:.0f} min left",
                    file=log,
                    flush=True,
                )
    return num_answers


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("prompts", type=Path, nargs="+", help="JSONL files of prompts")
    p.add_argument("--out", type=Path, required=True, help="JSONL file of answers; what it has is not asked again")
    p.add_argument("--model", default=None, help="folder, hub id or GGUF file (default: the embedded model)")
    p.add_argument("--dtype", default=None, help="default: the machine's")
    p.add_argument("--temperatures", default="0,0.7", help="shared out over the prompts by their ids (default: 0,0.7)")
    p.add_argument("--batch", type=int, default=48, help="answers written at a time (default: 48)")
    p.add_argument("--max-tokens", type=int, default=208, help="of an answer (default: 208)")
    p.add_argument("--max-prompt", type=int, default=176, help="tokens; longer ones are left out (default: 176)")
    p.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    try:
        _run(p.parse_args(arguments))
    except DartspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _run(a: argparse.Namespace) -> None:
    try:
        temperatures = [float(t) for t in a.temperatures.split(",")]
    except ValueError:
        raise DartspecError(f"--temperatures is {a.temperatures!r}; it must be numbers such as 0,0.7") from None
    if a.threads < 1:
        raise DartspecError(f"--threads is {a.threads}; it must be 1 or more")
    prompts = sorted(read_prompts(a.prompts))
    random.Random(0).shuffle(prompts)  # sets mixed, so that a run stopped half-way has some of each
    torch.set_num_threads(a.threads)
    loaded = load_model(a.model, dtype=a.dtype)
    accelerate(loaded.model, torch.arange(3, 11)[None], a.threads)
    regenerate(
        as_target(loaded),
        Text(loaded.tokenizer),
        prompts,
        a.out,
        temperatures=temperatures,
        batch=a.batch,
        max_tokens=a.max_tokens,
        max_prompt=a.max_prompt,
    )


if __name__ == "__main__":
    raise SystemExit(main())
