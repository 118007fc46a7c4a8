"""Token ids to text, piece by piece, without ever taking back a character.

Decoding one token alone is wrong: a character's bytes can span tokens, and a SentencePiece token at the start of a
sequence loses its space. So a short window of recent tokens is decoded instead: a *context*, whose text is already out,
followed by the tokens whose text is not. What the window's text says beyond the context's is new. The window starts
afresh behind every finished piece, so a token costs the same however long the answer has become.

Text is held back only while later tokens could still change it:

- The last U+FFFD of a window can stand for the first bytes of a character. Only the last one can: an unfinished
  character shows as exactly one.
- SentencePiece's byte tokens (`<0xE4>`) decode as a run, all or nothing: one stray byte turns every character of the
  run into U+FFFD. A run comes out when a token of another kind ends it, or on `flush`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONG_WINDOW = 32
"""Tokens after which a window that never came to a clean end (bytes that are no text at all) is cut anyway."""


class Detokenizer:
    """Streams the text of one answer.

    For any ids, the pieces returned by `push` and `flush`, joined, equal
    `tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)`. Not thread-safe; one instance
    serves one answer.

    Args:
        tokenizer: the target's tokenizer. It is only read.
        keep: special tokens that are written out all the same (the markers of tool calls, for one).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, keep: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._keep = keep
        self._special = set(tokenizer.all_special_ids)
        self._special.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._pieces: list[str] = []
        self._window: list[int] = []
        self._context = 0  # the window's first tokens whose text is out; 0 while none has come to a clean end
        self._shown = ""  # the part of the window's text that is out
        self._flushed = False

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Takes the next token.

        Args:
            token_id: its id. A special token, or an id the tokenizer does not know, adds no text.

        Returns:
            The text that became final with it; "" while a character is incomplete.

        Raises:
            RuntimeError: `flush` has already ended this answer.
        """
        if self._flushed:
            raise RuntimeError("push() after flush(): make a new Detokenizer for a new answer")
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None or self._is_left_out(token_id):
            return ""
        self._window.append(token_id)
        if isinstance(token, str) and _BYTE_TOKEN.fullmatch(token):
            return ""  # a run may go on; this also keeps a long run linear: it is decoded once, at its end
        return self._release(self._decode(self._window))

    def flush(self) -> str:
        """Returns the text still held, U+FFFD for bytes that never became a character, and ends the answer."""
        rest = self._decode(self._window)[len(self._shown) :]
        self._flushed, self._window, self._shown = True, [], ""
        return self._out(rest)

    def peek(self, token_ids: Sequence[int]) -> str:
        """Says what would be appended to `text` if these tokens followed and generation then ended. Changes nothing.

        Args:
            token_ids: the tokens; empty asks for the text held now.

        Returns:
            The held text and theirs, with U+FFFD for an incomplete character at the end.
        """
        if self._keep:
            token_ids = [token for token in token_ids if not self._is_left_out(token)]
        return self._decode([*self._window, *token_ids])[len(self._shown) :]

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=not self._keep, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _is_left_out(self, token_id: int) -> bool:
        """Whether this is a special token to leave out, as opposed to one that only the tokenizer's names call so."""
        if token_id not in self._special or token_id in self._keep:
            return False
        return bool(self._keep) or self._decode([*self._window, token_id]) == self._decode(self._window)

    def _out(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _release(self, full: str) -> str:
        """Puts out what is final of `full`, the window's text, and moves the window on."""
        final = full[:-1] if full.endswith(_UNFINISHED) else full
        if not final.startswith(self._shown):
            return ""  # a decoder that rewrites what it said: wait rather than contradict
        piece = final[len(self._shown) :]
        self._shown = final
        if len(final) == len(full):
            self._start_window(self._window[self._context :])
        elif len(self._window) > _LONG_WINDOW:
            self._cut_window(full)
        return self._out(piece)

    def _start_window(self, context: list[int]) -> None:
        """Makes `context`, whose text is out and ends cleanly, all of the window.

        A context without text would leave the next token at the start of a sequence, where it may lose its space; the
        window then grows until it has some.
        """
        shown = self._decode(context)
        if shown:
            self._window, self._context, self._shown = context, len(context), shown

    def _cut_window(self, full: str) -> None:
        """Drops the older half of a window that has no clean end yet, where that provably changes nothing.

        Two halves whose texts join to the text of the whole share no character: had a character's bytes been parted,
        both halves would show U+FFFD where the whole shows one.
        """
        for cut in range(len(self._window) // 2, len(self._window) // 2 + 4):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if tail and head + tail == full:
                self._window, self._context, self._shown = self._window[cut:], 0, self._shown[len(head) :]
                return
