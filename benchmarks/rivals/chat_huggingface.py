"""ChatHuggingFace over HuggingFacePipeline (langchain-huggingface) on a local folder, row by row."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import transformers
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from langchain_huggingface.data._profiles import _PROFILES
from rows import (
    Verdict,
    answers_with_cache,
    attempt,
    loop_turns,
    loop_verdict,
    main,
    quote,
    row,
    said,
    traced_model,
    verdict,
    warned,
    within,
)
from tiny_model import WINDOW, Watch, save

FOLDER = save()
WORDS = "one two three four five six seven eight nine ten"


def load(folder: Any = FOLDER, *, echo: bool = False, sample: bool = False, **kwargs: Any) -> ChatHuggingFace:
    """The model as its documentation loads it; `return_full_text=False` unless the echo of the prompt is the point."""
    pipeline_kwargs = {"max_new_tokens": 60, "do_sample": sample, **({} if echo else {"return_full_text": False})}
    return ChatHuggingFace.from_model_id(str(folder), pipeline_kwargs=pipeline_kwargs, **kwargs)


def watch(chat: ChatHuggingFace, **kwargs: Any) -> Watch:
    """A watch on the model inside."""
    return Watch(chat.llm.pipeline.model, chat.tokenizer, **kwargs)


def merged(chunks: Any) -> AIMessageChunk:
    """The chunks of a stream as one message."""
    first, *others = list(chunks)
    return first.__add__(others) if others else first


@row("1", "reply without prompt echo")
def echo() -> Verdict:
    """The content is the answer, with no option set."""
    chat = load(echo=True)
    with watch(chat, says="fine"):
        content = chat.invoke("how are you?").content
    return verdict(content == "fine", f"the model wrote 'fine', content was {quote(content, 110)}")


@row("2a", "sync streaming")
def stream() -> Verdict:
    """The answer arrives in pieces that add up to it."""
    chat = load()
    with watch(chat, says=WORDS):
        pieces = [chunk.text for chunk in chat.stream("count")]
    filled = [piece for piece in pieces if piece]
    return verdict(
        "".join(pieces) == WORDS and len(filled) > 1, f"{len(filled)} pieces, joined {quote(''.join(pieces))}"
    )


@row("2b", "error while streaming reaches the caller")
def stream_error() -> Verdict:
    """A model that fails while streaming raises its own exception, at once."""
    waits: list[float] = []

    class Streamer(transformers.TextIteratorStreamer):
        def __init__(self, *args: Any, timeout: float, **kwargs: Any) -> None:
            waits.append(timeout)
            super().__init__(*args, timeout=3.0, **kwargs)

    chat, start = load(), time.perf_counter()
    with (
        watch(chat, error=RuntimeError("out of memory")),
        mock.patch("transformers.TextIteratorStreamer", Streamer),
    ):
        result = within(20, lambda: list(chat.stream("count")))
    seconds = time.perf_counter() - start
    what = said(result) if isinstance(result, Exception) else f"{len(result)} chunks and no exception"
    limit = f"its own limit of {waits[0]:g} s was cut to 3 s here" if waits else "it set no time limit"
    return verdict(
        "out of memory" in str(result),
        f"the model raised RuntimeError('out of memory'), the caller got {what} after {seconds:.1f} s ({limit})",
    )


@row("3", "ainvoke")
def ainvoke() -> Verdict:
    """`ainvoke` answers and leaves the event loop running."""
    chat = load()
    with watch(chat, says=WORDS, delay=0.01):
        return loop_verdict(loop_turns(lambda: chat.ainvoke("count")))


@row("4", "astream")
def astream() -> Verdict:
    """`astream` answers and leaves the event loop running."""
    chat = load()

    async def consume() -> list[Any]:
        return [chunk async for chunk in chat.astream("count")]

    with watch(chat, says=WORDS, delay=0.01):
        return loop_verdict(loop_turns(consume))


@row("5", "closing a stream stops compute")
def close() -> Verdict:
    """A stream closed after its first piece, long before the end, costs at most one more token."""
    chat = load()
    with watch(chat, says=WORDS, delay=0.02) as watched:
        pieces = chat.stream("count")
        next(pieces)
        pieces.close()
        at_close = watched.forwards
        time.sleep(2)
        after = watched.forwards - at_close
    return verdict(
        at_close < 10 and after <= 1, f"{at_close} forwards until the stream was closed, {after} more after it", "no"
    )


@row("6a", "per-call max_tokens")
def call_max_tokens() -> Verdict:
    """`invoke(..., max_tokens=4)` writes 4 tokens."""
    chat, counts = load(), {}
    for name, kwargs in {
        "max_tokens=4": {"max_tokens": 4},
        "max_new_tokens=4": {"max_new_tokens": 4},
        "pipeline_kwargs={'max_new_tokens': 4}": {"pipeline_kwargs": {"max_new_tokens": 4}},
    }.items():
        with watch(chat, says=WORDS) as watched:
            chat.invoke("count", **kwargs)
        counts[name] = watched.forwards
    return verdict(
        counts["max_tokens=4"] == 4,
        "tokens written: " + ", ".join(f"{count} with {name}" for name, count in counts.items()),
    )


@row("6b", "per-call temperature")
def call_temperature() -> Verdict:
    """At `temperature=0.000001` five sampled answers are the same, whatever the model's own temperature."""
    chat = load(sample=True, temperature=5.0)
    outer = {chat.invoke("hi", temperature=1e-6).content for _ in range(5)}
    nested = {chat.invoke("hi", pipeline_kwargs={"temperature": 1e-6}).content for _ in range(5)}
    return verdict(
        len(outer) == 1,
        f"5 answers with temperature=0.000001, {len(outer)} different; inside pipeline_kwargs= {len(nested)} different",
    )


