"""HuggingFaceLLM (llama-index-llms-huggingface) on a local folder, row by row."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llama_index.core.llms import ChatMessage, TextBlock
from llama_index.llms.huggingface import HuggingFaceLLM
from rows import (
    Verdict,
    attempt,
    loop_turns,
    loop_verdict,
    main,
    quote,
    row,
    said,
    verdict,
    warned,
    within,
    work_after_cancel,
)
from tiny_model import WINDOW, Watch, save

FOLDER = save()
WORDS = "one two three four five six seven eight nine ten"


def load(folder: Path = FOLDER, **kwargs: Any) -> HuggingFaceLLM:
    """The model as its documentation loads it."""
    options = {"max_new_tokens": 60, "context_window": WINDOW, "device_map": "cpu", **kwargs}
    return HuggingFaceLLM(model_name=str(folder), tokenizer_name=str(folder), **options)


def watch(llm: HuggingFaceLLM, **kwargs: Any) -> Watch:
    """A watch on the model inside."""
    return Watch(llm._model, llm._tokenizer, **kwargs)


def user(text: str) -> list[ChatMessage]:
    """A conversation of one message."""
    return [ChatMessage(role="user", content=text)]


def joined(pieces: Any) -> str:
    """The text of a stream."""
    return "".join(piece.delta for piece in pieces)


@row("1", "reply without prompt echo")
def echo() -> Verdict:
    """The answer is the answer, with no option set."""
    llm = load()
    with watch(llm, says="fine"):
        text = llm.chat(user("how are you?")).message.content
    return verdict(text == "fine", f"the model wrote 'fine', content was {quote(text)}")


@row("2a", "sync streaming")
def stream() -> Verdict:
    """The answer arrives in pieces that add up to it."""
    llm = load()
    with watch(llm, says=WORDS):
        pieces = [piece.delta for piece in llm.stream_chat(user("count")) if piece.delta]
    return verdict(
        "".join(pieces) == WORDS and len(pieces) > 1, f"{len(pieces)} pieces, joined {quote(''.join(pieces))}"
    )


@row("2b", "error while streaming reaches the caller")
def stream_error() -> Verdict:
    """A model that fails while streaming raises its own exception, at once."""
    llm = load()
    with watch(llm, error=RuntimeError("out of memory")):
        result = within(10, lambda: list(llm.stream_chat(user("count"))))
    what = said(result) if isinstance(result, Exception) else f"{len(result)} pieces and no exception"
    return verdict(
        "out of memory" in str(result), f"the model raised RuntimeError('out of memory'), the caller got {what}"
    )


@row("3", "achat")
def achat() -> Verdict:
    """`achat` answers and leaves the event loop running."""
    llm = load()
    with watch(llm, says=WORDS, delay=0.01):
        return loop_verdict(loop_turns(lambda: llm.achat(user("count"))))


@row("4", "astream_chat")
def astream() -> Verdict:
    """`astream_chat` answers and leaves the event loop running."""
    llm = load()

    async def consume() -> list[Any]:
        return [piece async for piece in await llm.astream_chat(user("count"))]

    with watch(llm, says=WORDS, delay=0.01):
        return loop_verdict(loop_turns(consume))


@row("5a", "closing a stream stops compute")
def close() -> Verdict:
    """A stream closed after its first piece, long before the end, costs at most one more token."""
    llm = load()
    with watch(llm, says=WORDS, delay=0.02) as watched:
        pieces = llm.stream_chat(user("count"))
        next(pieces)
        pieces.close()
        at_close = watched.forwards
        time.sleep(2)
        after = watched.forwards - at_close
    return verdict(
        at_close < 10 and after <= 1, f"{at_close} forwards until the stream was closed, {after} more after it", "no"
    )


@row("5b", "cancelling achat stops compute")
def cancel() -> Verdict:
    """`achat` under a time limit of 0.1 s is cancelled, and the model computes at most one more token."""
    llm = load()
    with watch(llm, says=WORDS, delay=0.02) as watched:
        outcome, before, after = work_after_cancel(lambda: llm.achat(user("count")), lambda: watched.forwards)
    return verdict(
        outcome == "cancelled" and after <= 1,
        f"with a time limit of 0.1 s it was {outcome}, after {before} forwards of 20 ms and more; {after} followed",
        "no",
    )


@row("6a", "per-call max tokens")
def call_max_tokens() -> Verdict:
    """`chat(..., max_new_tokens=4)` or `max_tokens=4` writes 4 tokens."""
    llm, counts = load(), {}
    for name in ("max_new_tokens", "max_tokens"):
        with watch(llm, says=WORDS) as watched:
            llm.chat(user("count"), **{name: 4})
        counts[name] = watched.forwards
    return verdict(
        4 in counts.values(), "tokens written: " + ", ".join(f"{count} with {name}=4" for name, count in counts.items())
    )


@row("6b", "per-call temperature")
def call_temperature() -> Verdict:
    """At `temperature=0.000001` five sampled answers are the same, whatever the model's own temperature."""
    llm = load(generate_kwargs={"do_sample": True, "temperature": 5.0})
    texts = {llm.chat(user("hi"), temperature=1e-6).message.content for _ in range(5)}
    return verdict(len(texts) == 1, f"5 answers with temperature=0.000001, {len(texts)} different")


