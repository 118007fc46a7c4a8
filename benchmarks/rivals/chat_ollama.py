"""ChatOllama (langchain-ollama) against a small HTTP server that records what it is sent, row by row.

The server speaks Ollama's `/api/chat`, one JSON document per line, and is no model: it says WORDS. Rows that are about
what an Ollama server does with a request are not run.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_ollama import ChatOllama
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


class Server(ThreadingHTTPServer):
    """A server on a free port of this machine."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.pieces_sent = 0
        self.delay = 0.0
        self.thinking = ""
        self.fails_after: int | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reset(self, *, delay: float = 0.0, thinking: str = "", fails_after: int | None = None) -> None:
        """Forgets all requests and sets how it answers from now on."""
        self.requests, self.pieces_sent = [], 0
        self.delay, self.thinking, self.fails_after = delay, thinking, fails_after


class Handler(BaseHTTPRequestHandler):
    """One request: the answer word by word, then counts and the reason for its end."""

    server: Server

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_POST(self) -> None:
        """Answers, until the client has gone."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()
        answer = body["model"] if body["model"].startswith("says-") else WORDS
        words = [word + " " for word in answer.split()]
        words[-1] = words[-1].rstrip()
        try:
            if self.server.thinking:
                self._send({"message": {"role": "assistant", "content": "", "thinking": self.server.thinking}})
            for number, word in enumerate(words):
                if number == self.server.fails_after:
                    self._line({"error": "out of memory"})
                    return
                self._send({"message": {"role": "assistant", "content": word}})
            self._send(
                {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"}
                | {"prompt_eval_count": 7, "eval_count": len(words)}
            )
        except OSError:
            return

    def _send(self, part: dict[str, Any]) -> None:
        model = self.server.requests[-1]["model"]
        self._line({"model": model, "created_at": "2026-01-01T00:00:00Z", "done": False, **part})
        self.server.pieces_sent += 1
        time.sleep(self.server.delay)

    def _line(self, document: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(document).encode() + b"\n")
        self.wfile.flush()


SERVER = Server()


def load(**kwargs: Any) -> ChatOllama:
    """The model on the fake server."""
    return ChatOllama(**{"model": "tiny", "base_url": f"http://127.0.0.1:{SERVER.server_port}", **kwargs})


def sent(llm: Any, messages: Any = "hi", **kwargs: Any) -> dict[str, Any] | Exception:
    """The request that a call makes, or the exception that it raises before it."""
    SERVER.reset()
    result = attempt(lambda: llm.invoke(messages, **kwargs))
    if SERVER.requests:
        return SERVER.requests[-1]
    return result if isinstance(result, Exception) else RuntimeError("nothing was sent")


def options(request: dict[str, Any] | Exception) -> str:
    """The options of a request, or the exception instead of it."""
    return said(request) if isinstance(request, Exception) else f"options {request.get('options')}"


def option(request: dict[str, Any] | Exception, name: str) -> Any:
    """One option of a request."""
    return None if isinstance(request, Exception) else request["options"].get(name)


def merged(chunks: Any) -> AIMessageChunk:
    """The chunks of a stream as one message."""
    first, *others = list(chunks)
    return first.__add__(others) if others else first


@row("2a", "sync streaming")
def stream() -> Verdict:
    """The answer arrives in pieces that add up to it."""
    SERVER.reset()
    pieces = [chunk.text for chunk in load().stream("count") if chunk.text]
    return verdict(
        "".join(pieces) == WORDS and len(pieces) > 1, f"{len(pieces)} pieces, joined {quote(''.join(pieces))}"
    )


@row("2b", "error while streaming reaches the caller")
def stream_error() -> Verdict:
    """An error that the server reports in the middle of an answer is raised."""
    SERVER.reset(fails_after=3)
    result = attempt(lambda: list(load().stream("count")))
    what = said(result) if isinstance(result, Exception) else f"{len(result)} chunks and no exception"
    return verdict("out of memory" in str(result), f"the server reported 'out of memory', the caller got {what}")


@row("3", "ainvoke")
def ainvoke() -> Verdict:
    """`ainvoke` answers and leaves the event loop running."""
    SERVER.reset(delay=0.05)
    return loop_verdict(loop_turns(lambda: load().ainvoke("count")))


@row("4", "astream")
def astream() -> Verdict:
    """`astream` answers and leaves the event loop running."""
    SERVER.reset(delay=0.05)

    async def consume() -> list[Any]:
        return [chunk async for chunk in load().astream("count")]

    return loop_verdict(loop_turns(consume))


@row("5a", "closing a stream closes the connection")
def close() -> Verdict:
    """After a stream is closed, the server cannot send more than the piece it is at."""
    SERVER.reset(delay=0.1)
    pieces = load().stream("count")
    next(pieces)
    pieces.close()
    at_close = SERVER.pieces_sent
    time.sleep(1.5)
    after = SERVER.pieces_sent - at_close
    return verdict(after <= 2, f"of 11 pieces {at_close} were sent until the stream was closed, {after} after it", "no")


@row("5b", "cancelling ainvoke closes the connection")
def cancel() -> Verdict:
    """After a call is cancelled, the server cannot send more than the piece it is at."""
    SERVER.reset(delay=0.1)
    outcome, before, after = work_after_cancel(lambda: load().ainvoke("count"), lambda: SERVER.pieces_sent)
    return verdict(
        outcome == "cancelled" and after <= 2,
        f"with a time limit of 0.1 s it was {outcome}; of 11 pieces {before} were sent before, {after} in 0.5 s after",
        "no",
    )


@row("6a", "per-call temperature, max_tokens")
def per_call() -> Verdict:
    """`invoke(..., temperature=0.5)` and a limit of tokens are sent."""
    llm = load()
    results = {name: sent(llm, **{name: value}) for name, value in (("temperature", 0.5), ("num_predict", 4))}
    results["max_tokens"] = sent(llm, max_tokens=4)
    good = option(results["temperature"], "temperature") == 0.5 and 4 in (
        option(results["num_predict"], "num_predict"),
        option(results["max_tokens"], "num_predict"),
    )
    return verdict(good, "; ".join(f"{name}: {options(result)}" for name, result in results.items()))


@row("6b", "per-call options keep the constructor's")
def call_options() -> Verdict:
    """`invoke(..., options={"temperature": 0.5})` keeps what the constructor set for everything else."""
    llm = load(seed=7, num_ctx=4096)
    plain, changed = sent(llm), sent(llm, options={"temperature": 0.5})
    good = option(changed, "temperature") == 0.5 and option(changed, "seed") == 7
    return verdict(good, f"{options(plain)} without, {options(changed)} with options={{'temperature': 0.5}}")


@row("7", "constructor max_tokens")
def max_tokens() -> Verdict:
    """`ChatOllama(max_tokens=4)` limits the answer, or raises."""
    made = attempt(lambda: load(max_tokens=4))
    if isinstance(made, Exception):
        return verdict(False, said(made), "no")
    request, other = sent(made), sent(load(num_predict=4))
    return verdict(
        option(request, "num_predict") == 4, f"accepted, sent {options(request)}; with num_predict=4 {options(other)}"
    )


@row("8a", "stop on invoke")
def stop() -> Verdict:
    """A stop string of a call is sent."""
    request = sent(load(), stop=["four"])
    return verdict(option(request, "stop") == ["four"], options(request))


@row("8b", "stop in the constructor and in the call")
def stop_both() -> Verdict:
    """A stop string of a call is sent where the constructor has one too."""
    request = sent(load(stop=["three"]), stop=["four"])
    return verdict("four" in (option(request, "stop") or []), options(request))


@row("9", "stop on stream")
def stop_stream() -> Verdict:
    """A stop string of a stream is sent."""
    SERVER.reset()
    list(load().stream("count", stop=["four"]))
    request = SERVER.requests[-1]
    return verdict(option(request, "stop") == ["four"], options(request))


@row("10a", "seed in the constructor")
def seed() -> Verdict:
    """A seed of the constructor is sent."""
    request = sent(load(seed=7))
    return verdict(option(request, "seed") == 7, options(request))


@row("10b", "seed in a call")
def seed_call() -> Verdict:
    """A seed of a call is sent."""
    request = sent(load(), seed=7)
    return verdict(option(request, "seed") == 7, options(request))


@row("17", "usage on invoke")
def usage() -> Verdict:
    """The server's token counts are in `usage_metadata`."""
    SERVER.reset()
    found = load().invoke("hi").usage_metadata or {}
    return verdict(
        (found.get("input_tokens"), found.get("output_tokens")) == (7, 10), f"the server said 7 and 10, found {found}"
    )


