"""In which zone a token is, however the text around it was cut into tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fly_llm.text.families import DEEPSEEK, GEMMA, HERMES, LLAMA3, MISTRAL, QWEN_XML
from fly_llm.text.zones import Zones

FAMILIES = (HERMES, QWEN_XML, LLAMA3, MISTRAL, DEEPSEEK, GEMMA)
WEIGHT = ("text", "reasoning", "code", "json", "tool")
LETTER = {"text": "t", "reasoning": "r", "code": "c", "json": "j", "tool": "T"}


def zones_of(text, family=HERMES, opened=""):
    """The zone of every character, as letters, when each is a token."""
    zones = Zones(family, opened)
    return "".join(LETTER[zones.push(char)] for char in text)


def check(marked, family=HERMES, opened=""):
    """`marked` is (text, letter) by turns: the zone of the text's last character and of all that are not a marker's."""
    text = "".join(piece for piece, _ in marked)
    found = zones_of(text, family, opened)
    at = 0
    for piece, letter in marked:
        got = found[at : at + len(piece)]
        assert got == letter * len(piece), (piece, got, found)
        at += len(piece)


# What is a zone. A marker's first characters are text until the last one has shown what they are.


@pytest.mark.parametrize(
    "marked",
    [
        [("Hello {there} [1] <b>", "t")],
        [("Hi <tool_call", "t"), (">", "T"), ('{"a": 1}</tool_call>', "T"), (" and", "t")],
        [("{", "j"), ('"a": 1}', "j"), (" and {", "t")],
        [(" \n\t", "t"), ("[1, [2, {}]]", "j"), ("\nso", "t")],
        [('{"a": "}{[\\"]}", "b": "\\\\"}', "j"), ("x", "t")],
        [("A: ", "t"), ("{}", "t")],
        [("``", "t"), ("`python\n{}\n``", "c"), ("`", "c"), ("\nso", "t")],
        [("Look:\n``", "t"), ("`json", "c"), ('\n{"a": "``"}\n``', "j"), ("`", "j"), (" so", "t")],
        [("``", "t"), ("`JSON ", "c"), ("\n[]\n```", "j"), ("{", "t")],
        [("``", "t"), ("`\n{}\n```", "c"), ("{", "t")],
        [("<think", "t"), (">hm {} ```\n</think>", "r"), ("\n", "t"), ("[1]", "j"), ("x", "t")],
        [("<think", "t"), (">hm</think>", "r"), ("\nHello ", "t"), ("{}", "t")],
        [("Hi ", "t"), ("<think", "t"), (">hm</think>", "r"), ("{}", "t")],
        [("{}", "j"), (" {}", "t")],
        [("``", "t"), ("`py\n```", "c"), ("\n``", "t"), ("`json", "c"), ("\n1```", "j")],
    ],
    ids=lambda marked: "".join(piece for piece, _ in marked)[:24],
)
def test_table(marked):
    check(marked)


@pytest.mark.parametrize(
    ("family", "opener", "closer"),
    [
        (HERMES, "<tool_call>", "</tool_call>"),
        (QWEN_XML, "<tool_call>", "</tool_call>"),
        (LLAMA3, "<|python_tag|>", None),
        (MISTRAL, "[TOOL_CALLS]", None),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        (GEMMA, "<|tool_call>", "<tool_call|>"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_tool_markers_of_every_family(family, opener, closer):
    call = 'f{a: 1}\n```json\n<think> "x" </think>'
    for before in ("Hi ", "", " \n", "<think>a</think>\n"):
        zones = Zones(family)
        for char in before:
            zones.push(char)
        for char in opener[:-1]:
            assert zones.push(char) != "tool"
        assert zones.push(opener[-1]) == "tool", "the token that completes the opener belongs to the call"
        assert {zones.push(char) for char in call} == {"tool"}
        if closer is None:
            assert {zones.push(char) for char in " and more\n\n"} == {"tool"}, "it lasts to the end"
        else:
            assert {zones.push(char) for char in closer} == {"tool"}, "so does the closer"
            assert zones.zone == "text"
            assert zones.push("{") == "text"


def test_opener_as_one_token_is_in_the_call_and_so_is_whatever_shares_a_token_with_it():
    zones = Zones(HERMES)
    assert zones.push("Hi <tool_call>") == "tool"
    assert zones.push("x</tool_call> so") == "tool"
    assert zones.push("so") == "text"
    assert Zones(HERMES).peek(["Hi <to", "ol_call>{", "x"]) == ["tool", "tool", "tool"], "what may become an opener too"
    assert Zones(HERMES).push("Hi <to") == "text", "but it is text until it has"
    assert Zones(HERMES).peek(["Hi <to", " you"]) == ["tool", "text"]
    assert Zones(HERMES).peek(["a", "{"]) == ["text", "text"]
    assert Zones(HERMES).peek([" {", "}", " "]) == ["json", "json", "text"]
    assert Zones(HERMES).peek(["<think>hm</think>{", "}"]) == ["json", "json"]


@pytest.mark.parametrize("family", [HERMES, GEMMA, DEEPSEEK], ids=lambda family: family.name)
def test_b7_a_closing_marker_in_a_string_of_a_call_does_not_end_its_zone(family):
    quote = family.quote or '"'
    inside = f"{{{quote}a {family.call_close[0]} b{quote}: 1, {quote}{quote}: 2"
    text = family.call_open[0] + inside + "}" + family.call_close[0]
    found = zones_of(text + " so", family)
    assert found.endswith("T" + "ttt")
    assert set(found[len(family.call_open[0]) - 1 : len(text)]) == {"T"}


def test_a_broken_string_in_a_call_ends_with_its_line():
    assert zones_of('<tool_call>{"a\n</tool_call>x').endswith("Tt")
    assert zones_of('<tool_call>{"a \\" </tool_call>x').endswith("TT"), "the string goes on: strict, to be safe"


def test_a_tool_marker_that_begins_like_a_list():
    check([("[", "j"), ("TOOL_CALLS", "j"), ("]", "T"), (' [{"n": 1}] x', "T")], MISTRAL)
    check([("[TOOL", "j"), ("]", "j"), (" x", "t")], MISTRAL)
    check([('["[TOOL_CALLS]", 1]', "j"), ("x", "t")], MISTRAL)
    check([("[TOOL_CALLS]", "j"), (" x", "t")], HERMES)


def test_first_character_that_is_no_space():
    check([("\n\n ", "t"), ("{}", "j"), ("{}", "t")])
    check([(".", "t"), ("{}", "t")])
    check([("<", "t"), ("{}", "t")])
    check([("<tool", "t"), ("{}", "t")])


def test_what_the_prompt_has_opened():
    check([("hm {", "r"), ("</think>", "r"), ("\n\n", "t"), ("{}", "j")], opened="<think>")
    check([("hm ", "r")], opened="<think>\n")
    assert Zones(HERMES, "<think>").zone == "reasoning"
    assert Zones(HERMES, "").zone == "text"


# However it is cut.

PARTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>", "```", "```json\n", "\n"]
        ),
        st.sampled_from(["<|tool_call>", "<tool_call|>", '<|"|>', "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]),
        st.sampled_from(['{"a": "}"}', "[1, 2]", '{"a": {', "<|python_tag|>", "\\", '"', "`", "<"]),
        st.text('ab {}[]"\\\n`<', max_size=5),
    ),
    max_size=8,
).map("".join)


def cut(text, places):
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(borders)] or [""]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FAMILIES), PARTS, st.lists(st.integers(0, 200), max_size=12), st.sampled_from(["", "<think>"]))
@example(MISTRAL, "[TOOL_CALLS]x", [3, 11], "")
@example(HERMES, 'Hi <tool_call>{"a": 1}</tool_call> so', [5, 14, 30], "")
def test_a_token_is_in_the_heaviest_zone_that_its_characters_touch(family, text, places, opened):
    """A character touches the zone that the text is in before it, and the one that it is in behind it."""
    by_char, behind = Zones(family, opened), []
    for char in text:
        before = by_char.zone
        zone = by_char.push(char)
        assert zone == max(before, by_char.zone, key=WEIGHT.index)
        behind.append(zone)
    tokens = cut(text, places)
    zones = Zones(family, opened)
    at = 0
    for token in tokens:
        before = zones.zone
        expected = max([before, *behind[at : at + len(token)]], key=WEIGHT.index)
        assert zones.push(token) == expected
        at += len(token)
    assert zones.zone == by_char.zone
    assert zones.push("z") == by_char.push("z")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FAMILIES), PARTS, PARTS, st.lists(st.integers(0, 99), max_size=8))
def test_peek_foretells_push_and_changes_nothing(family, before, after, places):
    asked, plain = Zones(family), Zones(family)
    asked.push(before)
    plain.push(before)
    tokens = cut(after, places)
    foretold = asked.peek(tokens)
    assert asked.peek(tokens) == foretold
    assert asked.peek([]) == []
    assert asked.zone == plain.zone
    pushed = [plain.push(token) for token in tokens]
    assert [asked.push(token) for token in tokens] == pushed
    so_far = before
    for token, zone, told in zip(tokens, pushed, foretold, strict=True):
        so_far += token
        begun = any(so_far.endswith(marker[:n]) for marker in family.call_open for n in range(1, len(marker)))
        assert told == ("tool" if zone == "text" and begun else zone)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text('ab"\\{}[]`<\n', max_size=6)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text('a{"}', max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    ).filter(lambda value: isinstance(value, (dict, list))),
    st.sampled_from([None, 1]),
)
def test_any_json_value_is_one_zone_to_its_last_bracket(value, indent):
    import json

    text = json.dumps(value, indent=indent)
    found = zones_of(" " + text + " and {}")
    assert found == "t" + "j" * len(text) + "t" * len(" and {}")


def test_empty_tokens_take_the_zone_they_lie_in():
    zones = Zones(HERMES)
    assert zones.push("") == "text"
    zones.push("<tool_call>")
    assert zones.push("") == "tool"
    assert zones.peek(["", "</tool_call>", ""]) == ["tool", "tool", "text"]
