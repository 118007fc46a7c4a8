"""Tools, structured output and reasoning through `ChatFLy` and LlamaIndex' `FLyLLM`.

Most models here write a script (`test_answer_zones.scripted`), and their draft models propose the same: words matter,
and a tiny model has none. Rows of the bug log are in the tests' names: B tool calls, C structured output, reasoning.
"""

from __future__ import annotations

import asyncio
import functools
import json
import operator
from typing import Literal, TypedDict

import pydantic.v1
import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.llms.fly import FLyLLM
from llama_index.llms.fly.messages import to_chat as index_chat
from pydantic import BaseModel, Field
from test_answer_zones import ADDED, CALL, SPECIAL, TEXT, THINKS, scripted
from test_answers import EOS, SPACE
from tiny_models import CHAT_TEMPLATE, noisy_copy, tiny_llama, tiny_tokenizer

from fly_llm import ConfigError
from fly_llm.request import encode
from langchain_fly import ChatFLy
from langchain_fly.messages import to_chat

ASKED = "the fox?"
LOOSE = {"theta": 0.0, "window": 1, "num_speculative_tokens": 12, "drafting": "model"}
ONCE = {"max_tokens": 1, "drafting": "lookup"}
FORM = '{"n": 7, "w": "fox"}'


def get(n: int, w: Literal["fox", "dog"]) -> str:
    """Get the fox.

    Args:
        n: how many.
        w: which.
    """
    return f"{n} {w}"


class Get(BaseModel):
    """Get the fox."""

    n: int
    w: Literal["fox", "dog"]


class OldGet(pydantic.v1.BaseModel):
    """Get the fox."""

    n: int
    w: Literal["fox", "dog"]


class TypedGet(TypedDict):
    """Get the fox."""

    n: int
    w: Literal["fox", "dog"]


SCHEMA = {**Get.model_json_schema(), "title": "Get"}
OPENAI = {"type": "function", "function": {"name": "get", "description": "Get it.", "parameters": SCHEMA}}
get_tool = tool(get)


def big(vocab_size, seed=5):
    model = tiny_llama(vocab_size, eos_token_id=EOS, seed=seed)
    model.config.max_position_embeddings = 2048
    return model


@pytest.fixture(scope="module")
def babble():
    """A `ChatFLy` that writes anything at all, and soon ends what a grammar lets it end."""
    target = big(len(TEXT))
    draft = noisy_copy(target, 0.2)
    return ChatFLy(model=target, draft_model=draft, tokenizer=TEXT, max_tokens=150, logit_bias=SPACE, **LOOSE)


def chat(text, *, ask=None, tokenizer=TEXT, **fields):
    """A chat model that writes this text to `ASKED`; `ask` binds what goes along to the prompt."""
    script = tokenizer.encode(text, add_special_tokens=False)
    fields = {"tokenizer": tokenizer, "max_tokens": len(script) + 1, **LOOSE, **fields}
    bind = ask or (lambda llm: llm)
    counted = bind(ChatFLy(model=big(len(tokenizer)), **{**fields, **ONCE})).invoke(ASKED)
    start = counted.usage_metadata["input_tokens"]
    models = [scripted(script, start, len(tokenizer)) for _ in range(2)]
    return bind(ChatFLy(model=models[0], draft_model=models[1], **fields))


def with_tools(**options):
    return lambda llm: llm.bind_tools([OPENAI], **options)


# LangChain: tools.

FORMS = {"function": get, "pydantic": Get, "tool": get_tool, "dict": OPENAI, "bare dict": OPENAI["function"]}


