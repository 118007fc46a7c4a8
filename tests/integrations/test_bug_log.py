"""What users of other local model classes and engines have reported, and that it does not happen here.

The names are those of the bug log: A speculation, D streamed text, E templates and prompts, F settings and resources.
Most models here write what they are told to (`scripted`), so that a token falls where the report has it: into the
middle of a block, behind half a character, to the position where the target is unsure.

A6 to A11 (tools and grammars) and the groups B and C belong to later work and are left out.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import json
import logging
import threading
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from langchain_core import exceptions as core_errors
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.prompts import PromptTemplate as LangChainPromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from test_feature_rows import (
    DRAFT,
    ENDLESS,
    LENGTH,
    LOOSE,
    PLAIN,
    QUESTION,
    SYSTEM,
    TARGET,
    TOKENIZER,
    WAYS,
    Forwards,
    LlamaIndexWay,
    bos_tokenizer,
    chat_ways,
    decoded,
    every_way,
    generated,
    given,
    templated_ways,
    wait_until_idle,
    with_eos,
)
from text.tokenizers_for_tests import sentencepiece
from tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, noisy_copy, tiny_gemma3, tiny_llama, tiny_mistral, tiny_tokenizer
from tokenizers import AddedToken

from fly_llm import ConfigError, ContextOverflowError, ModelLoadError, PromptError, TokenizerMismatchError
from fly_llm.models import registry
from langchain_fly import FLyLLM as LangChainFLyLLM

CHATFLY, COMPLETION, LLAMA_CHAT, LLAMA_COMPLETE = WAYS
EOS, IM_START, IM_END = 1, 2, 3
BLOCK = {"num_speculative_tokens": 8, "drafting": "model"}
TEXT = "the fox and the dog sleep in the sun and then the fox jumps over the lazy dog"


def tokens(text, tokenizer=TOKENIZER):
    return tokenizer.encode(text, add_special_tokens=False)


def scripted(script, start, unsure=(), vocab_size=VOCAB_SIZE):
    """A tiny Llama that writes these tokens behind a prompt of `start`, whatever stands there, and repeats the last.

    It is certain of each, but at the positions `unsure`, where two others are nearly as likely.
    """
    model = tiny_llama(vocab_size)

    def rewrite(module, args, kwargs, output):
        positions = kwargs["position_ids"][0, -output.logits.shape[1] :].tolist()
        logits = torch.zeros_like(output.logits)
        for row, position in zip(logits[0], positions, strict=True):
            i = min(max(position + 1 - start, 0), len(script) - 1)
            row[script[i]] = 30.0
            if i in unsure:
                row[250], row[251] = 29.5, 29.0
        output.logits = logits

    model.register_forward_hook(rewrite, with_kwargs=True)
    return model


def writer(way, script, *, draft=None, unsure=(), prompt=QUESTION, tokenizer=TOKENIZER, **fields):
    """An instance whose target writes `script` to this prompt, and whose draft model proposes `draft`, or the same."""
    start = len(way.prompt_ids(prompt, tokenizer))
    models = {
        "model": scripted(script, start, unsure, len(tokenizer)),
        "draft_model": scripted(draft or script, start, (), len(tokenizer)),
    }
    return way.make(**models, tokenizer=tokenizer, **{"max_tokens": len(script), **BLOCK, **fields})


def committed(rounds):
    """The tokens of each round."""
    return [list(fly_round.token_ids) for fly_round in rounds]


def joined(rounds):
    """The tokens of all rounds."""
    return [token for fly_round in rounds for token in fly_round.token_ids]


def may_be_special(token):
    """Whether a token stands in no prompt here."""
    return TOKENIZER.decode([token]) not in CHAT_TEMPLATE + QUESTION + "the dog and then"


def with_special(token):
    """A tokenizer to which an ordinary token is a special one, as the end of an answer usually is."""
    assert may_be_special(token)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(tokenizer.convert_ids_to_tokens(token), special=True)])
    assert tokenizer.decode([token], skip_special_tokens=True) == ""
    return tokenizer


# -- A: speculation ---------------------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("mode", [{"lossless": True}, LOOSE], ids=["lossless", "loose"])
def test_a1_eos_in_the_middle_of_a_block(way, mode):
    """transformers #47912: an EOS inside a verified block is passed over, the tail appears; right: a cut there."""
    words = tokens(TEXT)
    script = [*words[:5], EOS, *words[5:]]
    llm = writer(way, script, **mode)
    assert committed(way.rounds(llm, QUESTION, ignore_eos=True))[0] == script[:9]  # what the block would have been
    rounds, answer = way.watched(llm, QUESTION)
    assert committed(rounds) == [script[:6]]
    assert (answer.text, answer.finish_reason, answer.usage[1]) == (decoded(words[:5]), "stop", 6)
    assert answer.fly["accepted_per_round"] == [0] * 6 + [1]  # drafted and accepted, the EOS too


@every_way
def test_a1_eos_is_neither_relaxed_nor_relaxed_away(way):
    """As above, where the target is unsure: its EOS holds against a draft that goes on, a drafted EOS ends nothing."""
    words, other = tokens(TEXT), tokens("X")[0]
    ending, going_on = [*words[:5], EOS, *words[5:]], [*words[:5], other, *words[5:]]
    for script, draft, expected in (
        (ending, going_on, words[:5]),
        (going_on, ending, going_on),
    ):
        answer = way.ask(writer(way, script, draft=draft, unsure=(5,), **LOOSE), QUESTION)
        assert answer.text == decoded(expected)
        assert answer.fly["num_relaxed_tokens"] == 0
    third = [*words[:5], tokens("Y")[0], *words[5:]]  # an ordinary token is relaxed there
    answer = way.ask(writer(way, going_on, draft=third, unsure=(5,), **LOOSE), QUESTION)
    assert (answer.text, answer.fly["num_relaxed_tokens"]) == (decoded(third), 1)


@chat_ways
@pytest.mark.parametrize("how", ["eos", "stop"])
def test_a1_and_a2_the_cache_is_cut_where_the_answer_is(way, how):
    """As above and below: nothing behind the cut is left in the cache from which the next turn goes on."""
    own = generated(way.prompt_ids(QUESTION))
    target, tokenizer, options = TARGET, TOKENIZER, {"stop": [decoded(own[11:14])]}
    if how == "eos":
        eos = own[14]
        target, tokenizer, options = with_eos(TARGET, eos), with_special(eos), {}
    models = {"model": target, "draft_model": copy.deepcopy(TARGET), "tokenizer": tokenizer}
    llm = way.make(**models, **BLOCK, lossless=True)
    rounds, first = way.watched(llm, QUESTION, **options)
    assert 1 < len(rounds[-1].token_ids) < 9  # cut
    turns = [("user", QUESTION), ("assistant", first.text), ("user", "and then")]
    second = way.ask(llm, turns)
    prompt = way.prompt_ids(turns)
    expected = generated(prompt)
    if how == "eos" and eos in expected:
        expected = expected[: expected.index(eos)]
    assert second.text == decoded(expected)
    assert len(way.prompt_ids(QUESTION)) <= second.cached < len(prompt)