@row("18", "usage on stream")
def usage_stream() -> Verdict:
    """The server's token counts are in the chunks' `usage_metadata`."""
    SERVER.reset()
    found = merged(load().stream("hi")).usage_metadata or {}
    return verdict(
        (found.get("input_tokens"), found.get("output_tokens")) == (7, 10), f"the server said 7 and 10, found {found}"
    )


@row("19", "finish reason and model name")
def metadata() -> Verdict:
    """`response_metadata` says why the answer ended and which model wrote it, in `invoke` and `stream`."""
    SERVER.reset()
    found = [load().invoke("hi").response_metadata, merged(load().stream("hi")).response_metadata]
    good = all(data.get("done_reason") == "stop" and data.get("model_name") == "tiny" for data in found)
    short = [{name: data.get(name) for name in ("done_reason", "model_name")} for data in found]
    return verdict(good, f"response_metadata had {short[0]} in invoke, {short[1]} in stream", "no")


@row("21a", "thinking switch")
def thinking() -> Verdict:
    """Thinking can be switched off in a call."""
    request = sent(load(reasoning=True), reasoning=False)
    what = said(request) if isinstance(request, Exception) else f"'think' was sent as {request.get('think')}"
    return verdict(not isinstance(request, Exception) and request.get("think") is False, what)