@row("7a", "constructor max_tokens (from_model_id)")
def max_tokens() -> Verdict:
    """`from_model_id(..., max_tokens=4)` writes 4 tokens."""
    chat = ChatHuggingFace.from_model_id(str(FOLDER), max_tokens=4)
    with watch(chat, says=WORDS) as watched:
        chat.invoke("count")
    return verdict(watched.forwards == 4, f"{watched.forwards} tokens written")


@row("7b", "constructor max_tokens (ChatHuggingFace)")
def max_tokens_field() -> Verdict:
    """`ChatHuggingFace(llm=..., max_tokens=4)`, a documented field, writes 4 tokens."""
    chat = ChatHuggingFace(llm=load().llm, max_tokens=4)
    with watch(chat, says=WORDS) as watched:
        chat.invoke("count")
    return verdict(watched.forwards == 4, f"{watched.forwards} tokens written, chat.max_tokens is {chat.max_tokens}")


@row("8", "stop on invoke")
def stop() -> Verdict:
    """`invoke(..., stop=["four"])` ends before the stop string."""
    chat = load()
    with watch(chat, says=WORDS):
        content = chat.invoke("count", stop=["four"]).content
    return verdict(content == "one two three ", f"with stop=['four'] content was {quote(content)}")


@row("9a", "stop on stream, several tokens")
def stop_stream() -> Verdict:
    """`stream(..., stop=["four"])` ends before the stop string."""
    chat = load()
    with watch(chat, says=WORDS):
        text = merged(chat.stream("count", stop=["four"])).text
    return verdict(text == "one two three ", f"with stop=['four'] the stream was {quote(text)}")


@row("9b", "stop on stream, one token")
def stop_stream_token() -> Verdict:
    """A stop string that is one token of the vocabulary ends the text before it too."""
    chat = load()
    with watch(chat, says="1, 2, 3, 4"):
        text = merged(chat.stream("count", stop=["3"])).text
    return verdict(text == "1, 2, ", f"with stop=['3'] the stream was {quote(text)}")


