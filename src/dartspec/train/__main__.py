"""`python -m dartspec.train CONFIG.json [--set KEY=VALUE ...] [--dry-run]`: train a drafter for a model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dartspec.errors import DartspecError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dartspec.train", description=__doc__)
    parser.add_argument("config", type=Path, help="JSON file, the keys of TrainConfig")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key")
    parser.add_argument("--dry-run", action="store_true", help="say tokens, coverage, rate and hours; write nothing")
    options = parser.parse_args(arguments)
    try:
        _run(options.config, options.set, options.dry_run)
    except DartspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(path: Path, overrides: list[str], dry_run: bool) -> None:
    from dartspec.target.load import load_model
    from dartspec.target.target import Target
    from dartspec.text import Text
    from dartspec.train.config import TrainConfig
    from dartspec.train.run import train

    values: dict[str, Any] = TrainConfig.from_json(path).to_dict()
    for item in overrides:
        key, sign, value = item.partition("=")
        if not sign:
            raise DartspecError(f"--set {item}: must read KEY=VALUE")
        values[key.replace("-", "_")] = _value(value)
    config = TrainConfig.from_dict(values)
    loaded = load_model(config.target)
    text = Text(loaded.tokenizer)
    target = Target(
        loaded.model,
        text.num_tokens,
        text.eos_token_ids(getattr(loaded.model, "generation_config", None)),
        loaded.name,
        text.fingerprint,
        loaded.weights_fingerprint,
    )
    folder = train(config, target, dry_run=dry_run, report=_say, template_hash=text.template_hash)
    print(json.dumps({"drafter": str(folder), "dry_run": dry_run}))


def _say(line: str) -> None:
    print(line, flush=True)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    raise SystemExit(main())
