"""`ChatFLy` over the real local engine, on a tiny model."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import operator
import pickle
import time

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError as CoreContextOverflowError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from pydantic import ValidationError
from tiny_models import noisy_copy, tiny_llama, tiny_tokenizer

from fly_llm import ConfigError, ContextOverflowError, FLyEngine, PromptError
from langchain_fly import ChatFLy
from langchain_fly.messages import to_chat

QUESTION = "the quick brown fox and the dog sleep"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = tiny_llama(seed=2)
    for name, model in (("target", target), ("draft", noisy_copy(target))):
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    return str(root / "target"), str(root / "draft")


@pytest.fixture(scope="module")
def llm(folders):
    return ChatFLy(model=folders[0], draft_model=folders[1], max_tokens=40, window=2)


@pytest.fixture(scope="module")
def engine(folders):
    with FLyEngine.from_pretrained(*folders, max_tokens=40, window=2) as engine:
        yield engine


def ask(engine, text=QUESTION, **options):
    return engine.generate([{"role": "user", "content": text}], **options)


def test_invoke_gives_the_engines_answer_with_usage_and_statistics(llm, engine):
    answer, expected = llm.invoke(QUESTION), ask(engine)
    assert isinstance(answer, AIMessage)
    assert answer.content == expected.text
    assert answer.usage_metadata == {
        "input_tokens": expected.usage.prompt_tokens,
        "output_tokens": 40,
        "total_tokens": expected.usage.prompt_tokens + 40,
        "input_token_details": {"cache_read": answer.response_metadata["fly"]["num_cached_tokens"]},
    }
    metadata = answer.response_metadata
    assert (metadata["model_name"], metadata["model_provider"]) == (llm.model, "fly")
    assert metadata["finish_reason"] == "length"
    fly = json.loads(json.dumps(metadata["fly"], allow_nan=False))
    assert (fly["theta"], fly["window"], fly["num_speculative_tokens"], fly["lossless"]) == (0.3, 2, 15, False)
    assert [change["position"] for change in fly["relaxations"]] == list(expected.relaxed)
    assert fly["num_relaxed_tokens"] > 0
    assert [tuple(span) for span in fly["relaxed_spans"]] == list(expected.relaxed_spans)


def test_stream_carries_text_and_says_the_rest_once(llm):
    chunks = list(llm.stream(QUESTION))
    whole = llm.invoke(QUESTION)
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
    assert len(chunks) > 3
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert [bool(chunk.usage_metadata) for chunk in chunks].count(True) == 1
    assert [bool(chunk.response_metadata.get("model_name")) for chunk in chunks].count(True) == 1
    assert chunks[-1].usage_metadata
    assert chunks[-1].chunk_position == "last"
    merged = sum(chunks[1:], chunks[0])
    assert merged.usage_metadata == whole.usage_metadata
    counts = ("num_rounds", "num_relaxed_tokens", "relaxed_spans", "theta")
    assert [merged.response_metadata["fly"][name] for name in counts] == [
        whole.response_metadata["fly"][name] for name in counts
    ]


def test_every_way_to_ask_gives_the_same_answer(llm):
    expected = llm.invoke(QUESTION).content

    async def main():
        answer = (await llm.ainvoke(QUESTION)).content
        streamed = "".join([chunk.content async for chunk in llm.astream(QUESTION)])
        batch = [message.content for message in await llm.abatch([QUESTION, QUESTION])]
        return [answer, streamed, *batch]

    assert asyncio.run(main()) == [expected] * 4
    assert [message.content for message in llm.batch([QUESTION] * 3)] == [expected] * 3
    assert llm.invoke([HumanMessage(QUESTION)]).content == expected
    assert llm.invoke([("user", QUESTION)]).content == expected
    assert (llm | StrOutputParser()).invoke(QUESTION) == expected
    assert (
        "".join((ChatPromptTemplate.from_template("{x}") | llm | StrOutputParser()).stream({"x": QUESTION})) == expected
    )


def test_a_batch_gives_what_single_calls_give(llm):
    questions = [f"{QUESTION} {i}" for i in range(16)]
    single = [llm.invoke(question) for question in questions]
    batch = llm.batch(questions)
    assert [message.content for message in batch] == [message.content for message in single]
    names = ("input_tokens", "output_tokens")  # how much of the prompts was cached depends on their order
    assert [[message.usage_metadata[name] for name in names] for message in batch] == [
        [message.usage_metadata[name] for name in names] for message in single
    ]
    assert len({message.content for message in single}) > 8


PER_CALL = [
    {"theta": 0.9},
    {"window": 1},
    {"num_speculative_tokens": 4},
    {"lossless": True},
    {"max_tokens": 7},
    {"temperature": 0.8, "seed": 5},
    {"entropy": "normalized", "theta": 0.1},
    {"strict_prefix": 20},
    {"drafting": "lookup"},
]


@pytest.mark.parametrize("options", PER_CALL, ids=str)
def test_settings_per_call_bound_and_in_the_constructor_do_the_same(llm, engine, options):
    expected = ask(engine, **options)
    for answer in (
        llm.invoke(QUESTION, **options),
        llm.bind(**options).invoke(QUESTION),
        ChatFLy(
            **{"model": llm.model, "draft_model": llm.draft_model, "max_tokens": 40, "window": 2, **options}
        ).invoke(QUESTION),
        functools.reduce(operator.add, llm.stream(QUESTION, **options)),
    ):
        assert answer.content == expected.text
        fly = answer.response_metadata["fly"]
        for name, value in options.items():
            assert fly[name] == value
        assert fly["num_relaxed_tokens"] == len(expected.relaxed)


def test_settings_do_something(llm):
    texts = {json.dumps(options): llm.invoke(QUESTION, **options).content for options in PER_CALL}
    assert len(set(texts.values())) >= 5
    assert llm.invoke(QUESTION, lossless=True).response_metadata["fly"]["num_relaxed_tokens"] == 0


def test_lossless_is_the_targets_own_answer(llm, engine):
    own = ask(engine, num_speculative_tokens=0)
    assert llm.invoke(QUESTION, lossless=True).content == own.text != llm.invoke(QUESTION, window=1, theta=0.0).content


def test_stop_and_max_tokens(llm, folders):
    full = llm.invoke(QUESTION, lossless=True).content
    stop = full[6:9]
    expected = full[: full.index(stop)]
    for answer in (
        llm.invoke(QUESTION, stop=[stop], lossless=True),
        ChatFLy(model=folders[0], stop=[stop], max_tokens=40, lossless=True).invoke(QUESTION),
        ChatFLy(model=folders[0], stop=["zzz"], max_tokens=40, lossless=True).invoke(QUESTION, stop=[stop]),
    ):
        assert answer.content == expected
        assert answer.response_metadata["finish_reason"] == "stop"
    assert "".join(c.content for c in llm.stream(QUESTION, stop=[stop], lossless=True)) == expected
    stopping = ChatFLy(model=folders[0], stop=[stop], max_tokens=40, lossless=True)
    assert stopping.invoke(QUESTION, stop=[]).content == full  # an empty list is none
    for options in ({"max_tokens": 5}, {"max_new_tokens": 5}):
        assert llm.invoke(QUESTION, **options).usage_metadata["output_tokens"] == 5
        assert ChatFLy(model=folders[0], **options).invoke(QUESTION).usage_metadata["output_tokens"] == 5
    assert llm.invoke(QUESTION, max_tokens=None, stop=None).usage_metadata["output_tokens"] == 40


def test_unknown_names_are_refused_with_a_suggestion(llm, folders):
    with pytest.raises(ConfigError, match="unknown setting 'thetaa': did you mean 'theta'"):
        llm.invoke(QUESTION, thetaa=0.2)
    with pytest.raises(ConfigError, match="unknown setting 'top_n'"):
        list(llm.stream(QUESTION, top_n=2))
    with pytest.raises(ValidationError, match="unknown setting 'temperture': did you mean 'temperature'"):
        ChatFLy(model=folders[0], temperture=0.3)
    with pytest.raises(ValidationError, match="window=15 must be smaller"):
        ChatFLy(model=folders[0], window=15)


def test_settings_of_remote_models_are_tolerated(folders):
    llm = ChatFLy(model=folders[0], temperature=0, max_tokens=4, timeout=60, stop=[], max_retries=2, api_key="test")
    assert llm.invoke(QUESTION, stream=True).usage_metadata["output_tokens"] == 4


def test_identifying_params_hold_everything_that_changes_the_output(llm, folders):
    base = ChatFLy(model=folders[0])._identifying_params
    json.dumps(base)
    changes = {
        "theta": 0.1, "window": 3, "num_speculative_tokens": 7, "entropy": "normalized", "lossless": True, "seed": 1,
        "strict_prefix": 2, "relax_lookup": True, "drafting": "lookup", "temperature": 0.5, "top_p": 0.5, "top_k": 3,
        "min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "max_tokens": 9, "stop": ["x"],
        "dtype": "float32", "draft_model": folders[1], "model": folders[1], "chat_template": "{{ x }}",
    }  # fmt: skip
    seen = [base]
    for name, value in changes.items():
        params = ChatFLy(**{"model": folders[0], name: value})._identifying_params
        assert params not in seen, name
        seen.append(params)
    changed = ChatFLy(model=folders[0])
    changed.theta = 0.1
    assert changed._identifying_params == seen[1]
    assert "token" not in base


def test_a_changed_attribute_counts_from_the_next_call(folders):
    llm = ChatFLy(model=folders[0], max_tokens=5)
    assert llm.invoke(QUESTION).usage_metadata["output_tokens"] == 5
    llm.max_tokens, llm.theta = 8, 0.7
    answer = llm.invoke(QUESTION)
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["fly"]["theta"] == 0.7
    llm.model = folders[1]
    assert llm.invoke(QUESTION).response_metadata["model_name"] == folders[1]


def test_constructing_loads_nothing(tmp_path):
    ChatFLy(model=str(tmp_path / "nowhere"))  # imports are done
    start = time.perf_counter()
    for _ in range(10):
        ChatFLy(model=str(tmp_path / "nowhere"))
    assert (time.perf_counter() - start) / 10 < 0.01
    assert ChatFLy()._get_ls_params()["ls_model_name"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_live_models_are_accepted():
    target = tiny_llama()
    llm = ChatFLy(model=target, draft_model=noisy_copy(target), tokenizer=tiny_tokenizer(), max_tokens=6)
    answer = llm.invoke(QUESTION)
    assert answer.usage_metadata["output_tokens"] == 6
    assert answer.response_metadata["fly"]["drafting"] == "nested"


def test_tokens_are_counted_with_the_real_template(llm):
    messages = [SystemMessage("be brief"), HumanMessage(QUESTION)]
    assert llm.get_num_tokens_from_messages(messages) == llm.invoke(messages).usage_metadata["input_tokens"]
    assert llm.get_num_tokens("the dog") == len(tiny_tokenizer()("the dog")["input_ids"])


def test_overflow_is_langchains_error_and_ours(llm):
    for kind in (CoreContextOverflowError, ContextOverflowError):
        with pytest.raises(kind, match="window holds 512"):
            llm.invoke("word " * 600)

    async def main():
        with pytest.raises(CoreContextOverflowError):
            await llm.ainvoke("word " * 600)

    asyncio.run(main())


class Tokens(BaseCallbackHandler):
    def __init__(self):
        self.tokens, self.errors = [], []

    def on_llm_new_token(self, token, **_):
        self.tokens.append(token)

    def on_llm_error(self, error, **_):
        self.errors.append(error)


def test_callbacks_see_every_piece_once(llm, folders):
    for ask_it in (
        lambda handler: "".join(c.content for c in llm.stream(QUESTION, config={"callbacks": [handler]})),
        lambda handler: ChatFLy(
            model=folders[0], draft_model=folders[1], max_tokens=40, window=2, streaming=True
        ).invoke(QUESTION, config={"callbacks": [handler]}).content,
    ):  # fmt: skip
        handler = Tokens()
        text = ask_it(handler)
        assert "".join(handler.tokens) == text
        assert len(handler.tokens) > 3


def test_breaking_off_a_stream_stops_the_engine(llm):
    model = llm._get_engine().load()._handle.models.pair().target.model
    count = 0

    def tick(*_):
        nonlocal count
        count += 1
        time.sleep(0.01)

    hook = model.register_forward_pre_hook(tick)
    options = {"num_speculative_tokens": 0, "max_tokens": 300, "ignore_eos": True}
    for _ in llm.stream(QUESTION, **options):
        break

    async def main():
        async for _ in llm.astream(QUESTION, **options):
            break
        task = asyncio.create_task(llm.ainvoke(QUESTION, **options))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen = count
        await asyncio.sleep(0.1)
        return count - seen

    assert asyncio.run(main()) <= 1
    hook.remove()
    assert count < 60


def test_messages_are_converted_and_not_changed():
    call = {"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}
    messages = [
        SystemMessage("s"),
        HumanMessage([{"type": "text", "text": "h"}], name="bob"),
        AIMessage([{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "a"}], tool_calls=[call]),
        ToolMessage("3", tool_call_id="c1", name="add"),
        ChatMessage(role="user", content="u"),
    ]
    before = [message.model_dump() for message in messages]
    assert to_chat(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "h"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}],
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        {"role": "user", "content": "u"},
    ]
    assert [message.model_dump() for message in messages] == before


def test_bad_messages(llm):
    with pytest.raises(PromptError, match="there are no messages"):
        llm.invoke([])
    with pytest.raises(PromptError, match="image"):
        llm.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "data:..."}}])])
    with pytest.raises(PromptError, match="FunctionMessage has no role"):
        llm.invoke([FunctionMessage(name="f", content="x")])
    assert llm.invoke("").usage_metadata["input_tokens"] > 0  # an empty turn is a turn


def test_copies_do_not_close_or_change_each_other(folders):
    first = ChatFLy(model=folders[0], max_tokens=6)
    expected = first.invoke(QUESTION).content
    other = first.model_copy(update={"model": folders[1], "max_tokens": 3})
    assert other.invoke(QUESTION).usage_metadata["output_tokens"] == 3
    assert first.invoke(QUESTION).content == expected
    twin = copy.copy(first)
    twin.close()
    assert first.invoke(QUESTION).content == expected
    deep = copy.deepcopy(first)
    deep.theta = 0.9
    assert pickle.loads(pickle.dumps(deep)).invoke(QUESTION).response_metadata["fly"]["theta"] == 0.9
    assert first.invoke(QUESTION).response_metadata["fly"]["theta"] == 0.3


def test_a_stop_string_may_be_given_bare(llm, folders):
    full = llm.invoke(QUESTION, lossless=True).content
    stop = full[6:9]
    expected = full[: full.index(stop)]
    assert llm.bind(stop=stop).invoke(QUESTION, lossless=True).content == expected
    bare = ChatFLy(model=folders[0], stop=stop, max_tokens=40, lossless=True)
    assert bare.invoke(QUESTION).content == expected
    assert bare._get_ls_params()["ls_stop"] == [stop]


def test_a_synonym_and_its_original_are_not_both_taken():
    with pytest.raises(ValidationError, match="synonym of max_tokens"):
        ChatFLy(max_tokens=4, max_new_tokens=5)


def test_the_bundled_model_goes_by_its_public_name(folders, monkeypatch):
    monkeypatch.setattr("fly_llm.models.bundled.default_target", lambda: folders[0])
    answer = ChatFLy(max_tokens=2).invoke(QUESTION)
    assert answer.response_metadata["model_name"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert answer.response_metadata["fly"]["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_control_tokens_count_as_the_text_they_are(llm):
    assert llm.get_num_tokens("<|im_end|>") > 1