@chat_ways
@pytest.mark.parametrize("mode", [{"lossless": True}, LOOSE], ids=["lossless", "loose"])
def test_a2_stop_string_in_the_middle_of_a_block(way, mode):
    """transformers #48039: a stop string counts only at a block's end; right: the text ends before it anywhere."""
    text = "the fox said abxyz and went on and on, there and here, now and then"
    script = tokens(text)
    llm = writer(way, script, **mode)
    whole = committed(way.rounds(llm, QUESTION))
    assert [len(ids) for ids in whole[:-1]] == [9] * (len(whole) - 1)
    middles = 0
    for stop in ("ab", "fox s", "d abxyz an", "on a", "here, "):
        last = next(n for n in range(len(script)) if stop in decoded(script[: n + 1])) + 1
        rounds, pieces, answer = way.watched_stream(llm, QUESTION, stop=[stop])
        assert joined(rounds) == script[:last]
        middles += 1 < len(rounds[-1].token_ids) < 9
        assert rounds[-1].num_draft_tokens == 8  # the drafter is told of no stop strings
        assert "".join(pieces) == answer.text == way.ask(llm, QUESTION, stop=[stop]).text == text[: text.index(stop)]
        assert (answer.finish_reason, answer.usage[1]) == ("stop", last)
    assert middles >= 3


@every_way
def test_a2_a_stop_string_is_neither_relaxed_nor_relaxed_away(way):
    """As above, where the target is unsure: a drafted stop string is not kept, and the target's own is not lost."""
    words = tokens(TEXT)
    plain, stopping = ([*words[:5], tokens(char)[0], *words[5:]] for char in "X@")
    for script, draft, expected in ((plain, stopping, plain), (stopping, plain, words[:5])):
        llm = writer(way, script, draft=draft, unsure=(5,), **LOOSE)
        without = way.ask(llm, QUESTION)
        assert (without.text, without.fly["num_relaxed_tokens"]) == (decoded(draft), 1)
        answer = way.ask(llm, QUESTION, stop=["@"])
        assert (answer.text, answer.fly["num_relaxed_tokens"]) == (decoded(expected), 0)


@every_way
def test_a3_stop_and_max_tokens_in_one_block(way):
    """sglang #31599: "length", and text behind the stop, where a block holds both; right: the earlier one wins."""
    script = tokens(TEXT)
    words = [decoded([token]) for token in script]
    llm = writer(way, script)
    for count, stop, reason, kept in (
        (5, words[2], "stop", 2),
        (5, words[4], "stop", 4),  # the last token of the budget completes it
        (5, words[5], "length", 5),
        (9, words[5], "stop", 5),
    ):
        assert len(stop) > 1
        first = next(n for n in range(len(script)) if stop in decoded(script[: n + 1]))
        kept = min(kept, first)
        rounds, pieces, answer = way.watched_stream(llm, QUESTION, max_tokens=count, stop=[stop])
        assert len(rounds) == 1  # one block
        assert (answer.finish_reason, "".join(pieces)) == (reason, decoded(script[:kept])), stop
    ended = writer(way, [*script[:3], EOS, *script[3:]])
    for count, reason in ((3, "length"), (4, "stop"), (5, "stop")):
        answer = way.ask(ended, QUESTION, max_tokens=count)
        assert (answer.finish_reason, answer.text, answer.usage[1]) == (reason, decoded(script[:3]), min(count, 4))


@chat_ways
def test_a5_nothing_is_streamed_after_the_eos(way):
    """koboldcpp #1276: random text behind the EOS once a draft model is on; right: as without one, at any position."""
    own = generated(way.prompt_ids(QUESTION))
    in_a_block = 0
    control = [position for position in range(2, LENGTH) if may_be_special(own[position])]
    for position in control[:6]:
        end = own.index(own[position])
        target, tokenizer = with_eos(TARGET, own[position]), with_special(own[position])
        llm = way.make(model=target, tokenizer=tokenizer, num_speculative_tokens=6, lossless=True)
        rounds, pieces, answer = way.watched_stream(llm, QUESTION)
        assert "".join(pieces) == answer.text == decoded(own[:end])
        assert (answer.finish_reason, answer.usage[1]) == ("stop", end + 1)
        assert joined(rounds) == own[: end + 1]
        in_a_block += len(rounds[-1].token_ids) > 1
    assert in_a_block >= 2


@pytest.mark.parametrize("make", [tiny_mistral, tiny_gemma3])
@pytest.mark.parametrize("way", [CHATFLY, LLAMA_CHAT], ids=repr)
def test_a12_sliding_window_and_drafts(way, make):
    """transformers #48280: a sliding window's cache is cut wrongly, answers change; right: strict is greedy."""
    target = make()  # each layer, or every other, sees 8 tokens
    llm = way.make(model=target, draft_model=noisy_copy(target), lossless=True)
    turns, seen = [("user", QUESTION)], set()
    for drafting in ("model", "lookup", "nested"):
        prompt = way.prompt_ids(turns)
        assert len(prompt) > 3 * 8
        answer = way.ask(llm, turns, drafting=drafting)
        assert answer.text == decoded(generated(prompt, model=target)), drafting
        seen |= {count for count, rounds in enumerate(answer.fly["accepted_per_round"]) if rounds}
        turns = [*turns, ("assistant", answer.text), ("user", "and the dog")]
    assert 0 in seen  # drafts were rejected at once, in part, and accepted at length
    assert len(seen) > 3


@pytest.mark.parametrize("way", [CHATFLY, COMPLETION, LLAMA_CHAT], ids=repr)
def test_a14_special_tokens_copied_from_the_prompt(way):
    """transformers #40726: an n-gram drafter proposes image tokens of the prompt; right: none is kept loosely."""

    def ask(ending, draft_has):
        if way.chat:  # what stands behind the last "assistant" turn is proposed for this one
            prompt = [("user", "a"), ("assistant", f"yes{ending}"), ("user", "b")]
        else:
            prompt = f"Q:\nyes{ending}{'' if ending else '<|im_end|>'}\nok\nQ:\n"
        yes, newline = tokens("yes"), tokens("\n")
        script = [*yes, tokens("X")[0], *newline, *tokens(" and the dog sleep")]
        llm = writer(way, script, unsure=(len(yes),), prompt=prompt, drafting="lookup", relax_lookup=True, **LOOSE)
        start = way.prompt_ids(prompt)
        assert any(start[i : i + len(yes) + 2] == [*yes, draft_has, *newline] for i in range(len(start)))
        return script, len(yes), way.ask(llm, prompt)

    script, _, answer = ask("", IM_END)
    assert answer.text == decoded(script)
    assert answer.fly["num_relaxed_tokens"] == 0
    assert answer.fly["num_protected_rejections"] == 1
    script, at, answer = ask("!\n", tokens("!")[0])  # an ordinary token in its place is relaxed
    assert answer.fly["num_relaxed_tokens"] == 1
    assert answer.text == decoded([*script[:at], tokens("!")[0], *script[at + 1 :]])


@every_way
def test_a14_forbidden_tokens_are_not_kept_from_a_draft(way):
    """As above: processors come before acceptance, so a draft cannot bring in what `logit_bias` forbids."""
    words = tokens(TEXT)
    plain, drafted = ([*words[:5], tokens(char)[0], *words[5:]] for char in "XY")
    llm = writer(way, plain, draft=drafted, unsure=(5,), **LOOSE)
    assert way.ask(llm, QUESTION).text == decoded(drafted)
    answer = way.ask(llm, QUESTION, logit_bias={tokens("Y")[0]: -float("inf")})
    assert (answer.text, answer.fly["num_relaxed_tokens"]) == (decoded(plain), 0)
    assert answer.fly["num_draft_tokens"] > 5
    answer = way.ask(llm, QUESTION, logit_bias={words[2]: -float("inf")})  # what target and draft agree on, too
    assert decoded([words[2]]) not in answer.text