@row("7", "constructor max_new_tokens")
def max_tokens() -> Verdict:
    """`HuggingFaceLLM(max_new_tokens=4)` writes 4 tokens."""
    llm = load(max_new_tokens=4)
    with watch(llm, says=WORDS) as watched:
        llm.chat(user("count"))
    other = attempt(lambda: load(max_tokens=4))
    what = said(other) if isinstance(other, Exception) else "it was accepted"
    return verdict(
        watched.forwards == 4,
        f"{watched.forwards} tokens written; with max_tokens=4 {what}",
    )


@row("8", "stop on chat")
def stop() -> Verdict:
    """`chat(..., stop=["four"])` ends before the stop string."""
    llm = load()
    with watch(llm, says=WORDS):
        text = llm.chat(user("count"), stop=["four"]).message.content
    return verdict(text == "one two three ", f"with stop=['four'] content was {quote(text)}")


@row("9a", "stop on stream")
def stop_stream() -> Verdict:
    """`stream_chat(..., stop=["four"])` ends before the stop string."""
    llm = load()
    with watch(llm, says=WORDS):
        text = joined(llm.stream_chat(user("count"), stop=["four"]))
    return verdict(text == "one two three ", f"with stop=['four'] the stream was {quote(text)}")


@row("9b", "stop token ids")
def stop_ids() -> Verdict:
    """A token of `stopping_ids` ends the text before it, in `chat` and `stream_chat`."""
    llm = load(stopping_ids=load()._tokenizer.encode("3"))
    with watch(llm, says="1, 2, 3, 4"):
        texts = [llm.chat(user("count")).message.content, joined(llm.stream_chat(user("count")))]
    return verdict(texts == ["1, 2, "] * 2, f"with the id of '3' in stopping_ids the answers were {texts}")


@row("10", "seed")
def seed() -> Verdict:
    """A seed can be set, in a call or in the constructor, and repeats a sampled answer."""
    llm = load(generate_kwargs={"do_sample": True})
    texts = {llm.chat(user("hi"), seed=7).message.content for _ in range(3)}
    field = attempt(lambda: load(seed=7))
    what = said(field) if isinstance(field, Exception) else "accepted"
    return verdict(
        len(texts) == 1, f"3 answers with seed=7 in the call, {len(texts)} different; in the constructor: {what}"
    )


@row("17", "usage on chat")
def usage() -> Verdict:
    """The response has token counts, in `raw` or `additional_kwargs`."""
    llm = load()
    with watch(llm, says="fine"):
        response = llm.chat(user("hi"))
    found = {**(response.raw or {}), **response.additional_kwargs, **response.message.additional_kwargs}
    return verdict(
        bool({"usage", "prompt_tokens", "completion_tokens", "total_tokens"} & set(found)),
        f"keys of raw and additional_kwargs together: {sorted(found)}",
        "no",
    )


