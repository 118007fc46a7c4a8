"""Tools, structured output and reasoning through LlamaIndex' `FLyLLM`; scripted models, as in `test_tools.py`."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ThinkingBlock, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.function_program import FunctionCallingProgram, get_function_tool
from llama_index.core.tools import FunctionTool
from llama_index.llms.fly import FLyLLM
from llama_index.llms.fly.structured import response_format
from pydantic import BaseModel, Field
from test_answer_zones import ADDED, CALL, SPECIAL, TEXT, THINKS, scripted
from test_answers import EOS, SPACE
from tiny_models import noisy_copy, tiny_llama, tiny_tokenizer

from fly_llm import ConfigError

ASKED = "the fox?"
LOOSE = {"theta": 0.0, "window": 1, "num_speculative_tokens": 12, "drafting": "model"}
SMALL_CALL = CALL.replace('"get"', '"Small"')


def get(n: int, w: Literal["fox", "dog"]) -> str:
    """Get the fox."""
    return f"{n} of the {w}"


class Small(BaseModel):
    """Get the fox."""

    n: int = Field(ge=0, le=999)
    w: Literal["fox", "dog"]


get_tool = FunctionTool.from_defaults(get, fn_schema=Small)


def big(vocab_size, seed=5):
    model = tiny_llama(vocab_size, eos_token_id=EOS, seed=seed)
    model.config.max_position_embeddings = 2048
    return model


@pytest.fixture(scope="module")
def babble():
    """Writes anything at all, and soon ends what a grammar lets it end."""
    target = big(len(TEXT))
    bias = {**SPACE}
    return FLyLLM(
        model=target, draft_model=noisy_copy(target, 0.2), tokenizer=TEXT, max_tokens=200, logit_bias=bias, **LOOSE
    )


def writes(text, start_of, tokenizer=TEXT, **fields):
    """A model that writes this text; `start_of` asks a model once, and gives the answer's `raw`."""
    script = tokenizer.encode(text, add_special_tokens=False)
    counter = FLyLLM(model=big(len(tokenizer)), tokenizer=tokenizer, max_tokens=1)
    start = start_of(counter).raw["usage"]["prompt_tokens"]
    models = [scripted(script, start, len(tokenizer)) for _ in range(2)]
    options = {"max_tokens": 300, **LOOSE, **fields}
    return FLyLLM(model=models[0], draft_model=models[1], tokenizer=tokenizer, **options)


def with_tool(llm):
    return llm.chat_with_tools([get_tool], user_msg=ASKED)


def test_b12_function_calling_agents_take_it(babble, tiny_folders):
    assert isinstance(babble, FunctionCallingLLM)
    assert babble.metadata.is_function_calling_model
    assert FLyLLM(model=tiny_folders[0]).metadata.is_function_calling_model
    FunctionAgent(llm=babble, tools=[get_tool])
    formatted = FLyLLM(model=tiny_folders[0], messages_to_prompt=str)
    assert not formatted.metadata.is_function_calling_model, "there is no template to put tools into"


def test_b12_a_function_agent_calls_a_tool_and_answers(monkeypatch):
    prompts, real = [], FLyLLM.astream_chat

    async def recorded(self, messages, **kwargs):
        prompts.append(list(messages))
        return await real(self, messages, **kwargs)

    llm = writes(CALL, with_tool)
    monkeypatch.setattr(FLyLLM, "astream_chat", recorded)
    called = []

    def get(n: int, w: Literal["fox", "dog"]) -> str:
        """Get the fox."""
        called.append((n, w))
        return "seven"

    async def main():
        agent = FunctionAgent(llm=llm, tools=[FunctionTool.from_defaults(get, fn_schema=Small)], timeout=30)
        return await agent.run(ASKED)

    response = asyncio.run(main())
    assert called == [(7, "fox")]
    assert len(prompts) == 2, "once for the call, once with its result"
    assert [message.role for message in prompts[1]][-2:] == [MessageRole.ASSISTANT, MessageRole.TOOL]
    assert [call.tool_name for call in response.tool_calls] == ["get"]


