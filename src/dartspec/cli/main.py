"""The program `dartspec`: its verbs, and what happens to errors.

Nothing heavy is imported here: `dartspec --help` answers at once. Each verb imports what it needs when it runs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from dartspec import __version__
from dartspec.cli import (
    bench,
    chat,
    data,
    demo,
    doctor,
    drafters,
    eval,
    generate,
    inspect,
    interrupt,
    ngram,
    serve,
    train,
)
from dartspec.cli.options import debugging, forget
from dartspec.cli.terminal import error_line
from dartspec.errors import DartspecError

BAD_INPUT, OUR_FAULT, PIPE_CLOSED = 2, 1, 141
OUT_OF_MEMORY = ("can't allocate memory", "CUDA out of memory")  # torch's words


class Verbs(TyperGroup):
    """Turns what goes wrong in a verb into one sentence on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        forget()
        try:
            return self._interruptible(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            interrupt.taken()
            error_line("stopped")
            raise typer.Exit(interrupt.INTERRUPTED) from None
        except BrokenPipeError:  # the reader (`| head`) has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None
        except (DartspecError, OSError) as error:
            if debugging():
                raise
            error_line(_one_line(error))
            raise typer.Exit(BAD_INPUT) from None
        except Exception as error:
            # typer's own complaints about arguments pass; anything else is a fault of ours
            if debugging() or hasattr(error, "format_message"):
                raise
            if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
                error_line(f"not enough memory: {_one_line(error)[:300]}; ask for less, or use a larger machine")
                raise typer.Exit(BAD_INPUT) from None
            error_line(
                f"internal error, {type(error).__name__}: {_one_line(error)} (--debug shows where; please report)"
            )
            raise typer.Exit(OUR_FAULT) from None

    def _interruptible(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception:
            if interrupt.asked():  # Ctrl-C came out of a library as another error
                raise interrupt.Stopped from None
            raise


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


app = typer.Typer(
    name="dartspec",
    cls=Verbs,
    help=(
        "Faster text from a language model that you own, without changing what it says.\n\n"
        "A small drafter guesses several tokens, the model checks them all at once and keeps those that it would have "
        "written itself.\n\n"
        "\b\nBegin with:\n"
        "  dartspec demo                       plain decoding and DART side by side\n"
        '  dartspec generate "Why is it dark at night?"\n'
        "  dartspec chat                       a conversation\n"
        "  dartspec serve                      a server for OpenAI clients, and its page\n"
        "  dartspec doctor                     what this machine can do\n\n"
        "Every verb has its own --help with examples."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dartspec {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None: ...


app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.add_typer(ngram.app, name="ngram")
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("eval")(eval.evaluate)
app.command("drafters")(drafters.drafters)
app.command("card")(drafters.card)
app.command("push")(drafters.push)
app.add_typer(bench.app, name="bench")
app.command("inspect")(inspect.inspect)
app.command("convert")(inspect.convert)
app.command("doctor")(doctor.doctor)
