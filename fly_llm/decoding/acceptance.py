"""The FLy rule (arXiv 2511.22972, sections 3.2 and 3.3), on masks and entropies alone.

No tensors, no model: what is drafted, sampled and measured is decided elsewhere, and this file only says how many
tokens of a draft are kept, which of them are relaxed, and why the first rejected one was rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fly_llm.types import Rejection


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How much of a draft is kept.

    Attributes:
        length: the first `length` draft tokens are kept.
        relaxed: 0-based positions below `length` of the relaxed ones.
        rejection: why the token at `length` was rejected; None if the whole draft is kept.
    """

    length: int
    relaxed: tuple[int, ...]
    rejection: Rejection | None


def accept(
    matches: Sequence[bool],
    entropies: Sequence[float],
    protected: Sequence[bool],
    *,
    theta: float,
    window: int | None,
) -> Acceptance:
    """Decide which draft tokens are kept.

    A mismatch at position i (0-based, of n) is kept iff the target is uncertain there (`entropies[i] >= theta`), the
    position is not protected, i + window < n, and all of positions i+1 .. i+window match. A second mismatch inside the
    window therefore rejects the first one, whatever its entropy; mismatches further apart are judged one by one.

    Args:
        matches: n native decisions: would strict verification accept this token, given the ones before it?
        entropies: n target entropies, in the unit of `theta`; may be empty if `window` is None.
        protected: n flags: this position is never relaxed; may be empty if `window` is None.
        theta: θ, threshold of the entropy gate. `inf` rejects every mismatch.
        window: W ≥ 1. None, or a window that cannot fit (W ≥ n), is strict.

    Returns:
        The kept length, the relaxed positions, and the reason of the first rejection.
    """
    n = len(matches)
    relaxed: list[int] = []
    i = 0
    while i < n:
        if matches[i]:
            i += 1
            continue
        reason = _rejection(i, matches, entropies, protected, theta, window)
        if reason is not None:
            return Acceptance(i, tuple(relaxed), reason)
        assert window is not None
        relaxed.append(i)
        i += 1 + window
    return Acceptance(n, tuple(relaxed), None)


def _rejection(
    i: int,
    matches: Sequence[bool],
    entropies: Sequence[float],
    protected: Sequence[bool],
    theta: float,
    window: int | None,
) -> Rejection | None:
    """Why the mismatch at `i` must be rejected, or None if it may be relaxed."""
    if window is None or not entropies[i] >= theta:  # "not >=": an undefined entropy counts as certain
        return "gate"
    if i + window >= len(matches) or not all(matches[i + 1 : i + 1 + window]):
        return "window"
    return "protected" if protected[i] else None