@pytest.mark.parametrize("kind", FORMS)
def test_b1_b4_tools_of_every_kind_are_in_the_prompt_and_can_be_forced(babble, kind):
    given = FORMS[kind]
    name = "Get" if kind == "pydantic" else "get"
    plain = babble.invoke(ASKED, max_tokens=2).usage_metadata["input_tokens"]
    assert babble.bind_tools([given]).invoke(ASKED, max_tokens=2).usage_metadata["input_tokens"] > plain + 50
    message = babble.bind_tools([given], tool_choice="any").invoke(ASKED)
    (call,) = message.tool_calls
    assert (call["name"], call["type"]) == (name, "tool_call")
    Get.model_validate(call["args"])
    assert isinstance(call["args"]["n"], int)
    assert message.content == ""
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert message.response_metadata["fly"]["num_relaxed_tokens"] == 0


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("any", True),
        ("required", True),
        (True, True),
        ("get", True),
        ({"type": "function", "function": {"name": "get"}}, True),
        ({"type": "tool", "name": "get"}, True),
        ({"type": "any"}, True),
        ("none", False),
        (False, False),
        ({"type": "auto"}, None),
        ("auto", None),
        (None, None),
    ],
)
def test_b3_every_form_of_tool_choice(babble, choice, called):
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    llm = babble.bind_tools([OPENAI, other], tool_choice=choice)
    message = llm.invoke(ASKED)
    if called:
        names = {call["name"] for call in message.tool_calls}
        assert names <= {"get", "other"}
        assert len(message.tool_calls) == 1
        if "get" in str(choice):
            assert names == {"get"}
    else:
        assert message.tool_calls == []
    plain = babble.invoke(ASKED, max_tokens=2).usage_metadata["input_tokens"]
    assert (message.usage_metadata["input_tokens"] == plain) is (called is False), "only `none` hides the tools"


@pytest.mark.parametrize("choice", ["gte", {"type": "function", "function": {"name": "gte"}}, 3, ["get"]])
def test_b3_an_unknown_tool_is_a_clear_error(babble, choice):
    with pytest.raises(ConfigError, match=r"tool_choice must be one of 'auto', .*'get'"):
        babble.bind_tools([OPENAI], tool_choice=choice).invoke(ASKED)
    with pytest.raises(ConfigError, match="needs tools"):
        babble.invoke(ASKED, tools=[], tool_choice="required")


@pytest.mark.parametrize("tokenizer", [TEXT, ADDED, SPECIAL], ids=["text", "added", "special"])
def test_b5_b9_b11_parallel_calls_and_their_chunks(tokenizer):
    llm = chat(f"a fox {CALL}\n{CALL.replace('7', '9')}", ask=with_tools(), tokenizer=tokenizer)
    whole = llm.invoke(ASKED)
    assert [call["args"] for call in whole.tool_calls] == [{"n": 7, "w": "fox"}, {"n": 9, "w": "fox"}]
    assert len({call["id"] for call in whole.tool_calls}) == 2
    assert whole.content.strip() == "a fox"
    chunks = list(llm.stream(ASKED))
    parts = [part for chunk in chunks for part in chunk.tool_call_chunks]
    assert [part["index"] for part in parts] == [0, 1], "one chunk per call, with whole numbers"
    assert [json.loads(part["args"]) for part in parts] == [call["args"] for call in whole.tool_calls]
    assert all(part["id"] and part["name"] == "get" for part in parts)
    first_call = next(i for i, chunk in enumerate(chunks) if chunk.tool_call_chunks)
    assert "".join(chunk.text for chunk in chunks[: first_call + 1]).strip() == "a fox", "text comes first"
    merged = functools.reduce(operator.add, chunks)
    assert isinstance(merged, AIMessageChunk)
    without_ids = [[{**call, "id": ""} for call in message.tool_calls] for message in (merged, whole)]
    assert without_ids[0] == without_ids[1]
    assert merged.content == whole.content
    assert merged.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert merged.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"] == "tool_calls"

    async def main():
        return [chunk async for chunk in llm.astream(ASKED)], await llm.ainvoke(ASKED)

    streamed, message = asyncio.run(main())
    assert (
        functools.reduce(operator.add, streamed).tool_calls[1]["args"]
        == message.tool_calls[1]["args"]
        == {"n": 9, "w": "fox"}
    )


@pytest.mark.parametrize("how", ["invoke", "stream", "astream"])
def test_b13_a_call_cut_short_is_invalid_with_its_raw_text(how):
    llm = chat(f"a fox {CALL}", ask=with_tools())

    def answer(n):
        if how == "invoke":
            return llm.invoke(ASKED, max_tokens=n)
        if how == "stream":
            return functools.reduce(operator.add, llm.stream(ASKED, max_tokens=n))

        async def main():
            return [chunk async for chunk in llm.astream(ASKED, max_tokens=n)]

        return functools.reduce(operator.add, asyncio.run(main()))

    seen = 0
    for n in range(16, len(TEXT.encode(f"a fox {CALL}")) - 12, 4):
        message = answer(n)
        assert message.tool_calls == []
        (broken,) = message.invalid_tool_calls
        assert CALL.startswith(broken["args"])
        assert broken["args"].startswith("<tool_call>")
        assert message.response_metadata["finish_reason"] == "length"
        seen += "7" in broken["args"]
    assert seen
    assert answer(400).tool_calls[0]["args"] == {"n": 7, "w": "fox"}


