"""Answers of every family are parted the same however they were cut, and nothing in them is lost or made up.

The rows of the bug log are in the tests' names: A speculation, B tool calls, C reasoning.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fly_llm.text.families import DEEPSEEK, GEMMA, HERMES, LLAMA3, MISTRAL, QWEN_XML, Family
from fly_llm.text.parse import Reader, new_id, opened_by
from fly_llm.types import InvalidToolCall

KINDS = {"text": "string", "n": "integer", "x": "number", "yes": "boolean", "o": "object", "a": "array"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in KINDS.items()}},
        },
    }
    for name in ("get", "put")
]
THINK = '<think>\nhm, {0} or "that"?\n</think>\n\n'
EVERY_MARKER = sorted(
    {
        *(marker for family in (HERMES, LLAMA3, MISTRAL, DEEPSEEK, GEMMA) for marker in family.call_open),
        *(marker for family in (HERMES, LLAMA3, MISTRAL, DEEPSEEK, GEMMA) for marker in family.call_close),
        *("<think>", "</think>", "```json", "```", "[ARGS]", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁sep｜>", "</function>", "call:", "function"),
    },
    key=len,
    reverse=True,
)


class Form(NamedTuple):
    """One way to write calls: a family, what stands around the calls, one call, and what is between two."""

    family: Family
    before: str
    call: object
    between: str
    after: str


def json_call(before, after, key="arguments"):
    def write(name, arguments):
        return before + json.dumps({"name": name, key: arguments}, ensure_ascii=False) + after

    return write


def named_call(before, middle, after):
    def write(name, arguments):
        return before + name + middle + json.dumps(arguments, ensure_ascii=False) + after

    return write


def xml_call(name, arguments):
    written = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def gemma_value(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return json.dumps(value)


def gemma_call(name, arguments):
    return f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>"


FORMS = {
    "hermes": Form(HERMES, "", json_call("<tool_call>\n", "\n</tool_call>"), "\n", ""),
    "qwen-xml": Form(QWEN_XML, "", xml_call, "\n", ""),
    "llama3": Form(LLAMA3, "<|python_tag|>", json_call("", "", "parameters"), "; ", ""),
    "mistral list": Form(MISTRAL, "[TOOL_CALLS] [", json_call("", ""), ", ", "]"),
    "mistral named": Form(MISTRAL, "", named_call("[TOOL_CALLS]", "[ARGS]", ""), "", ""),
    "mistral bare": Form(MISTRAL, "", named_call("[TOOL_CALLS]", "", ""), "", ""),
    "deepseek v3": Form(
        DEEPSEEK,
        "<｜tool▁calls▁begin｜>",
        named_call("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek v3.1": Form(
        DEEPSEEK,
        "<｜tool▁calls▁begin｜>",
        named_call("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "gemma": Form(GEMMA, "", gemma_call, "", ""),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)

NASTY = {
    "text": 'a <tool_call> b </tool_call> [TOOL_CALLS] <|python_tag|> ``` ; <tool_call|> é 😀 日本 {["x',
    "n": 42,
    "o": {"k}": [1, {"z": "}"}], "<tool_call>": None},
}
PLAIN = {"yes": True, "x": 2.5, "a": ["one", "two"]}


def nasty(form):
    """Arguments that are hard to read, as far as the form can write them at all."""
    if form.family is GEMMA:  # bare keys; a quote inside one of its strings is an ordinary character
        return {**NASTY, "o": {"k": [1, {"z": "}"}]}}
    if form.family is QWEN_XML:  # no escapes: what closes a call can be in no value
        return {**NASTY, "text": NASTY["text"] + "\nand\n"[:4]}
    return {**NASTY, "text": NASTY["text"] + '"\n<|tool_call>\\\n</think>\t</tool_call>'}


def written(form, calls):
    return form.before + form.between.join(form.call(*call) for call in calls) + form.after


def texts_of(form):
    """An answer with everything in it, and its parts."""
    calls = [("get", nasty(form)), ("put", PLAIN)]
    content = "Wait < 3 [ minutes;" if form.family is not LLAMA3 else "Wait < 3 minutes"
    return THINK + content + "\n" + written(form, calls), content, calls


def read(family, pieces, *, tools=TOOLS, **options):
    reader = Reader(family, tools=tools, **options)
    return [part for piece in pieces for part in reader.push(piece)] + reader.finish()


def joined(parts):
    """Parts without their ids, touching ones of one kind joined."""
    out = []
    for part in parts:
        if part.call is None and out and out[-1][0] == part.kind:
            out[-1] = (part.kind, out[-1][1] + part.text, None)
        else:
            call = part.call and (part.call.raw if part.kind == "invalid" else (part.call.name, part.call.arguments))
            out.append((part.kind, part.text, call))
    return out


def said(parts, kind="content"):
    return "".join(part.text for part in parts if part.kind == kind)


def calls_of(parts):
    return [(part.call.name, part.call.arguments) for part in parts if part.kind == "call"]


def invalid_of(parts):
    return [part.call.raw for part in parts if part.kind == "invalid"]


BETWEEN = re.compile("|".join([r"\s", *map(re.escape, [*EVERY_MARKER, "<function=", "get", "put", ">"])]))


def is_covered(text, parts):
    """Whether the parts, in order, hold all of the text but space, markers, and the names in calls' markers."""
    places = {0}
    for own in [*(part.call.raw if part.kind == "invalid" else part.text for part in parts), ""]:
        waiting, found = list(places), set()
        while waiting:
            at = waiting.pop()
            if text.startswith(own, at):
                found.add(at + len(own))
            marker = BETWEEN.match(text, at)
            waiting.extend([marker.end()] if marker else ())
        places = found
    return len(text) in places


