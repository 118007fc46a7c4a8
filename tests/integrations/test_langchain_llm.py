"""`langchain_fly.FLyLLM`: text completion, over the real local engine, on a tiny model."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError as CoreContextOverflowError
from langchain_core.globals import set_llm_cache
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import ConfigurableField
from pydantic import ValidationError

import fly_llm
from fly_llm import ConfigError, FLyEngine
from langchain_fly import FLyCallbackHandler, FLyLLM

TEXT = "the dog and the fox sleep in the sun"


@pytest.fixture(scope="module")
def llm(tiny_folders):
    return FLyLLM(model=tiny_folders[0], draft_model=tiny_folders[1], max_tokens=40, window=2)


@pytest.fixture(scope="module")
def engine(tiny_folders):
    with FLyEngine.from_pretrained(*tiny_folders, max_tokens=40, window=2) as engine:
        yield engine


def test_a_prompt_is_completed_as_it_stands_in_every_way(llm, engine):
    expected = engine.generate(TEXT).text
    assert expected != engine.generate([{"role": "user", "content": TEXT}]).text

    async def main():
        streamed = "".join([piece async for piece in llm.astream(TEXT)])
        return [await llm.ainvoke(TEXT), streamed, *await llm.abatch([TEXT, TEXT])]

    assert llm.invoke(TEXT) == expected
    assert "".join(llm.stream(TEXT)) == expected
    assert llm.batch([TEXT] * 3) == [expected] * 3
    assert asyncio.run(main()) == [expected] * 4
    assert (PromptTemplate.from_template("{x}") | llm | StrOutputParser()).invoke({"x": TEXT}) == expected


def test_a_generation_says_what_it_used_and_what_fly_did(llm, engine):
    expected = engine.generate(TEXT)
    result = llm.generate([TEXT, "the dog"])
    info = json.loads(json.dumps(result.generations[0][0].generation_info, allow_nan=False))
    assert info["fly"]["num_relaxed_tokens"] == expected.stats.num_relaxed_tokens > 0
    assert (info["model_name"], info["finish_reason"], info["model_provider"]) == (llm.model, "length", "fly")
    assert info["usage_metadata"]["output_tokens"] == 40
    prompt_tokens = expected.usage.prompt_tokens + engine.generate("the dog").usage.prompt_tokens
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 80, "total_tokens": prompt_tokens + 80}
    assert result.llm_output == {"token_usage": usage, "model_name": llm.model}


OPTIONS = [{"theta": 0.9}, {"lossless": True}, {"max_tokens": 7}, {"temperature": 0.8, "seed": 5}, {"stop": ["the"]}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_settings_reach_the_engine_from_everywhere(llm, engine, options):
    expected = engine.generate(TEXT, **options).text
    assert llm.invoke(TEXT, **options) == expected
    assert llm.bind(**options).invoke(TEXT) == expected
    assert llm.with_options(**options).invoke(TEXT) == expected
    assert "".join(llm.stream(TEXT, **options)) == expected
    with fly_llm.overrides(**options):
        assert llm.invoke(TEXT) == expected
    assert llm.invoke(TEXT) == engine.generate(TEXT).text


def test_misspelt_names_are_errors(llm):
    with pytest.raises(ConfigError, match="did you mean 'theta'"):
        llm.invoke(TEXT, thetta=1)
    with pytest.raises(ValidationError, match="did you mean 'theta'"):
        FLyLLM(thetta=1)


def test_tokens_are_called_back_once_and_rounds_too(llm, engine):
    class Watch(FLyCallbackHandler):
        def __init__(self):
            self.tokens, self.rounds = [], []

        def on_llm_new_token(self, token, **kwargs):
            self.tokens.append(token)
            super().on_llm_new_token(token, **kwargs)

        def on_fly_round(self, fly_round, *, run_id, **kwargs):
            self.rounds.append((run_id, fly_round))

    expected = engine.generate(TEXT)

    async def astream(watch):
        return [piece async for piece in llm.astream(TEXT, config={"callbacks": [watch]})]

    for ask, streams in (
        (lambda watch: llm.invoke(TEXT, config={"callbacks": [watch]}), False),
        (lambda watch: list(llm.stream(TEXT, config={"callbacks": [watch]})), True),
        (lambda watch: asyncio.run(llm.ainvoke(TEXT, config={"callbacks": [watch]})), False),
        (lambda watch: asyncio.run(astream(watch)), True),
    ):
        watch = Watch()
        ask(watch)
        assert "".join(watch.tokens) == (expected.text if streams else "")
        assert [token for _, fly_round in watch.rounds for token in fly_round.token_ids] == list(expected.token_ids)
        assert len({run_id for run_id, _ in watch.rounds}) == 1


def test_the_cache_tells_settings_apart(llm):
    set_llm_cache(InMemoryCache())
    try:
        loose = llm.invoke(TEXT)
        assert llm.invoke(TEXT, max_tokens=3) != loose
        assert llm.with_options(max_tokens=4).invoke(TEXT) != loose
        with fly_llm.overrides(max_tokens=5):
            assert llm.invoke(TEXT) != loose
        assert llm.invoke(TEXT) == loose
    finally:
        set_llm_cache(None)


def test_copies_share_the_weights(llm):
    models = llm._get_engine()._handle.models
    configured = llm.configurable_fields(theta=ConfigurableField(id="theta"))
    answer = configured.with_config(configurable={"theta": 0.9}).invoke(TEXT)
    assert answer == llm.invoke(TEXT, theta=0.9)
    copied = pickle.loads(pickle.dumps(llm))
    assert copied._get_engine()._handle.models is models
    assert copied.invoke(TEXT) == llm.invoke(TEXT)


def test_overflow_is_langchains_error_too(llm):
    with pytest.raises(CoreContextOverflowError):
        llm.invoke("the " * 600)


def test_tracing_parameters_and_token_counts(llm, engine):
    params = llm._get_ls_params(stop=["x"], temperature=0.5, max_tokens=9)
    assert params["ls_model_type"] == "llm"
    assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0.5, 9, ["x"])
    assert llm.get_num_tokens(TEXT) == engine.count_tokens(TEXT)
    assert isinstance(FLyCallbackHandler(), BaseCallbackHandler)
