"""The LlamaIndex examples and the watching ones, really: in this process, over the bundled model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from llama_index.core import Settings
from llama_index.core.instrumentation import get_dispatcher

from fly_llm import FLyEngine

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module", autouse=True)
def engine():
    """Keeps the weights in memory from one example to the next."""
    with FLyEngine.from_pretrained(dtype="float32") as engine:
        yield engine.load()


@pytest.fixture(autouse=True)
def clean():
    """LlamaIndex's settings and event handlers belong to the process."""
    handlers = list(get_dispatcher().event_handlers)
    yield
    get_dispatcher().event_handlers[:] = handlers
    Settings._llm = Settings._embed_model = Settings._node_parser = None
    Settings.tokenizer = None


@pytest.fixture
def load(monkeypatch):
    return lambda name: _load(name, monkeypatch)


def _load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where pydantic looks for the names in annotations
    spec.loader.exec_module(module)
    return module


def test_query_engine(load, engine, capsys):
    module = load("llama_index_query_engine")
    told = module.main(max_tokens=24)
    shown = capsys.readouterr().out
    text = "".join(told["pieces"])
    assert len(told["pieces"]) > 3
    assert "product owner" in text.lower()
    assert any("product owner" in source.text for source in told["sources"])
    assert text in shown
    assert f"{told['fly']['num_relaxed_tokens']} of {told['fly']['num_output_tokens']} tokens relaxed" in shown
    assert told["fly"]["lossless"] is False
    assert told["exact_fly"]["lossless"] is True
    prompt = module.PROMPT.format(
        context_str="\n\n".join(source.get_content("llm").strip() for source in told["sources"]),
        query_str=module.QUESTION,
    )
    messages = [{"role": "user", "content": prompt}]
    settings = {"max_tokens": 24, "stop": ["\n\n"], "lossless": True}
    assert told["exact"] == engine.generate(messages, **settings).text
    assert told["exact_fly"]["num_prompt_tokens"] == engine.count_tokens(messages)


def test_chat_engine(load, capsys):
    module = load("llama_index_chat_engine")
    told = module.main(max_tokens=16)
    shown = capsys.readouterr().out
    assert [text in shown for text in told["texts"]] == [True] * 3
    assert [message.content for message in told["history"][::2]] == list(module.TURNS)
    assert [message.content for message in told["history"][1::2]] == [text.strip() for text in told["texts"]]
    prompts = [raw["usage"]["prompt_tokens"] for raw in told["raws"]]
    cached = [raw["usage"]["prompt_tokens_details"]["cached_tokens"] for raw in told["raws"]]
    assert len(prompts) == 3
    assert prompts == sorted(set(prompts))  # each turn has the ones before in its prompt
    assert min(cached[1:]) >= 20
    assert f"({cached[2]} of {prompts[2]} tokens" in shown


@pytest.mark.parametrize("name", ["langchain_rounds", "llama_index_rounds"])
def test_rounds(load, name, engine, capsys):
    module = load(name)
    told = module.main(max_tokens=24)
    lines = capsys.readouterr().out.splitlines()
    expected = engine.generate([{"role": "user", "content": module.QUESTION}], max_tokens=24)
    assert len(told["rounds"]) == expected.stats.num_rounds > 2
    assert lines[-1] == expected.text
    accepted = [line.count("█") for line in lines[:-1]]
    assert accepted == [round_.num_accepted_tokens for round_ in told["rounds"]]
    assert sum(accepted) == expected.stats.num_accepted_tokens > 0
