"""Calls that small models write without markers, JSON that is no call, types of arguments, whose template is whose."""

from __future__ import annotations

import pytest
from test_parse import FORMS, calls_of, every_form, read, said, written

from fly_llm.text.families import GEMMA, family_of


@every_form
@pytest.mark.parametrize("fence", ["", "```json\n", "```\n"])
def test_a_call_without_markers(form, fence):
    text = fence + '{"name": "get", "arguments": {"n": 1, "text": "a } ``` b"}}' + ("\n```" if fence else "")
    assert calls_of(read(form.family, list(text))) == [("get", {"n": 1, "text": "a } ``` b"})]
    two = '{"name": "get", "parameters": {"n": 1}}; {"name": "put", "parameters": {}}'
    assert calls_of(read(form.family, [two])) == [("get", {"n": 1}), ("put", {})]


@every_form
@pytest.mark.parametrize("opened", ["", "<think>"])
def test_a_call_without_markers_behind_reasoning(form, opened):
    thought = "<think>"[len(opened) :] + 'I need it.\n{"name": "get"}</think>\n\n'
    call = '{"name": "get", "arguments": {"n": 1}}'
    parts = read(form.family, list(thought + call), opened=opened)
    assert calls_of(parts) == [("get", {"n": 1})]
    assert "".join(part.text for part in parts if part.kind == "reasoning").strip() == 'I need it.\n{"name": "get"}'
    assert said(parts) == ""
    parts = read(form.family, list(thought + '{"name": "Bob"} is it.'), opened=opened)
    assert calls_of(parts) == []
    assert said(parts) == '{"name": "Bob"} is it.'
    parts = read(form.family, list(thought + "Well: " + call), opened=opened)
    assert (calls_of(parts), said(parts)) == ([], "Well: " + call)


@every_form
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "other", "arguments": {"n": 1}}',
        '```json\n{"name": "Bob"}\n```\nThat is Bob.',
        '{"city": "Paris"}',
        '[{"name": "get"}]',
        '{"name": "get", "arguments": {"n": 1}} is how to call it.',
        '{"name": "get", "arguments": {"n": ',
    ],
)
def test_a_json_answer_is_no_call(form, text):
    parts = read(form.family, list(text))
    assert [part.kind for part in parts if part.kind != "content"] == []
    assert said(parts) == text


@pytest.mark.parametrize("name", ["hermes", "qwen-xml"])
def test_arguments_take_the_types_of_the_schema(name):
    form = FORMS[name]
    strings = {"text": "1", "n": "12", "x": "2.5", "yes": "True", "o": '{"k": "1"}', "a": "[1]"}
    typed = {"text": "1", "n": 12, "x": 2.5, "yes": True, "o": {"k": "1"}, "a": [1]}
    text = written(form, [("get", strings)])
    assert calls_of(read(form.family, [text])) == [("get", typed)]
    wrong = {"n": "many", "yes": "perhaps", "a": "{}"}
    assert calls_of(read(form.family, [written(form, [("get", wrong)])])) == [("get", wrong)]


def test_family_by_template():
    class Tokenizer:
        response_template = None

        def __init__(self, template):
            self.chat_template = template

    for marks, name in (
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}<tool_call><function=", "qwen-xml"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek"),
        ("{{ tools }}<|tool_call>", "gemma"),
        ("{{ tools }}<|start_header_id|>", "llama3"),
        ("<|start_header_id|>", "hermes"),
        (None, "hermes"),
    ):
        family = family_of(Tokenizer(marks))
        assert (family.name, family.renders_tools) == (name, "tools" in (marks or ""))
    assert family_of(Tokenizer({"default": "x", "tool_use": "{{ tools }}[TOOL_CALLS]"})).name == "mistral"
    assert family_of(Tokenizer("{{ tools }}</think>")).reasons
    gemma = family_of(Tokenizer("{{ tools }}<|tool_call>"))
    assert (gemma.quote, gemma.json_body) == (GEMMA.quote, False)