def cut(text, places):
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(borders)] or [""]


# Whole answers.


@every_form
def test_an_answer_with_everything_in_it(form):
    text, content, calls = texts_of(form)
    parts = read(form.family, [text])
    assert said(parts, "reasoning").strip() == 'hm, {0} or "that"?'
    assert said(parts).rstrip() == content
    assert calls_of(parts) == calls
    assert invalid_of(parts) == []
    assert [part.kind for part in parts if part.call is not None] == ["call", "call"]
    assert is_covered(text, parts)


@every_form
def test_a6_a7_any_split_gives_the_same(form):
    text, _, calls = texts_of(form)
    whole = joined(read(form.family, list(text)))
    assert [call for kind, _, call in whole if kind == "call"] == calls, "A6: both calls, with all of their arguments"
    assert joined(read(form.family, [text])) == whole
    for i in range(0, len(text) + 1, 9):
        assert joined(read(form.family, [text[:i], text[i:]])) == whole, text[:i]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FORMS)), st.lists(st.integers(0, 5000), max_size=12))
def test_a6_random_splits_give_the_same(name, places):
    form = FORMS[name]
    text, _, _ = texts_of(form)
    assert joined(read(form.family, cut(text, places))) == joined(read(form.family, [text]))


@every_form
def test_a6_every_split_into_three_of_two_short_calls(form):
    calls = [("get", {"n": 42}), ("put", {"o": {}})]
    text = written(form, calls)
    whole = joined(read(form.family, [text]))
    assert [call for kind, _, call in whole if kind == "call"] == calls, "A7: the last brace is there"
    for i in range(len(text) + 1):
        assert joined(read(form.family, [text[:i], text[i:]])) == whole, text[:i]
    step = max(1, len(text) // 12)
    for i in range(0, len(text), step):
        for j in range(i, len(text), step):
            assert joined(read(form.family, [text[:i], text[i:j], text[j:]])) == whole


@every_form
def test_content_is_streamed_as_soon_as_it_cannot_be_a_marker(form):
    reader = Reader(form.family, tools=TOOLS)
    assert said(reader.push("Hello there. ")).strip() == "Hello there."
    assert calls_of(reader.push(written(form, [("get", {"n": 1})]))) in ([], [("get", {"n": 1})])
    reader.finish()


@every_form
def test_b11_ids_are_unique_and_of_nine_letters_and_digits(form):
    text = written(form, [("get", {"n": 1})] * 3)
    parts = read(form.family, [text + text[:-6]]) + read(form.family, [text])
    ids = [part.call.id for part in parts if part.call is not None]
    assert len(ids) >= 4
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in ids)
    assert len({new_id() for _ in range(500)}) == 500


