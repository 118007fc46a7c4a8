"""One answer as it grows: what reads its text, what it may be, and what is said of it at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fly_llm.config import FLyConfig, SamplingConfig
from fly_llm.models.registry import Pair
from fly_llm.text.constrain import Constraint, grammar_tokenizer
from fly_llm.text.families import THINK_CLOSE, THINK_OPEN, Family, family_of
from fly_llm.text.parse import Reader, opened_by
from fly_llm.text.tools import Structure
from fly_llm.text.transcript import Transcript
from fly_llm.text.zones import Zones
from fly_llm.types import Event, FinishReason, InvalidToolCall, Relaxation, Result, Round, Stats, ToolCall, Usage


def transcript_of(
    pair: Pair, prompt: list[int], fly: FLyConfig, sampling: SamplingConfig, structure: Structure, *, is_chat: bool
) -> tuple[Transcript, Constraint | None]:
    """What reads the answer, and the grammar it is under, if there is one."""
    tokenizer = pair.target.tokenizer
    family = family_of(tokenizer)
    shipped = family.name == "shipped"
    opened = opened_by(tokenizer.decode(prompt[-8:])) if is_chat else ""
    grammar = structure.grammar(tokenizer, family, opened=opened)
    constraint = None
    if grammar is not None:
        if pair.grammar_tokenizer is None:
            pair.grammar_tokenizer = grammar_tokenizer(tokenizer, pair.target.vocab_size, pair.target.eos_ids)
        constraint = Constraint(pair.grammar_tokenizer, grammar, pair.target.eos_ids)
    reader, keep = None, frozenset[int]()
    added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    markers = {number: token.content for number, token in added.items() if token.content in _zone_markers(family)}
    if is_chat and (structure.visible_tools or family.reasons):
        prefix = tokenizer.decode(prompt) if shipped else opened
        tools = structure.visible_tools
        reader = Reader(family, opened=prefix, tools=tools, calls=bool(tools), forced=structure.is_forced)
        seen = "".join((*family.call_open, *family.call_close, str(family.template)))
        keep = frozenset(number for number, token in added.items() if token.content in seen)
    transcript = Transcript(
        tokenizer,
        sampling.stop if constraint is None else (),  # a stop string would break what the grammar makes whole
        fly.strict_prefix,
        zones=Zones(family, opened),
        strict_zones=fly.strict_zones,
        in_grammar=constraint is not None,
        reader=reader,
        keep=keep,
        end_ids=frozenset() if sampling.ignore_eos else pair.target.eos_ids,
        markers={number: text for number, text in markers.items() if number not in keep},
    )
    return transcript, constraint


def _zone_markers(family: Family) -> tuple[str, ...]:
    return (*family.call_open, *family.call_close, THINK_OPEN, THINK_CLOSE)


class Answer:
    """What has been committed so far in one request."""

    def __init__(self, tokenizer: Any, transcript: Transcript, settings: dict[str, Any]) -> None:
        self.transcript = transcript
        self.stats = Stats()
        self._tokenizer = tokenizer
        self._settings = settings
        self._ids: list[int] = []
        self._relaxed: list[tuple[int, int]] = []  # position, the target's own token
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._invalid: list[InvalidToolCall] = []

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens committed so far."""
        return self._ids

    def add(self, round_: Round) -> Event:
        """Take a round, whose tokens the transcript has seen already."""
        positions = [len(self._ids) + i for i in round_.relaxed]
        self.transcript.mark(positions)
        self._relaxed.extend(zip(positions, round_.overruled, strict=True))
        self._ids.extend(round_.token_ids)
        return dataclasses.replace(self._event(), token_ids=round_.token_ids, relaxed=round_.relaxed, round=round_)

    def _event(self) -> Event:
        """What has been released since the last one."""
        text, spans = self.transcript.take()
        reasoning, parts = self.transcript.take_parts()
        calls = [part for part in parts if isinstance(part, ToolCall)]
        invalid = [part for part in parts if isinstance(part, InvalidToolCall)]
        self._texts.append(text)
        self._reasoning.append(reasoning)
        self._calls.extend(calls)
        self._invalid.extend(invalid)
        return Event(
            text,
            relaxed_spans=spans,
            reasoning=reasoning,
            tool_calls=tuple(calls),
            invalid_tool_calls=tuple(invalid),
        )

    def finish(self, reason: FinishReason) -> Event:
        """Release what is held, and sum up."""
        self.transcript.finish()
        event = self._event()
        whole = "".join(self._texts)
        result = Result(
            text=whole,
            token_ids=tuple(self._ids),
            finish_reason="tool_calls" if self._calls and reason == "stop" else reason,
            usage=Usage(self.stats.num_prompt_tokens, len(self._ids), self.stats.num_cached_tokens),
            stats=self.stats,
            relaxations=tuple(self._relaxation(whole, position, own) for position, own in self._relaxed),
            settings=self._settings,
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
            invalid_tool_calls=tuple(self._invalid),
        )
        return dataclasses.replace(event, result=result)

    def _relaxation(self, text: str, position: int, own: int) -> Relaxation:
        start, end = self.transcript.span(position)
        own_text = self._tokenizer.decode([own])
        zone = self.transcript.zone(position)
        return Relaxation(position, self._ids[position], own, start, end, text[start:end], own_text, zone)