@row("10", "seed")
def seed() -> Verdict:
    """Two sampled answers with one seed are the same."""
    chat = ChatHuggingFace(llm=load(sample=True).llm, seed=7)
    field = {chat.invoke("hi").content for _ in range(3)}
    call = {chat.invoke("hi", seed=7).content for _ in range(3)}
    return verdict(
        len(field) == len(call) == 1,
        f"3 answers with seed=7 in the constructor, {len(field)} different; in the call, {len(call)} different",
    )


@row("17", "usage on invoke")
def usage() -> Verdict:
    """The message has `usage_metadata`."""
    chat = load()
    with watch(chat, says="fine"):
        message = chat.invoke("hi")
    return verdict(bool(message.usage_metadata), f"usage_metadata is {message.usage_metadata}", "no")


@row("18", "usage on stream")
def usage_stream() -> Verdict:
    """The chunks add up to a message with `usage_metadata`, at least with `stream_usage=True`, a documented field."""
    chat = ChatHuggingFace(llm=load().llm, stream_usage=True)
    with watch(chat, says="fine"):
        message = merged(chat.stream("hi"))
    return verdict(
        bool(message.usage_metadata), f"with stream_usage=True usage_metadata is {message.usage_metadata}", "no"
    )


@row("19", "finish reason and model name")
def metadata() -> Verdict:
    """`response_metadata` says why the answer ended and which model wrote it, in `invoke` and `stream`."""
    chat = load()
    with watch(chat, says="fine"):
        found = [chat.invoke("hi").response_metadata, merged(chat.stream("hi")).response_metadata]
    good = all("finish_reason" in data and "model_name" in data for data in found)
    return verdict(good, f"response_metadata was {quote(found[0])} in invoke, {quote(found[1])} in stream", "no")


@row("20", "chat template used")
def template() -> Verdict:
    """The prompt is the conversation in the tokenizer's own chat template."""
    chat = load()
    with watch(chat, says="fine") as watched:
        chat.invoke("hi")
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    return verdict(watched.prompt == expected, f"the prompt was {quote(watched.prompt)}")


@row("21", "template variables, thinking switch")
def template_kwargs() -> Verdict:
    """A template's own variable, here `enable_thinking=False`, can be set in a call."""
    chat, prompts = load(), []
    with watch(chat, says="fine") as watched:
        for kwargs in ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}):
            chat.invoke("hi", **kwargs)
            prompts.append(watched.prompt)
    return verdict(
        any(prompt.endswith("<think></think>") for prompt in prompts),
        "with chat_template_kwargs={'enable_thinking': False}, and with enable_thinking=False, the prompts ended "
        + " and ".join(quote(prompt[-25:]) for prompt in prompts),
        "no",
    )


@row("22", "reasoning separated")
def reasoning() -> Verdict:
    """What the model thinks is not in the text of its answer, but in a reasoning block or field."""
    chat = load()
    with watch(chat, says="<think>twice two</think>four"):
        message = chat.invoke("2+2")
    apart = any(block["type"] == "reasoning" for block in message.content_blocks)
    return verdict(
        message.text == "four" and (apart or "reasoning_content" in message.additional_kwargs),
        f"content was {quote(message.content)}, additional_kwargs {message.additional_kwargs}",
        "no",
    )


@row("23", "BOS exactly once")
def bos() -> Verdict:
    """Where both chat template and tokenizer add a beginning-of-sequence token, the prompt has one."""
    chat = load(save(bos=True))
    with watch(chat, says="fine") as watched:
        chat.invoke("hi")
    count = watched.prompts[-1].count(0)
    return verdict(count == 1, f"the model was given {count} BOS tokens, the prompt began {quote(watched.prompt[:25])}")


@row("24", "list content")
def list_content() -> Verdict:
    """A message of text parts is the text of the parts."""
    chat = load()
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    with watch(chat, says="fine") as watched:
        chat.invoke([HumanMessage(parts)])
    return verdict("user\nhello world<" in watched.prompt, f"the prompt was {quote(watched.prompt, 130)}")


