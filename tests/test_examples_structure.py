"""The examples of agents and extraction, really: in this process, over the bundled model."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from langchain_core.exceptions import OutputParserException
from llama_index.llms.fly import FLyLLM

from fly_llm import FLyEngine
from langchain_fly import ChatFLy

EXAMPLES = Path(__file__).parent.parent / "examples"

pytest.importorskip("llguidance")


@pytest.fixture(scope="module", autouse=True)
def engine():
    """Keeps the weights in memory from one example to the next."""
    with FLyEngine.from_pretrained(dtype="float32") as engine:
        yield engine.load()


@pytest.fixture
def load(monkeypatch):
    return lambda name: _load(name, monkeypatch)


def _load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where pydantic looks for the names in annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["langchain_agent", "llama_index_agent", "extraction", "langchain_fallbacks"])
def test_every_example_says_how_to_run_it_and_fits_on_a_page(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    docstring = text.split('"""')[1]
    assert text.startswith('"""') and "Needs" in docstring and "Runs offline" in docstring
    assert f"python examples/{name}.py" in docstring
    assert len(text.splitlines()) <= 100


def test_langchain_agent(load, capsys):
    pytest.importorskip("langchain")
    module = load("langchain_agent")
    said = module.main(max_tokens=48)
    shown = capsys.readouterr().out
    assert list(said) == list(module.QUESTIONS)
    called, relaxed = [], 0
    for question, (call, result, answer) in said.items():
        (made,) = call.tool_calls
        called.append((made["name"], made["args"], result.text))
        assert result.tool_call_id == made["id"]
        assert result.text in answer.text and not answer.tool_calls
        start = shown.index(f"> {question}")
        at = shown.index(f"  call: {made['name']} {made['args']}", start)
        assert at < shown.index(f"  result: {result.text}", at) < shown.index(f"  answer: {answer.text}", at)
        for message in (call, answer):
            fly = message.response_metadata["fly"]
            relaxed += fly["num_relaxed_tokens"]
            assert f"{fly['num_relaxed_tokens']} of {fly['num_output_tokens']} tokens relaxed, 0 in calls" in shown
        assert call.response_metadata["fly"]["relaxed_by_zone"] == {}
    assert called == [
        ("count_words", {"word": "users"}, str(module.count_words("users"))),
        ("calculate", {"expression": "23 * 17"}, "391"),
        ("weekday", {"day": "1969-07-20"}, "Sunday"),
    ]
    assert relaxed > 0, "nothing was relaxed anywhere, so that nothing was in a call shows nothing"


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("23 * 17", "391"),
        ("(12 + 30) / 8 - 0.25", "5.0"),
        ("1 / 0", "Error in '1 / 0': division by zero"),
        ("2 ** 9", "Error in '2 ** 9': only numbers"),
        ("__import__('os').getcwd()", 'Error in "__import__'),
        ("open('x')", 'Error in "open'),
        ("12 +", "Error in '12 +': invalid syntax"),
        ("True + 1", "Error in 'True + 1': only numbers"),
    ],
)
def test_the_calculator_runs_arithmetic_and_nothing_else(load, expression, result):
    pytest.importorskip("langchain")
    assert load("langchain_agent").calculate(expression).startswith(result)


def test_llama_index_agent(load, capsys):
    module = load("llama_index_agent")
    told = module.main(max_tokens=70)
    shown = capsys.readouterr().out
    assert list(told) == list(module.QUESTIONS)
    (count,), (days,) = (one["results"] for one in told.values())
    assert (count.tool_name, count.tool_kwargs) == ("count_words", {"word": "users"})
    assert count.tool_output.raw_output == module.count_words("users") > 10
    assert (days.tool_name, days.tool_kwargs) == ("days_between", {"start": "2024-02-01", "end": "2024-03-01"})
    assert days.tool_output.raw_output == 29
    for question, one in told.items():
        (result,), (call, answer) = one["results"], one["outputs"]
        number = str(result.tool_output.raw_output)
        assert number in one["answer"] and "".join(one["pieces"]).strip() == one["answer"].strip()
        start = shown.index(f"> {question}")
        arguments = ", ".join(f"{name}={value!r}" for name, value in result.tool_kwargs.items())
        at = shown.index(f"  {result.tool_name}({arguments}) = {number}", start)
        assert at < shown.index(one["answer"], at)
        assert [step.raw["finish_reason"] for step in (call, answer)] == ["tool_calls", "stop"]
        assert "tool" not in call.raw["fly"]["relaxed_by_zone"]


def test_extraction(load, capsys):
    module = load("extraction")
    told = module.main()
    shown = capsys.readouterr().out
    for name, place in (("LangChain", told["langchain"]), ("LlamaIndex", told["llama_index"])):
        assert isinstance(place, module.Place) and f"{name}: {place!r}" in shown
        assert module.Place.model_validate(place.model_dump()) == place
        assert place.opened == 1986 and place.kind is module.Kind.MUSEUM and place.people
    assert "Ingrid Solberg" in [person.name for person in told["langchain"].people]

    partial = told["partial"]
    assert len(partial) > 10 and all(f"  {fields}\n" in shown for fields in partial)
    assert module.Place.model_validate(partial[-1]) == told["langchain"]
    for earlier, later in pairwise(partial):  # it only grows
        assert list(later)[: len(earlier)] == list(earlier)
        assert len(later.get("people", ())) >= len(earlier.get("people", ()))

    assert isinstance(told["error"], OutputParserException) and "'length'" in str(told["error"])
    assert "LangChain, 30 tokens: the answer was cut short" in shown


def test_what_is_extracted_validates_whatever_the_text(load):
    module = load("extraction")
    llm = ChatFLy(dtype="float32", max_tokens=250).with_structured_output(module.Place)
    assert isinstance(llm.invoke(module.PROMPT.format(text="Nothing here is a place. 1 2 3 }}} ]")), module.Place)


def test_an_answer_cut_short_is_an_error(load):
    module = load("extraction")
    question = module.PROMPT.format(text=module.TEXT)
    short = ChatFLy(dtype="float32", max_tokens=60)  # a name, a kind, a year and one whole person
    with pytest.raises(OutputParserException, match="cut short"):
        short.with_structured_output(module.Place).invoke(question)
    prompt = module.PromptTemplate(module.PROMPT)
    with pytest.raises(ValueError):  # noqa: PT011
        FLyLLM(dtype="float32", max_tokens=30).structured_predict(module.Place, prompt, text=module.TEXT)


@pytest.mark.parametrize("window", [1, 9, 40])
def test_the_conversation_of_the_fallbacks_is_too_long_for_any_window(load, window):
    module = load("langchain_fallbacks")
    one = 4915

    class Model:
        profile = {"max_input_tokens": window * one}  # noqa: RUF012

        def get_num_tokens_from_messages(self, messages):
            return sum(len(message.text) for message in messages) // 4

    messages = module.too_long(Model())
    assert Model().get_num_tokens_from_messages(messages) > window * one
    assert messages[-1].type == "human" and messages[0].type == "system"