@every_form
def test_text_behind_calls_and_no_tools_at_all(form):
    if form.family.call_close:
        text = written(form, [("get", {"n": 1})]) + "\n\nDone."
        parts = read(form.family, [text])
        assert (calls_of(parts), said(parts)) == ([("get", {"n": 1})], "Done.")
    text, _, _ = texts_of(form)
    parts = read(form.family, [text], tools=None, calls=False)
    assert {part.kind for part in parts} == {"reasoning", "content"}, "a call that nobody asked for is text"
    assert said(parts) == text.partition("</think>")[2].lstrip()


# Half answers.


@every_form
def test_b13_a_call_cut_anywhere_is_never_a_shorter_one(form):
    text, _, calls = texts_of(form)
    invalid = 0
    for i in range(len(text)):
        parts = read(form.family, [text[:i]])
        found = calls_of(parts)
        assert found == calls[: len(found)], text[:i][-60:]
        assert is_covered(text[:i], parts), text[:i][-60:]
        invalid += len(invalid_of(parts))
    assert invalid > 20
    assert not is_covered(text, read(form.family, [text.replace("minutes", "")])), "the check sees what is missing"


@every_form
@pytest.mark.parametrize("arguments", [{"n": 123456}, {"text": "one two three", "n": 5}, {"a": [1, 2, 3]}], ids=str)
def test_b13_numbers_and_last_arguments_are_not_shortened(form, arguments):
    text = written(form, [("get", arguments)])
    for i in range(len(text)):
        assert calls_of(read(form.family, [text[:i]])) in ([], [("get", arguments)]), text[:i]
    assert calls_of(read(form.family, [text])) == [("get", arguments)]


@every_form
def test_b13_the_raw_text_of_a_cut_call_says_whose_call_it_was(form):
    text = "Hi " + written(form, [("get", {"text": "one two three"})])
    for i in range(text.index("one"), text.index("three")):
        parts = read(form.family, [text[:i]])
        (raw,) = invalid_of(parts)
        assert raw == text[:i].partition("Hi ")[2].removeprefix("<｜tool▁calls▁begin｜>")
        assert said(parts).rstrip() == "Hi"


FRAGMENTS = st.lists(
    st.one_of(
        st.sampled_from(
            [*EVERY_MARKER, '{"name": "get", "arguments": {"n": 1}}', '{"name": "Bob"}', "get", '"', "{", "}"]
        ),
        st.sampled_from(
            ["<function=get>", "<parameter=n>\n1\n</parameter>", '<|"|>', "\\", "\n", " ", "[{", "}]", "\0"]
        ),
        st.text('ab é<[|;`"{}:\\\n\x01', max_size=6),
    ),
    max_size=10,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([HERMES, QWEN_XML, LLAMA3, MISTRAL, DEEPSEEK, GEMMA]), FRAGMENTS, st.lists(st.integers(0, 99)))
@example(GEMMA, 'a <|tool_call>call:get{text:"\x01"}<tool_call|>{"name": "x"} b', [])
def test_arbitrary_text_never_raises_and_is_neither_lost_nor_doubled(family, text, places):
    parts = read(family, cut(text, places))
    assert joined(parts) == joined(read(family, list(text)))
    out = "".join(part.call.raw if part.kind == "invalid" else part.text for part in parts)
    for char in "abé1x":
        assert out.count(char) <= text.count(char), "made up"
    assert out.count("é") == text.count("é") or family is QWEN_XML, "lost"


def test_braces_without_end_take_no_time():
    for many in ("{" * 60, "{" * 60 + "}" * 60, '{"a": ' * 60 + "}" * 60):
        parts = read(HERMES, [f"<tool_call>{many}</tool_call>"])
        assert invalid_of(parts) == [f"<tool_call>{many}"]
    doubled = '<tool_call>{{"name": "get", "arguments": {"n": 1}}</tool_call>'
    assert calls_of(read(HERMES, [doubled])) == [("get", {"n": 1})]