@row("18", "usage on stream")
def usage_stream() -> Verdict:
    """The last response of a stream has token counts."""
    llm = load()
    with watch(llm, says="fine"):
        response = list(llm.stream_chat(user("hi")))[-1]
    found = {**(response.raw or {}), **response.additional_kwargs, **response.message.additional_kwargs}
    return verdict(
        bool({"usage", "prompt_tokens", "completion_tokens", "total_tokens"} & set(found)),
        f"keys of raw and additional_kwargs together: {sorted(found)}",
        "no",
    )


@row("19", "finish reason and model name")
def metadata() -> Verdict:
    """The response says why it ended and which model wrote it."""
    llm = load()
    with watch(llm, says="fine"):
        response = llm.chat(user("hi"))
    found = {**(response.raw or {}), **response.additional_kwargs, **response.message.additional_kwargs}
    return verdict(
        any("finish" in key or "stop" in key for key in found) and any("model_name" in key for key in found),
        f"keys of raw and additional_kwargs together: {sorted(found)}",
        "no",
    )


@row("20", "chat template used")
def template() -> Verdict:
    """The prompt is the conversation in the tokenizer's own chat template."""
    llm = load()
    with watch(llm, says="fine") as watched:
        llm.chat(user("hi"))
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    return verdict(watched.prompt == expected, f"the prompt was {quote(watched.prompt)}")


@row("21", "template variables, thinking switch")
def template_kwargs() -> Verdict:
    """A template's own variable, here `enable_thinking=False`, can be set in a call."""
    llm, prompts = load(), []
    with watch(llm, says="fine") as watched:
        for kwargs in ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}):
            llm.chat(user("hi"), **kwargs)
            prompts.append(watched.prompt)
    return verdict(
        any(prompt.endswith("<think></think>") for prompt in prompts),
        "with chat_template_kwargs={'enable_thinking': False}, and with enable_thinking=False, the prompts ended "
        + " and ".join(quote(prompt[-25:]) for prompt in prompts),
        "no",
    )


@row("22", "reasoning separated")
def reasoning() -> Verdict:
    """What the model thinks is not in the text of its answer, but in a thinking block."""
    llm = load()
    with watch(llm, says="<think>twice two</think>four"):
        message = llm.chat(user("2+2")).message
    kinds = [block.block_type for block in message.blocks]
    return verdict(
        message.content == "four" and "thinking" in kinds, f"content was {quote(message.content)}, blocks {kinds}", "no"
    )


@row("23", "BOS exactly once")
def bos() -> Verdict:
    """Where both chat template and tokenizer add a beginning-of-sequence token, the prompt has one."""
    llm = load(save(bos=True))
    with watch(llm, says="fine") as watched:
        llm.chat(user("hi"))
    count = watched.prompts[-1].count(0)
    return verdict(count == 1, f"the model was given {count} BOS tokens, the prompt began {quote(watched.prompt[:25])}")


@row("24", "list content")
def list_content() -> Verdict:
    """A message of text blocks is the text of the blocks."""
    llm = load()
    with watch(llm, says="fine") as watched:
        llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="hello"), TextBlock(text="world")])])
    return verdict(
        "user\nhello" in watched.prompt and "world<|im_end|>" in watched.prompt,
        f"the prompt was {quote(watched.prompt)}",
    )


def _prompts(llm: HuggingFaceLLM) -> dict[str, str]:
    prompts = {}
    with watch(llm, says="fine") as watched:
        llm.complete("hi")
        prompts["complete"] = watched.prompt
        list(llm.stream_complete("hi"))
        prompts["stream_complete"] = watched.prompt
    return prompts


@row("25", "system prompt honoured")
def system() -> Verdict:
    """`system_prompt` is in the prompts of `complete` and `stream_complete`."""
    llm = load(system_prompt="be brief")
    prompts = _prompts(llm)
    return verdict(
        all("be brief" in prompt for prompt in prompts.values()),
        "the prompts were " + ", ".join(f"{quote(prompt, 90)} in {name}" for name, prompt in prompts.items()),
    )


