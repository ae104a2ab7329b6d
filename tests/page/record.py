"""Writes recorded.json: answers of a running server, as the page's tests replay them.

`dartspec serve --served-name SmolLM2-135M-Instruct`, then `python tests/page/record.py http://127.0.0.1:8000`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from dartspec.bench.provenance import provenance

PROMPTS = {
    "Name three sights in Paris as a list, with one sentence each.": 120,
    "Write a Python class for a stack with push and pop, and show how to use it.": 140,
}


def main(server: str) -> None:
    with urlopen(f"{server}/dartspec/info") as response:
        info = json.load(response)
    drafters = ("plain", info["default_drafter"])
    streams = {p: {d: ask(server, p, d, n) for d in drafters} for p, n in PROMPTS.items()}
    # one chunk a line, so that a new recording can be read as a difference
    lines = [
        f"{json.dumps(prompt)}: {{\n"
        + ",\n".join(f"{json.dumps(d)}: [\n" + ",\n".join(map(dumps, c)) + "\n]" for d, c in by_drafter.items())
        + "\n}"
        for prompt, by_drafter in streams.items()
    ]
    made = json.dumps(provenance())
    whole = f'{{"provenance": {made},\n"info": {json.dumps(info)},\n"streams": {{\n' + ",\n".join(lines) + "\n}}\n"
    json.loads(whole)
    Path(__file__).with_name("recorded.json").write_text(whole, encoding="utf-8")


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def ask(server: str, prompt: str, drafter: str, max_tokens: int) -> list[dict[str, Any]]:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "dartspec": {"drafter": drafter, "rounds": True},
    }
    question = Request(f"{server}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(question) as response:
        chunks = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    return [{key: c[key] for key in ("choices", "usage", "dartspec") if key in c} for c in chunks]


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