@pytest.mark.parametrize("tokenizer", [TEXT, ADDED, SPECIAL], ids=["text", "added", "special"])
def test_b5_b11_chat_with_tools_whole_and_streamed(tokenizer):
    text = f"a fox {CALL}\n{CALL.replace('7', '9')}"
    llm = writes(text, with_tool, tokenizer)
    whole = llm.chat_with_tools([get_tool], user_msg=ASKED, allow_parallel_tool_calls=True)
    calls = llm.get_tool_calls_from_response(whole)
    assert [(call.tool_name, call.tool_kwargs) for call in calls] == [("get", {"n": n, "w": "fox"}) for n in (7, 9)]
    assert len({call.tool_id for call in calls}) == 2
    assert whole.message.content.strip() == "a fox"
    assert whole.raw["finish_reason"] == "tool_calls"
    one = llm.chat_with_tools([get_tool], user_msg=ASKED)
    assert [call.tool_kwargs["n"] for call in llm.get_tool_calls_from_response(one)] == [7], (
        "one is all that was allowed"
    )
    partials = list(llm.stream_chat_with_tools([get_tool], user_msg=ASKED, allow_parallel_tool_calls=True))
    numbers = [len(llm.get_tool_calls_from_response(partial, error_on_no_tool_call=False)) for partial in partials]
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == (0, 2)
    assert "".join(partial.delta or "" for partial in partials).strip() == "a fox"
    first = partials[numbers.index(1)]
    assert llm.get_tool_calls_from_response(first)[0].tool_kwargs == {"n": 7, "w": "fox"}, "calls come whole"

    async def main():
        answer = await llm.achat_with_tools([get_tool], user_msg=ASKED, allow_parallel_tool_calls=True)
        stream = await llm.astream_chat_with_tools([get_tool], user_msg=ASKED, allow_parallel_tool_calls=True)
        return [answer, [partial async for partial in stream][-1]]

    for answer in asyncio.run(main()):
        assert [call.tool_kwargs["n"] for call in llm.get_tool_calls_from_response(answer)] == [7, 9]


def test_b3_b4_tool_required_and_tool_choice(babble):
    other = FunctionTool.from_defaults(lambda: "x", name="other", description="the dog")
    for options in ({"tool_required": True}, {"tool_choice": "get"}, {"tool_choice": "any"}):
        response = babble.chat_with_tools([get_bounded, other], user_msg=ASKED, **options)
        (call,) = babble.get_tool_calls_from_response(response)
        assert call.tool_name in (("get",) if options == {"tool_choice": "get"} else ("get", "other"))
        if call.tool_name == "get":
            Small.model_validate(call.tool_kwargs)
        assert response.raw["fly"]["num_relaxed_tokens"] == 0
    free = babble.chat_with_tools([get_bounded], user_msg=ASKED, max_tokens=5)
    assert babble.get_tool_calls_from_response(free, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="called no tool"):
        babble.get_tool_calls_from_response(free)
    with pytest.raises(ConfigError, match="tool_choice must be one of"):
        babble.chat_with_tools([get_bounded], user_msg=ASKED, tool_choice="gte")
    hidden = babble.chat_with_tools([], user_msg=ASKED, max_tokens=2)
    assert hidden.raw["usage"]["prompt_tokens"] < free.raw["usage"]["prompt_tokens"]


def bounded(**kwargs):
    return json.dumps(kwargs)


get_bounded = FunctionTool.from_defaults(bounded, name="get", description="Get the fox.", fn_schema=Small)


def test_b13_a_call_cut_short_is_no_call():
    llm = writes(f"a fox {CALL}", with_tool)
    for n in (20, 40, 60):
        response = llm.chat_with_tools([get_tool], user_msg=ASKED, max_tokens=n)
        assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
        (raw,) = response.message.additional_kwargs["invalid_tool_calls"]
        assert CALL.startswith(raw)
        assert raw.startswith("<tool_call>")
        assert response.raw["finish_reason"] == "length"


def test_b2_the_history_of_a_tool_loop(babble):
    history = [
        ChatMessage(ASKED),
        ChatMessage(
            role="assistant",
            blocks=[ToolCallBlock(tool_call_id="abcdefghi", tool_name="get", tool_kwargs={"n": 7, "w": "fox"})],
        ),
        ChatMessage("seven", role="tool", additional_kwargs={"tool_call_id": "abcdefghi", "name": "get"}),
    ]
    before = [message.model_copy(deep=True) for message in history]
    assert babble.chat(history, max_tokens=3).raw["usage"]["completion_tokens"] == 3
    assert babble.chat_with_tools([get_tool], chat_history=history, max_tokens=3).raw["usage"]["completion_tokens"] == 3
    assert history == before


