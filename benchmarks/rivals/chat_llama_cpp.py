"""ChatLlamaCpp (langchain-community) over a stand-in for `llama_cpp`, row by row.

llama-cpp-python has no wheels on the package index, it has to be compiled. These rows are about the integration's own
Python code: which arguments it passes on, what it makes of a response, when it loads. The stand-in has the signature of
the real `Llama.create_chat_completion`, keeps its arguments, and answers WORDS in the real format.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField
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
    work_after_cancel,
)

WORDS = "one two three four five six seven eight nine ten"


class Llama:
    """Stand-in for `llama_cpp.Llama`."""

    loaded: int = 0
    loads: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    written = 0
    closed = 0
    delay = 0.0
    at_once = 0
    most_at_once = 0
    _lock = threading.Lock()

    def __init__(self, model_path: str, **kwargs: Any) -> None:
        Llama.loads.append({"model_path": model_path, **kwargs})
        self.model_path = model_path

    @classmethod
    def reset(cls, delay: float = 0.0) -> None:
        """Forgets all loads and calls; every word takes `delay` seconds from now on."""
        cls.loads, cls.calls, cls.written, cls.closed, cls.delay, cls.most_at_once = [], [], 0, 0, delay, 0

    def create_chat_completion(
        self,
        messages: list[dict[str, Any]],
        functions: Any = None,
        function_call: Any = None,
        tools: Any = None,
        tool_choice: Any = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: Any = (),
        seed: int | None = None,
        response_format: Any = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: Any = None,
        grammar: Any = None,
        logit_bias: Any = None,
        logprobs: Any = None,
        top_logprobs: Any = None,
    ) -> Any:
        """WORDS, cut at `max_tokens` words and before a stop string; no usage in a stream, like the real one."""
        Llama.calls.append({key: value for key, value in locals().items() if key != "self"})
        answer = self.model_path if self.model_path.startswith("says-") else WORDS
        text = answer
        for string in stop or ():
            text = text.split(string)[0]
        words = text.split(" ")
        reason = "stop"
        if max_tokens and len(words) > max_tokens:
            words, reason = words[:max_tokens], "length"
        pieces = [word if index == 0 else " " + word for index, word in enumerate(words)]
        head = {"id": "chatcmpl-1", "created": 0, "model": self.model_path}
        if stream:
            return self._stream(head, pieces, reason)
        written = "".join(self._write(pieces))
        message = {"role": "assistant", "content": written}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        usage = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
        return {**head, "object": "chat.completion", "choices": [choice], "usage": usage}

    def _stream(self, head: dict[str, Any], pieces: list[str], reason: str) -> Iterator[dict[str, Any]]:
        def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            return {**head, "object": "chat.completion.chunk", "choices": [choice]}

        yield chunk({"role": "assistant"})
        for piece in self._write(pieces):
            yield chunk({"content": piece})
        yield chunk({}, reason)

    def _write(self, pieces: list[str]) -> Iterator[str]:
        with Llama._lock:
            Llama.at_once += 1
            Llama.most_at_once = max(Llama.most_at_once, Llama.at_once)
        try:
            for piece in pieces:
                time.sleep(Llama.delay)
                Llama.written += 1
                yield piece
        except GeneratorExit:
            Llama.closed += 1
            raise
        finally:
            with Llama._lock:
                Llama.at_once -= 1


sys.modules["llama_cpp"] = types.ModuleType("llama_cpp")
sys.modules["llama_cpp"].Llama = Llama
sys.modules["llama_cpp"].LlamaGrammar = type("LlamaGrammar", (), {})

from langchain_community.chat_models import ChatLlamaCpp  # noqa: E402


def load(model_path: str = "tiny.gguf", delay: float = 0.0, **kwargs: Any) -> ChatLlamaCpp:
    """A model on the stand-in, whose record begins with this load."""
    Llama.reset(delay)
    return ChatLlamaCpp(model_path=model_path, verbose=False, **kwargs)


def merged(chunks: Any) -> AIMessageChunk:
    """The chunks of a stream as one message."""
    first, *others = list(chunks)
    return first.__add__(others) if others else first


@row("2", "sync streaming")
def stream() -> Verdict:
    """The answer arrives in pieces that add up to it."""
    pieces = [chunk.text for chunk in load().stream("count") if chunk.text]
    return verdict(
        "".join(pieces) == WORDS and len(pieces) > 1, f"{len(pieces)} pieces, joined {quote(''.join(pieces))}"
    )


@row("3", "ainvoke")
def ainvoke() -> Verdict:
    """`ainvoke` answers and leaves the event loop running."""
    llm = load(delay=0.05)
    return loop_verdict(loop_turns(lambda: llm.ainvoke("count")))


@row("4", "astream")
def astream() -> Verdict:
    """`astream` answers and leaves the event loop running."""
    llm = load(delay=0.05)

    async def consume() -> list[Any]:
        return [chunk async for chunk in llm.astream("count")]

    return loop_verdict(loop_turns(consume))


@row("5a", "closing a stream stops compute")
def close() -> Verdict:
    """Closing a stream closes llama.cpp's own generator."""
    pieces = load(delay=0.02).stream("count")
    while not Llama.written:
        next(pieces)
    pieces.close()
    written = Llama.written
    time.sleep(0.5)
    after = Llama.written - written
    return verdict(
        after <= 1 and Llama.closed == 1, f"{after} words after the close, generators closed: {Llama.closed}", "no"
    )