PROMPTS = [QUESTION, "she said that there is nothing", "numbers 10 20 30 and 100"]


@chat_ways
@pytest.mark.parametrize("drafting", ["lookup", "model", "nested"])
def test_a15_strict_equals_greedy_in_float32(way, drafting):
    """transformers #39421, #30042, #30413: greedy with a draft model differs from greedy; right: equal to the token."""
    llm = way.make(lossless=True, drafting=drafting)
    accepted = rejected = 0
    for prompt in PROMPTS:
        own = generated(way.prompt_ids(prompt))
        rounds = way.rounds(llm, prompt)
        assert joined(rounds) == own
        accepted += sum(fly_round.num_accepted_tokens for fly_round in rounds)
        rejected += sum(fly_round.rejection == "gate" for fly_round in rounds)
    assert accepted > 10
    assert rejected > 5


@chat_ways
def test_a15_strict_differs_from_greedy_in_bfloat16_at_near_ties_only(way):
    """As above: kernels round differently over many tokens, so a near-tie may fall the other way, and nothing else."""
    target = copy.deepcopy(TARGET).to(torch.bfloat16)
    llm = way.make(model=target, draft_model=noisy_copy(target), prefix_cache_bytes=0, lossless=True)
    accepted = 0
    for prompt in PROMPTS[:2]:
        start = way.prompt_ids(prompt)
        rounds = way.rounds(llm, prompt)
        strict, plain = joined(rounds), joined(way.rounds(llm, prompt, **PLAIN))
        accepted += sum(fly_round.num_accepted_tokens for fly_round in rounds)
        differing = [i for i in range(LENGTH) if strict[i] != plain[i]]
        if differing:
            i = differing[0]
            with torch.inference_mode():
                logits = target(torch.tensor([[*start, *plain[:i]]]), use_cache=False).logits[0, -1].float()
            assert abs(logits[strict[i]] - logits[plain[i]]) <= 0.5  # four steps of bfloat16 between 16 and 32
            assert logits.max() - logits[strict[i]] <= 0.5
    assert accepted > 5


@chat_ways
def test_a16_a_second_model_as_draft_model(way, tmp_path):
    """llama-cpp-python #1865: users want `draft_model=` to take a model, and get prompt lookup; right: any model."""
    own = decoded(generated(way.prompt_ids(QUESTION)))
    for name, model in (("target", TARGET), ("draft", DRAFT)):
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    named = {"model": str(tmp_path / "target"), "tokenizer": None}
    for llm in (
        way.make(**named, draft_model=str(tmp_path / "draft")),
        way.make(**named, draft_model=tmp_path / "draft"),
        way.make(**named, draft_model=DRAFT, draft_tokenizer=TOKENIZER),
        way.make(),
    ):
        answer = way.ask(llm, QUESTION, lossless=True)
        assert answer.text == own
        assert answer.fly["drafting"] == "nested"
        assert answer.fly["num_draft_forwards"] > 0 < answer.fly["num_accepted_tokens"]
    with pytest.raises(ModelLoadError, match="does not exist"):
        way.ask(way.make(draft_model=str(tmp_path / "nowhere")), QUESTION)


def other_vocabulary(way):
    return way.make(draft_model=tiny_llama(300), draft_tokenizer=tiny_tokenizer(300))


@chat_ways
def test_a16_a_draft_model_of_another_vocabulary(way):
    """As above: with another vocabulary, errors come now and then; right: a refusal that names the first difference."""
    with Forwards() as forwards:
        for ask in (way.ask, way.streamed):
            with pytest.raises(TokenizerMismatchError, match=r"does not share the tokenizer .* id 300 is absent"):
                ask(other_vocabulary(way), QUESTION)
    assert forwards.count == 0


@every_way
def test_a16_the_refusal_names_a_setting_of_the_class(way):
    """As above: what the error tells the user to do can be done with this class."""
    with pytest.raises(TokenizerMismatchError, match=r"draft_model=None"):
        way.ask(other_vocabulary(way), QUESTION)


# -- D: streamed text -------------------------------------------------------------------------------------------------


@chat_ways
def test_d1_characters_whose_bytes_span_tokens_and_blocks(way):
    """textgen #1603, #6778: U+FFFD in the stream for emoji, Cyrillic and CJK; right: bytes wait for their character."""
    text = "Привет, 😀 世界! 👨‍👩‍👧 größer 🇫🇷 done"
    script = tokens(text)
    assert len(script) > 1.5 * len(text)
    halves = 0
    for k in (0, 2, 5):
        llm = writer(way, script, num_speculative_tokens=k)
        rounds, pieces, answer = way.watched_stream(llm, QUESTION)
        assert "".join(pieces) == answer.text == text
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        sizes = [len(ids) for ids in committed(rounds)]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        halves += sum(decoded(script[:end]).endswith("\N{REPLACEMENT CHARACTER}") for end in ends)
    assert halves > 10  # blocks that ended within a character
    cut = next(n for n in range(9, len(script)) if decoded(script[:n]).endswith("\N{REPLACEMENT CHARACTER}"))
    pieces, answer = way.streamed(llm, QUESTION, max_tokens=cut)
    assert "".join(pieces) == answer.text == decoded(script[:cut])  # a character that is never finished is shown so


@chat_ways
def test_d3_spaces_between_words_of_a_sentencepiece_model(way):
    """transformers #22710, #28776: spaces are lost where tokens are decoded alone; right: the text of the whole."""
    tokenizer = sentencepiece(chat_template=CHAT_TEMPLATE)
    text = "the quick brown fox jumps over the lazy dog, größer über naïve 中文 😀 and the sun"
    script = tokens(text, tokenizer)
    assert decoded(script, tokenizer) == text
    assert "".join(decoded([token], tokenizer) for token in script).count(" ") < text.count(" ")  # the mistake
    spaces = 0
    for k in (0, 3):
        llm = writer(way, script, tokenizer=tokenizer, num_speculative_tokens=k)
        rounds, pieces, answer = way.watched_stream(llm, QUESTION)
        assert "".join(pieces) == answer.text == text
        firsts = [ids[0] for ids in committed(rounds)]
        spaces += sum(token.startswith("▁") for token in tokenizer.convert_ids_to_tokens(firsts))
    assert spaces > 10  # blocks whose first token begins with a space


@chat_ways
@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_d4_beginning_of_a_stop_string_is_held_back(way, k):
    """vLLM #3574: "DEF" of the stop string "DEFGHIJ" is streamed; right: held back, and out once it is none."""
    text = "abc DEF then DEFGHIJ and more"
    script = tokens(text)
    assert len(tokens("DEFGHIJ")) > 4
    llm = writer(way, script, num_speculative_tokens=k)
    expected = "abc DEF then "
    for stop in (["DEFGHIJ"], ["DEFGHIJ", "EFGX"], "DEFGHIJ"):
        pieces, answer = way.streamed(llm, QUESTION, stop=stop)
        assert "".join(pieces) == answer.text == way.ask(llm, QUESTION, stop=stop).text == expected
        assert answer.finish_reason == "stop"
    if k == 0:  # a token a piece: the first "DEF" came out with what showed that it was no stop string
        assert any(piece.startswith("DEF ") for piece in pieces)
        assert "D" not in pieces
    never = way.streamed(llm, QUESTION, stop=["and more than that"])  # what is held at the end is part of the answer
    assert "".join(never[0]) == never[1].text == text


