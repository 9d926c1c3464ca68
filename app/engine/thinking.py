"""Tell a model's thinking from its answer while the text streams in.

Markers such as `◁think▷` can be several tokens, be cut anywhere by the token stream, and share a token with the text
around them (`.◁/`), so the splitter works on characters. No marker text ever leaves it.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from app.engine.request import ClosedThinking


class Channel(enum.Enum):
    """Where a piece of output text belongs."""

    REASONING = "reasoning"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of output text."""

    channel: Channel
    text: str


@dataclass(frozen=True, slots=True)
class Markers:
    """The strings around the thinking, as the model writes them."""

    open: str
    close: str

    def closed(self, text: str) -> ClosedThinking:
        """A thinking that is over, for the model to go on from."""
        return ClosedThinking(self.open, text, self.close)


class ThinkingSplitter:
    """Feed text, get deltas.

    Before the first visible character the output is undecided: an opening marker starts the thinking, anything else is
    the answer of a model that does not think. A closing marker ends the thinking once; markers after that, or nested
    ones, are replaced by a space.

    Args:
        markers: The opening and closing marker.
        answering: The thinking is already over (it was prefilled in the prompt).

    Attributes:
        thought: The opening marker has come.
    """

    def __init__(self, markers: Markers, *, answering: bool = False) -> None:
        self._markers = markers
        self.thought = False
        self._held = ""
        self._channel: Channel | None = Channel.ANSWER if answering else None
        self._at_start = True

    @property
    def channel(self) -> Channel | None:
        """The current channel; None while nothing visible has come."""
        return self._channel

    def feed(self, text: str) -> list[Delta]:
        """Take the next characters; return what is now certain."""
        self._held += text
        if self._channel is None and not self._decide():
            return []
        return list(self._drain())

    def finish(self) -> list[Delta]:
        """The output ended: return what was held back as a possible marker."""
        if self._channel is None:
            self._channel = Channel.ANSWER
        text, self._held = self._held, ""
        return self._emit(text)

    def close(self) -> None:
        """Continue with the answer, as if the closing marker had come (the thinking was cut off)."""
        self._channel, self._at_start, self._held = Channel.ANSWER, True, ""

    def _decide(self) -> bool:
        visible = self._held.lstrip()
        if len(visible) < len(self._markers.open) and self._markers.open.startswith(visible):
            return False
        if visible.startswith(self._markers.open):
            self.thought = True
            self._channel, self._held = Channel.REASONING, visible[len(self._markers.open) :]
        else:
            self._channel, self._held = Channel.ANSWER, visible
        return True

    def _drain(self) -> Iterator[Delta]:
        while found := self._first_marker():
            marker, at = found
            before, after = self._held[:at], self._held[at + len(marker) :]
            if self._channel is Channel.REASONING and marker == self._markers.close:
                yield from self._emit(before)
                self.close()
                self._held = after
            else:
                # A space takes its place: the two sides must not form a marker together (markers have no spaces).
                self._held = f"{before} {after}"
        safe = len(self._held) - self._possible_marker()
        text, self._held = self._held[:safe], self._held[safe:]
        yield from self._emit(text)

    def _first_marker(self) -> tuple[str, int] | None:
        found = [(self._held.find(marker), marker) for marker in (self._markers.open, self._markers.close)]
        return min(((marker, at) for at, marker in found if at >= 0), key=lambda pair: pair[1], default=None)

    def _possible_marker(self) -> int:
        """Length of the longest end of the held text that may be the beginning of a marker."""
        longest = max(len(self._markers.open), len(self._markers.close)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if self._markers.open.startswith(end) or self._markers.close.startswith(end):
                return length
        return 0

    def _emit(self, text: str) -> list[Delta]:
        if self._at_start:
            text = text.lstrip()
        if not text or self._channel is None:
            return []
        self._at_start = False
        return [Delta(self._channel, text)]
