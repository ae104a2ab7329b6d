"""Which characters of an answer came from accepted draft tokens.

The engine's chunks carry text that is certain (whole characters, no beginning of a stop string) and ids; this file
knows how to lay the one over the other.
"""

from __future__ import annotations

from collections import deque

from dartspec.cli.terminal import Piece
from dartspec.engine import Chunk
from dartspec.text import Text


class Painter:
    """Follows one answer. The pieces of all chunks joined together are the chunks' texts joined together."""

    def __init__(self, text: Text) -> None:
        self._decoder = text.stream()
        self._waiting: deque[Piece] = deque()  # decoded here, not yet released by the engine

    def push(self, chunk: Chunk) -> list[Piece]:
        """The chunk's text, cut where accepted and own tokens meet."""
        for place, token in enumerate(chunk.ids):
            self._add(self._decoder.push([token]), place < chunk.num_accepted)
        if chunk.finish:
            self._add(self._decoder.flush(), False)
        pieces: list[Piece] = []
        wanted = len(chunk.text)
        while wanted and self._waiting:
            text, accepted = self._waiting.popleft()
            if len(text) > wanted:
                self._waiting.appendleft((text[wanted:], accepted))
                text = text[:wanted]
            wanted -= len(text)
            if pieces and pieces[-1][1] == accepted:
                text = pieces.pop()[0] + text
            pieces.append((text, accepted))
        return pieces

    def _add(self, text: str, accepted: bool) -> None:
        if text:
            self._waiting.append((text, accepted))
