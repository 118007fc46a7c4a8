"""Decoding under a grammar: which tokens may follow, at every position of a draft, by llguidance.

A grammar covers the whole answer. Its state follows committed tokens; positions of a draft are looked at ahead and
rolled back. Once the grammar is finished only an end-of-sequence token may follow, and nothing is asked of it after.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fly_llm.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_MISSING = "structured output and forced tool calls need llguidance: pip install 'fly-llm[structured]'"


def grammar_tokenizer(tokenizer: Any, vocab_size: int, eos_ids: Collection[int]) -> Any:
    """What llguidance needs of a tokenizer. Takes about a second, so it is kept with the model.

    Raises:
        ConfigError: llguidance is not installed, or the tokenizer is of a kind that it cannot read.
    """
    try:
        import llguidance.hf
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} cannot be decoded under a grammar, which takes a tokenizer made of a "
            "tokenizer.json: use another model, or ask for the form in the prompt"
        )
    return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids) or None)


class Constraint:
    """The grammar of one answer.

    Args:
        tokenizer: from `grammar_tokenizer`.
        grammar: in Lark, with llguidance's extensions.
        eos_ids: what may follow once the grammar is finished.

    Raises:
        ConfigError: the grammar, or the schema in it, is not one.
    """

    def __init__(self, tokenizer: Any, grammar: str, eos_ids: Collection[int]) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if self._matcher.is_error():
            raise ConfigError(f"the schema cannot be enforced: {self._matcher.get_error():.300}")
        self._vocab_size: int = tokenizer.vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._ended = False

    @property
    def ended(self) -> bool:
        """An end-of-sequence token was committed, or the grammar was left."""
        return self._ended

    def mask(self, tentative: Sequence[int], draft_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Forbid what the grammar does not allow.

        Args:
            tentative: tokens that follow the committed ones and precede the draft.
            draft_ids: n proposed tokens.
            logits: [n+1, vocab] logits at the draft's positions and behind it.

        Returns:
            The logits with forbidden tokens at -inf; positions behind a token that the grammar forbids are left alone,
            since that token is rejected.
        """
        import torch
        from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask

        n = len(draft_ids)
        if self._ended:
            return logits
        walked = self._walk(tentative)
        if walked < len(tentative):
            self._back(walked)
            return logits
        bits = allocate_token_bitmask(n + 1, self._vocab_size)
        for i in range(n + 1):
            if not self._matcher.is_stopped():
                fill_next_token_bitmask(self._matcher, bits, i)
            else:
                bits[i] = 0
                for token in self._eos_ids:
                    bits[i, token // 32] |= _bit(token % 32)
            if i == n or not self._consume(draft_ids[i]):
                break
            walked += 1
        self._back(walked)
        allowed = (bits[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        forbidden = (allowed.reshape(n + 1, -1)[:, : logits.shape[1]] == 0).to(logits.device)
        if forbidden.shape[1] < logits.shape[1]:
            forbidden = torch.nn.functional.pad(forbidden, (0, logits.shape[1] - forbidden.shape[1]), value=True)
        return logits.masked_fill(forbidden, -torch.inf)

    def forced(self, tentative: Sequence[int], max_tokens: int) -> list[int]:
        """The tokens that must follow, as far as the grammar leaves no choice; the end of the answer is one."""
        if self._ended or max_tokens < 1:
            return []
        walked = self._walk(tentative)
        found = [] if walked < len(tentative) else list(self._matcher.compute_ff_tokens())[:max_tokens]
        if found:
            found = found[: self._matcher.validate_tokens(found)]
        if walked == len(tentative) and len(found) < max_tokens and self._eos_ids:
            walked += self._walk(found)
            if self._matcher.is_stopped():
                found.append(min(self._eos_ids))
        self._back(walked)
        return found

    def allowed(self, tentative: Sequence[int], draft_ids: Sequence[int]) -> int:
        """How many first tokens of a draft the grammar allows."""
        if self._ended:
            return len(draft_ids)
        tokens = [*tentative, *draft_ids]
        walked = self._walk(tokens)
        ends = walked < len(tokens) and tokens[walked] in self._eos_ids and self._matcher.is_accepting()
        self._back(walked)
        return max(0, walked + ends - len(tentative))

    def commit(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these tokens."""
        for token in token_ids:
            if self._ended or token in self._eos_ids or not self._consume(token):
                self._ended = True
                return

    def _walk(self, token_ids: Sequence[int]) -> int:
        """Consume tokens as far as they are allowed; returns how many, for the caller to roll back."""
        walked = 0
        for token in token_ids:
            if not self._consume(token):
                break
            walked += 1
        return walked

    def _back(self, walked: int) -> None:
        """Undo `_walk`."""
        if walked and not self._matcher.rollback(walked):
            raise RuntimeError(f"the state of the grammar was lost: {self._matcher.get_error():.300}")

    def _consume(self, token: int) -> bool:
        """One token further. False, and no step, if the grammar does not allow it or has ended."""
        if token in self._eos_ids or self._matcher.is_stopped():
            return False
        return bool(self._matcher.try_consume_tokens([token]) == 1)


def _bit(place: int) -> int:
    """One bit of a signed 32-bit word."""
    return 1 << place if place < 31 else -(1 << 31)


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that fits a schema; see `json_rule`."""
    return f"start: value\nvalue: {json_rule(schema)}\n"


def json_rule(schema: Mapping[str, Any]) -> str:
    """The right side of a grammar's rule for JSON that fits a schema.

    An object holds the properties that the schema names and no others, unless the schema allows them. Space between
    values is free but bounded: small models can go on with it for ever.
    """
    closed = _closed(schema)
    return f"%json {json.dumps({**closed, 'x-guidance': {'whitespace_pattern': _SPACE}})}"


_SPACE = r"[ \n\r\t]{1,40}"


def _closed(schema: Any) -> Any:
    """A schema whose objects take no other properties than those they name, where it does not say."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: value if name in ("enum", "const", "default") else _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping) and "patternProperties" not in schema and "allOf" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def regex_grammar(pattern: str) -> str:
    """The grammar of text that matches a regular expression as a whole."""
    return f"start: /{_escaped(pattern)}/\n"


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of one of several texts."""
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices) + "\n"


def _escaped(pattern: str) -> str:
    """A regular expression between slashes."""
    out, escaped = [], False
    for char in pattern:
        out.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return "".join(out)