@row("25", "system prompt honoured")
def system() -> Verdict:
    """A system message is in the prompt, as such."""
    chat = load()
    with watch(chat, says="fine") as watched:
        chat.invoke([SystemMessage("be brief"), HumanMessage("hi")])
    return verdict(
        "<|im_start|>system\nbe brief<|im_end|>" in watched.prompt, f"the prompt was {quote(watched.prompt)}"
    )


@row("27", "context overflow reported")
def overflow() -> Verdict:
    """A prompt that is longer than the context window raises."""
    chat = load()
    with watch(chat, says="fine") as watched:
        result, warnings = warned(lambda: chat.invoke("x" * (WINDOW + 100)))
    what = f"raised {said(result)}" if isinstance(result, Exception) else f"answered {quote(result.content)}"
    longest = max(map(len, watched.prompts), default=0)
    return verdict(
        isinstance(result, Exception),
        f"{what}; the model was given {longest} tokens, its window is {WINDOW}; {len(warnings)} warnings were logged",
        "no",
    )


@row("28", "exact token counting")
def count() -> Verdict:
    """`get_num_tokens` counts the tokens of the model in use."""
    chat, asked = load(), []

    def refuse(name: str, **_: Any) -> None:
        asked.append(name)
        raise OSError("no network")

    with mock.patch.object(transformers.GPT2TokenizerFast, "from_pretrained", refuse):
        result = attempt(lambda: chat.get_num_tokens("hello world"))
    what = f"{result} tokens" if isinstance(result, int) else said(result)
    right = len(chat.tokenizer.encode("hello world"))
    return verdict(
        result == right, f"the model counts {right}; get_num_tokens asked for the tokenizer of {asked}: {what}", "no"
    )


@row("29", "cache tells models apart")
def cache() -> Verdict:
    """With LangChain's cache on, a second model does not get the first one's answer."""
    first, second = load(), load(save(seed=1), temperature=0.5)
    with watch(first, says="alpha"), watch(second, says="beta"):
        answers = answers_with_cache(first, second)
    return verdict(
        answers == ["alpha", "beta"],
        f"two models of two folders and two temperatures wrote 'alpha' and 'beta', the answers were {answers}",
    )


@row("30a", "LangSmith: model of a call")
def traced() -> Verdict:
    """A trace names the model that a call asks for."""
    chat = load()
    with watch(chat, says="fine"):
        name = traced_model(chat, model="other")
    return verdict(name == "other", f"invoke(..., model='other') was traced as {name!r}")


@row("30b", "LangSmith: model of the object")
def traced_default() -> Verdict:
    """A trace names the model in use."""
    chat = load()
    with watch(chat, says="fine"):
        name = traced_model(chat)
    return verdict(name == chat.model_id, f"model_id is the folder's path, the trace has {name!r}", "no")


@row("31", "safe under batch()")
def batch() -> Verdict:
    """`batch` on four threads gives what one call after the other gives, ten times over."""
    chat = load()
    prompts = [f"prompt {index}" * (index + 1) for index in range(8)]
    expected = [chat.invoke(prompt).content for prompt in prompts]
    wrong, errors = 0, set()
    for _ in range(10):
        results = chat.batch(prompts, config={"max_concurrency": 4}, return_exceptions=True)
        errors |= {said(result) for result in results if isinstance(result, Exception)}
        wrong += sum(
            isinstance(got, Exception) or got.content != want for got, want in zip(results, expected, strict=True)
        )
    return verdict(wrong == 0, f"{wrong} of 80 greedy answers differed {' '.join(errors)}".strip())


@row("32", "does not change the caller's history")
def history() -> Verdict:
    """The list of messages is the same after the call."""
    chat, messages = load(), [SystemMessage("be brief"), HumanMessage("hi")]
    before = [message.model_copy(deep=True) for message in messages]
    with watch(chat, says="fine"):
        chat.invoke(messages)
    return verdict(
        messages == before, f"{len(before)} messages before, {len(messages)} after, equal: {messages == before}"
    )


