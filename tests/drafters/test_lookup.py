"""Prompt lookup against a slow reference, and its cost."""

from __future__ import annotations

import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly_llm.drafters.base import DraftRequest
from fly_llm.drafters.lookup import LookupDrafter


def reference(committed, tentative, max_tokens, longest=4, shortest=1):
    """Scan everything: the longest suffix first, its latest earlier end in the committed text first."""
    text = [*committed, *tentative]
    for size in range(longest, shortest - 1, -1):
        if size > len(text):
            continue
        suffix = text[-size:]
        for end in range(len(committed) - 1, size - 1, -1):
            if committed[end - size : end] == suffix:
                out = []
                for i in range(max_tokens):
                    out.append((text + out)[end + i])
                return tuple(out)
    return ()


tokens = st.lists(st.integers(0, 3), max_size=6)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(tokens, tokens, st.integers(0, 9)), min_size=1, max_size=8), st.integers(1, 2))
def test_equals_a_full_scan_round_after_round(rounds, shortest):
    drafter = LookupDrafter(min_ngram=shortest)
    drafter.start(DraftRequest())
    committed: list[int] = []
    for new, tentative, count in rounds:
        committed.extend(new)
        found = drafter.propose(committed, tentative, count)
        assert found.ids == reference(committed, tentative, count, shortest=shortest)
        assert found.probs is None


CASES = [
    ("nothing repeats", [1, 2, 3], [], 5, ()),
    ("latest match wins", [1, 2, 7, 1, 2, 8, 1, 2], [], 1, (8,)),
    ("longest match wins over a later short one", [5, 1, 2, 7, 9, 2, 8, 5, 1, 2], [], 1, (7,)),
    ("a copy goes on past the end", [6, 7, 8, 6, 7], [], 6, (8, 6, 7, 8, 6, 7)),
    ("one token repeats", [3, 3], [], 4, (3, 3, 3, 3)),
    ("tentative tokens are matched", [1, 2, 3, 4], [1, 2], 2, (3, 4)),
    ("and copied, but not indexed", [1, 2, 9], [5, 5, 1], 5, (2, 9, 5, 5, 1)),
    ("no room", [3, 3], [], 0, ()),
]


@pytest.mark.parametrize(
    ("committed", "tentative", "count", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_table(committed, tentative, count, expected):
    assert LookupDrafter().propose(committed, tentative, count).ids == expected


def test_a_new_request_forgets_the_last_one():
    drafter = LookupDrafter()
    assert drafter.propose([1, 2, 3, 1], [], 1).ids == (2,)
    drafter.start(DraftRequest())
    assert drafter.propose([4, 1], [], 1).ids == ()


def test_ngram_sizes_are_checked():
    with pytest.raises(ValueError, match="min_ngram <= max_ngram"):
        LookupDrafter(2, 3)


def test_cost_per_proposal_does_not_grow_with_the_context():
    """A full scan of 32,000 tokens takes milliseconds; the index answers as fast as for 500."""

    def median_cost(length):
        drafter = LookupDrafter()
        committed = [i * 7919 % 5003 for i in range(length)]
        drafter.propose(committed, [], 15)
        times = []
        for i in range(300):
            committed.extend([i % 977, i % 13])
            start = time.perf_counter()
            drafter.propose(committed, [], 15)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    assert median_cost(32_000) < 5 * median_cost(500) + 20e-6
