"""Settings of one call, whoever makes it: copies, `overrides`, chains; rounds watched; errors with two names."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from langchain_core import exceptions as core
from langchain_core.caches import InMemoryCache
from langchain_core.embeddings import Embeddings
from langchain_core.globals import set_llm_cache
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from tiny_models import tiny_llama, tiny_tokenizer

import fly_llm
from fly_llm import ConfigError, FLyEngine, ModelLoadError, PromptError, overrides
from langchain_fly import ChatFLy, FLyCallbackHandler

QUESTION = "the quick brown fox and the dog sleep"


@pytest.fixture(scope="module")
def llm(tiny_folders):
    return ChatFLy(model=tiny_folders[0], draft_model=tiny_folders[1], max_tokens=40, window=2)


@pytest.fixture(scope="module")
def engine(tiny_folders):
    with FLyEngine.from_pretrained(*tiny_folders, max_tokens=40, window=2) as engine:
        yield engine


def fly(message):
    return message.response_metadata["fly"]


# -- overrides --------------------------------------------------------------------------------------------------------


def test_overrides_go_over_settings_and_under_a_call(engine, llm):
    with overrides(theta=0.7, window=1):
        assert engine.generate(QUESTION).settings["theta"] == 0.7
        assert engine.generate(QUESTION, theta=0.2).settings["theta"] == 0.2
        with overrides(theta=0.5, lossless=True):
            inner = fly(llm.invoke(QUESTION))
            assert (inner["theta"], inner["window"], inner["lossless"], inner["num_relaxed_tokens"]) == (
                0.5,
                None,
                True,
                0,
            )
        outer = fly(llm.bind(max_tokens=6).invoke(QUESTION))
        assert (outer["theta"], outer["window"], outer["max_tokens"]) == (0.7, 1, 6)
        assert fly(llm.invoke(QUESTION, theta=0.1))["theta"] == 0.1
    assert fly(llm.invoke(QUESTION))["theta"] == 0.3
    assert engine.generate(QUESTION).settings["theta"] == 0.3


def test_overrides_end_with_their_block_also_on_an_error(llm):
    with pytest.raises(RuntimeError), overrides(theta=0.7):
        raise RuntimeError
    assert fly(llm.invoke(QUESTION))["theta"] == 0.3


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"thetta": 1}, "did you mean 'theta'"),
        ({"theta": -1}, "theta must be a number"),
        ({"model": "x"}, "unknown setting 'model'"),
        ({"window": 0}, "window must be"),
        ({"stop": [1]}, "stop must be"),
    ],
)
def test_overrides_are_checked_at_once(knobs, said):
    with pytest.raises(ConfigError, match=said), overrides(**knobs):
        raise AssertionError("not reached")
    with overrides(window=20, num_speculative_tokens=25):  # fits, though not into the default K
        pass
    with overrides(window=20):  # may fit the model it reaches
        pass


@pytest.fixture
def chain(llm):
    class Letters(Embeddings):
        def embed_query(self, text):
            return [float(text.count(letter)) + 0.01 for letter in "abcdefgh"]

        def embed_documents(self, texts):
            return [self.embed_query(text) for text in texts]

    store = InMemoryVectorStore.from_texts(["the fox sleeps in the sun", "a dog jumps"], Letters())
    prompt = ChatPromptTemplate.from_template("{context}\n{question}")
    return {"context": store.as_retriever(), "question": RunnablePassthrough()} | prompt | llm


def test_overrides_reach_through_a_retrieval_chain(chain):
    async def aask():
        answer = await chain.ainvoke("where is the fox?")
        pieces = [piece async for piece in chain.astream("where is the fox?")]
        return [answer, pieces[-1], *await chain.abatch(["a fox?", "a dog?"])]

    with overrides(theta=0.7, window=1):
        answers = [chain.invoke("where is the fox?"), *chain.batch(["a fox?", "a dog?"]), *asyncio.run(aask())]
        answers.append(list(chain.stream("where is the fox?"))[-1])
        both = RunnableParallel(a=chain, b=chain).invoke("where is the fox?")
        answers.extend(both.values())
    assert [(fly(answer)["theta"], fly(answer)["window"]) for answer in answers] == [(0.7, 1)] * 10
    assert fly(chain.invoke("where is the fox?"))["theta"] == 0.3


def test_overrides_leak_into_no_other_task_or_thread(llm):
    async def one(theta, start):
        if theta is None:
            await start.wait()
            return fly(await llm.ainvoke(QUESTION))["theta"]
        with overrides(theta=theta):
            await start.wait()
            return fly(await llm.ainvoke(QUESTION))["theta"]

    async def main():
        start = asyncio.Event()
        tasks = [asyncio.create_task(one(theta, start)) for theta in (0.1, None, 0.5, None)]
        await asyncio.sleep(0)
        start.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [0.1, 0.3, 0.5, 0.3]
    seen = {}
    inside, done = threading.Event(), threading.Event()

    def other():
        inside.wait()
        seen["other"] = fly(llm.invoke(QUESTION))["theta"]
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with overrides(theta=0.9):
        inside.set()
        done.wait()
    thread.join()
    assert seen == {"other": 0.3}


def test_the_cache_tells_overrides_apart(llm):
    set_llm_cache(InMemoryCache())
    try:
        loose = llm.invoke(QUESTION).content
        with overrides(lossless=True):
            exact = llm.invoke(QUESTION).content
        assert exact != loose
        assert llm.invoke(QUESTION).content == loose
        with overrides(lossless=True):
            assert llm.invoke(QUESTION).content == exact
    finally:
        set_llm_cache(None)


# -- copies -----------------------------------------------------------------------------------------------------------


def test_with_options_is_a_cheap_copy_that_shares_the_weights(llm):
    models = llm._get_engine()._handle.models
    loads = models.pair()
    start = time.perf_counter()
    copies = [llm.with_options(theta=0.01 * i) for i in range(100)]
    assert (time.perf_counter() - start) / 100 < 0.005
    assert copies[50].theta == 0.5
    assert llm.theta == 0.3
    assert fly(copies[50].invoke(QUESTION))["theta"] == 0.5
    assert copies[50]._get_engine()._handle.models is models
    copies[50].close()
    assert llm._get_engine()._handle.models.pair() is loads
    assert llm.with_options(max_new_tokens=3).max_tokens == 3
    assert llm.with_options(stop=["x"], metadata={"a": 1}).metadata == {"a": 1}


@pytest.mark.parametrize(
    ("options", "said"),
    [({"thetta": 1}, "did you mean 'theta'"), ({"theta": -1}, "theta must be"), ({"window": 15}, "must be smaller")],
)
def test_with_options_checks(llm, options, said):
    with pytest.raises(ConfigError, match=said):
        llm.with_options(**options)


def test_three_configured_calls_load_once(tmp_path, monkeypatch):
    import fly_llm.models.registry as registry

    tiny_llama(seed=4).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loads = []
    load = registry.ModelSpec.load
    monkeypatch.setattr(registry.ModelSpec, "load", lambda spec: loads.append(spec) or load(spec))
    llm = ChatFLy(model=str(tmp_path), max_tokens=5).configurable_fields(
        theta=ConfigurableField(id="theta"), lossless=ConfigurableField(id="lossless")
    )
    answers = [llm.with_config(configurable={"theta": theta}).invoke(QUESTION) for theta in (0.1, 0.5, 0.9)]
    assert [fly(answer)["theta"] for answer in answers] == [0.1, 0.5, 0.9]
    assert len(loads) == 1


def test_construction_takes_milliseconds(tiny_folders):
    ChatFLy(model=tiny_folders[0])  # imports done
    start = time.perf_counter()
    models = [ChatFLy(model=tiny_folders[0], draft_model=tiny_folders[1], theta=0.01 * i) for i in range(20)]
    assert (time.perf_counter() - start) / 20 < 0.01
    assert models[1].profile["max_input_tokens"] == 512


def test_a_batch_of_32_equals_sequential_calls(llm):
    questions = [f"{QUESTION} {i}" for i in range(32)]
    batch = [message.content for message in llm.batch(questions)]
    assert batch == [llm.invoke(question).content for question in questions]
    assert len(set(batch)) > 16


# -- what is not a setting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model", "draft_model", "dtype", "tokenizer"])
def test_a_call_cannot_change_the_model(llm, name):
    with pytest.raises(ConfigError, match=rf"with_options\({name}="):
        llm.invoke(QUESTION, **{name: "x"})


def test_strict_is_not_lossless(llm):
    with pytest.raises(ConfigError, match="did you mean 'lossless'"):
        llm.invoke(QUESTION, strict=True)


def test_parameters_of_remote_models_are_accepted(llm, tiny_folders):
    other = ChatFLy(model=tiny_folders[0], timeout=60, max_retries=2, api_key="x", base_url="y", streaming=True)
    assert other.streaming
    assert llm.invoke(QUESTION, timeout=3, max_tokens=3).content


# -- rounds -----------------------------------------------------------------------------------------------------------


class Watch(FLyCallbackHandler):
    def __init__(self):
        self.tokens, self.rounds = [], []

    def on_llm_new_token(self, token, **kwargs):
        self.tokens.append(token)
        super().on_llm_new_token(token, **kwargs)

    def on_fly_round(self, fly_round, *, run_id, **kwargs):
        self.rounds.append((run_id, fly_round))


async def _adrain(stream):
    return [piece async for piece in stream]


WAYS = {
    "invoke": lambda llm, config: llm.invoke(QUESTION, config=config),
    "stream": lambda llm, config: list(llm.stream(QUESTION, config=config)),
    "ainvoke": lambda llm, config: asyncio.run(llm.ainvoke(QUESTION, config=config)),
    "astream": lambda llm, config: asyncio.run(_adrain(llm.astream(QUESTION, config=config))),
    "streaming": lambda llm, config: llm.with_options(streaming=True).invoke(QUESTION, config=config),
    "in a chain": lambda llm, config: (RunnableLambda(str) | llm | StrOutputParser()).invoke(QUESTION, config=config),
    "v1": lambda llm, config: list(llm.with_options(output_version="v1").stream(QUESTION, config=config)),
    "v3": lambda llm, config: list(llm.stream_events(QUESTION, version="v3", config=config)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_handler_is_told_every_round_once_and_tokens_once(llm, engine, way):
    watch = Watch()
    WAYS[way](llm, {"callbacks": [watch]})
    expected = engine.generate([{"role": "user", "content": QUESTION}])
    assert [token for _, fly_round in watch.rounds for token in fly_round.token_ids] == list(expected.token_ids)
    assert len({run_id for run_id, _ in watch.rounds}) == 1
    assert sum(fly_round.num_relaxed_tokens for _, fly_round in watch.rounds) == expected.stats.num_relaxed_tokens > 0
    assert all(fly_round.verify_seconds > 0 for _, fly_round in watch.rounds)
    if way in ("stream", "astream", "streaming"):
        assert "".join(watch.tokens) == expected.text


def test_a_handler_that_fails_fails_alone(llm):
    class Broken(FLyCallbackHandler):
        def on_fly_round(self, fly_round, *, run_id, **kwargs):
            raise RuntimeError("mine")

    expected = llm.invoke(QUESTION).content
    assert llm.invoke(QUESTION, config={"callbacks": [Broken()]}).content == expected
    assert "".join(chunk.content for chunk in llm.stream(QUESTION, config={"callbacks": [Broken()]})) == expected


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors_are_langchains_and_ours(llm, tmp_path):
    for ours, theirs, ask in (
        (fly_llm.ContextOverflowError, core.ContextOverflowError, lambda: llm.invoke("the " * 600)),
        (ConfigError, core.ModelInvalidRequestError, lambda: llm.invoke(QUESTION, thetta=1)),
        (PromptError, core.ModelInvalidRequestError, lambda: llm.invoke([])),
        (ModelLoadError, core.ModelNotFoundError, lambda: ChatFLy(model=str(tmp_path / "none")).invoke("x")),
    ):
        with pytest.raises(ours) as mine:
            ask()
        assert isinstance(mine.value, theirs)
        assert isinstance(mine.value, core.ModelError)
        assert not mine.value.is_retryable
        assert str(mine.value)
    with pytest.raises(fly_llm.ContextOverflowError) as error:
        llm.invoke([HumanMessage("the " * 600)])
    assert (error.value.context_window, error.value.prompt_tokens > 512) == (512, True)


def test_the_profile_comes_from_the_config_alone(tiny_folders, tmp_path):
    fresh = ChatFLy(model=tiny_folders[0], dtype="bfloat16")  # nobody else loads it so
    assert fresh.profile["max_input_tokens"] == 512
    assert fresh.profile["max_output_tokens"] == 512
    assert fresh.profile["image_inputs"] is False
    assert not fresh._get_engine()._handle.models.is_loaded
    assert ChatFLy().profile["max_input_tokens"] == 8192
    assert ChatFLy(model=tiny_llama(), tokenizer=tiny_tokenizer()).profile["max_input_tokens"] == 512
    assert ChatFLy(model=str(tmp_path / "none")).profile is None
    assert ChatFLy(model=tiny_folders[0], profile={"max_input_tokens": 5}).profile == {"max_input_tokens": 5}
