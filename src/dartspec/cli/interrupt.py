"""Ctrl-C always ends the command.

Python raises KeyboardInterrupt wherever the program happens to be. There it may be lost: libraries that are being
imported catch it with a bare except, C code clears it, a destructor prints it and goes on; or it comes out as another
error. So it is raised again until somebody says that it was `taken`. Knows the standard library only, to be in place
before anything slow is imported.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

INTERRUPTED = 130  # the exit code
PATIENCE_S = 2.0  # after that it is raised again; longer than tidying up takes

_asked = False


class Stopped(KeyboardInterrupt):
    """Ctrl-C.

    Not KeyboardInterrupt itself: once that has left code that `exec` runs (a dataclass being made), the interpreter
    ends by a signal, whatever exit code it is asked for.
    """


def listen() -> None:
    """Takes Ctrl-C over. Where a shell started the command with Ctrl-C ignored (`dartspec ... &` in a script), it stays
    ignored, as it does for other programs."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _stop)
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, _stop)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    global _asked
    _asked = True
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    raise Stopped


def asked() -> bool:
    """Whether Ctrl-C was pressed and not yet taken."""
    return _asked


def taken() -> None:
    """What Ctrl-C was pressed for has ended."""
    global _asked
    _asked = False
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)


def leave() -> None:
    """Says that the command was stopped, and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one has nothing left to stop
    taken()
    sys.stderr.write("dartspec: stopped\n")
    sys.exit(INTERRUPTED)