@every_way
def test_d5_react_loops_stop_before_the_observation(way):
    """smolagents #1703, haystack #5542: the stop text stays, and agents loop on it; right: gone in both modes."""
    text = "Thought: look\nAction: search\nObservation: made up\nThought: done"
    script = tokens(text)
    for stop in ("Observation:", "\nObservation:"):
        llm = writer(way, script, stop=[stop])
        pieces, answer = way.streamed(llm, QUESTION)
        expected = text[: text.index(stop)]
        assert "".join(pieces) == answer.text == way.ask(llm, QUESTION).text == expected
        assert asyncio.run(way.aask(llm, QUESTION)).text == expected
    if way is CHATFLY:
        chain = ChatPromptTemplate.from_template("{x}") | writer(way, script).bind(stop=["\nObservation:"])
        parsed = chain | StrOutputParser()
        assert parsed.invoke({"x": QUESTION}) == "".join(parsed.stream({"x": QUESTION})) == expected
    if way.chat:
        turns = [("user", QUESTION), ("assistant", answer.text), ("user", "\nObservation: found")]
        rendered = TOKENIZER.decode(given(lambda **options: way.ask(way.make(), turns, **options)))
        assert rendered.count("Observation:") == 1


def in_time(call, *args, **kwargs):
    """What a call gives or raises; one that waits for ever is an error, and does not hold up the tests."""
    future = Future()

    def run():
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout=20)


class Fails:
    """Makes the n-th forward of the target raise."""

    def __init__(self, at):
        self._at, self._count = at, 0

    def _before(self, *_):
        self._count += 1
        if self._count == self._at:
            raise RuntimeError("out of memory")

    def __enter__(self):
        self._hook = TARGET.register_forward_pre_hook(self._before)

    def __exit__(self, *_):
        self._hook.remove()


@chat_ways
@pytest.mark.parametrize("how", ["ask", "streamed", "aask", "astreamed"])
def test_d6_an_error_in_the_middle_of_an_answer(way, how):
    """transformers PR 22576: the thread dies and the consumer waits for ever; right: the error, and a next request."""
    llm = way.make(lossless=True)
    expected = decoded(generated(way.prompt_ids(QUESTION)))

    def call(**options):
        result = getattr(way, how)(llm, QUESTION, **options)
        return asyncio.run(result) if how.startswith("a") and how != "ask" else result

    for at in (1, 6):
        with Fails(at), pytest.raises(RuntimeError, match="out of memory"):
            in_time(call, **PLAIN)
    with pytest.raises(ConfigError, match="unknown setting 'top_n'"):
        in_time(call, top_n=3)
    assert in_time(way.ask, llm, QUESTION).text == expected


@every_way
@pytest.mark.parametrize("how", ["break", "timeout", "exception"])
def test_d7_a_consumer_that_is_gone_frees_the_model(way, how):
    """transformers #27927, mlx-openai-server #269: the GPU goes on, the next request waits; right: neither."""
    llm = way.make(prefix_cache_bytes=0)

    async def leave(forwards):
        if how == "timeout":
            with pytest.raises(TimeoutError):
                await expire(forwards)
        elif how == "exception":
            with pytest.raises(KeyError):
                await read(forwards)
        else:
            await read(forwards)
        for _ in range(5):
            await asyncio.sleep(0)  # the loop closes the iterators that were left
        forwards.go_on()
        return await way.aask(llm, "the dog", max_tokens=3, **PLAIN)

    async def read(forwards):
        async for _ in await way.astream(llm, QUESTION, **ENDLESS):
            await asyncio.to_thread(forwards.reached.wait, 10)
            if how == "exception":
                raise KeyError("the caller's own")
            break

    async def expire(forwards):
        async with asyncio.timeout(None) as deadline:

            async def beside():
                await asyncio.to_thread(forwards.reached.wait, 10)
                deadline.reschedule(asyncio.get_running_loop().time())

            task = asyncio.create_task(beside())
            await way.aask(llm, QUESTION, **ENDLESS)
        await task

    with Forwards(hold=12) as forwards:
        answer = asyncio.run(leave(forwards))
        wait_until_idle(llm)
    assert not forwards.held_in_vain
    assert forwards.count == 12 + 1 + 3  # the one that ran; prefill and three tokens of the next
    assert answer.text == decoded(generated(way.prompt_ids("the dog"), 3))


@every_way
def test_d7_a_stream_closed_before_it_is_read(way):
    """As above, for a consumer that never began: closing the stream cancels the request, or it was never made."""
    llm = way.make()
    way.ask(llm, "the dog", max_tokens=1)
    with Forwards(hold=1) as forwards:
        stream = way.stream(llm, QUESTION, **ENDLESS)
        stream.close()
        forwards.go_on()
        wait_until_idle(llm)
        assert forwards.count <= 1
    del stream


@every_way
def test_d8_astream_works(way):
    """langchain #34134: `astream` of a local pipeline crashes in LangGraph Studio; right: it streams everywhere."""
    llm = way.make(lossless=True)
    own = decoded(generated(way.prompt_ids(QUESTION)))

    async def main():
        stream = await way.astream(llm, QUESTION)
        texts = ["".join([way.piece(item) async for item in stream])]
        if isinstance(way, LlamaIndexWay):
            if way.chat:
                template = PromptTemplate("{x}")
                texts.append("".join([piece async for piece in await llm.astream(template, x=QUESTION)]))
        else:
            kind = "on_chat_model_stream" if way.chat else "on_llm_stream"
            pieces = [
                event["data"]["chunk"]
                async for event in llm.astream_events(QUESTION, version="v2")
                if event["event"] == kind
            ]
            texts.append("".join(getattr(piece, "content", getattr(piece, "text", piece)) for piece in pieces))
            chain = (
                ChatPromptTemplate.from_template("{x}") if way.chat else LangChainPromptTemplate.from_template("{x}")
            )
            texts.append("".join([piece async for piece in (chain | llm | StrOutputParser()).astream({"x": QUESTION})]))
        return texts

    assert set(asyncio.run(main())) == {own}


@chat_ways
@pytest.mark.parametrize("how", ["aask", "astreamed"])
def test_d9_a_workflow_does_not_block_the_event_loop(way, how, tmp_path, monkeypatch):
    """llama_index #18182: one workflow blocks a whole FastAPI process; right: not even the first call, which loads."""
    TARGET.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    began, go_on, in_vain = threading.Event(), threading.Event(), []
    load = registry.ModelSpec.load

    def held(spec):
        began.set()
        in_vain.append(not go_on.wait(10))
        return load(spec)

    monkeypatch.setattr(registry.ModelSpec, "load", held)
    llm = way.make(model=str(tmp_path), draft_model=None, tokenizer=None, lossless=True)

    async def main():
        async def beside():
            await asyncio.to_thread(began.wait, 10)
            go_on.set()

        task = asyncio.create_task(beside())
        result = await getattr(way, how)(llm, QUESTION)
        await task
        return result[1] if how == "astreamed" else result

    assert asyncio.run(main()).text == decoded(generated(way.prompt_ids(QUESTION)))
    assert in_vain == [False]