def test_strict_is_taken_and_has_nothing_to_do_with_verification(babble):
    message = babble.bind_tools([OPENAI], strict=True, tool_choice="any").invoke(ASKED)
    assert message.tool_calls
    fly = message.response_metadata["fly"]
    assert (fly["lossless"], fly["theta"]) == (False, 0.0)
    result = chat_structured(Get, "json_schema", strict=True, include_raw=True).invoke(ASKED)
    assert result["parsed"] == Get(n=7, w="fox")
    assert result["raw"].response_metadata["fly"]["lossless"] is False


# LangChain: the way back.

ARGUMENTS = {"n": 7, "w": "fox"}
HISTORY = [
    HumanMessage(ASKED),
    AIMessage("", tool_calls=[{"name": "get", "args": ARGUMENTS, "id": "abcdefghi"}]),
    ToolMessage("seven of them", tool_call_id="abcdefghi", name="get"),
]
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.name if m.role == 'tool' }}"
TEMPLATES = {
    "dicts": LOOP + CALLS + "{{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}{{ tools }}",
    "items": LOOP
    + CALLS
    + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}]{% endfor %}{% endfor %}{{ tools }}",
    "strings": LOOP + CALLS + "{{ ', ' + c.function.arguments }}]{% endfor %}{% endfor %}{{ tools }}",
    "text": LOOP
    + CALLS
    + "{% if m.content is none %}{{ raise_exception('None') }}{% endif %}]{% endfor %}{% endfor %}{{ tools }}",
    "no tools": CHAT_TEMPLATE,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_b2_b10_history_with_calls_and_results_is_rendered_by_every_template(name):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    before = [message.model_copy(deep=True) for message in HISTORY]
    text = tokenizer.decode(encode(tokenizer, len(tokenizer), to_chat(HISTORY), {"tools": [OPENAI]}))
    assert "seven of them" in text
    assert text.count("get") >= 2
    if name == "dicts":
        assert '[get {"n": 7, "w": "fox"}]' in text, "not encoded twice"
    elif name == "items":
        assert "n=7w=fox" in text
    elif name == "strings":
        assert '[get , {"n": 7, "w": "fox"}]' in text
    elif name == "no tools":
        assert "You may call one or more functions" in text, "B1: the model is told all the same"
        assert '<tool_call>\n{"name": "get", "arguments": {"n": 7, "w": "fox"}}\n</tool_call>' in text
        assert "<tool_response>\nseven of them\n</tool_response>" in text
        assert text.endswith("<|im_start|>assistant\n"), "B2: any last role will do"
    index = [
        ChatMessage(ASKED),
        ChatMessage(
            role="assistant", blocks=[ToolCallBlock(tool_call_id="abcdefghi", tool_name="get", tool_kwargs=ARGUMENTS)]
        ),
        ChatMessage("seven of them", role="tool", additional_kwargs={"tool_call_id": "abcdefghi", "name": "get"}),
    ]
    assert tokenizer.decode(encode(tokenizer, len(tokenizer), index_chat(index), {"tools": [OPENAI]})) == text
    assert before == HISTORY
    llm = ChatFLy(model=big(len(tokenizer)), tokenizer=tokenizer, max_tokens=3)
    assert llm.bind_tools([get]).invoke(HISTORY).usage_metadata["output_tokens"] == 3


def test_b13_what_was_no_call_goes_back_as_text():
    broken = AIMessage("Hm.", invalid_tool_calls=[{"name": None, "args": "<tool_call>{", "id": "1", "error": "cut"}])
    assert to_chat([broken])[0]["content"] == "Hm.\n<tool_call>{"


# LangChain: structured output.


