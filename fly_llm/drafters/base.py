"""What every drafter is told and asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fly_llm.config import SamplingConfig
from fly_llm.types import Draft

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter knows about the request it drafts for.

    Attributes:
        sampling: the request's sampling settings; a draft model samples with the same ones.
        seed: seeds the drafter's own draws; never the target's seed.
        eos_ids: drafting stops after any of these.
        cancelled: read before every forward.
        cached: the tokens that the draft model's cache holds already, from an earlier request.
        mask: (tentative tokens, n draft ids, [n+1, vocab] logits) -> the logits with tokens at -inf that a grammar
            forbids there.
    """

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    eos_ids: Collection[int] = frozenset()
    cancelled: Callable[[], bool] = lambda: False
    cached: Sequence[int] = ()
    mask: Callable[[Sequence[int], Sequence[int], Tensor], Tensor] | None = None


class Drafter(Protocol):
    """Proposes tokens. `committed` only grows within a request, so an index or a cache can extend itself."""

    @property
    def num_forwards(self) -> int:
        """Model forwards in this request so far."""

    def start(self, request: DraftRequest) -> None:
        """Begin a request: forget the last one."""

    def propose(self, committed: Sequence[int], tentative: Sequence[int], max_tokens: int) -> Draft:
        """Propose a continuation.

        Args:
            committed: the prompt and every token emitted so far.
            tentative: guesses that follow `committed` and may be retracted; never remembered.
            max_tokens: most tokens to propose.

        Returns:
            0 to `max_tokens` tokens.
        """

    def close(self) -> None:
        """End the request and release its memory."""