@row("5b", "cancelling ainvoke stops compute")
def cancel() -> Verdict:
    """After a call is cancelled, at most one more token is written."""
    llm = load(delay=0.05)
    outcome, before, after = work_after_cancel(lambda: llm.ainvoke("count"), lambda: Llama.written)
    return verdict(
        outcome == "cancelled" and after <= 1,
        f"with a time limit of 0.1 s it was {outcome}; {before} words were written before, {after} in 0.5 s after",
        "no",
    )


@row("6", "per-call temperature, max_tokens")
def per_call() -> Verdict:
    """`invoke(..., temperature=0.5, max_tokens=4)` reaches llama.cpp."""
    load().invoke("count", temperature=0.5, max_tokens=4)
    call = Llama.calls[-1]
    return verdict(
        (call["temperature"], call["max_tokens"]) == (0.5, 4),
        f"the stand-in got temperature={call['temperature']}, max_tokens={call['max_tokens']}",
    )


@row("7", "constructor max_tokens")
def max_tokens() -> Verdict:
    """`ChatLlamaCpp(max_tokens=4)` reaches llama.cpp."""
    load(max_tokens=4).invoke("count")
    return verdict(Llama.calls[-1]["max_tokens"] == 4, f"the stand-in got max_tokens={Llama.calls[-1]['max_tokens']}")


@row("8", "stop on invoke")
def stop() -> Verdict:
    """`invoke(..., stop=["four"])` reaches llama.cpp."""
    content = load().invoke("count", stop=["four"]).content
    return verdict(
        Llama.calls[-1]["stop"] == ["four"],
        f"the stand-in got stop={Llama.calls[-1]['stop']}, content was {quote(content)}",
    )


@row("9", "stop on stream")
def stop_stream() -> Verdict:
    """`stream(..., stop=["four"])` reaches llama.cpp."""
    text = merged(load().stream("count", stop=["four"])).text
    return verdict(
        Llama.calls[-1]["stop"] == ["four"],
        f"the stand-in got stop={Llama.calls[-1]['stop']}, the stream was {quote(text)}",
    )


@row("10a", "seed in the constructor")
def seed() -> Verdict:
    """A seed of the constructor reaches llama.cpp."""
    load(seed=7)
    return verdict(Llama.loads[-1]["seed"] == 7, f"the stand-in got seed={Llama.loads[-1]['seed']}")


@row("10b", "seed in a call")
def seed_call() -> Verdict:
    """A seed of a call reaches llama.cpp."""
    load().invoke("count", seed=7)
    return verdict(Llama.calls[-1]["seed"] == 7, f"the stand-in got seed={Llama.calls[-1]['seed']}")


@row("17", "usage on invoke")
def usage() -> Verdict:
    """llama.cpp's token counts are in `usage_metadata`, whether `streaming` is on, the default, or off."""
    on, off = load().invoke("hi").usage_metadata, load(streaming=False).invoke("hi").usage_metadata
    return verdict(
        bool(on and off),
        f"usage_metadata is {on}, and with streaming=False, where the response has counts, {off}",
        "no",
    )


@row("18", "usage on stream")
def usage_stream() -> Verdict:
    """The chunks add up to a message with `usage_metadata`."""
    found = merged(load().stream("hi")).usage_metadata
    return verdict(bool(found), f"usage_metadata is {found}", "no")


@row("19", "finish reason and model name")
def metadata() -> Verdict:
    """`response_metadata` says why the answer ended and which model wrote it, in `invoke` and `stream`."""
    found = [load().invoke("hi").response_metadata, merged(load().stream("hi")).response_metadata]
    good = all("finish_reason" in data and "model_name" in data for data in found)
    return verdict(good, f"response_metadata was {found[0]} in invoke, {found[1]} in stream", "no")


@row("21", "template variables, thinking switch")
def template_kwargs() -> Verdict:
    """Variables of the chat template can be set in a call."""
    result = attempt(lambda: load().invoke("hi", chat_template_kwargs={"enable_thinking": False}))
    what = said(result) if isinstance(result, Exception) else f"the stand-in got {sorted(Llama.calls[-1])}"
    return verdict("enable_thinking" in str(Llama.calls), what, "no")


@row("24", "list content")
def list_content() -> Verdict:
    """A message of text parts reaches llama.cpp, whose format it is."""
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    load().invoke([HumanMessage(parts)])
    content = Llama.calls[-1]["messages"][0]["content"]
    return verdict(content in (parts, "hello world"), f"the stand-in got content {content!r}")