def chat_structured(schema, method, text=None, max_tokens=None, **options):
    """A model whose structured output is `FORM`, in the way the method has it."""
    written = text or (CALL if method == "function_calling" else FORM)
    name = "Get" if method == "function_calling" else ""
    if text is None and name:
        name = schema["title"] if isinstance(schema, dict) else schema.__name__
        written = written.replace('"get"', json.dumps(name))

    start = {}

    def ask(llm):
        bound = llm.with_structured_output(schema, method=method, **{**options, "include_raw": True})
        start["prompt"] = bound.invoke(ASKED)["raw"].usage_metadata["input_tokens"]
        return llm

    script = TEXT.encode(written, add_special_tokens=False)
    fields = {"tokenizer": TEXT, **LOOSE}
    ask(ChatFLy(model=big(len(TEXT)), **{**fields, **ONCE}))
    models = [scripted(script, start["prompt"], len(TEXT)) for _ in range(2)]
    llm = ChatFLy(model=models[0], draft_model=models[1], max_tokens=max_tokens or 120, **fields)
    return llm.with_structured_output(schema, method=method, **options)


@pytest.mark.parametrize("include_raw", [False, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize(
    "schema", [Get, OldGet, TypedGet, SCHEMA], ids=["pydantic", "pydantic v1", "TypedDict", "dict"]
)
def test_c1_c2_structured_output_in_every_way(schema, method, include_raw):
    llm = chat_structured(schema, method, include_raw=include_raw)
    result = llm.invoke(ASKED)
    if include_raw:
        assert set(result) == {"raw", "parsed", "parsing_error"}
        assert result["parsing_error"] is None
        assert isinstance(result["raw"], AIMessage)
        assert result["raw"].response_metadata["fly"]["num_draft_tokens"] > 0
        result = result["parsed"]
    if schema in (Get, OldGet):
        assert isinstance(result, schema), "C2: an instance, whatever the method"
        result = result.dict() if schema is OldGet else result.model_dump()
    assert result == {"n": 7, "w": "fox"}
    assert list(llm.stream(ASKED))[-1]


@pytest.mark.parametrize(
    "schema", [Get, OldGet, TypedGet, SCHEMA], ids=["pydantic", "pydantic v1", "TypedDict", "dict"]
)
@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_c3_a_truncated_answer_raises_and_is_never_repaired(schema, method):
    for n in (4, 6, 9):
        with pytest.raises(OutputParserException, match="cut short"):
            chat_structured(schema, method, max_tokens=n).invoke(ASKED)
        both = chat_structured(schema, method, max_tokens=n, include_raw=True).invoke(ASKED)
        assert both["parsed"] is None
        assert isinstance(both["parsing_error"], OutputParserException)
        assert FORM.startswith(both["raw"].content)


EVERY_SCHEMA = pytest.mark.parametrize(
    "schema", [Get, OldGet, TypedGet, SCHEMA], ids=["pydantic", "pydantic v1", "TypedDict", "dict"]
)


@EVERY_SCHEMA
def test_c3_a_truncated_call_is_no_answer(schema):
    for n in (20, 40):
        both = chat_structured(schema, "function_calling", max_tokens=n, include_raw=True).invoke(ASKED)
        assert both["parsed"] is None
        assert len(both["raw"].invalid_tool_calls) == 1


@EVERY_SCHEMA
@pytest.mark.parametrize("include_raw", [False, True])
def test_c3_a_truncated_call_raises(schema, include_raw):
    llm = chat_structured(schema, "function_calling", max_tokens=20, include_raw=include_raw)
    if include_raw:
        assert isinstance(llm.invoke(ASKED)["parsing_error"], OutputParserException)
    else:
        with pytest.raises(OutputParserException):
            llm.invoke(ASKED)


def test_structured_output_needs_a_schema_and_a_known_method(babble):
    with pytest.raises(ConfigError, match="method must be one of"):
        babble.with_structured_output(Get, method="yaml")
    with pytest.raises(ConfigError, match="needs a schema"):
        babble.with_structured_output(None)
    assert isinstance(chat_structured(None, "json_mode", text='{"a": 1}').invoke(ASKED), dict)


def test_c1_structured_output_of_a_model_without_words(babble):
    """Nothing here but the grammar: θ = 0, W = 1, and no relaxed token."""

    class Small(BaseModel):
        n: int = Field(ge=0, le=999)
        w: Literal["fox", "dog"]

    for seed in range(4):
        result = babble.with_structured_output(Small, include_raw=True).invoke(f"the fox {seed}")
        assert isinstance(result["parsed"], Small)
        assert result["raw"].response_metadata["fly"]["num_relaxed_tokens"] == 0


@pytest.mark.parametrize("text", [FORM, CALL], ids=["answer", "call"])
def test_response_format_beside_tools_as_create_agent_sends_it(text):
    form = {"type": "json_schema", "json_schema": {"name": "Get", "schema": SCHEMA, "strict": True}}
    llm = chat(text, ask=lambda llm: llm.bind_tools([OPENAI], response_format=form, strict=True))
    message = llm.invoke(ASKED)
    if text == FORM:
        assert json.loads(message.content) == ARGUMENTS
        assert message.tool_calls == []
    else:
        assert [call["args"] for call in message.tool_calls] == [ARGUMENTS]


def test_create_agent_with_a_provider_strategy():
    model = chat_structured(Get, "json_schema").first.bound
    agent = create_agent(model, tools=[], response_format=ProviderStrategy(Get))
    assert agent.invoke({"messages": [("user", ASKED)]})["structured_response"] == Get(n=7, w="fox")


# Reasoning.


@pytest.mark.parametrize("kind", THINKS)
def test_c4_c5_reasoning_is_beside_the_content(kind):
    text = "the dog, so </think>\n\nthe fox jumps over"
    llm = chat(text, tokenizer=THINKS[kind])
    message = llm.invoke(ASKED)
    assert message.content.strip() == "the fox jumps over"
    assert message.additional_kwargs["reasoning_content"].strip() == "the dog, so"
    kinds = [block["type"] for block in message.content_blocks]
    assert kinds == ["reasoning", "text"]
    merged = functools.reduce(operator.add, llm.stream(ASKED))
    assert (merged.content, merged.additional_kwargs) == (message.content, message.additional_kwargs)


def test_c7_enable_thinking_reaches_the_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        CHAT_TEMPLATE + "{% if enable_thinking is false %}<think>the fox sleeps</think>{% endif %}"
    )
    llm = ChatFLy(model=big(len(tokenizer)), tokenizer=tokenizer, max_tokens=2)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    plain = llm.invoke(ASKED).usage_metadata["input_tokens"]
    longer = llm.invoke(ASKED, **off).usage_metadata["input_tokens"]
    assert longer > plain
    fixed = ChatFLy(model=big(len(tokenizer)), tokenizer=tokenizer, max_tokens=2, **off)
    assert fixed.invoke(ASKED).usage_metadata["input_tokens"] == longer
    index = FLyLLM(model=big(len(tokenizer)), tokenizer=tokenizer, max_tokens=2)
    for given, expected in (({}, plain), (off, longer)):
        usage = index.chat([ChatMessage(ASKED)], **given).raw["usage"]
        assert usage["prompt_tokens"] == expected


def test_the_bundled_model_fills_in_forms_with_words():
    """SmolLM2-135M: real words, θ = 0 and W = 1, lookup relaxed as well, and still the target's own values."""

    class Sky(BaseModel):
        """What the sky is like."""

        colour: Literal["blue", "green", "red"]
        clouds: int = Field(ge=0, le=9)

    asked = "The sky is blue, and there are 3 clouds. What colour is the sky, and how many clouds are there?"
    llm = ChatFLy(dtype="float32", max_tokens=60, theta=0.0, window=1, relax_lookup=True)
    results = [
        llm.with_structured_output(Sky, include_raw=True, **options).invoke(asked)
        for options in ({}, {"lossless": True}, {"num_speculative_tokens": 0, "window": None})
    ]
    assert len({str(result["parsed"]) for result in results}) == 1
    assert results[0]["parsed"].colour == "blue"
    fly = results[0]["raw"].response_metadata["fly"]
    assert (fly["num_relaxed_tokens"], fly["relaxed_by_zone"]) == (0, {})
    assert fly["num_accepted_tokens"] > 3, "what the grammar forces costs nothing"
    (call,) = llm.bind_tools([Sky], tool_choice="any").invoke(asked).tool_calls
    assert (call["name"], Sky.model_validate(call["args"]).colour) == ("Sky", "blue")
