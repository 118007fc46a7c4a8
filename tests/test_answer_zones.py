"""Answers that are scripted, so that a mismatch falls where it matters: into a call, a marker, a thought, a grammar.

The target writes its script, surely but where it is `unsure`; the draft model writes the same with some tokens changed.
At θ = 0 and W = 1 every change that the next token does not follow up would be kept in plain text.
"""

from __future__ import annotations

import json

import pytest
import torch
from test_answers import ASK, EOS, NOW, TOOL, answers_with
from tiny_models import tiny_llama

from fly_llm import FLyEngine

LOOSE = {"theta": 0.0, "window": 1, "num_speculative_tokens": 100, "drafting": "model"}
"""Blocks as long as the answer, so that none ends where a mismatch needs the token behind it."""
PLAIN = {"num_speculative_tokens": 0}
CALL = '<tool_call>\n{"name": "get", "arguments": {"n": 7, "w": "fox"}}\n</tool_call>'
TEXT = answers_with("<tool_call>")
ADDED = answers_with("<tool_call>", ("<tool_call>", "</tool_call>"))
SPECIAL = answers_with("<tool_call>", ("<tool_call>", "</tool_call>"), special=True)
tokenizers = pytest.mark.parametrize("tokenizer", [TEXT, ADDED, SPECIAL], ids=["text", "added", "special"])


def scripted(script, start, vocab_size):
    """A model that writes these tokens behind a prompt of `start`, whatever stands there, and then ends its answer.

    It is a little unsure of each: two others are nearly as likely.
    """
    model = tiny_llama(vocab_size, eos_token_id=EOS)
    model.config.max_position_embeddings = 2048

    def rewrite(module, args, kwargs, output):
        positions = kwargs["position_ids"][0, -output.logits.shape[1] :].tolist()
        logits = torch.zeros_like(output.logits)
        for row, position in zip(logits[0], positions, strict=True):
            i = position + 1 - start
            token = script[i] if 0 <= i < len(script) else EOS
            row[token], row[(token + 1) % 256 + 4], row[(token + 2) % 256 + 4] = 30.0, 29.5, 29.0
        output.logits = logits

    model.register_forward_hook(rewrite, with_kwargs=True)
    return model


def writes(tokenizer, text, draft=None, tools=(TOOL,), **options):
    """An engine whose target writes `text`, and whose draft model proposes `draft` (of as many tokens)."""
    script = tokenizer.encode(text, add_special_tokens=False)
    proposal = script if draft is None else tokenizer.encode(draft, add_special_tokens=False)
    assert len(proposal) == len(script), "the scripts run side by side"
    template = {"tools": list(tools)} if tools else {}
    with FLyEngine.from_pretrained(tiny_llama(len(tokenizer)), tokenizer=tokenizer) as counter:
        start = counter.count_tokens(ASK, **template)
    models = (scripted(one, start, len(tokenizer)) for one in (script, proposal))
    settings = {"max_tokens": len(script) + 1, **LOOSE, **options}
    return FLyEngine.from_pretrained(*models, tokenizer=tokenizer, **settings)


def changed(result):
    """(zone, what was kept, what the target would have written) of every relaxed token."""
    return [(one.zone, one.text, one.own_text) for one in result.relaxations]


# Tool calls.


@tokenizers
def test_nothing_is_relaxed_inside_a_call_and_without_its_zone_the_call_is_another(tokenizer):
    text = f"a fox 1 here {CALL} a fox 2 here"
    draft = text.replace("1", "3").replace("7", "8").replace("2 here", "4 here")
    with writes(tokenizer, text, draft) as engine:
        result = engine.generate(ASK, tools=[TOOL])
        assert [(zone, own) for zone, _, own in changed(result)] == [("text", "1"), ("text", "2")]
        assert (
            result.text == "a fox 3 herea fox 4 here" or result.text.replace("\n", " ") == "a fox 3 here a fox 4 here"
        )
        assert [(call.name, call.arguments) for call in result.tool_calls] == [("get", {"n": 7, "w": "fox"})]
        assert result.finish_reason == "tool_calls"
        assert result.stats.num_protected_rejections > 0
        assert result.report()["relaxed_by_zone"] == {"text": 2}
        for start, end in result.relaxed_spans:
            assert result.text[start:end] in "34"
        twin = engine.generate(ASK, tools=[TOOL], strict_zones=())
        assert [(zone, own) for zone, _, own in changed(twin)] == [("text", "1"), ("tool", "7"), ("text", "2")]
        assert twin.tool_calls[0].arguments == {"n": 8, "w": "fox"}, "a wrong number: what zones are for"
        assert engine.generate(ASK, tools=[TOOL], lossless=True).tool_calls[0].arguments == {"n": 7, "w": "fox"}


