"""Makes text of the tokens of one answer, as far as it is certain.

    tokens    "Good" " day" "\\xe2\\x82" "\\xac"  "\\nHu" "man:"
    certain    Good   day    (held)     the letter  (held: "\\nHuman:" may be a stop string)

A token may be a part of a letter, and the end of the text may be the begin of a stop string: both are held
back until the next tokens decide. All pieces together are the text of the answer, up to the stop
string that is complete first.

Only the tokens since the last boundary at which nothing was held are decoded again, with those before it as
context, because some tokenizers write a token differently at the begin of a text.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what tokenizers write for bytes that are no letter, or not yet one
MAX_HELD = 3  # bytes of a letter that are not all there


class AnswerText:
    """The text of one answer, which ends before one of `stop_strings`. `decode` makes text of token ids."""

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str]) -> None:
        self._decode, self._stop_strings = decode, stop_strings
        self._tokens = list[int]()  # since the last boundary but one
        self._boundary = 0  # of these, how many lie before the last boundary
        self._num_read = 0  # letters of the text of these that were read
        self._held = ""  # may be the begin of a stop string
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Returns the text that is certain with `token`, and was not before."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        letters = text.rstrip(REPLACEMENT)
        end = max(len(letters), len(text) - MAX_HELD)
        new, self._num_read = text[self._num_read : end], max(self._num_read, end)
        if end == len(text):
            self._tokens, self._boundary = self._tokens[self._boundary :], len(self._tokens) - self._boundary
            self._num_read = len(self._decode(self._tokens))
        return self._certain(new)

    def finish(self) -> str:
        """Returns the rest of the text, where no token follows."""
        rest = self._certain(self._decode(self._tokens)[self._num_read :]) + self._held
        self._tokens, self._boundary, self._num_read, self._held = [], 0, 0, ""
        return rest

    def _certain(self, new: str) -> str:
        """Returns what is certain of the text that was held and `new` after it."""
        if self.is_stopped:
            return ""
        text = self._held + new
        found = [place for each in self._stop_strings if (place := text.find(each)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        longest = min(len(text), max(map(len, self._stop_strings), default=1) - 1)
        begins = (
            count
            for count in range(longest, 0, -1)
            if any(each.startswith(text[-count:]) for each in self._stop_strings)
        )
        num_held = next(begins, 0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]
