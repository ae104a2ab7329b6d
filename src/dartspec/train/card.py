"""A drafter's model card, README.md with its curves as PNG, and `push`: the folder to the hub or to another folder.

The card says only what the folder and the run's log hold: the target with its fingerprints, the recipe, the curve, the
figures of `dartspec eval`. Curves need matplotlib (the extra `train`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dartspec.drafters._checkpoint import read_json
from dartspec.errors import DartspecError
from dartspec.files import written_aside
from dartspec.train.watch import Record, read_log

CARD, CURVES, EVAL = "README.md", "curves.png", "eval.json"
FILES = re.compile(
    r"config\.json|model\.safetensors|index\.ngram|calibration.*\.json|eval\.json|README\.md|curves\.png"
)
SHOWN_OFFSETS = 3
NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")  # a repository of the hub


def write_card(folder: Path, *, log: Path | None = None, base_model: str = "", license_: str = "") -> Path:
    """Writes `README.md` and, where the run's log has a curve, `curves.png` into a drafter's folder.

    log: the run's `log.jsonl`; default: the one beside or above the folder, if there is one. base_model: hub id of the
    target; default: what the drafter calls it, where that is one. license_: of the drafter's weights, which may be
    bound by the target's terms; left out where it is not said.
    """
    config = read_json(folder / "config.json")
    if "num_target_layers" not in config:
        raise DartspecError(
            f"{folder} holds another program's drafter: a card is written for ours (`dartspec convert`)"
        )
    path = log if log is not None else next((p for p in (folder, folder.parent) if (p / "log.jsonl").exists()), None)
    if path is not None and path.is_dir():
        path = path / "log.jsonl"
    if path is not None and not path.is_file():
        raise DartspecError(f"{path}: no such file; give the run's log.jsonl, or leave --log out")
    if base_model and not NAME.fullmatch(base_model):
        raise DartspecError(f"base model {base_model!r} is not a hub id such as owner/name")
    if license_ and not re.fullmatch(r"[\w.-]+", license_):
        raise DartspecError(f"license {license_!r} is not an id such as apache-2.0 or other")
    records = read_log(path) if path is not None else []
    if any(not {"step", "tokens"} <= record.keys() for _, record in records):
        raise DartspecError(f"{path} is not the log of a training run: give the run's log.jsonl, or leave --log out")
    judged = json.loads((folder / EVAL).read_text(encoding="utf-8")) if (folder / EVAL).exists() else None
    has_curves = draw(records, folder / CURVES)
    base = base_model or (config["target"] if NAME.fullmatch(config.get("target") or "") else "")
    with written_aside(folder / CARD) as aside:
        aside.write_text(card(config, judged, records, has_curves, base, license_), encoding="utf-8")
    return folder / CARD


def card(
    config: Mapping[str, Any],
    judged: Mapping[str, Any] | None,
    records: Sequence[tuple[str, Record]],
    has_curves: bool,
    base_model: str,
    license_: str = "",
) -> str:
    """The text. Its head is what the hub reads: `base_model` and tags, by which `load` finds the drafter."""
    target = base_model or config.get("target") or "its target"
    head = ["---", "library_name: dartspec", "tags:", "- dartspec", "- speculative-decoding", f"- {config['method']}"]
    if license_:
        head.append(f"license: {license_}")
    if base_model:
        head += [f"base_model: {base_model}", "base_model_relation: adapter"]
    lines = [
        *head,
        "---",
        "",
        f"# A {config['method']} drafter for {target}",
        "",
        f"It guesses the next {config['d']} tokens of {target}, which checks them and keeps what it would have written",
        "itself: the same text, sooner. It is of use with this model, and models fine-tuned from it, alone.",
        "",
        "```console",
        f'$ dartspec generate --model {base_model or "PATH-OF-THE-MODEL"} --drafter PATH-OF-THIS-FOLDER "Why?"',
        "```",
        "",
        "## What it was trained for",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _facts(config)),
    ]
    if judged is not None:
        lines += ["", "## What it gives", "", *_figures(judged)]
    if has_curves or records:
        lines += ["", "## Training", ""]
    if has_curves:
        lines += [f"![curves]({CURVES})", ""]
    lines += _curve_table(records)
    if provenance := config.get("provenance"):
        shown = {k: v for k, v in provenance.items() if k not in ("curve", "init")}
        lines += ["", "## Provenance", "", "```json", json.dumps(shown, indent=1, ensure_ascii=False), "```"]
    return "\n".join(lines) + "\n"


def _facts(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    p = config.get("provenance") or {}
    named = [
        ("target", config.get("target")),
        ("tokenizer fingerprint", config.get("tokenizer_fingerprint")),
        ("weights fingerprint", config.get("weights_fingerprint")),
        ("chat template (hash)", config.get("template_hash")),
        ("hidden states read", ", ".join(map(str, config["taps"]))),
        ("positions predicted", config["d"]),
        ("draft vocabulary", f"{config['draft_vocab_size']:,} of {config['vocab_size']:,} ids"),
        ("trained tokens, prompts included", f"{p['trained_tokens']:,}" if p.get("trained_tokens") else None),
        ("updates", f"{p['step']:,}" if p.get("step") else None),
    ]
    return [(name, value) for name, value in named if value not in (None, "")]


def _figures(judged: Mapping[str, Any]) -> list[str]:
    """The table of `dartspec eval`."""
    from dartspec.accounting import with_interval

    columns = [(t, n) for t, by_size in judged["sets"][-1]["M"].items() for n in by_size]
    heads = ["set", *(f"M, T = {t}, {n} nodes" for t, n in columns), "chain", "hit@1", "hit@10"]
    lines = [
        "M: committed tokens a round, loops cut, with its 95 % interval over prompts. hit@k: the model's first choice",
        f"is among the drafter's k first, at offsets 1 to {SHOWN_OFFSETS}. chain: offsets in a row that are right.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    ]
    for row in judged["sets"]:
        cells = [row["set"]]
        for t, n in columns:
            m = row["M"].get(t, {}).get(n)
            cells.append("-" if m is None else with_interval(m))
        cells.append("-" if row["chain"] is None else f"{row['chain']:.2f}")
        cells += [" ".join(f"{x:.2f}" for x in (row[k] or [])[:SHOWN_OFFSETS]) or "-" for k in ("hit1", "hit10")]
        lines.append(f"| {' | '.join(cells)} |")
    p = judged.get("provenance", {})
    lines += ["", f"`{p.get('command')}`, commit {p.get('commit')}, {p.get('cpu')}, {p.get('date')}."]
    return lines


def _curve_table(records: Sequence[tuple[str, Record]]) -> list[str]:
    """At most eight rows of the held-out figures, the last among them."""
    curve = [r for kind, r in records if kind == "eval"]
    if not curve:
        return []
    taken = sorted({round(i * (len(curve) - 1) / 7) for i in range(8)})
    lines = [
        "On held-out answers:",
        "",
        "| updates | tokens | hit@1, offsets 1 to 3 | hit@10, 1 to 3 | chain |",
        "|---|---|---|---|---|",
    ]
    for r in (curve[i] for i in taken):
        hits = [" ".join(f"{x:.2f}" for x in r[k][:SHOWN_OFFSETS]) for k in ("hit1", "hit10")]
        lines.append(f"| {r['step']:,} | {r['tokens']:,} | {hits[0]} | {hits[1]} | {r['chain']:.2f} |")
    return lines


def draw(records: Sequence[tuple[str, Record]], path: Path) -> bool:
    """Loss, hit@1 and M against trained tokens, as a PNG; False, and nothing written, where there is no curve."""
    train = [r for kind, r in records if kind == "train"]
    held = [r for kind, r in records if kind == "eval"]
    measured = [r for kind, r in records if kind == "m"]
    if len(train) < 2 and len(held) < 2:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise DartspecError("the card's curves need the package matplotlib: pip install 'dartspec[train]'") from None
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3 if measured else 2)
    _lines(axes[0], train, "loss", "loss on training data, by offset")
    _lines(axes[1], held, "hit1", "hit@1 on held-out data, by offset")
    if measured:
        axes[2].plot([r["tokens"] / 1e6 for r in measured], [r["M"] for r in measured], marker="o", markersize=3)
        axes[2].set_title(f"M, {measured[-1]['nodes']} nodes", fontsize=9)
    for ax in axes:
        ax.set_xlabel("million tokens", fontsize=8)
        ax.tick_params(labelsize=7)
        ax.grid(alpha=0.3)
    with written_aside(path) as aside:
        figure.savefig(aside, format="png", dpi=110)
    return True


def _lines(ax: Any, records: Sequence[Record], name: str, title: str) -> None:
    """One line for each of the first offsets."""
    tokens = [r["tokens"] / 1e6 for r in records]
    for offset in range(min(SHOWN_OFFSETS + 1, min((len(r[name]) for r in records), default=0))):
        ax.plot(tokens, [r[name][offset] for r in records], label=str(offset + 1), linewidth=1)
    ax.set_title(title, fontsize=9)
    if records:
        ax.legend(fontsize=7)


# -- to others -------------------------------------------------------------------------------------------------------


def push(folder: Path, to: str, *, private: bool = True, message: str = "") -> str:
    """Copies a drafter's files into a folder (`./x`, `/x`, `~/x`), or uploads them to the repository `owner/name` of
    the hub, which is made where it is not there. Returns where they are.

    Only what belongs to a drafter goes: weights, config, index, calibration, figures and card. A folder without a card
    is refused: nobody could tell what it is for.
    """
    if not folder.is_dir():
        raise DartspecError(f"{folder} is no folder: give a drafter's folder")
    files = sorted(p for p in folder.iterdir() if p.is_file() and FILES.fullmatch(p.name))
    names = {p.name for p in files}
    for wanted in ("config.json", "model.safetensors"):
        if wanted not in names:
            raise DartspecError(f"{folder} has no {wanted}: give a drafter's folder")
    if CARD not in names:
        raise DartspecError(f"{folder} has no {CARD}: write it first (`dartspec card {folder}`)")
    if "num_target_layers" not in read_json(folder / "config.json"):
        raise DartspecError(f"{folder}/config.json is not of a drafter of ours: give a drafter's folder")
    if to.startswith((".", "/", "~")):
        place = Path(to).expanduser()
        if place.exists() and not place.is_dir():
            raise DartspecError(f"{place} is a file: give a folder to copy to")
        if (place / CARD).exists() and not (place / "config.json").exists():
            raise DartspecError(f"{place} holds a {CARD} and no drafter: give a folder of its own")
        place.mkdir(parents=True, exist_ok=True)
        for file in files:
            with written_aside(place / file.name) as aside:
                shutil.copyfile(file, aside)
        return str(place)
    if not NAME.fullmatch(to):
        raise DartspecError(f"{to!r} is neither a folder (./name) nor a repository (owner/name)")
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(to, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=to,
            folder_path=folder,
            allow_patterns=sorted(names),
            commit_message=message or "A drafter for speculative decoding",
        )
    except Exception as error:  # its own, and those of the HTTP library below it, which is not always the same one
        first = str(error).strip().split("\n")[0]
        raise DartspecError(f"{to} could not be written on the hub: {first}") from error
    return str(url)