@every_way
def test_d10_more_than_one_eos_id(way):
    """textgen #5885: Llama 3 never stops, as its config names one EOS of two; right: those of all places count."""
    script = tokens(TEXT)
    for where, eos in (("config", IM_START), ("generation config", IM_END), ("its list", 0), ("tokenizer", EOS)):
        target = scripted([*script[:4], eos, *script[4:]], len(way.prompt_ids(QUESTION)))
        target.config.eos_token_id = IM_START
        target.generation_config.eos_token_id = [IM_END, 0]
        answer = way.ask(way.make(model=target, draft_model=None), QUESTION)
        assert (answer.text, answer.finish_reason) == (decoded(script[:4]), "stop"), where


@every_way
def test_d10_an_eos_that_is_not_marked_special_is_not_shown(way):
    """As above: some checkpoints end with an added token that is not marked special; right: the end is no text."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|eot|>", special=False, normalized=False)])
    eot = tokenizer.convert_tokens_to_ids("<|eot|>")
    script = tokens(TEXT)
    target = scripted([*script[:4], eot, *script[4:]], len(way.prompt_ids(QUESTION)), vocab_size=VOCAB_SIZE + 1)
    target.generation_config.eos_token_id = [EOS, eot]
    pieces, answer = way.streamed(way.make(model=target, draft_model=None, tokenizer=tokenizer), QUESTION)
    assert (answer.finish_reason, answer.usage[1]) == ("stop", 5)
    assert "".join(pieces) == answer.text == decoded(script[:4])


@every_way
def test_d10_a_stop_string_that_is_a_special_token(way):
    """vLLM #4180: `stop=["<|eot_id|>"]` never matches, as special tokens leave no text; right: matched, never shown."""
    words = tokens(TEXT)
    script = [*words[:5], IM_END, *words[5:]]
    llm = writer(way, script)
    assert committed(way.rounds(llm, QUESTION))[0] == script[:9]
    for stop in (["<|im_end|>"], ["zzz", "<|im_end|>"]):
        pieces, answer = way.streamed(llm, QUESTION, stop=stop)
        assert "".join(pieces) == answer.text == way.ask(llm, QUESTION, stop=stop).text == decoded(words[:5])
        assert (answer.finish_reason, answer.usage[1]) == ("stop", 6)
    without = way.ask(llm, QUESTION, stop=["zzz"])
    assert (without.text, without.finish_reason) == (TEXT[: len(without.text)], "length")
    assert "<|" not in without.text


# -- E: templates and prompts -----------------------------------------------------------------------------------------

GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start>' + message['role'] + '\n' + message['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>model\n' }}{% endif %}"
)
"""Like Gemma 2's: no system role, and roles must alternate."""
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for turn in turns %}{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if turn['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + turn['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + turn['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""Like Mistral's: roles must alternate."""


def prompted(way, llm, turns):
    """The text that the target was given as its prompt, control tokens included."""
    return TOKENIZER.decode(given(lambda **options: way.ask(llm, turns, **options)))


@chat_ways
def test_e1_a_template_without_a_system_role(way, caplog):
    """llama-cpp-python #1580: "System role not supported" ends the run; right: it is put before the first user turn."""
    caplog.set_level(logging.DEBUG, "fly_llm")
    llm = way.make(chat_template=GEMMA)
    turns = [("system", SYSTEM), ("user", QUESTION)]
    expected = f"<s><start>user\n{SYSTEM}\n\n{QUESTION}<end>\n<start>model\n"
    assert prompted(way, llm, turns) == expected
    longer = [*turns, ("assistant", "the dog"), ("user", "and the fox?")]
    rendered = prompted(way, llm, longer)
    assert rendered.count(SYSTEM) == 1
    assert rendered.startswith(expected.removesuffix("<start>model\n"))
    assert caplog.text.count("system messages were moved into the first user message") == 1
    if isinstance(way, LlamaIndexWay):
        assert prompted(way, way.make(chat_template=GEMMA, system_prompt=SYSTEM), turns[1:]) == expected


@chat_ways
@pytest.mark.parametrize("template", [GEMMA, MISTRAL], ids=["gemma", "mistral"])
def test_e2_two_user_turns_in_a_row(way, template):
    """llama_index #13728: "Conversation roles must alternate" for context and question; right: one turn of both."""
    llm = way.make(chat_template=template)
    one = prompted(way, llm, [("user", f"context: the fox\n\n{QUESTION}")])
    assert prompted(way, llm, [("user", "context: the fox"), ("user", QUESTION)]) == one
    assert prompted(way, way.make(), [("user", "a"), ("user", "b")]).count("<|im_start|>user") == 2  # nothing to mend
    both = [("system", SYSTEM), ("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e")]
    merged = [("user", f"{SYSTEM}\n\na\n\nb"), ("assistant", "c\n\nd"), ("user", "e")]
    assert prompted(way, llm, both) == prompted(way, llm, merged)


@templated_ways
def test_e3_a_model_without_a_chat_template(way):
    """langchain #29126: a base model's error says nothing of templates; right: it names `chat_template=`."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    llm = way.make(tokenizer=tokenizer)
    if not way.chat:  # completions need none
        assert given(lambda **options: way.ask(llm, QUESTION, **options)) == tokens(QUESTION)
        return
    for ask in (way.ask, way.streamed):
        with pytest.raises(PromptError, match=r"no chat template .* pass chat_template="):
            ask(llm, QUESTION)
    plain = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
    assert (
        prompted(way, way.make(tokenizer=tokenizer, chat_template=plain), QUESTION) == f"user: {QUESTION}\nassistant:"
    )
    if isinstance(way, LlamaIndexWay):
        assert not llm.metadata.is_chat_model
        assert way.make(tokenizer=tokenizer, chat_template=plain).metadata.is_chat_model


@every_way
@pytest.mark.parametrize("template", [GEMMA, MISTRAL, CHAT_TEMPLATE], ids=["gemma", "mistral", "no-bos"])
def test_e4_one_bos_token(way, template):
    """DeepSeek-R1 #151, OpenRLHF #393: template and tokenizer each add a BOS; right: one, if the template writes it."""
    tokenizer = bos_tokenizer(template)
    messages = [{"role": "user", "content": QUESTION}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if template != CHAT_TEMPLATE:
        assert tokenizer(rendered)["input_ids"][:2] == [0, 0]  # the mistake
    ids = given(lambda **options: way.ask(way.make(tokenizer=tokenizer), QUESTION, **options))
    templated = way.cls is not LangChainFLyLLM
    assert ids == tokenizer.encode(rendered if templated else f"<s>{QUESTION}", add_special_tokens=False)
    assert ids.count(0) == (0 if templated and template == CHAT_TEMPLATE else 1)


@chat_ways
def test_e5_list_content(way):
    """verl #2814: list content crashes, or a Python list is in the prompt; right: its texts, and no images."""
    llm = way.make()
    if way is CHATFLY:
        parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
        messages = [SystemMessage(parts), HumanMessage(parts), AIMessage(parts), HumanMessage(["x", " y"])]
        joined, call, last = "one two", llm.invoke, "x y"
        images = [HumanMessage([*parts, {"type": "image", "url": "https://example.org/x.png"}])]
        empty = [HumanMessage([])]
    else:
        parts = [TextBlock(text="one "), TextBlock(text="two")]
        messages = [ChatMessage(role=role, blocks=parts) for role in ("system", "user", "assistant")]
        messages.append(ChatMessage(role="user", blocks=[TextBlock(text="x"), TextBlock(text="y")]))
        joined, call, last = "one \ntwo", llm.chat, "x\ny"
        images = [ChatMessage(role="user", blocks=[*parts, ImageBlock(url="https://example.org/x.png")])]
        empty = [ChatMessage(role="user", blocks=[])]
    turns = [("system", joined), ("user", joined), ("assistant", joined), ("user", last)]
    assert given(lambda **options: call(messages, **options)) == way.prompt_ids(turns)
    assert given(lambda **options: call(empty, **options)) == way.prompt_ids("")
    with pytest.raises(PromptError, match=r"(?i)image"):
        call(images)


def test_e6_system_prompt_in_every_endpoint():
    """llama_index #13494: `system_prompt` does nothing in chat and complete; right: once, in all endpoints."""
    llm = LLAMA_CHAT.make(system_prompt=SYSTEM)
    once = LLAMA_CHAT.prompt_ids([("system", SYSTEM), ("user", QUESTION)])
    for way in (LLAMA_CHAT, LLAMA_COMPLETE):
        assert given(lambda way=way, **options: way.ask(llm, QUESTION, **options)) == once
        assert given(lambda way=way, **options: way.streamed(llm, QUESTION, **options)) == once
        assert given(lambda way=way, **options: asyncio.run(way.aask(llm, QUESTION, **options))) == once
        assert given(lambda way=way, **options: asyncio.run(way.astreamed(llm, QUESTION, **options))) == once
    assert (
        given(
            lambda **options: llm.chat([ChatMessage(role="system", content=SYSTEM), ChatMessage(QUESTION)], **options)
        )
        == once
    )
    tiny = llm.with_options(max_tokens=1, prefix_cache_bytes=0, **PLAIN)
    assert given(lambda **_: tiny.predict(PromptTemplate("{x}"), x=QUESTION)) == once
    assert given(lambda **_: list(tiny.stream(PromptTemplate("{x}"), x=QUESTION))) == once
    assert given(lambda **options: llm.complete(QUESTION, formatted=True, **options)) == tokens(QUESTION)
    own = [("system", "another"), ("user", QUESTION)]
    expected = LLAMA_CHAT.prompt_ids([("system", SYSTEM), *own])
    assert given(lambda **options: LLAMA_CHAT.ask(llm, own, **options)) == expected


@every_way
def test_e7_the_template_is_used_and_not_echoed(way):
    """langchain #19933: a local pipeline passes "hi" without its template and returns it; right: neither."""
    llm = way.make()
    ids = given(lambda **options: way.ask(llm, "hi", **options))
    templated = way.cls is not LangChainFLyLLM
    assert (IM_START in ids) == templated
    assert ids == way.prompt_ids("hi")
    answer = way.ask(llm, "hi", lossless=True)
    assert answer.text == decoded(generated(way.prompt_ids("hi")))
    assert "assistant" not in answer.text and not answer.text.startswith("hi")


@templated_ways
def test_e7_a_tokenizer_with_words_of_its_own(way):
    """As above: a word added to a tokenizer ("ole", say) is part of "role", which must not keep all messages out."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("ole", special=False)])
    llm = way.make(model=tiny_llama(VOCAB_SIZE + 1), draft_model=None, tokenizer=tokenizer)
    ids = given(functools.partial(way.ask, llm, "hi"), llm.model)
    assert ids == way.prompt_ids("hi", tokenizer)


@every_way
def test_e8_a_prompt_too_long_is_an_error_and_never_cut(way):
    """ollama #8531, #14259: the prompt is cut, the system turn gone; right: an error with the counts, to the token."""
    llm = way.make(max_tokens=None, lossless=True)

    def filled(size):
        """A prompt that becomes exactly `size` tokens."""
        text = "the fox 10 " * 120
        while len(way.prompt_ids(text)) > size:
            text = text[:-1]
        return text + "!" * (size - len(way.prompt_ids(text)))

    assert [len(way.prompt_ids(filled(size))) for size in (490, 511, 512)] == [490, 511, 512]
    with Forwards() as forwards:
        for ask in (way.ask, way.streamed):
            with pytest.raises(ContextOverflowError, match=r"512 tokens and .* window holds 512") as caught:
                ask(llm, filled(512))
            assert (caught.value.prompt_tokens, caught.value.context_window) == (512, 512)
    assert forwards.count == 0
    last = way.ask(llm, filled(511))
    assert (last.usage, last.finish_reason) == ((511, 1, 512), "length")
    for options in (
        {},
        {"max_tokens": 400},
        {"drafting": "lookup"},
        {"num_speculative_tokens": 30, "drafting": "model"},
    ):
        answer = way.ask(llm, filled(490), **options)  # drafts end with the window, too
        assert (answer.usage, answer.finish_reason) == ((490, 22, 512), "length")
        assert answer.fly["max_tokens"] == 22
        assert answer.text == decoded(generated(way.prompt_ids(filled(490)), 22))
        assert answer.fly["num_draft_tokens"] > 0


@chat_ways
def test_e8_old_turns_and_the_system_turn_are_never_dropped(way):
    """As above: a conversation that grows past the window is an error, and before that it reaches the model whole."""
    llm = way.make()
    turns = [("system", SYSTEM), ("user", "first")]
    while len(way.prompt_ids(turns)) < 512:
        assert given(functools.partial(way.ask, llm, turns)) == way.prompt_ids(turns)
        turns += [("assistant", f"answer {len(turns)} the quick brown fox"), ("user", f"question {len(turns)}")]
    assert len(turns) > 10
    with pytest.raises(ContextOverflowError) as caught:
        way.ask(llm, turns)
    assert caught.value.prompt_tokens == len(way.prompt_ids(turns))
    if way is CHATFLY:
        assert isinstance(caught.value, core_errors.ContextOverflowError)


# -- F: settings and resources ----------------------------------------------------------------------------------------


@chat_ways
@pytest.mark.parametrize("zero", [0, 1e-6])
def test_f1_temperature_zero_is_greedy(way, zero):
    """llama #687, graphrag #416: temperature 0 raises; right: it is greedy decoding."""
    own = decoded(generated(way.prompt_ids(QUESTION)))
    options = {"lossless": True, "top_p": 0.9, "top_k": 40}
    assert way.ask(way.make(temperature=0.9, seed=1), QUESTION, temperature=zero, **options).text == own
    assert way.ask(way.make(temperature=zero), QUESTION, **options).text == own


@chat_ways
def test_f2_the_token_limit_holds_wherever_it_is_given(way):
    """langchain #25219, #7192: the limit is not passed on, 20 or 100 tokens come; right: one limit, reported."""
    small = tiny_tokenizer()
    small.model_max_length = 128
    room = 128 - len(way.prompt_ids(QUESTION))
    assert room < 120
    for fields, options, count in (
        ({"max_tokens": 130}, {}, 130),
        ({"max_tokens": 5}, {"max_tokens": 60}, 60),
        ({"max_tokens": None, "tokenizer": small}, {}, room),  # 1024 by default, if there is room
        ({"max_tokens": 100_000, "tokenizer": small}, {}, room),
    ):
        answer = way.ask(way.make(**fields), QUESTION, ignore_eos=True, **options)
        assert (answer.usage[1], answer.fly["max_tokens"], answer.finish_reason) == (count, count, "length")
    if not isinstance(way, LlamaIndexWay):
        bound = way.make(max_tokens=5).bind(max_tokens=60)
        assert len(joined(way.rounds(bound, QUESTION))) == 60


@every_way
def test_f3_a_checkpoints_penalty_is_not_inherited(way, tmp_path, caplog):
    """lm-evaluation-harness #3154: some backends apply a checkpoint's penalty; right: none unasked, and it is said."""
    TARGET.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text())
    config |= {"repetition_penalty": 1.6, "do_sample": True, "temperature": 0.7}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    caplog.set_level(logging.INFO, "fly_llm")
    llm = way.make(model=str(tmp_path), draft_model=DRAFT, draft_tokenizer=TOKENIZER, tokenizer=None, lossless=True)
    prompt = way.prompt_ids(QUESTION)
    own, penalised = generated(prompt), generated(prompt, repetition_penalty=1.6)
    assert own != penalised
    for _ in range(2):
        answer = way.ask(llm, QUESTION)
        assert answer.text == decoded(own)
        assert answer.fly["repetition_penalty"] == 1.0
    assert ["repetition_penalty=1.6" in record.getMessage() for record in caplog.records].count(True) == 1
    answer = way.ask(llm, QUESTION, repetition_penalty=1.6)  # asked for, it is transformers' own, under drafting too
    assert answer.text == decoded(penalised)
    assert answer.fly["num_accepted_tokens"] > 0


@chat_ways
def test_f5_a_tokenizer_in_many_threads(way):
    """tokenizers #537, transformers #47085: "Already borrowed" from several threads; right: answers and counts."""
    llm = way.make(max_tokens=4)
    prompts = [f"{QUESTION} <|im_end|> {i}" for i in range(32)]
    single = [way.ask(llm, prompt).text for prompt in prompts]
    counts = [len(llm.encode(prompt)) for prompt in prompts]

    def count(prompt):
        if way is CHATFLY:
            return len(llm.encode(prompt)), llm.get_num_tokens_from_messages([HumanMessage(prompt)])
        return len(llm.encode(prompt)), None

    with ThreadPoolExecutor(8) as pool:
        counted = pool.map(count, prompts * 4)
        assert way.batch(llm, prompts) == single
        counted = list(counted)
    assert [found[0] for found in counted] == counts * 4
    if way is CHATFLY:
        assert counted[0][1] == way.ask(llm, prompts[0]).usage[0]


@every_way
def test_f6_streams_interleaved_in_one_thread(way):
    """llama-cpp-python #471, #1529, xinference #54: two users of a model crash it or mix; right: each gets its own."""
    llm = way.make(lossless=True)
    prompts = [QUESTION, "the lazy dog", "numbers 10 20"]
    own = [decoded(generated(way.prompt_ids(prompt))) for prompt in prompts]
    assert len(set(own)) == 3

    def interleave():
        streams = [way.stream(llm, prompt) for prompt in prompts]
        texts = [""] * 3
        for turn in range(3 * 60):
            texts[turn % 3] += "".join(way.piece(item) for item in [next(streams[turn % 3], None)] if item is not None)
        return texts

    assert in_time(interleave) == own


def test_f6_streams_of_all_classes_share_one_model():
    """As above, across frameworks: LangChain's and LlamaIndex's classes on the same weights, at the same time."""
    ways = [CHATFLY, COMPLETION, LLAMA_CHAT, LLAMA_COMPLETE]
    llms = [way.make(lossless=True) for way in ways]
    assert len({id(llm._get_engine()._handle.models) for llm in llms}) == 1

    async def main():
        return await asyncio.gather(*(way.astreamed(llm, QUESTION) for way, llm in zip(ways, llms, strict=True)))

    for way, (pieces, answer) in zip(ways, asyncio.run(main()), strict=True):
        assert "".join(pieces) == answer.text == decoded(generated(way.prompt_ids(QUESTION)))


@pytest.fixture
def new_tensors():
    """Counts the tensors alive that were made since it was called first."""
    frozen = False

    def count():
        nonlocal frozen
        gc.collect()
        if not frozen:
            gc.freeze()  # what is there already is looked at no more
            frozen = True
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    yield count
    gc.unfreeze()


@chat_ways
def test_f7_a_batch_runs_one_request_at_a_time_and_keeps_nothing(way, new_tensors):
    """langchain #16824: memory grows over `batch` until it is gone; right: one request computes, and nothing stays."""
    llm = way.make(max_tokens=4, prefix_cache_bytes=0)
    prompts = [f"{QUESTION} {i}" for i in range(8)]
    way.batch(llm, prompts)
    wait_until_idle(llm)
    assert new_tensors() == 0
    running = most = 0

    def enter(*_):
        nonlocal running, most
        running += 1
        most = max(most, running)

    def leave(*_):
        nonlocal running
        running -= 1

    hooks = [TARGET.register_forward_pre_hook(enter), TARGET.register_forward_hook(leave)]
    answers = [way.batch(llm, prompts) for _ in range(2)]
    for hook in hooks:
        hook.remove()
    wait_until_idle(llm)
    assert (most, running) == (1, 0)
    assert new_tensors() == 0
    assert answers[0] == answers[1]


@chat_ways
def test_f8_nothing_is_kept_alive_between_calls(way, new_tensors):
    """mellea PR 544, transformers PR 47731: caches live on in metadata or models; right: none, or as many as asked."""
    kept = 100_000 if way is LLAMA_CHAT else 0
    llm = way.make(max_tokens=4, prefix_cache_bytes=kept)
    answers = []
    for i in range(12):
        answers.append(way.ask(llm, f"{QUESTION} {i}"))
        stream = way.stream(llm, QUESTION, max_tokens=100)
        next(stream)
        del stream
        if i == 1:
            wait_until_idle(llm)
            new_tensors()
    wait_until_idle(llm)
    store = llm._get_engine()._handle.models.pair().prefixes
    assert (len(store) > 0) == (kept > 0)
    assert store.nbytes <= kept
    assert (len(store) > 0) <= new_tensors() <= 4 * len(store)  # keys and values of two layers
    for answer in answers:  # plain values alone
        json.dumps([answer.fly, answer.usage], allow_nan=False)
    if isinstance(way, LlamaIndexWay):
        json.dumps([response.raw for response in way.stream(llm, QUESTION)], allow_nan=False)


def write_gguf(path, model, tokenizer):
    """A llama GGUF file, not quantised."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocab = tokenizer.get_vocab()
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_types([3 if token < 4 else 1 for token in range(len(vocab))])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(tokenizer.chat_template)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        name, values = name.removesuffix(".weight"), weight.float().numpy()
        if count := heads.get(name.split(".")[-1]):  # llama.cpp pairs the dimensions of a rotation otherwise
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if name not in names:
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            names[name] = f"blk.{layer}.{parts[part]}"
        writer.add_tensor(f"{names[name]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@chat_ways
def test_f9_gguf_files(way, tmp_path, caplog):
    """transformers #34417, #31630: 90 GB for a small file, a wrong tokenizer; right: the size is said, ids agree."""
    path = str(tmp_path / "model.gguf")
    write_gguf(path, TARGET, TOKENIZER)
    caplog.set_level(logging.INFO, "fly_llm")
    write_gguf(draft := str(tmp_path / "draft.gguf"), DRAFT, TOKENIZER)
    llm = way.make(model=path, draft_model=draft, tokenizer=None, dtype="float32")
    answer = way.ask(llm, QUESTION, lossless=True)
    assert answer.text == decoded(generated(way.prompt_ids(QUESTION)))
    assert (answer.fly["drafting"], answer.fly["dtype"]) == ("nested", "float32")
    assert answer.fly["num_accepted_tokens"] > 0
    sizes = [record.getMessage() for record in caplog.records if "are unpacked to" in record.getMessage()]
    assert len(sizes) == 2
    assert all("torch.float32 and will take" in message for message in sizes)
    assert llm.encode("größer 😀") == tokens("größer 😀")
    other = way.make(model=path, tokenizer=None, draft_model=tiny_llama(300), draft_tokenizer=tiny_tokenizer(300))
    with pytest.raises(TokenizerMismatchError, match="id 300 is absent"):
        way.ask(other, QUESTION)


@chat_ways
def test_f9_a_gguf_file_and_a_draft_model_of_the_original_repository(way, tmp_path):
    """As above: the file's tokenizer is compared with the original's, and found to be the same, where it is."""
    write_gguf(path := str(tmp_path / "model.gguf"), TARGET, TOKENIZER)
    llm = way.make(model=path, tokenizer=None, draft_model=DRAFT, draft_tokenizer=TOKENIZER, dtype="float32")
    answer = way.ask(llm, QUESTION, lossless=True)
    assert answer.text == decoded(generated(way.prompt_ids(QUESTION)))
    assert answer.fly["num_accepted_tokens"] > 0


def test_f9_a_token_that_the_model_does_not_have(tmp_path):
    """As above: the added token has no row in the embedding, where it raises an IndexError; right: a PromptError."""
    write_gguf(path := str(tmp_path / "model.gguf"), TARGET, TOKENIZER)
    llm = COMPLETION.make(model=path, tokenizer=None, draft_model=None, dtype="float32")
    with pytest.raises(PromptError, match="is not in the target's vocabulary of 320 ids"):
        COMPLETION.ask(llm, "the dog <|endoftext|>")


@chat_ways
def test_f10_a_dispatched_model_is_not_moved(way, tmp_path, monkeypatch):
    """langchain #10985, #4900: `.to()` of a dispatched or quantised model raises; right: models stay where they are."""
    for name, model in (("target", TARGET), ("draft", DRAFT)):
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)

    def refuse(*_, **__):
        raise ValueError("`.to` is not supported for a dispatched model")

    own = decoded(generated(way.prompt_ids(QUESTION)))
    names = {"model": str(tmp_path / "target"), "draft_model": str(tmp_path / "draft"), "tokenizer": None}
    for devices in ({"device_map": "auto", "draft_device": "cpu"}, {"device_map": {"": "cpu"}}):
        llm = way.make(**names, **devices, lossless=True)
        models = llm._get_engine().load()._handle.models.pair()
        assert {str(model.device) for model in (models.target.model, models.draft.model)} == {"cpu"}
        assert way.ask(llm, QUESTION).text == own
    target, draft = copy.copy(TARGET), copy.copy(DRAFT)
    target.hf_device_map = draft.hf_device_map = {"": "cpu"}
    monkeypatch.setattr(type(target), "to", refuse)
    monkeypatch.setattr(type(target), "cuda", refuse)
    answer = way.ask(way.make(model=target, draft_model=draft, device_map="cpu", lossless=True), QUESTION)
    assert (answer.text, answer.fly["drafting"]) == (own, "nested")


langchain_ways = pytest.mark.parametrize("way", [CHATFLY, COMPLETION], ids=repr)


@langchain_ways
def test_f11_a_cache_shared_by_two_models(way):
    """langchain #25712, #14590, #19328: the cache gives another model's or temperature's answer; right: each its."""
    cache = InMemoryCache()
    other = copy.deepcopy(TARGET)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(1, 1))
    for model in (TARGET, other, TARGET):
        llm = way.make(model=model, cache=cache, lossless=True)
        answer = llm.invoke(QUESTION)
        assert getattr(answer, "content", answer) == decoded(generated(way.prompt_ids(QUESTION), model=model))
    texts = [llm.invoke(QUESTION, temperature=1.5, seed=seed) for seed in (1, 2, 1)]
    texts = [getattr(text, "content", text) for text in texts]
    assert texts[0] == texts[2] != texts[1]
    assert len(cache._cache) == 4


@langchain_ways
def test_f11_a_loaded_model_and_one_that_took_its_place_in_memory(way):
    """As above: a model that is gone leaves answers in the cache, and they are not those of any later model."""
    seen = {}
    for seed in range(60):
        llm = way.make(model=tiny_llama(seed=seed), draft_model=None)
        place, key, model = id(llm.model), json.dumps(llm._identifying_params), weakref.ref(llm.model)
        if place in seen:
            assert key != seen[place]
            return
        seen[place] = key
        llm.close()
        del llm
        if model() is not None:
            gc.collect()
        assert model() is None
    pytest.skip("no model took the place of another")


@chat_ways
def test_f13_no_warnings_about_padding(way):
    """h2ogpt #625, Qwen3 #267: a warning about the pad token or mask on each call; right: none, and nothing is set."""
    heard = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = heard.append
    loggers = [logging.getLogger("transformers"), logging.getLogger("fly_llm")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        assert (TARGET.config.pad_token_id, TOKENIZER.pad_token) == (None, None)
        with_eos(TARGET, EOS).generate(torch.tensor([[5, 6, 7]] * 2), max_new_tokens=1, eos_token_id=EOS)
        assert heard  # this is what it sounds like
        heard.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm = way.make(model=with_eos(TARGET, EOS))
            for options in ({}, {"temperature": 0.7, "seed": 1}, PLAIN):
                way.ask(llm, QUESTION, max_tokens=8, **options)
                way.streamed(llm, QUESTION, max_tokens=8, **options)
        assert heard == []
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert (TARGET.config.pad_token_id, TARGET.generation_config.pad_token_id) == (None, None)
    assert TOKENIZER.pad_token is None


@every_way
def test_f14_the_concurrency_contract(way):
    """langchain #3869, llama_index #13375: is async, are threads safe at all? Right: README says so, and it is so."""
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert "Requests may come from any thread or task." in readme
    assert "run one after the other, in the order they arrive" in readme
    llm = way.make(max_tokens=3, prefix_cache_bytes=0, **PLAIN)
    prompts = [f"{'the fox ' * i}sleeps" for i in range(5)]
    with Forwards(hold=1) as forwards, ThreadPoolExecutor(5) as pool:
        futures = []
        for prompt in prompts:
            queued = llm._get_engine()._handle.models._jobs.qsize()
            futures.append(pool.submit(way.ask, llm, prompt))
            if len(futures) == 1:
                assert forwards.reached.wait(10)
            else:
                while llm._get_engine()._handle.models._jobs.qsize() == queued:
                    threading.Event().wait(0.001)
        forwards.go_on()
        assert [future.result(timeout=20).usage[1] for future in futures] == [3] * 5
    order = [len(ids) for ids in forwards.ids if len(ids) > 1]
    assert order == [len(way.prompt_ids(prompt)) - 1 for prompt in prompts]  # prefills, one after the other
