"""The words of this project, and the values that pass between its rooms.

- *target*, *draft model*: the large model whose text is wanted; the small model that guesses.
- *drafter*: anything that proposes tokens: a draft model, prompt lookup, or a draft model that is itself drafted for by
  prompt lookup (*nested drafting*).
- *round*: one proposal of up to K tokens and the one target forward that verifies it.
- K, `num_speculative_tokens`: most tokens proposed in a round. θ, `theta`: threshold of the entropy gate.
  W, `window`: the number of tokens after a mismatch that must all match.
- *accepted*: a draft token that is kept; it is *matching* or *relaxed*. *Relaxed*: a mismatching draft token that FLy
  keeps; these are what makes FLy lossy, so they are counted, reported and marked.
- *recovered* / *bonus*: the target's own token after a rejection / after a fully accepted draft.
- *committed*: can no longer be retracted. Only committed tokens are streamed, counted or matched against stop strings.
- *mean acceptance length*, τ: emitted tokens / rounds, the recovered or bonus token included; at most K+1.
- *strict*: no relaxation, lossless speculative decoding.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "tool_calls"]
Zone = Literal["text", "reasoning", "code", "json", "tool", "grammar"]
"""Where in an answer a token is."""
Rejection = Literal["gate", "window", "protected"]
Span = tuple[int, int]
"""First character, and one past the last."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one round.

    Attributes:
        ids: the proposed tokens, in order; may be empty.
        probs: [len(ids), vocab] float32, the distribution each token was sampled from; None for tokens chosen
            without chance (lookup, greedy draft), which count as one-hot.
        copied: the tokens come straight from prompt lookup, with no draft model in between.
    """

    ids: tuple[int, ...] = ()
    probs: torch.Tensor | None = None
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """The committed outcome of one round.

    Attributes:
        token_ids: the tokens this round emitted, after the cut at end-of-sequence, stop string and budget; at least 1.
        relaxed: positions in `token_ids` of relaxed tokens.
        overruled: for each of them, the token the target would have chosen.
        num_draft_tokens: how many tokens were proposed.
        num_accepted_tokens: how many of the proposed tokens were kept, matching and relaxed.
        rejection: why the first rejected token was rejected: "gate" (the target was certain, or nothing may be
            relaxed), "window" (it was uncertain, but the next W tokens did not all match or were not there),
            "protected" (special token, forbidden token, exactness zone or strict prefix); None if everything was kept.
        finish_reason: set on the last round of a request.
        draft_seconds: time in the drafter.
        verify_seconds: time in the target's forward, judging included.
    """

    token_ids: tuple[int, ...]
    relaxed: tuple[int, ...]
    overruled: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int
    rejection: Rejection | None
    finish_reason: FinishReason | None
    draft_seconds: float
    verify_seconds: float

    @property
    def num_relaxed_tokens(self) -> int:
        """How many kept tokens are relaxed."""
        return len(self.relaxed)


@dataclass(slots=True)
class Stats:
    """Counters of one request first; every ratio is derived from them.

    Attributes:
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: of these, how many were in a cache that an earlier request had left.
        num_output_tokens: emitted tokens, end-of-sequence included.
        num_rounds: rounds, which is also the number of verifying target forwards.
        num_draft_tokens: proposed tokens.
        num_accepted_tokens: proposed tokens that were kept, relaxed ones included.
        num_relaxed_tokens: kept tokens the target would not have chosen.
        num_gate_rejections, num_window_rejections, num_protected_rejections: rounds by the reason their first rejected
            token was rejected.
        num_target_forwards: target forwards, prefill chunks included.
        num_draft_forwards: draft model forwards, prefill chunks included.
        num_host_copies: device-to-host copies.
        prefill_seconds: target prefill.
        draft_seconds: time in the drafter, its prefill included.
        verify_seconds: time in verifying target forwards, judging included.
        decode_seconds: wall time of all rounds, everything included.
        accepted_per_round: histogram: index a counts the rounds that kept a draft tokens.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_relaxed_tokens: int = 0
    num_gate_rejections: int = 0
    num_window_rejections: int = 0
    num_protected_rejections: int = 0
    num_target_forwards: int = 0
    num_draft_forwards: int = 0
    num_host_copies: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0
    accepted_per_round: list[int] = field(default_factory=list)

    def add(self, round_: Round) -> None:
        """Count one round."""
        self.num_rounds += 1
        self.num_output_tokens += len(round_.token_ids)
        self.num_draft_tokens += round_.num_draft_tokens
        self.num_accepted_tokens += round_.num_accepted_tokens
        self.num_relaxed_tokens += len(round_.relaxed)
        self.num_gate_rejections += round_.rejection == "gate"
        self.num_window_rejections += round_.rejection == "window"
        self.num_protected_rejections += round_.rejection == "protected"
        self.draft_seconds += round_.draft_seconds
        self.verify_seconds += round_.verify_seconds
        missing = round_.num_accepted_tokens + 1 - len(self.accepted_per_round)
        self.accepted_per_round.extend([0] * missing)
        self.accepted_per_round[round_.num_accepted_tokens] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """τ: emitted tokens per round, recovered and bonus tokens included; 0.0 before the first round."""
        return self.num_output_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Kept draft tokens / proposed tokens; 0.0 if nothing was proposed."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def relaxed_share(self) -> float:
        """Relaxed tokens / emitted tokens; 0.0 before the first token."""
        return self.num_relaxed_tokens / self.num_output_tokens if self.num_output_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding, prefill excluded; 0.0 before the first round."""
        return self.num_output_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived ratios, JSON-able."""
        return {
            **dataclasses.asdict(self),
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "relaxed_share": self.relaxed_share,
            "tokens_per_second": self.tokens_per_second,
        }

    @property
    def other_seconds(self) -> float:
        """Decode time spent neither drafting nor verifying."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt_tokens: tokens of the rendered prompt.
        completion_tokens: emitted tokens; counts the end-of-sequence token, and the tokens of a stop string up to
            its last.
        cached_tokens: tokens of the prompt that were not computed, because an earlier request had left them in a cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that is whole.

    Attributes:
        id: nine letters and digits, unique.
        name: of the tool.
        arguments: a JSON object, converted to the types of the tool's schema where that says more.
    """

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """What began as a tool call and is none: cut short, or malformed.

    Attributes:
        id: as of a call.
        raw: its text, the marker that opened it included.
        error: what is wrong with it.
    """

    id: str
    raw: str
    error: str


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One relaxed token: what FLy kept, and what the target would have written.

    Attributes:
        position: of the token in the answer's `token_ids`.
        token_id: the token that was kept.
        own_token_id: the token the target would have chosen there.
        start: first character of the answer's `text` that the kept token wrote, or helped to write.
        end: one past the last; equal to `start` where it wrote none (a stop string took its text away).
        text: those characters.
        own_text: what the target's own token would have written.
        zone: in which part of the answer it is.
    """

    position: int
    token_id: int
    own_token_id: int
    start: int
    end: int
    text: str
    own_text: str
    zone: Zone = "text"


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer.

    Attributes:
        text: the answer, before the first stop string, special tokens left out.
        token_ids: every emitted token, the end-of-sequence token and the tokens of a stop string included.
        finish_reason: "stop" (end-of-sequence or stop string), "length" (`max_tokens` or the context was used up), or
            "tool_calls" (the answer stopped, and calls tools).
        usage: token counts.
        stats: what drafting and verification did.
        relaxations: every relaxed token, in order.
        settings: the values in force for this request (θ, W, K, temperature, seed ...), JSON-able.
        reasoning: what the model thought before it answered; not part of `text`.
        tool_calls: whole calls, in order; not part of `text`.
        invalid_tool_calls: what began as calls and are none.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    stats: Stats
    relaxations: tuple[Relaxation, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()

    @property
    def relaxed(self) -> tuple[int, ...]:
        """Positions in `token_ids` of relaxed tokens."""
        return tuple(relaxation.position for relaxation in self.relaxations)

    @property
    def relaxed_spans(self) -> tuple[Span, ...]:
        """(start, end) character positions in `text` of relaxed text, touching ones joined."""
        return join_spans([(relaxation.start, relaxation.end) for relaxation in self.relaxations])

    def report(self) -> dict[str, Any]:
        """What FLy was set to and what it did, JSON-able: settings, counters, ratios, relaxed text."""
        return {
            **self.settings,
            **self.stats.as_dict(),
            "relaxed_spans": [list(span) for span in self.relaxed_spans],
            "relaxed_by_zone": dict(Counter(relaxation.zone for relaxation in self.relaxations)),
            "relaxations": [dataclasses.asdict(relaxation) for relaxation in self.relaxations],
        }


def join_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans in order, empty ones left out, those that touch joined into one."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if start == end:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of a streamed answer; the pieces' `text`, joined, is the result's `text`.

    Attributes:
        text: new committed text; may be empty while bytes or a possible stop string are held back.
        token_ids: the tokens of the round behind this event; empty on the last event.
        relaxed: positions in `token_ids` of relaxed tokens.
        relaxed_spans: (start, end) character positions in this event's `text` of text written by relaxed tokens.
        round: the round behind this event, None on the last event.
        result: the finished answer, on the last event only.
        reasoning: new text of the model's reasoning.
        tool_calls: calls that were completed.
        invalid_tool_calls: what began as calls and are none.
    """

    text: str
    token_ids: Sequence[int] = ()
    relaxed: Sequence[int] = ()
    relaxed_spans: tuple[Span, ...] = ()
    round: Round | None = None
    result: Result | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()

    @property
    def says_something(self) -> bool:
        """Whether a reader gets anything with it; a round whose text is held back says nothing."""
        parts = (self.text, self.reasoning, self.tool_calls, self.invalid_tool_calls, self.result is not None)
        return any(parts)
