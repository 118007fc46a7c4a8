"""`llama_index.llms.fly.FLyLLM` over the real local engine, on a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import pickle
import threading
import time

import pytest
from llama_index.core import PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.base.llms.types import (
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent, LLMCompletionEndEvent
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.schema import TextNode
from llama_index.llms.fly import FLyLLM, FLyRoundEvent
from llama_index.llms.fly.messages import to_chat
from pydantic import ValidationError
from tiny_models import noisy_copy, tiny_llama, tiny_tokenizer

import fly_llm
from fly_llm import ConfigError, ContextOverflowError, FLyEngine, PromptError

QUESTION = "the quick brown fox and the dog sleep"
SYSTEM = "she said that there is nothing"


@pytest.fixture(scope="module")
def llm(tiny_folders):
    return FLyLLM(model=tiny_folders[0], draft_model=tiny_folders[1], max_tokens=40, window=2)


@pytest.fixture(scope="module")
def engine(tiny_folders):
    with FLyEngine.from_pretrained(*tiny_folders, max_tokens=40, window=2) as engine:
        yield engine


def ask(engine, text=QUESTION, system=None, **options):
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return engine.generate(messages, **options)


async def _collect(stream):
    return [item async for item in await stream]


ENDPOINTS = {
    "chat": lambda llm, text, **kw: llm.chat([ChatMessage(text)], **kw),
    "stream_chat": lambda llm, text, **kw: list(llm.stream_chat([ChatMessage(text)], **kw))[-1],
    "complete": lambda llm, text, **kw: llm.complete(text, **kw),
    "stream_complete": lambda llm, text, **kw: list(llm.stream_complete(text, **kw))[-1],
    "achat": lambda llm, text, **kw: asyncio.run(llm.achat([ChatMessage(text)], **kw)),
    "astream_chat": lambda llm, text, **kw: asyncio.run(_collect(llm.astream_chat([ChatMessage(text)], **kw)))[-1],
    "acomplete": lambda llm, text, **kw: asyncio.run(llm.acomplete(text, **kw)),
    "astream_complete": lambda llm, text, **kw: asyncio.run(_collect(llm.astream_complete(text, **kw)))[-1],
}
COMPLETIONS = [name for name in ENDPOINTS if "complete" in name]


def said(response):
    return response.text if hasattr(response, "text") else response.message.content


@pytest.fixture(params=ENDPOINTS)
def endpoint(request):
    return ENDPOINTS[request.param]


def test_it_is_both_kinds_of_llm(llm):
    assert isinstance(llm, CustomLLM)
    assert isinstance(llm, FunctionCallingLLM)
    assert llm.class_name() == "FLyLLM"


def test_every_endpoint_gives_the_engines_answer_with_usage_and_statistics(llm, engine, endpoint):
    response, expected = endpoint(llm, QUESTION), ask(engine)
    assert said(response) == expected.text
    raw = json.loads(json.dumps(response.raw, allow_nan=False))  # no tensors
    assert raw["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert raw["usage"]["completion_tokens"] == 40
    assert raw["usage"]["total_tokens"] == expected.usage.prompt_tokens + 40
    assert raw["finish_reason"] == "length"
    assert raw["model"] == llm.model
    assert raw["fly"]["num_relaxed_tokens"] == expected.stats.num_relaxed_tokens > 0
    assert (raw["fly"]["theta"], raw["fly"]["window"], raw["fly"]["lossless"]) == (0.3, 2, False)


PER_CALL = [
    {"theta": 0.9},
    {"lossless": True},
    {"max_tokens": 7},
    {"num_speculative_tokens": 4, "window": 1},
    {"temperature": 0.8, "seed": 5},
    {"stop": ["the"]},
]


@pytest.mark.parametrize("options", PER_CALL, ids=str)
def test_settings_per_call_in_a_copy_in_the_constructor_and_around_do_the_same(llm, engine, endpoint, options):
    expected = ask(engine, **options)
    whole = FLyLLM(**{"model": llm.model, "draft_model": llm.draft_model, "max_tokens": 40, "window": 2, **options})
    with fly_llm.overrides(**options):
        around = endpoint(llm, QUESTION)
    for response in (
        endpoint(llm, QUESTION, **options),
        endpoint(llm.with_options(**options), QUESTION),
        endpoint(whole, QUESTION),
        around,
    ):
        assert said(response) == expected.text
        fly = response.raw["fly"]
        assert {name: fly[name] for name in options} == options
        assert fly["num_relaxed_tokens"] == expected.stats.num_relaxed_tokens
    assert endpoint(llm, QUESTION).raw["fly"]["theta"] == 0.3


def test_max_new_tokens_is_max_tokens(llm, endpoint):
    assert endpoint(llm, QUESTION, max_new_tokens=5).raw["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("name", ["thetta", "do_sample", "k"])
def test_unknown_names_are_errors(llm, endpoint, name):
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        endpoint(llm, QUESTION, **{name: 1})
    with pytest.raises(ValidationError, match=f"unknown setting '{name}'"):
        FLyLLM(**{name: 1})


def test_streams_are_cumulative_with_deltas_and_say_the_rest_once(llm):
    for pieces in (
        [(r.message.content, r.delta, r.raw) for r in llm.stream_chat([ChatMessage(QUESTION)])],
        [(r.text, r.delta, r.raw) for r in llm.stream_complete(QUESTION)],
    ):
        assert len(pieces) > 3
        whole = ""
        for text, delta, _ in pieces:
            whole += delta
            assert text == whole
        assert [raw is not None for _, _, raw in pieces].count(True) == 1
        assert pieces[-1][2] is not None


def test_formatted_text_is_completed_as_it_stands(llm, engine):
    expected = engine.generate(QUESTION)
    for name in COMPLETIONS:
        assert said(ENDPOINTS[name](llm, QUESTION, formatted=True)) == expected.text != ask(engine).text


@pytest.mark.parametrize("name", ENDPOINTS)
def test_the_system_prompt_comes_first_exactly_once(llm, engine, name):
    expected = ask(engine, system=SYSTEM)
    own = llm.with_options(system_prompt=SYSTEM)
    response = ENDPOINTS[name](own, QUESTION)
    assert said(response) == expected.text != ask(engine).text
    assert response.raw["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


def test_predict_adds_the_system_prompt_once(llm, engine):
    own = llm.with_options(system_prompt=SYSTEM)
    template = PromptTemplate("{x}")
    expected = ask(engine, system=SYSTEM).text
    assert own.predict(template, x=QUESTION) == expected
    assert "".join(own.stream(template, x=QUESTION)) == expected
    assert asyncio.run(own.apredict(template, x=QUESTION)) == expected


@pytest.mark.parametrize("name", ENDPOINTS)
def test_prompt_functions_are_applied_exactly_once(llm, engine, name):
    def completion_to_prompt(text):
        return f"<<{text}>>"

    def messages_to_prompt(messages):
        return "".join(f"[{message.role.value}:{message.content}]" for message in messages)

    own = llm.with_options(completion_to_prompt=completion_to_prompt, messages_to_prompt=messages_to_prompt)
    text = f"<<{QUESTION}>>" if name in COMPLETIONS else f"[user:{QUESTION}]"
    assert said(ENDPOINTS[name](own, QUESTION)) == engine.generate(text).text
    if name in COMPLETIONS:
        assert said(ENDPOINTS[name](own, QUESTION, formatted=True)) == engine.generate(QUESTION).text


def test_a_model_without_a_template_completes_and_says_what_chatting_takes(tmp_path):
    tiny_llama(seed=2).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    base = FLyLLM(model=str(tmp_path), max_tokens=20)
    assert not base.metadata.is_chat_model
    with FLyEngine.from_pretrained(str(tmp_path), max_tokens=20) as engine:
        for name in COMPLETIONS:
            assert said(ENDPOINTS[name](base, QUESTION)) == engine.generate(QUESTION).text
        assert base.predict(PromptTemplate("{x}"), x=QUESTION) == engine.generate(QUESTION).text
    with pytest.raises(PromptError, match="chat_template="):
        base.chat([ChatMessage(QUESTION)])


def test_metadata_is_true_cheap_and_loads_nothing(tiny_folders, tmp_path):
    for folder in tiny_folders:
        llm = FLyLLM(model=folder, seed=11)  # nobody else has loaded it without a draft model
        start = time.perf_counter()
        for _ in range(20):
            metadata = llm.metadata
        assert (time.perf_counter() - start) / 20 < 0.005
        assert (metadata.context_window, metadata.num_output) == (512, 128)
        assert metadata.is_chat_model
        assert metadata.model_name == folder
        assert json.dumps(llm.to_payload())
    assert not llm._get_engine()._handle.models.is_loaded
    assert FLyLLM(model=tiny_folders[0], max_tokens=33).metadata.num_output == 33
    live = FLyLLM(model=tiny_llama(), tokenizer=tiny_tokenizer())
    assert live.metadata.context_window == 512
    assert FLyLLM().metadata.context_window == 8192


class Recorder(BaseEventHandler):
    events: list

    @classmethod
    def class_name(cls):
        return "Recorder"

    def handle(self, event, **kwargs):
        self.events.append(event)


@contextlib.contextmanager
def recording():
    recorder = Recorder(events=[])
    root = get_dispatcher()
    root.add_event_handler(recorder)
    try:
        yield recorder.events
    finally:
        root.event_handlers.remove(recorder)


def test_each_call_is_one_event_and_tokens_are_counted_once(llm, endpoint):
    counter = TokenCountingHandler(tokenizer=llm.tokenizer)
    own = llm.with_options(callback_manager=CallbackManager([counter]))
    with recording() as events:
        response = endpoint(own, QUESTION)
    ends = [event for event in events if isinstance(event, (LLMChatEndEvent, LLMCompletionEndEvent))]
    assert len(ends) == 1
    usage = response.raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"]
    for event in events:
        if isinstance(event, LLMChatStartEvent):
            assert event.model_dict.get("context_window", 512) == 512  # not in every release


def test_every_round_is_an_event(llm, engine, endpoint):
    expected = ask(engine)
    with recording() as events:
        endpoint(llm, QUESTION)
    rounds = [event for event in events if isinstance(event, FLyRoundEvent)]
    assert len(rounds) == expected.stats.num_rounds
    assert [token for event in rounds for token in event.token_ids] == list(expected.token_ids)
    assert sum(event.num_draft_tokens for event in rounds) == expected.stats.num_draft_tokens
    assert sum(event.num_relaxed_tokens for event in rounds) == expected.stats.num_relaxed_tokens > 0
    assert all(event.verify_seconds > 0 for event in rounds)
    assert all(json.loads(event.model_dump_json()) for event in rounds)


def test_the_callers_messages_are_not_changed(llm):
    history = [ChatMessage("one"), ChatMessage(role="assistant", content="two"), ChatMessage("three")]
    before = copy.deepcopy(history)
    own = llm.with_options(system_prompt=SYSTEM)
    own.chat(history)
    list(own.stream_chat(history))
    asyncio.run(own.achat(history))
    assert history == before


def test_messages_become_plain_chat_messages():
    messages = [
        ChatMessage(role=MessageRole.DEVELOPER, content="be brief"),
        ChatMessage(role=MessageRole.USER, blocks=[TextBlock(text="a"), TextBlock(text="b")]),
        ChatMessage(
            role=MessageRole.ASSISTANT,
            blocks=[
                ThinkingBlock(content="hm"),
                TextBlock(text="c"),
                ToolCallBlock(tool_call_id="1", tool_name="add", tool_kwargs={"x": 1}),
                ToolCallBlock(tool_call_id="2", tool_name="add", tool_kwargs='{"x": 2}'),
            ],
        ),
        ChatMessage(role=MessageRole.TOOL, content="3", additional_kwargs={"tool_call_id": "1", "name": "add"}),
    ]
    assert to_chat(messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "c",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}},
                {"id": "2", "type": "function", "function": {"name": "add", "arguments": {"x": 2}}},
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
    ]
    with pytest.raises(PromptError, match="ImageBlock"):
        to_chat([ChatMessage(blocks=[ImageBlock(image=b"x")])])
    with pytest.raises(PromptError, match="no messages"):
        to_chat([])


def test_errors_reach_the_caller_of_every_endpoint(llm, endpoint):
    with pytest.raises(ContextOverflowError, match="512"):
        endpoint(llm, "the " * 600)
    assert said(endpoint(llm, QUESTION, max_tokens=3))


def test_copies_and_pickles_share_the_weights(llm):
    expected = llm.complete(QUESTION).text
    models = llm._get_engine()._handle.models
    for other in (pickle.loads(pickle.dumps(llm)), copy.deepcopy(llm), copy.copy(llm), llm.with_options(theta=0.3)):
        assert other.complete(QUESTION).text == expected
        assert other._get_engine()._handle.models is models
        assert other.max_tokens == 40
    restored = FLyLLM.from_dict(llm.to_dict())
    assert restored.complete(QUESTION).text == expected


def test_loaded_models_are_not_pickled():
    target = tiny_llama()
    live = FLyLLM(model=target, draft_model=noisy_copy(target), tokenizer=tiny_tokenizer())
    assert live.complete(QUESTION, max_tokens=3).text
    with pytest.raises(TypeError, match="from names or paths"):
        pickle.dumps(live)
    assert live.complete(QUESTION, max_tokens=3).text


def test_the_hub_token_is_nowhere_to_be_seen(tiny_folders):
    llm = FLyLLM(model=tiny_folders[0], token="hf_secret")
    shown = [repr(llm), str(llm), json.dumps(llm.to_dict()), json.dumps(llm.to_payload()), llm.to_json()]
    assert not [text for text in shown if "hf_secret" in text]


def test_the_tokenizer_counts_for_llama_index(llm):
    assert llm.tokenizer(QUESTION) == tiny_tokenizer().encode(QUESTION, add_special_tokens=False)
    before = Settings.tokenizer
    try:
        Settings.tokenizer = llm.tokenizer
        assert len(Settings.tokenizer("the fox")) == len(llm.encode("the fox"))
    finally:
        Settings.tokenizer = before


@pytest.fixture
def index():
    nodes = [TextNode(text=f"{text} {i}", id_=str(i)) for i, text in enumerate(["the fox sleeps", "the dog jumps"])]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=8))


def fly_of(events):
    return [event.response.raw["fly"] for event in events if isinstance(event, LLMChatEndEvent)]


def test_overrides_reach_through_a_query_engine(index):
    target = tiny_llama(seed=2)
    target.config.max_position_embeddings = 4096  # LlamaIndex leaves 500 tokens aside
    llm = FLyLLM(model=target, draft_model=noisy_copy(target), tokenizer=tiny_tokenizer(), max_tokens=40, window=2)
    engine = index.as_query_engine(llm=llm, similarity_top_k=2)
    streaming = index.as_query_engine(llm=llm, similarity_top_k=2, streaming=True)

    async def ask_async():
        await engine.aquery("where is the fox?")

    with recording() as events:
        with fly_llm.overrides(theta=0.7, window=1):
            engine.query("where is the fox?")
            asyncio.run(ask_async())
            assert streaming.query("where is the fox?").get_response().response  # it asks when it is read
        engine.query("where is the fox?")
    assert [(fly["theta"], fly["window"]) for fly in fly_of(events)] == [(0.7, 1)] * 3 + [(0.3, 2)]


def test_overrides_do_not_leak_into_other_tasks_or_threads(llm):
    async def one(theta, start):
        if theta is None:
            await start.wait()
            return (await llm.achat([ChatMessage(QUESTION)])).raw["fly"]["theta"]
        with fly_llm.overrides(theta=theta):
            await start.wait()
            return (await llm.achat([ChatMessage(QUESTION)])).raw["fly"]["theta"]

    async def main():
        start = asyncio.Event()
        tasks = [asyncio.create_task(one(theta, start)) for theta in (0.1, None, 0.5, None)]
        await asyncio.sleep(0)
        start.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [0.1, 0.3, 0.5, 0.3]
    seen = []
    with fly_llm.overrides(theta=0.9):
        thread = threading.Thread(target=lambda: seen.append(llm.complete(QUESTION).raw["fly"]["theta"]))
        thread.start()
        thread.join()

        async def in_thread():
            return (await asyncio.to_thread(llm.complete, QUESTION)).raw["fly"]["theta"]

        seen.append(asyncio.run(in_thread()))
    assert seen == [0.3, 0.9]