@row("21b", "template variables")
def template_kwargs() -> Verdict:
    """Variables of the chat template can be set in a call."""
    request = sent(load(), chat_template_kwargs={"enable_thinking": False})
    what = said(request) if isinstance(request, Exception) else f"keys sent: {sorted(request)}"
    return verdict("enable_thinking" in str(request) and not isinstance(request, Exception), what, "no")


@row("22", "reasoning separated")
def reasoning() -> Verdict:
    """What the server sends as thinking is not in the text of the answer, but in a reasoning field."""
    SERVER.reset(thinking="twice two")
    message = load(reasoning=True).invoke("2+2")
    return verdict(
        message.text == WORDS and message.additional_kwargs.get("reasoning_content") == "twice two",
        f"with reasoning=True content was {quote(message.content)}, additional_kwargs {message.additional_kwargs}",
    )


@row("24", "list content")
def list_content() -> Verdict:
    """A message of text parts is sent as the text of the parts, and nothing before it."""
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    request = sent(load(), [HumanMessage(parts)])
    if isinstance(request, Exception):
        return verdict(False, said(request))
    content = request["messages"][0]["content"]
    return verdict(content.startswith("hello") and content.endswith("world"), f"the content sent was {content!r}")


@row("25", "system prompt honoured")
def system() -> Verdict:
    """A system message is sent as such."""
    request = sent(load(), [SystemMessage("be brief"), HumanMessage("hi")])
    roles = [] if isinstance(request, Exception) else [(part["role"], part["content"]) for part in request["messages"]]
    return verdict(roles == [("system", "be brief"), ("user", "hi")], f"sent {roles}")