@row("25", "system prompt honoured")
def system() -> Verdict:
    """A system message reaches llama.cpp as such."""
    load().invoke([SystemMessage("be brief"), HumanMessage("hi")])
    roles = [(message["role"], message["content"]) for message in Llama.calls[-1]["messages"]]
    return verdict(roles == [("system", "be brief"), ("user", "hi")], f"the stand-in got {roles}")


@row("28", "exact token counting")
def count() -> Verdict:
    """`get_num_tokens` counts the tokens of the model in use: it asks llama.cpp, whose method is `tokenize`."""
    llm, asked = load(), []
    llm.client.tokenize = lambda text, *_, **__: asked.append(text) or [0, 1]
    result = attempt(lambda: llm.get_num_tokens("hello world"))
    what = f"{result} tokens" if isinstance(result, int) else said(result, 200)
    return verdict(result == 2 and bool(asked), f"the stand-in was asked {len(asked)} times; {what}", "no")


@row("29", "cache tells models and settings apart")
def cache() -> Verdict:
    """With LangChain's cache on, a second model, or the first at another temperature, is asked anew."""
    first, second = load("says-alpha"), load("says-beta")
    third = load("says-beta", temperature=0.1)
    answers = answers_with_cache(first, second, third)
    return verdict(
        answers == ["says-alpha", "says-beta", "says-beta"] and len(Llama.calls) == 3,
        f"two models, one at two temperatures: answers {answers}, {len(Llama.calls)} of 3 from the stand-in",
    )


@row("30a", "LangSmith: model of a call")
def traced() -> Verdict:
    """A trace names the model that a call asks for."""
    name = traced_model(load(), model="other")
    return verdict(name == "other", f"invoke(..., model='other') was traced as {name!r}")


@row("30b", "LangSmith: model of the object")
def traced_default() -> Verdict:
    """A trace names the model in use."""
    name = traced_model(load())
    return verdict(bool(name), f"model_path is 'tiny.gguf', the trace has {name!r}", "no")


@row("31", "safe under batch()")
def batch() -> Verdict:
    """`batch` on four threads does not enter one llama.cpp context twice at a time."""
    load(delay=0.02).batch(["count"] * 4, config={"max_concurrency": 4})
    return verdict(
        Llama.most_at_once == 1,
        f"{Llama.most_at_once} calls were inside one Llama object, the stand-in, at a time",
        "no",
    )


@row("32", "does not change the caller's history")
def history() -> Verdict:
    """The list of messages is the same after the call."""
    messages = [SystemMessage("be brief"), HumanMessage("hi")]
    before = [message.model_copy(deep=True) for message in messages]
    load().invoke(messages)
    return verdict(
        messages == before, f"{len(before)} messages before, {len(messages)} after, equal: {messages == before}"
    )


@row("33", "weights shared across configurable_fields")
def configurable() -> Verdict:
    """Three calls with three settings load nothing."""
    configured = load().configurable_fields(temperature=ConfigurableField(id="temperature"))
    before = len(Llama.loads)
    for temperature in (0.1, 0.2, 0.3):
        configured.invoke("hi", config={"configurable": {"temperature": temperature}})
    loads = len(Llama.loads) - before
    return verdict(loads == 0, f"3 calls loaded the stand-in {loads} times, after the first load")


@row("34", "speculation reachable")
def speculation() -> Verdict:
    """A draft model reaches llama.cpp."""
    draft = object()
    load(model_kwargs={"draft_model": draft})
    got = Llama.loads[-1].get("draft_model") is draft
    return verdict(got, f"with model_kwargs={{'draft_model': ...}} the stand-in got it: {got}")


@row("35", "speculation set per call")
def speculation_per_call() -> Verdict:
    """A draft model, or how much it drafts, can be set in a call."""
    results = {
        name: attempt(lambda name=name, value=value: load().invoke("hi", **{name: value}))
        for name, value in (("draft_model", object()), ("num_pred_tokens", 4))
    }
    what = "; ".join(
        f"{name}: {said(result, 80) if isinstance(result, Exception) else 'accepted'}"
        for name, result in results.items()
    )
    return verdict(any(not isinstance(result, Exception) for result in results.values()), what, "no")


@row("36", "model profile")
def profile() -> Verdict:
    """The object says what its model can do."""
    found = load().profile
    return verdict(bool(found), f"profile is {found}", "no")


if __name__ == "__main__":
    main(
        "ChatLlamaCpp (stand-in)",
        ("langchain-community", "langchain-core"),
        "llama_cpp is a stand-in here: llama-cpp-python has to be compiled. What llama.cpp itself does was not run.",
        "Not run, needs llama.cpp compiled: 1, 20, 22, 23, 27.",
        "5, 8, 9, 10, 24, 31, 34: only what llama.cpp is given was seen, not what it makes of it.",
    )