@row("33", "weights shared across configurable_fields")
def configurable() -> Verdict:
    """Three calls with three settings load nothing."""
    chat = load()
    configured = chat.configurable_fields(temperature=ConfigurableField(id="temperature"))
    loader = transformers.AutoModelForCausalLM.from_pretrained
    with (
        watch(chat, says="fine") as watched,
        mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", side_effect=loader) as loads,
    ):
        for temperature in (0.1, 0.2, 0.3):
            configured.invoke("hi", config={"configurable": {"temperature": temperature}})
    asked = len(watched.prompts)
    return verdict(
        loads.call_count == 0 and asked == 3, f"3 calls, {loads.call_count} loads, {asked} answers by the first model"
    )


@row("34", "speculation reachable")
def speculation() -> Verdict:
    """A draft model can be given, and saves forwards of the target: here it is the same model."""
    chat, draft = load(), load().llm.pipeline.model
    counts = {}
    for name, kwargs in {"plain": {}, "drafted": {"pipeline_kwargs": {"assistant_model": draft}}}.items():
        with watch(chat) as watched:
            content = attempt(lambda kwargs=kwargs: chat.invoke("hello", **kwargs).content)
        counts[name] = (watched.forwards, content)
    plain, drafted = counts["plain"], counts["drafted"]
    same = "the same answer" if plain[1] == drafted[1] else f"not the same answer: {quote(drafted[1])}"
    return verdict(
        drafted[0] < plain[0] and plain[1] == drafted[1],
        f"with pipeline_kwargs={{'assistant_model': ...}} {drafted[0]} target forwards instead of {plain[0]}, {same}",
    )


@row("35a", "speculation set per call")
def speculation_per_call() -> Verdict:
    """How many tokens are drafted can be set in a call."""
    chat, draft = load(), load().llm.pipeline.model
    draft.generation_config.assistant_confidence_threshold = 0.0
    forwards: dict[str, list[int]] = {}
    for name, says, kwargs in (
        ("prompt_lookup_num_tokens", "a" * 100, {}),
        ("num_assistant_tokens", "", {"assistant_model": draft}),
    ):
        for value in (2, 8):
            with watch(chat, says=says) as watched:
                chat.invoke("aaaaaaaa", pipeline_kwargs={name: value, **kwargs})
            forwards.setdefault(name, []).append(watched.forwards)
    return verdict(
        any(few != many for few, many in forwards.values()),
        "target forwards for 60 tokens, set to 2 and to 8 inside pipeline_kwargs=: "
        + ", ".join(f"{few} and {many} with {name}" for name, (few, many) in forwards.items()),
    )


@row("35b", "acceptance reported")
def acceptance() -> Verdict:
    """A drafted answer says how many drafted tokens were kept."""
    chat, draft = load(), load().llm.pipeline.model
    message = chat.invoke("hello", pipeline_kwargs={"assistant_model": draft})
    found = {**message.response_metadata, **message.additional_kwargs, **(message.usage_metadata or {})}
    return verdict(
        any(word in str(found).lower() for word in ("draft", "accept", "assistant")),
        f"with a draft model, all metadata of the answer together was {found}",
        "no",
    )


@row("36", "model profile")
def profile() -> Verdict:
    """A pipeline of a model that the package has a profile of makes a chat model with that profile."""
    name = next(iter(_PROFILES))
    pipeline = HuggingFacePipeline(pipeline=load().llm.pipeline, model_id=name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    inferred = ChatHuggingFace(llm=pipeline, tokenizer=tokenizer)
    given = ChatHuggingFace(llm=pipeline, tokenizer=tokenizer, model_id=name)
    return verdict(
        bool(inferred.profile),
        f"llm.model_id={name!r}: profile is {quote(inferred.profile, 40)} with chat.model_id resolved to "
        f"{inferred.model_id!r}, and has {len(given.profile or {})} entries if model_id= is given once more",
    )


if __name__ == "__main__":
    main(
        "ChatHuggingFace",
        ("langchain-huggingface", "langchain-core", "transformers", "huggingface-hub", "torch"),
        note="Over HuggingFacePipeline.from_model_id on a local folder with a tiny random Llama.",
    )
