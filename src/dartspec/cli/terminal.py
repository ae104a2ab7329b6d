"""Where this program's words go: answers to stdout, notes and progress to stderr, and one JSON object for machines.

Knows consoles and colours; knows no model.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TextIO

from rich.console import Console

ACCEPTED = "green"  # the colour of tokens that had been drafted
_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
# what a terminal would obey; a model may write anything. Tab and line end stay
_CONTROL = dict.fromkeys(i for i in [*range(32), *range(127, 160)] if chr(i) not in "\t\n")

Piece = tuple[str, bool]
"""Some text, and whether it had been drafted."""


class Terminal:
    """The streams of one run.

    json: stdout gets one JSON object, on its last line; what is for people goes to stderr.
    """

    def __init__(self, *, json: bool = False, no_color: bool = False) -> None:
        self.json = json
        plain = True if no_color else None  # None: rich asks NO_COLOR
        self.err = Console(stderr=True, no_color=plain, highlight=False)
        self.out = self.err if json else Console(no_color=plain, highlight=False)

    def note(self, text: str) -> None:
        """One line beside the answer, on stderr."""
        self.err.print(text, style="dim", markup=False, soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        """One line for people: stdout, or stderr beside --json."""
        self.out.print(text, style=style, markup=False, soft_wrap=True)

    @property
    def colored(self) -> bool:
        return self.out.is_terminal and self.out.color_system is not None and not self.out.no_color

    def write(self, pieces: Iterable[Piece]) -> None:
        """Text as it comes, byte for byte when piped; on a terminal accepted tokens are coloured."""
        stream: IO[str] = self.out.file
        for text, accepted in pieces:
            if self.out.is_terminal:
                text = text.translate(_CONTROL)
            stream.write(f"{_GREEN}{text}{_PLAIN}" if accepted and self.colored and text else text)
        stream.flush()

    def emit(self, result: Mapping[str, Any]) -> None:
        """The JSON object, when it was asked for."""
        if self.json:
            sys.stdout.write(json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n")
            sys.stdout.flush()


def printable(text: str) -> str:
    """Text without the characters that a terminal would obey."""
    return text.translate(_CONTROL)


def error_line(text: str, stream: TextIO | None = None) -> None:
    """The one sentence of an error."""
    (stream or sys.stderr).write(f"dartspec: {text}\n")


def quiet_libraries(debug: bool) -> None:
    """Third-party notices off, our own warnings as one line. Called before the libraries are imported."""
    if debug:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    ours = str(Path(__file__).parents[1])

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if filename.startswith(ours):
            sys.stderr.write(f"note: {message}\n")

    warnings.showwarning = show