def test_predict_and_call_runs_the_tool():
    llm = writes(CALL, with_tool)
    response = llm.predict_and_call([get_tool], user_msg=ASKED)
    assert response.response == "7 of the fox"
    assert [source.tool_name for source in response.sources] == ["get"]


@pytest.mark.parametrize("how", ["structured_predict", "as_structured_llm", "program", "astructured_predict"])
def test_c3_structured_answers_of_a_model_without_words(babble, how):
    prompt = PromptTemplate("the fox {x}")
    for x in ("one", "two"):
        if how == "structured_predict":
            answer = babble.structured_predict(Small, prompt, x=x)
        elif how == "astructured_predict":
            answer = asyncio.run(babble.astructured_predict(Small, prompt, x=x))
        elif how == "program":
            program = FunctionCallingProgram.from_defaults(Small, prompt=prompt, llm=babble)
            answer = program(x=x)
        else:
            response = babble.as_structured_llm(Small).complete(f"the fox {x}")
            assert json.loads(response.text) == response.raw.model_dump()
            answer = response.raw
        assert isinstance(answer, Small)


@pytest.mark.parametrize("n", [3, 6, 9])
def test_c3_a_truncated_structured_answer_is_an_error(babble, n):
    options = {"llm_kwargs": {"max_tokens": n}}
    with pytest.raises(ValueError, match="cut short"):
        babble.structured_predict(Small, PromptTemplate("the fox"), **options)
    with pytest.raises(ValueError, match="cut short"):
        asyncio.run(babble.astructured_predict(Small, PromptTemplate("the fox"), **options))


def test_c3_streamed_structured_answers_grow_and_end_with_the_whole():
    def once(llm):
        return llm.chat([ChatMessage(ASKED)], response_format=response_format(Small))

    llm = writes('{"n": 7, "w": "fox"}', once)
    partials = list(
        llm.stream_structured_predict(Small, PromptTemplate(ASKED), llm_kwargs={"num_speculative_tokens": 2})
    )
    assert len(partials) > 2
    assert (partials[-1].n, partials[-1].w) == (7, "fox")
    assert partials[0].w is None, "the first has only what was there"
    assert llm.structured_predict(Small, PromptTemplate(ASKED)) == Small(n=7, w="fox")


def test_c3_streamed_structured_answers_are_enforced(babble):
    responses = list(babble.as_structured_llm(Small).stream_chat([ChatMessage(ASKED)]))
    Small.model_validate(responses[-1].raw.model_dump())


def test_c3_a_streamed_program_ends_with_the_whole():
    def once(llm):
        return llm.chat_with_tools([get_function_tool(Small)], user_msg=ASKED)

    llm = writes(SMALL_CALL, once)
    program = FunctionCallingProgram.from_defaults(Small, prompt=PromptTemplate(ASKED), llm=llm)
    last = list(program.stream_call())[-1]
    assert (last.n, last.w) == (7, "fox")


@pytest.mark.parametrize("kind", THINKS)
def test_c4_c5_reasoning_is_a_thinking_block(kind):
    llm = writes("the dog, so </think>\n\nthe fox jumps over", lambda llm: llm.chat([ChatMessage(ASKED)]), THINKS[kind])
    response = llm.chat([ChatMessage(ASKED)])
    thought, *rest = response.message.blocks
    assert isinstance(thought, ThinkingBlock)
    assert thought.content.strip() == "the dog, so"
    assert response.message.content.strip() == "the fox jumps over"
    assert len(rest) == 1
    partials = list(llm.stream_chat([ChatMessage(ASKED)]))
    thinking = "".join(partial.additional_kwargs.get("thinking_delta", "") for partial in partials)
    assert thinking == thought.content
    assert "".join(partial.delta or "" for partial in partials) == response.message.content
    again = llm.chat([ChatMessage(ASKED), response.message, ChatMessage(ASKED)], max_tokens=2)
    assert again.raw["usage"]["completion_tokens"] >= 1, "thoughts of earlier turns do not go back"


def test_b1_a_template_without_tools_is_told_of_them():
    llm = FLyLLM(model=big(320), tokenizer=tiny_tokenizer(), max_tokens=200, logit_bias=SPACE)
    response = llm.chat_with_tools([get_bounded], user_msg=ASKED, tool_required=True)
    Small.model_validate(llm.get_tool_calls_from_response(response)[0].tool_kwargs)
    assert response.raw["usage"]["prompt_tokens"] > 300