@row("26", "completion_to_prompt")
def completion_to_prompt() -> Verdict:
    """`completion_to_prompt` makes the prompts of `complete` and `stream_complete`."""
    prompts = _prompts(load(completion_to_prompt=lambda text: f"[INST] {text} [/INST]"))
    return verdict(
        all(prompt == "[INST] hi [/INST]" for prompt in prompts.values()),
        "the prompts were " + ", ".join(f"{quote(prompt)} in {name}" for name, prompt in prompts.items()),
    )


@row("27", "context overflow reported")
def overflow() -> Verdict:
    """A prompt that is longer than the context window raises."""
    llm = load()
    with watch(llm, says="fine") as watched:
        result, warnings = warned(lambda: llm.chat(user("x" * (WINDOW + 100))))
    what = f"raised {said(result)}" if isinstance(result, Exception) else f"answered {quote(result.message.content)}"
    longest = max(map(len, watched.prompts), default=0)
    return verdict(
        isinstance(result, Exception),
        f"{what}; the model was given {longest} tokens, its window is {WINDOW}; {len(warnings)} warnings were logged",
        "no",
    )


@row("31", "safe from several threads")
def threads() -> Verdict:
    """Four threads get what one call after the other gives, ten times over."""
    llm = load()
    prompts = [f"prompt {index}" * (index + 1) for index in range(8)]
    expected = [llm.complete(prompt).text for prompt in prompts]
    wrong, errors = 0, set()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            results = list(pool.map(lambda prompt: attempt(lambda: llm.complete(prompt)), prompts))
            errors |= {said(result) for result in results if isinstance(result, Exception)}
            wrong += sum(
                isinstance(got, Exception) or got.text != want for got, want in zip(results, expected, strict=True)
            )
    return verdict(wrong == 0, f"{wrong} of 80 greedy answers differed {' '.join(errors)}".strip())


@row("32", "does not change the caller's history")
def history() -> Verdict:
    """The list of messages is the same after the call."""
    llm, messages = load(), user("hi")
    before = [message.model_copy(deep=True) for message in messages]
    with watch(llm, says="fine"):
        llm.chat(messages)
    return verdict(
        messages == before, f"{len(before)} messages before, {len(messages)} after, equal: {messages == before}"
    )


@row("34", "speculation reachable")
def speculation() -> Verdict:
    """A draft model can be given, and saves forwards of the target: here it is the same model."""
    draft, counts = load()._model, {}
    for name, kwargs in {"plain": {}, "drafted": {"generate_kwargs": {"assistant_model": draft}}}.items():
        llm = load(**kwargs)
        with watch(llm) as watched:
            text = attempt(lambda llm=llm: llm.complete("hello").text)
        counts[name] = (watched.forwards, text)
    plain, drafted = counts["plain"], counts["drafted"]
    same = "the same answer" if plain[1] == drafted[1] else f"not the same answer: {quote(drafted[1])}"
    return verdict(
        drafted[0] < plain[0] and plain[1] == drafted[1],
        f"with generate_kwargs={{'assistant_model': ...}} {drafted[0]} target forwards instead of {plain[0]}, {same}",
    )


@row("35a", "speculation set per call")
def speculation_per_call() -> Verdict:
    """How many tokens are drafted can be set in a call."""
    llm, forwards = load(), []
    for value in (2, 8):
        with watch(llm, says="a" * 100) as watched:
            llm.complete("aaaaaaaa", prompt_lookup_num_tokens=value)
        forwards.append(watched.forwards)
    few, many = forwards
    return verdict(
        few != many,
        f"target forwards for 60 tokens, with prompt_lookup_num_tokens set to 2 and to 8 in the call: {few} and {many}",
        "no",
    )


@row("35b", "acceptance reported")
def acceptance() -> Verdict:
    """A drafted answer says how many drafted tokens were kept."""
    response = load(generate_kwargs={"assistant_model": load()._model}).complete("hello")
    found = {**(response.raw or {}), **response.additional_kwargs}
    return verdict(
        any(word in key for key in found for word in ("draft", "accept", "assist")),
        f"with a draft model, keys of raw and additional_kwargs together: {sorted(found)}",
        "no",
    )


if __name__ == "__main__":
    main(
        "HuggingFaceLLM",
        ("llama-index-llms-huggingface", "llama-index-core", "transformers", "torch"),
        "On a local folder with a tiny random Llama.",
    )
