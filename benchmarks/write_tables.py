"""Writes the tables of README.md and docs/numbers.md from the results in docs/results/, between their marks.

    python benchmarks/write_tables.py

Reads table-t0.json and table-t08.json (table.py), acceptance.json (table.py --no-plain) and plain.json (plain.py). No
number in a table is typed by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def rows(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(result: dict[str, Any], name: str) -> str:
    p = result["provenance"]
    return (
        f"`{p['command']}` at commit {p['commit']}; torch {p['torch']}, transformers {p['transformers']}; "
        f"{p['cpu']}, {p['threads']} threads; {p['date'][:10]}; [{name}.json](RESULTS/{name}.json)"
    )


def speed(result: dict[str, Any]) -> str:
    """Per set: M, both times, S with its terms and the bound."""
    body = []
    for name, r in result["sets"].items():
        round_ms = sum(r["ms_per_round"].values())
        body.append(
            [
                f"**{name}**" if name == "all" else name,
                f"{r['M']:.2f}",
                f"{r['tokens_per_s'][0]:.0f}",
                f"{r['tokens_per_s'][1]:.0f}",
                f"**{r['speed_up']:.2f}x**",
                f"{r['M']:.2f} * {r['plain_ms']:.1f} / {round_ms:.1f}",
                f"{r['bound']:.2f}x",
                f"{r['uncut_speed_up']:.2f}x",
                f"{r['num_equal']}/{r['num_prompts']}",
            ]
        )
    header = ["set", "M", "plain, tokens/s", "DART, tokens/s", "S", "M * T_AR / T_round (ms)", "bound"]
    return rows([*header, "S, loops kept", "equal texts"], body)


def stages(result: dict[str, Any]) -> str:
    r = result["sets"]["all"]
    s = r["ms_per_round"]
    return (
        f"A round: draft {s['draft']:.2f} ms, search {s['search']:.2f} ms, verify {s['verify']:.2f} ms, rest "
        f"{s['other']:.2f} ms; a plain step {r['plain_ms']:.2f} ms; {result['config']['nodes']} nodes."
    )


def acceptance(result: dict[str, Any]) -> str:
    sets = {k: v for k, v in result["sets"].items() if k != "all"}
    body = [[name, f"{r['A']:.2f}", f"{r['M']:.2f}", f"{r['uncut_M']:.2f}"] for name, r in sets.items()]
    whole = result["sets"]["all"]
    body.append(["**mean of sets**", "", f"**{whole['mean_of_sets_M']:.2f}**", ""])
    body.append(["all rounds", f"{whole['A']:.2f}", f"{whole['M']:.2f}", f"{whole['uncut_M']:.2f}"])
    return rows(["set", "A", "M", "M, loops kept"], body)


def plain(result: dict[str, Any]) -> str:
    body = [
        [
            name,
            f"{r['ms_per_token']:.1f}",
            f"{r['ratio']:.2f}x",
            f"{r['ratio_range'][0]:.2f} to {r['ratio_range'][1]:.2f}",
        ]
        for name, r in result["forms"].items()
    ]
    return rows(["form", "ms a token", "speed against transformers", "range over prompts"], body)


def main() -> None:
    made: dict[str, str] = {}
    for name, table in (
        ("table-t0", speed),
        ("table-t08", speed),
        ("acceptance", acceptance),
        ("plain", plain),
    ):
        if (result := load(name)) is not None:
            more = "\n\n" + stages(result) if table is speed else ""
            if name == "plain":
                more = f"\n\nCompiling the static form took {result['compile_s']:.0f} s; ours compiles nothing."
            made[name] = f"{table(result)}{more}\n\n{provenance(result, name)}"
    for path, results in ((ROOT / "README.md", "docs/results"), (ROOT / "docs" / "numbers.md", "results")):
        text = path.read_text()
        for name, block in made.items():
            block = block.replace("RESULTS", results)
            mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            text = mark.sub(lambda m, b=block: f"{m[1]}\n{b}\n\n{m[2]}", text)
        path.write_text(text)


if __name__ == "__main__":
    main()