@pytest.mark.parametrize("value", ["[" * 3000 + "]" * 3000, "1" * 5000, "[" * 3000], ids=["nested", "digits", "open"])
@pytest.mark.parametrize("form", [FORMS[name] for name in FORMS if name not in ("qwen-xml", "mistral list", "gemma")])
def test_b7_what_python_cannot_read_is_invalid_and_what_follows_is_read(form, value):
    one = written(form, [("get", {"a": 7})])
    text = one.replace("7", value) + (" after" if form.family.call_close else one if form.before == "" else "")
    parts = read(form.family, [text])
    assert len(invalid_of(parts)) == 1
    assert value in invalid_of(parts)[0]
    if form.family.call_close:
        assert said(parts).strip() == "after"
    elif form.before == "":
        assert calls_of(parts) == [("get", {"a": 7})]


# Rows of the bug log.


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral list", "deepseek v3", "deepseek v3.1"])
def test_b7_a_bad_escape_is_an_invalid_call_with_its_text(name):
    form = FORMS[name]
    text = written(form, [("get", {"text": "Q <tool_call>"})]).replace("Q", "\\q")
    parts = read(form.family, [text])
    (raw,) = invalid_of(parts)
    assert "\\q <tool_call>" in raw
    assert calls_of(parts) == []
    assert said(parts) == ""
    error = next(part.call for part in parts if part.kind == "invalid")
    assert isinstance(error, InvalidToolCall)
    assert "JSON" in error.error


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call> hmm <tool_call>{"name": "get", "arguments": {"n": 1}}</tool_call>',
        '<tool_call><tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "pu\n<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>',
    ],
)
def test_a8_after_a_stray_marker_the_call_is_behind_the_last_one(text):
    parts = read(HERMES, [text])
    assert calls_of(parts) == [("get", {"n": 1})]
    assert invalid_of(parts) == []
    assert is_covered(text, parts)


def test_a8_stray_markers_of_other_families():
    for family, text in (
        (MISTRAL, '[TOOL_CALLS] hmm [TOOL_CALLS]get{"n": 1}'),
        (QWEN_XML, "<tool_call> hmm " + xml_call("get", {"n": 1})),
        (DEEPSEEK, '<｜tool▁call▁begin｜> hmm <｜tool▁call▁begin｜>get<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'),
    ):
        parts = read(family, [text])
        assert calls_of(parts) == [("get", {"n": 1})]
        assert "hmm" in said(parts)


def test_b9_markers_are_text_to_the_reader_and_special_tokens_only_to_the_tokenizer():
    """The engine keeps markers that are special tokens (`Detokenizer(keep=)`), so they come here as text."""
    parts = read(MISTRAL, ["[TOOL_CALLS]", "get", "[ARGS]", '{"n": 1}'])
    assert calls_of(parts) == [("get", {"n": 1})]
    assert "[TOOL_CALLS]" not in said(parts)


@every_form
def test_c4_reasoning_is_apart_from_the_answer_behind_it(form):
    answer = '{"city": "Paris"}'
    parts = read(form.family, [THINK + answer])
    assert json.loads(said(parts)) == {"city": "Paris"}
    assert "hm" in said(parts, "reasoning")


@every_form
def test_c5_a_tag_that_the_template_opened(form):
    text = THINK.removeprefix("<think>") + "Hello"
    for prompt_end in ("<|Assistant|><think>", "<|im_start|>assistant\n<think>\n"):
        parts = read(form.family, [text], opened=opened_by(prompt_end))
        assert (said(parts), said(parts, "reasoning").strip()) == ("Hello", 'hm, {0} or "that"?')
    assert opened_by("<think>\n\n</think>\n\n") == ""
    wrong = read(form.family, [text], opened="")
    assert said(wrong, "reasoning") == "", "without that, it all lands in the content"


def test_c5_reasoning_that_was_never_closed_is_reasoning():
    parts = read(HERMES, ['hm <tool_call>{"name": "get", "arguments": {}}</tool_call>'], opened="<think>")
    assert {part.kind for part in parts} == {"reasoning"}
