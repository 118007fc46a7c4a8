"""A stop string ends the text at the same place however the text was cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fly_llm.errors import ConfigError
from fly_llm.text.stopping import StopStrings

SMALL = st.text("abX\n", max_size=14)
STOPS = st.lists(st.text("abX\n", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule as one would say it: look after every character; the longest stop string that ends there wins."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def streamed(matcher, pieces: list[str]) -> tuple[str, bool]:
    out, stopped = "", False
    for piece in pieces:
        shown, stopped = matcher.push(piece)
        out += shown
        if stopped:
            break
    return out + matcher.flush(), stopped


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(borders)] or [""]


@settings(max_examples=600, deadline=None)
@given(SMALL, STOPS, st.lists(st.integers(0, 50), max_size=8))
@example("abX", ["b", "abX"], [])
@example("aab", ["ab", "aab"], [1])
@example("aXab", ["aXb", "Xab"], [2])
def test_output_and_decision_do_not_depend_on_the_pieces(text, stops, places):
    expected = reference(text, stops)
    assert streamed(StopStrings(stops), [text]) == expected
    assert streamed(StopStrings(stops), list(text)) == expected
    assert streamed(StopStrings(stops), cut(text, places)) == expected


class ForgetfulStops(StopStrings):
    """The wrong twin: looks at each piece by itself and holds nothing back."""

    def push(self, text):
        starts = [text.find(stop) for stop in self._stops if stop in text]
        return (text[: min(starts)], True) if starts else (text, False)


class EarliestStartStops(StopStrings):
    """Another wrong twin: of the stop strings in a piece, the one that begins first wins."""

    def _first_completed(self, text):
        hits = [(text.find(stop), stop) for stop in self._stops if stop in text]
        return min(hits) if hits else None


@pytest.mark.parametrize("twin", [ForgetfulStops, EarliestStartStops])
def test_wrong_twins_fail_the_property(twin):
    cases = [("one DEFGHIJ two", ["DEFGHIJ"]), ("xabcdx", ["abcd", "c"])]
    results = [
        (streamed(twin(stops), [text]), streamed(twin(stops), list(text)), reference(text, stops))
        for text, stops in cases
    ]
    assert any(at_once != by_character or at_once != right for at_once, by_character, right in results)


@settings(max_examples=300, deadline=None)
@given(SMALL, STOPS, SMALL)
def test_completes_foretells_push_and_changes_nothing(before, stops, after):
    asked, plain = StopStrings(stops), StopStrings(stops)
    assert asked.push(before) == plain.push(before)
    foretold = asked.completes(after)
    assert foretold == asked.completes(after)
    assert asked.push(after) == plain.push(after)
    assert foretold == asked.push("")[1]


@settings(max_examples=300, deadline=None)
@given(SMALL, STOPS)
def test_held_text_is_the_longest_end_that_could_become_a_stop_string(text, stops):
    matcher = StopStrings(stops)
    out, stopped = matcher.push(text)
    if not stopped:
        held = matcher.flush()
        assert out + held == text
        could = [n for n in range(1, len(text) + 1) if any(len(s) > n and s.startswith(text[-n:]) for s in stops)]
        assert len(held) == max(could, default=0)


def test_text_before_a_stop_string_is_released_and_nothing_after_it():
    matcher = StopStrings(["\n\nObservation:"])
    assert matcher.push("Action: look\n") == ("Action: look", False)
    assert matcher.push("\nObser") == ("", False)
    assert matcher.matched is None
    assert matcher.push("vation: 42") == ("", True)
    assert matcher.matched == "\n\nObservation:"
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""
    assert matcher.completes("")


def test_held_text_that_turns_out_harmless_is_released():
    matcher = StopStrings(["DEFGHIJ"])
    assert matcher.push("ABCDEF") == ("ABC", False)
    assert matcher.push("GHx") == ("DEFGHx", False)
    assert matcher.push("D") == ("", False)
    assert matcher.flush() == "D"
    assert matcher.flush() == ""


def test_without_stop_strings_everything_passes_at_once():
    matcher = StopStrings([])
    assert matcher.push("anything") == ("anything", False)
    assert not matcher.completes("anything")


@pytest.mark.parametrize("stops", ["END", [""], ["ok", 3]])
def test_bad_stop_strings_are_refused(stops):
    with pytest.raises(ConfigError, match="got"):
        StopStrings(stops)