@pytest.mark.parametrize(
    "tokenizer",
    [
        TEXT,
        ADDED,
        SPECIAL,
    ],
    ids=["text", "added", "special"],
)
def test_without_tools_a_call_is_text_that_is_still_strict(tokenizer):
    text = f"a fox {CALL} 2 here"
    with writes(tokenizer, text, text.replace("7", "8").replace("2", "3"), tools=()) as engine:
        result = engine.generate(ASK)
        assert [(zone, own) for zone, _, own in changed(result)] == [("text", "2")]
        assert result.tool_calls == ()
        assert '"n": 7' in result.text


def swapped(tokenizer, text, place, token):
    """The text's tokens with another one at the first character `place`."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    at = next(i for i in range(len(ids)) if len(tokenizer.decode(ids[: i + 1])) > place)
    return [*ids[:at], token, *ids[at + 1 :]], at


@tokenizers
@pytest.mark.parametrize("marker", ["<tool_call>", "</tool_call>"])
@pytest.mark.parametrize("zones", [("tool",), ()], ids=["strict", "loose"])
def test_markers_are_neither_relaxed_nor_relaxed_away(tokenizer, marker, zones):
    text = f"a fox {CALL} then a dog and then"
    place = text.index(marker) + len(marker) - 1
    wrong = tokenizer.encode("x", add_special_tokens=False)[0]
    proposal, at = swapped(tokenizer, text, place, wrong)
    script = tokenizer.encode(text, add_special_tokens=False)
    is_token = script[at] >= 320
    for first, second in ((script, proposal), (proposal, script)):
        with writes(tokenizer, text) as counter:
            start = counter.count_tokens(ASK, tools=[TOOL])
        pair = (scripted(one, start, len(tokenizer)) for one in (first, second))
        with FLyEngine.from_pretrained(*pair, tokenizer=tokenizer, max_tokens=len(script), **LOOSE) as engine:
            result = engine.generate(ASK, tools=[TOOL], strict_zones=zones)
            if zones or is_token:
                assert result.token_ids == tuple(first), "the target has its way"
                assert at not in result.relaxed
            else:
                assert at in result.relaxed, "the wrong twin: without zones a marker in letters is just text"


def test_an_end_of_sequence_or_special_token_is_never_relaxed():
    text = "a fox and then a dog and then"
    for special in (EOS, 2, 3):
        script = TEXT.encode(text, add_special_tokens=False)
        with writes(TEXT, text, tools=()) as counter:
            start = counter.count_tokens(ASK)
        proposal = [*script[:4], special, *script[5:]]
        for first, second in ((script, proposal), (proposal, script)):
            pair = (scripted(one, start, len(TEXT)) for one in (first, second))
            with FLyEngine.from_pretrained(*pair, tokenizer=TEXT, max_tokens=len(script), **LOOSE) as engine:
                result = engine.generate(ASK, strict_zones=())
                end = 5 if first[4] == EOS else len(script)
                assert result.token_ids == tuple(first[:end])
                assert result.relaxations == ()
                assert result.stats.num_draft_tokens > 0


# JSON and code.


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ('{"a": 7, "b": [8]} the 2 of', "78", "2"),
        ("the 2 of\n```json\n[7, 8]\n```\nthe 3 of", "78", "23"),
        ('[{"a": 7}] the 2 of', "7", "2"),
    ],
)
def test_json_is_strict_to_its_end(text, inside, outside):
    draft = "".join({"7": "5", "8": "6", "2": "4", "3": "1"}.get(char, char) for char in text)
    with writes(TEXT, text, draft, tools=()) as engine:
        result = engine.generate(ASK)
        assert [(zone, own) for zone, _, own in changed(result)] == [("text", digit) for digit in outside]
        assert all(digit in result.text for digit in inside)
        twin = engine.generate(ASK, strict_zones=("tool",))
        assert {zone for zone, _, _ in changed(twin)} == {"text", "json"}
        assert sorted(own for _, _, own in changed(twin)) == sorted(inside + outside)


def test_code_and_reasoning_are_strict_if_asked_for():
    tokenizer = answers_with("<tool_call> </think>")
    text = "<think>the 7 of</think>the 2 of\n```py\nx = 8\n```\nthe 3 of"
    draft = "".join({"7": "5", "8": "6", "2": "4", "3": "1"}.get(char, char) for char in text)
    with writes(tokenizer, text, draft, tools=()) as engine:
        for zones, expected in (
            (("tool", "json"), [("reasoning", "7"), ("text", "2"), ("code", "8"), ("text", "3")]),
            (("code",), [("reasoning", "7"), ("text", "2"), ("text", "3")]),
            (("reasoning",), [("text", "2"), ("code", "8"), ("text", "3")]),
            (("reasoning", "code", "tool", "json"), [("text", "2"), ("text", "3")]),
        ):
            result = engine.generate(ASK, strict_zones=zones)
            assert [(zone, own) for zone, _, own in changed(result)] == expected
            assert result.reasoning.strip() == ("the 7 of" if "reasoning" in zones else "the 5 of")
            assert "think" not in result.text


# Reasoning, then a grammar.

THINKS = {
    "text": answers_with("<tool_call> </think>", end="<think>\n"),
    "added": answers_with("<tool_call> </think>", ("<think>", "</think>"), end="<think>\n"),
    "special": answers_with("<tool_call> </think>", ("<think>", "</think>"), special=True, end="<think>\n"),
}


@pytest.mark.parametrize("k", [1, 3, 12, 30])
@pytest.mark.parametrize("kind", THINKS)
def test_a10_c4_c5_reasoning_ends_inside_a_block_and_the_grammar_holds_from_there(kind, k):
    text = "the dog, so </think>\n\nthe fox jumps over the lazy dog"
    rule = {"type": "object", "properties": {"n": {"enum": [17, 23]}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": rule}}
    with writes(THINKS[kind], text, tools=(), max_tokens=120) as engine:
        fly = {**LOOSE, "num_speculative_tokens": k, "window": None}
        events = list(engine.stream(ASK, response_format=form, **fly))
        result = events[-1].result
        assert result.reasoning.strip() == "the dog, so"
        assert json.loads(result.text)["n"] in (17, 23), "it wanted to write of the fox"
        assert result.finish_reason == "stop"
        assert result.relaxations == ()
        assert "".join(event.reasoning for event in events) == result.reasoning
        assert "".join(event.text for event in events) == result.text
        assert result.token_ids == engine.generate(ASK, response_format=form, **PLAIN).token_ids
        free = engine.generate(ASK, **fly)
        assert free.text.strip() == "the fox jumps over the lazy dog"
        assert free.reasoning.strip() == "the dog, so"


@pytest.mark.parametrize("kind", THINKS)
def test_a10_a_forced_call_behind_reasoning(kind):
    text = "the dog, so </think>\n\nthe fox jumps over the lazy dog"
    with writes(THINKS[kind], text, tools=(NOW,), max_tokens=200) as engine:
        for fly in (LOOSE, PLAIN):
            forced = engine.generate(ASK, tools=[NOW], tool_choice="required", **fly)
            assert [(call.name, call.arguments) for call in forced.tool_calls] == [("now", {})]
            assert (forced.reasoning.strip(), forced.text) == ("the dog, so", "")
            assert forced.finish_reason == "tool_calls"


@pytest.mark.parametrize("kind", THINKS)
def test_c5_a_thought_that_never_ends_is_all_reasoning(kind):
    with writes(THINKS[kind], "the dog and then the fox and then", tools=()) as engine:
        for options in ({}, {"response_format": {"type": "json_object"}}):
            result = engine.generate(ASK, **options, max_tokens=5)
            assert (result.text, result.finish_reason) == ("", "length")
            assert result.reasoning.startswith("the dog")


# Cut short, streamed, stopped.


@tokenizers
def test_b13_a_call_cut_by_max_tokens_is_invalid_with_its_text(tokenizer):
    text = f"a fox {CALL}"
    size = len(tokenizer.encode(text, add_special_tokens=False))
    with writes(tokenizer, text) as engine:
        kinds = set()
        for n in range(1, size + 2, 2):
            result = engine.generate(ASK, tools=[TOOL], max_tokens=n)
            kinds.add((len(result.tool_calls), len(result.invalid_tool_calls)))
            assert [call.arguments for call in result.tool_calls] in ([], [{"n": 7, "w": "fox"}])
            if n < size:
                assert result.finish_reason == "length"
            if result.invalid_tool_calls:
                (broken,) = result.invalid_tool_calls
                assert broken.raw.startswith("<tool_call>")
                assert CALL.startswith(broken.raw)
                assert result.text.strip() == "a fox"
            forced = engine.generate(ASK, tools=[TOOL], tool_choice="required", max_tokens=n)
            assert [call.name for call in forced.tool_calls] in ([], ["get"])
            assert all(len(call.arguments) == 2 for call in forced.tool_calls)
        assert {(0, 0), (0, 1), (1, 0)} <= kinds
        assert engine.generate(ASK, tools=[TOOL], max_tokens=size + 1).finish_reason == "tool_calls"


@tokenizers
@pytest.mark.parametrize("k", [0, 1, 4, 12])
def test_b5_text_is_streamed_until_a_call_opens_and_calls_come_whole(tokenizer, k):
    text = f"a fox and a dog {CALL}\n{CALL.replace('7', '9')} then"
    with writes(tokenizer, text, num_speculative_tokens=k, window=None) as engine:
        events = list(engine.stream(ASK, tools=[TOOL]))
        result = events[-1].result
        assert "".join(event.text for event in events) == result.text
        calls = [call for event in events for call in event.tool_calls]
        assert tuple(calls) == result.tool_calls
        assert [call.arguments["n"] for call in calls] == [7, 9]
        assert len({call.id for call in calls}) == 2
        texts = [event.text for event in events]
        assert "tool_call" not in result.text
        assert "get" not in result.text
        first_call = next(i for i, event in enumerate(events) if event.tool_calls)
        assert "".join(texts[: first_call + 1]).strip().startswith("a fox and a dog")
        if k <= 4:
            assert texts[0].strip(), "text is not held until the end"
        assert result.finish_reason == "tool_calls"
        again = engine.generate(ASK, tools=[TOOL])
        assert (again.text, again.token_ids) == (result.text, result.token_ids)


@tokenizers
def test_stop_strings_hold_in_text_and_not_in_calls_or_under_a_grammar(tokenizer):
    text = f"a fox {CALL} then a dog"
    with writes(tokenizer, text) as engine:
        inside = engine.generate(ASK, tools=[TOOL], stop=["arguments", 'fox"'])
        assert [call.name for call in inside.tool_calls] == ["get"]
        assert inside.text.endswith("dog")
        before = engine.generate(ASK, tools=[TOOL], stop=["fox"])
        assert (before.text, before.tool_calls, before.finish_reason) == ("a ", (), "stop")
        behind = engine.generate(ASK, tools=[TOOL], stop=["a dog"])
        assert [call.name for call in behind.tool_calls] == ["get"]
        assert "dog" not in behind.text
        forced = engine.generate(ASK, tools=[TOOL], tool_choice="required", stop=["get", '"', "{"], max_tokens=120)
        assert [call.name for call in forced.tool_calls] == ["get"]
        form = {"type": "choice", "choices": ["the fox sleeps"]}
        assert engine.generate(ASK, response_format=form, stop=["fox"], max_tokens=30).text == "the fox sleeps"


def test_tools_or_a_schema_the_model_may_choose():
    """`response_format` beside tools: the answer is a call, or fits the schema."""
    rule = {"type": "object", "properties": {"n": {"enum": [17, 23]}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": rule}}
    for tokenizer in (TEXT, ADDED, SPECIAL):
        with writes(tokenizer, CALL, max_tokens=120) as engine:
            called = engine.generate(ASK, tools=[TOOL], response_format=form)
            assert [(call.name, call.arguments) for call in called.tool_calls] == [("get", {"n": 7, "w": "fox"})]
        with writes(tokenizer, '{"n": 23}', max_tokens=120) as engine:
            said = engine.generate(ASK, tools=[TOOL], response_format=form)
            assert json.loads(said.text) == {"n": 23}
            assert said.tool_calls == ()