@row("28", "exact token counting")
def count() -> Verdict:
    """`get_num_tokens` counts the tokens of the model in use, so it asks the server or has the model's tokenizer."""
    SERVER.reset()
    result = attempt(lambda: load().get_num_tokens("hello world"))
    what = f"{result} tokens" if isinstance(result, int) else said(result, 200)
    return verdict(
        isinstance(result, int) and bool(SERVER.requests),
        f"{len(SERVER.requests)} requests to the server; {what}",
        "no",
    )


@row("29a", "cache tells models apart")
def cache() -> Verdict:
    """With LangChain's cache on, a second model does not get the first one's answer."""
    SERVER.reset()
    answers = answers_with_cache(load(model="says-alpha"), load(model="says-beta"))
    return verdict(
        answers == ["says-alpha", "says-beta"],
        f"models 'says-alpha' and 'says-beta' say their names, the answers were {answers}",
    )


@row("29b", "cache tells temperatures apart")
def cache_temperature() -> Verdict:
    """With LangChain's cache on, the same model at another temperature is asked anew."""
    SERVER.reset()
    answers_with_cache(load(temperature=0.1), load(temperature=0.9))
    return verdict(len(SERVER.requests) == 2, f"temperatures 0.1 and 0.9: {len(SERVER.requests)} requests were sent")


@row("30a", "LangSmith: model of a call")
def traced() -> Verdict:
    """A trace names the model that a call asks for."""
    SERVER.reset()
    name = traced_model(load(), model="other")
    used = SERVER.requests[-1]["model"]
    return verdict(name == used, f"invoke(..., model='other') was sent with model {used!r} and traced as {name!r}")


@row("30b", "LangSmith: model of the object")
def traced_default() -> Verdict:
    """A trace names the model in use."""
    SERVER.reset()
    name = traced_model(load())
    return verdict(name == "tiny", f"the model is 'tiny', the trace has {name!r}", "no")


@row("32", "does not change the caller's history")
def history() -> Verdict:
    """The list of messages is the same after the call."""
    messages = [SystemMessage("be brief"), HumanMessage("hi")]
    before = [message.model_copy(deep=True) for message in messages]
    sent(load(), messages)
    return verdict(
        messages == before, f"{len(before)} messages before, {len(messages)} after, equal: {messages == before}"
    )


@row("34", "speculation reachable")
def speculation() -> Verdict:
    """A draft model can be named."""
    made = attempt(lambda: load(draft_model="small"))
    if isinstance(made, Exception):
        return verdict(False, said(made), "no")
    request = sent(made)
    fields = [name for name in ChatOllama.model_fields if "draft" in name or "specul" in name or "assist" in name]
    keys = request if isinstance(request, Exception) else sorted(request)
    return verdict(
        "small" in str(request) and not isinstance(request, Exception),
        f"fields about drafting: {fields}; draft_model='small' was accepted, the keys sent were {keys}",
        "no",
    )


@row("35", "speculation set per call")
def speculation_per_call() -> Verdict:
    """A draft model, or how much it drafts, can be set in a call."""
    requests = {name: sent(load(), **{name: value}) for name, value in (("draft_model", "small"), ("num_draft", 4))}
    good = any(not isinstance(request, Exception) and name in str(request) for name, request in requests.items())
    return verdict(good, "; ".join(f"{name}: {options(request)}" for name, request in requests.items()), "no")


@row("36", "model profile")
def profile() -> Verdict:
    """The object says what its model can do."""
    found = load(model="llama3.1:8b").profile
    return verdict(bool(found), f"model 'llama3.1:8b': profile is {found}", "no")


if __name__ == "__main__":
    main(
        "ChatOllama",
        ("langchain-ollama", "langchain-core", "ollama"),
        "No Ollama server: against a fake one on localhost, which records requests and answers with fixed words.",
        "Not tried, needs a real server: 1, 20, 23, 27, 31 (prompt, template, BOS, overflow, concurrency).",
        "5, 8, 9, 10, 21: only what is sent was seen, not what a real server makes of it.",
    )
