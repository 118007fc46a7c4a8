"""The FLy rule against a plain reference, and its edges as a table."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly_llm.decoding.acceptance import Acceptance, accept


def reference(matches, entropies, protected, theta, window):
    """The rule of the paper, word for word: 1-based positions, the first rejection ends the kept part."""
    n = len(matches)
    deferred_until = 0
    relaxed = []
    for i in range(1, n + 1):
        if matches[i - 1] or i <= deferred_until:
            continue
        strict = window is None or entropies[i - 1] < theta or protected[i - 1]
        failed = window is None or i + window > n or any(not matches[j - 1] for j in range(i + 1, i + window + 1))
        if strict or failed:
            return i - 1, relaxed
        relaxed.append(i - 1)
        deferred_until = i + window
    return n, relaxed


positions = st.lists(
    st.tuples(
        st.booleans() | st.just(True),
        st.sampled_from([0.0, 0.1, 0.29, 0.3, 0.31, 0.9, 1.0986]),
        st.sampled_from([False, False, False, True]),
    ),
    max_size=25,
)


@settings(max_examples=1500, deadline=None)
@given(positions, st.sampled_from([None, 1, 2, 3, 6, 15]), st.sampled_from([0.0, 0.3, 0.31, 2.0, math.inf]))
def test_equals_the_reference(rows, window, theta):
    matches, entropies, protected = ([row[i] for row in rows] for i in range(3))
    found = accept(matches, entropies, protected, theta=theta, window=window)
    assert (found.length, list(found.relaxed)) == reference(matches, entropies, protected, theta, window)
    strict = accept(matches, entropies, protected, theta=math.inf, window=window)
    assert strict == accept(matches, (), (), theta=theta, window=None)
    assert strict.relaxed == () and found.length >= strict.length
    assert (found.rejection is None) == (found.length == len(rows))
    assert all(not matches[i] and not protected[i] and entropies[i] >= theta for i in found.relaxed)


def test_the_reference_comparison_reaches_every_outcome():
    """Guards the property above against a strategy that never relaxes anything."""
    outcomes = set()

    @settings(max_examples=1500, deadline=None, database=None, derandomize=True)
    @given(positions, st.sampled_from([1, 2, 3]))
    def sweep(rows, window):
        matches, entropies, protected = ([row[i] for row in rows] for i in range(3))
        found = accept(matches, entropies, protected, theta=0.3, window=window)
        outcomes.update({("relaxed", min(len(found.relaxed), 2)), ("rejection", found.rejection)})

    sweep()
    assert outcomes == {("relaxed", 0), ("relaxed", 1), ("relaxed", 2)} | {
        ("rejection", reason) for reason in (None, "gate", "window", "protected")
    }


H = 0.9  # uncertain
EDGES = [
    # name, matches ('.' match, 'x' mismatch), entropies of the mismatches, W, kept, relaxed, reason
    ("all match", "......", [], 2, 6, (), None),
    ("empty draft", "", [], 6, 0, (), None),
    ("strict at the first position", "x.....", [0.1], 2, 0, (), "gate"),
    ("entropy equal to theta passes", "x.....", [0.3], 2, 6, (0,), None),
    ("entropy just below theta fails", "x.....", [0.2999], 2, 0, (), "gate"),
    ("window reaches exactly the end (i + W = n)", "...x......", [H], 6, 10, (3,), None),
    ("window one past the end (i + W = n + 1)", "....x.....", [H], 6, 4, (), "window"),
    ("mismatch at the last position", ".........x", [H], 1, 9, (), "window"),
    ("second mismatch in the window rejects the first", "x...x.....", [H, H], 4, 0, (), "window"),
    ("... even when the second is certain", "x...x.....", [H, 0.0], 4, 0, (), "window"),
    ("second mismatch just after the window", "x....x....", [H, H], 4, 10, (0, 5), None),
    ("two relaxed, third one certain", "x..x..x..", [H, H, 0.0], 2, 6, (0, 3), "gate"),
    ("W = 1, alternating", "x.x.x.", [H, H, H], 1, 6, (0, 2, 4), None),
    ("W = n is strict", "x....", [H], 5, 0, (), "window"),
    ("W > n is strict", "x....", [H], 9, 0, (), "window"),
    ("undefined entropy counts as certain", "x.....", [math.nan], 2, 0, (), "gate"),
    ("no window at all", "x.....", [H], None, 0, (), "gate"),
]


@pytest.mark.parametrize(
    ("pattern", "values", "window", "kept", "relaxed", "reason"),
    [row[1:] for row in EDGES],
    ids=[row[0] for row in EDGES],
)
def test_edges(pattern, values, window, kept, relaxed, reason):
    matches = [mark == "." for mark in pattern]
    entropies, remaining = [], iter(values)
    for match in matches:
        entropies.append(5.0 if match else next(remaining))
    found = accept(matches, entropies, [False] * len(matches), theta=0.3, window=window)
    assert found == Acceptance(kept, relaxed, reason)


def test_a_protected_position_is_never_relaxed_but_may_match():
    matches = [True, False, True, True]
    assert accept(matches, [H] * 4, [False, True, False, False], theta=0.3, window=2) == Acceptance(1, (), "protected")
    assert accept(matches, [H] * 4, [True, False, True, True], theta=0.3, window=2) == Acceptance(4, (1,), None)


def test_the_authors_script_pattern_is_one_shorter():
    """Its `win_len=6` is one mismatch and FIVE matches; W=6 here is six matches, as in the paper and in vLLM."""
    five = [False] + [True] * 5 + [False] + [True] * 8
    entropies = [H] * len(five)
    assert accept(five, entropies, [False] * 15, theta=0.3, window=6).length == 0
    assert accept(five, entropies, [False] * 15, theta=0.3, window=5).relaxed == (0, 6)
