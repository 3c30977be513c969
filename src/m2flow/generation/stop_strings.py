"""Strings that end a completion: found at the token in which one of them becomes whole.

The text of a completion is what a function makes of all of its tokens; a completion ends with the
first token after which a stop string is part of it, however many tokens the string spans. Only the
end of the completion is turned into text again at each token: enough of it that no string can begin
before, and some tokens more, since the text of a token may depend on those beside it. Tokens are
dropped only where the text of the others is the end of the text as it was: a decoder may call a
whole run of bytes no text for one of them, such as the second half of a character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

TextOf = Callable[[Sequence[int]], str]

NO_TEXT = "\ufffd"
"""What decoders write for bytes that are no text, or not yet."""

CONTEXT_TOKENS = 8
"""Tokens on which the text of the next may depend: bytes of one character, spaces, special ones."""


class StopStrings:
    """Watches one completion.

    Args:
        strings: any of them ends it; none is empty.
        text_of: the text of tokens.
    """

    __slots__ = ("_end", "_longest", "_strings", "_text_of")

    def __init__(self, strings: Sequence[str], text_of: TextOf) -> None:
        assert all(strings), "an empty string would end every completion at once"
        self._strings, self._text_of = tuple(strings), text_of
        self._longest = max(map(len, self._strings))
        self._end: list[int] = []

    def completed_by(self, token: int) -> bool:
        """Whether a stop string is whole with the completion's next token."""
        self._end.append(token)
        text = self._text_of(self._end)
        if any(string in text for string in self._strings):
            return True
        # Drop half of it when half of it would do.
        half = len(self._end) // 2
        if half > CONTEXT_TOKENS and len(text) > 2 * self._longest:
            kept = self._end[half:]
            if len(self._text_of(kept[CONTEXT_TOKENS:])) >= self._longest:
                left = self._text_of(kept)
                if NO_TEXT not in left and text.endswith(left):
                    self._end = kept
        return False
