"""Tools, structure and reasoning at the engine, with the loosest rule there is: θ = 0, W = 1."""

from __future__ import annotations

import json
import random

import pytest
import torch
from tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, noisy_copy, tiny_llama, tiny_tokenizer
from tokenizers import AddedToken

from fly_llm import ConfigError, FLyEngine
from fly_llm.text.constrain import Constraint, grammar_tokenizer, json_grammar, regex_grammar

EOS = 1
LOOSE = {"theta": 0.0, "window": 1, "num_speculative_tokens": 8, "relax_lookup": True}
PLAIN = {"num_speculative_tokens": 0}
ASK = [{"role": "user", "content": "the fox?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "the dog",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9999}, "w": {"enum": ["fox", "dog"]}},
            "required": ["n", "w"],
        },
    },
}
OTHER = {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def answers_with(marks, added=(), special=False, end=""):
    """A tokenizer whose template has a place for tools and holds these marks, some of them tokens of their own."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in added])
    begin = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{# " + marks + " #}"
    tokenizer.chat_template = begin + CHAT_TEMPLATE.replace("assistant\n", "assistant\n" + end)
    return tokenizer


HERMES = answers_with("<tool_call>")


def without_eos(model):
    model.config.eos_token_id = EOS
    return model


@pytest.fixture(scope="module")
def engine():
    target = tiny_llama(len(HERMES), eos_token_id=EOS, seed=3)
    with FLyEngine.from_pretrained(target, noisy_copy(target, 0.2), tokenizer=HERMES, max_tokens=70) as engine:
        yield engine


SPACE = {i: -30.0 for i in range(len(HERMES)) if i > 3 and not HERMES.decode([i]).strip()}
"""A tiny model likes space as much as anything else."""
NEWLINE = HERMES.convert_tokens_to_ids("Ċ")


# JSON schemas.


def schema(rng, depth=2):
    """A small schema that a model ends soon that writes anything at all."""
    kinds = ["integer", "boolean", "enum", "string", "const", "null", *(["object", "array"] * 2 if depth else [])]
    kind = rng.choice(kinds)
    if kind == "integer":
        low = rng.randrange(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
    if kind == "enum":
        return {"enum": rng.sample(["fox", "dog", "the dog", 3, 4.5, None, True, 'a"b', "ü"], rng.randrange(1, 5))}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randrange(4), "minLength": 0}
    if kind == "const":
        return {"const": rng.choice(["the lazy dog", 17, [1, "x"], {"a": False}])}
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": rng.randrange(2), "maxItems": 2}
    if kind == "object":
        return objects(rng, depth - 1)
    return {"type": kind}


def objects(rng, depth):
    names = rng.sample(["name", "age", "a b", 'q"', "other", "n"], rng.randrange(4))
    properties = {name: schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required}


TYPES = {"integer": int, "boolean": bool, "string": str, "null": type(None), "object": dict, "array": list}


def fits(value, rule):
    """Whether a value fits a schema as `schema` makes them; there is no `jsonschema` here."""
    if "const" in rule:
        return json.dumps(value) == json.dumps(rule["const"])
    if "enum" in rule:
        return json.dumps(value) in map(json.dumps, rule["enum"])
    kind = rule["type"]
    if not isinstance(value, TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        return False
    if kind == "object":
        known = rule.get("properties", {})
        named = set(rule.get("required", ())) <= set(value) <= set(known)
        return named and all(fits(item, known[name]) for name, item in value.items())
    if kind == "array":
        size = rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", 99)
        return size and all(fits(item, rule["items"]) for item in value)
    if kind == "string":
        return len(value) <= rule.get("maxLength", 10**9)
    return kind != "integer" or rule.get("minimum", value) <= value <= rule.get("maximum", value)


def test_the_checker_tells_right_from_wrong():
    rule = TOOL["function"]["parameters"]
    rule = {**rule, "properties": {**rule["properties"], "l": {"type": "array", "items": {"type": "boolean"}}}}
    assert fits({"n": 3, "w": "fox"}, rule)
    for wrong in (
        {"n": 3},
        {"n": -1, "w": "fox"},
        {"n": True, "w": "fox"},
        {"n": 1, "w": "x"},
        {"n": 1, "w": "fox", "z": 1},
        [],
    ):
        assert not fits(wrong, rule)
    assert not fits({"n": 1, "w": "fox", "l": [1]}, rule)


def formed(rule):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": rule}}


@pytest.mark.parametrize("part", range(4))
def test_a9_200_schemas_fit_and_equal_strict_and_plain_decoding(engine, part):
    whole, drafted, kept, differing, relaxed = 0, 0, 0, 0, 0
    for i in range(part * 50, part * 50 + 50):
        rng = random.Random(i)
        rule = objects(rng, 2)
        options = {"response_format": formed(rule), "logit_bias": SPACE}
        prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(6)] * 2
        plain = engine.generate(prompt, **options, **PLAIN)
        drafting = ("lookup", "model", "nested")[i % 3]
        loose = engine.generate(prompt, **options, **LOOSE, drafting=drafting)
        assert loose.token_ids == plain.token_ids, (i, drafting, rule)
        assert loose.relaxations == ()
        assert (loose.text, loose.finish_reason) == (plain.text, plain.finish_reason)
        if i % 5 == 0:
            strict = engine.generate(prompt, **options, **{**LOOSE, "lossless": True}, drafting=drafting)
            assert strict.token_ids == plain.token_ids
        if loose.finish_reason == "stop":
            whole += 1
            assert loose.token_ids[-1] == EOS
            assert fits(json.loads(loose.text), rule), (rule, loose.text)
        drafted += loose.stats.num_draft_tokens
        kept += loose.stats.num_accepted_tokens
        if i % 5 == 1:  # the wrong twin: the grammar still holds, and the values are not the target's
            twin = engine.generate(prompt, **options, **LOOSE, strict_zones=(), drafting="model")
            relaxed += len(twin.relaxations)
            differing += twin.token_ids != plain.token_ids
            assert {one.zone for one in twin.relaxations} <= {"grammar"}
            if twin.finish_reason == "stop":
                assert fits(json.loads(twin.text), rule)
    assert whole >= 35, "tiny models end most of them"
    assert drafted > 300
    assert kept > 150
    assert relaxed >= 1
    assert differing >= 1


@pytest.mark.parametrize(
    ("form", "check"),
    [
        ({"type": "json_object"}, lambda text: isinstance(json.loads(text), dict)),
        ({"type": "regex", "regex": r"[a-f]{3}-[0-9]{2,5}"}, lambda text: text[3] == "-" and text[4:].isdigit()),
        (
            {"type": "choice", "choices": ["the fox", "the dog", "neither"]},
            lambda text: text in ("the fox", "the dog", "neither"),
        ),
        ({"type": "grammar", "grammar": 'start: "a" /[0-9]/ "b"'}, lambda text: len(text) == 3 and text[1].isdigit()),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("drafting", ["lookup", "model", "nested"])
def test_every_form_of_answer(engine, form, check, drafting):
    ended = 0
    for seed in range(4):
        prompt = [{"role": "user", "content": f"the fox {seed} {'and the dog' * seed}"}]
        options = {"response_format": form, "logit_bias": SPACE}
        plain = engine.generate(prompt, **options, **PLAIN)
        loose = engine.generate(prompt, **options, **LOOSE, drafting=drafting)
        assert loose.token_ids == plain.token_ids
        assert loose.relaxations == ()
        assert loose.tool_calls == loose.invalid_tool_calls == ()
        if loose.finish_reason == "stop":
            ended += 1
            assert check(loose.text), loose.text
    assert ended >= (1 if form["type"] == "json_object" else 4)


def test_what_cannot_be_enforced_is_an_error_before_anything_is_written(engine):
    for form in (
        formed({"not": {}}),
        formed({"type": "objekt"}),
        {"type": "regex", "regex": "("},
        {"type": "grammar", "grammar": "x"},
    ):
        with pytest.raises(ConfigError, match="the schema cannot be enforced"):
            engine.generate("the fox", response_format=form)
    for form in (
        {"type": "yaml"},
        {"type": "json_schema"},
        {"type": "choice", "choices": []},
        "json",
        {"type": "regex"},
    ):
        with pytest.raises(ConfigError, match="response_format must be"):
            engine.generate("the fox", response_format=form)
    assert engine.generate("the fox", max_tokens=2).text


@pytest.mark.parametrize("k", [1, 2, 3, 5, 9, 15])
def test_a11_a_grammar_that_ends_inside_a_block(engine, k):
    inside = 0
    for seed in range(5):
        prompt = engine.encode("the lazy dog and then the fox jumps over the lazy dog and then" + " x" * seed)
        options = {"response_format": {"type": "choice", "choices": ["the lazy dog and then the fox"]}}
        for drafting in ("lookup", "model"):
            fly = {**LOOSE, "num_speculative_tokens": k, "window": None, "drafting": drafting}
            events = list(engine.stream(prompt, **options, **fly))
            result = events[-1].result
            assert (result.text, result.finish_reason) == ("the lazy dog and then the fox", "stop")
            assert result.token_ids[-1] == EOS
            inside += len(events[-2].token_ids) > 1
        endless = engine.generate(prompt, **options, **LOOSE, ignore_eos=True, max_tokens=30)
        assert endless.text.startswith("the lazy dog and then the fox")
        assert len(endless.token_ids) == 30, "after the end nothing is asked of the grammar"
    assert inside > 0


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("drafting", ["lookup", "model", "nested"])
def test_a9_sampling_stays_inside_the_grammar(engine, temperature, drafting):
    rule = {**TOOL["function"]["parameters"]}
    guided, grammar, texts = grammar_tokenizer(HERMES, len(HERMES), {EOS}), json_grammar(rule), set()
    for seed in range(3):
        options = {"temperature": temperature, "seed": seed, "drafting": drafting, "response_format": formed(rule)}
        result = engine.generate(ASK, **options, **LOOSE)
        guide = Constraint(guided, grammar, {EOS})
        tokens = result.token_ids
        scores = guide.mask((), tokens, torch.zeros(len(tokens) + 1, len(HERMES)))
        assert all(scores[i, token] == 0 for i, token in enumerate(tokens)), "every token is allowed where it stands"
        assert result.relaxations == ()
        assert result.token_ids == engine.generate(ASK, **options, **LOOSE).token_ids
        if result.finish_reason == "stop":
            assert fits(json.loads(result.text), rule)
        texts.add(result.text)
    assert len(texts) > 1


# Forced tool calls, in every family's way of writing.

DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
FAMILIES = {
    "hermes": ("<tool_call>", ("<tool_call>", "</tool_call>")),
    "llama3": ("<|start_header_id|>", ("<|python_tag|>",)),
    "mistral": ("[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    "deepseek": ("<｜tool▁calls▁begin｜>", DS),
    "fallback": None,
}


def family_engine(name, kind):
    if FAMILIES[name] is None:
        tokenizer = tiny_tokenizer()
    else:
        marks, added = FAMILIES[name]
        tokenizer = answers_with(marks, added if kind != "text" else (), special=kind == "special")
    target = tiny_llama(len(tokenizer), eos_token_id=EOS, seed=5)
    target.config.max_position_embeddings = 2048  # the fallback's prompt is long, in bytes
    return FLyEngine.from_pretrained(
        target, noisy_copy(target, 0.2), tokenizer=tokenizer, max_tokens=200, logit_bias=SPACE
    )


@pytest.mark.parametrize("kind", ["text", "added", "special"])
@pytest.mark.parametrize("name", FAMILIES)
def test_b4_b9_forced_calls_parse_and_fit(name, kind):
    with family_engine(name, kind) as engine:
        for choice in ("required", "get", {"type": "function", "function": {"name": "get"}}, True):
            options = {"tools": [TOOL], "tool_choice": choice}
            plain = engine.generate(ASK, **options, **PLAIN)
            loose = engine.generate(ASK, **options, **LOOSE)
            assert loose.token_ids == plain.token_ids
            assert loose.finish_reason == "tool_calls", loose
            assert [(call.name, fits(call.arguments, TOOL["function"]["parameters"])) for call in loose.tool_calls] == [
                ("get", True)
            ]
            assert (loose.text, loose.invalid_tool_calls, loose.relaxations) == ("", (), ())
        both = engine.generate(ASK, tools=[TOOL, NOW], tool_choice="now", **LOOSE)
        assert [(call.name, call.arguments) for call in both.tool_calls] == [("now", {})]
        none = engine.generate(ASK, tools=[TOOL], tool_choice="none", **LOOSE)
        assert none.tool_calls == none.invalid_tool_calls == ()
        with pytest.raises(ConfigError, match="tool_choice must be one of 'auto', 'none', 'required', 'any', 'get'"):
            engine.generate(ASK, tools=[TOOL], tool_choice="gte")


@pytest.mark.parametrize("marks", ["<tool_call> <function=", "<|tool_call>"])
def test_families_whose_calls_cannot_be_forced_say_so(marks):
    tokenizer = answers_with(marks)
    with FLyEngine.from_pretrained(tiny_llama(len(tokenizer)), tokenizer=tokenizer, max_tokens=4) as engine:
        with pytest.raises(ConfigError, match="cannot be forced: use tool_choice='auto'"):
            engine.generate(ASK, tools=[TOOL], tool_choice="required")
        assert engine.generate(ASK, tools=[TOOL]).finish_reason == "length"


def test_a_tool_without_properties_takes_any(engine):
    result = engine.generate(ASK, tools=[OTHER], tool_choice="required", max_tokens=30, logit_bias=SPACE)
    assert [call.name for call in result.tool_calls] == ["now"] or result.invalid_tool_calls


def test_parallel_calls_only_if_asked_for(engine):
    numbers = set()
    for seed in range(6):
        bias = {**SPACE, NEWLINE: 0.0}
        options = {"tools": [TOOL], "tool_choice": "any", "temperature": 2.0, "seed": seed, "logit_bias": bias}
        options["max_tokens"] = 300
        one = engine.generate(ASK, **options, parallel_tool_calls=False, **LOOSE)
        assert len(one.tool_calls) == 1
        several = engine.generate(ASK, **options, parallel_tool_calls=True, **LOOSE)
        assert all(fits(call.arguments, TOOL["function"]["parameters"]) for call in several.tool_calls)
        assert len({call.id for call in several.tool_calls}) == len(several.tool_calls)
        numbers.add(len(several.tool_calls))
    assert max(numbers) > 1


def test_regex_grammar_is_what_the_engine_uses(engine):
    form = {"type": "grammar", "grammar": regex_grammar("[xy]{4}")}
    same = {"type": "regex", "regex": "[xy]{4}"}
    assert engine.generate("the", response_format=form).text == engine.generate("the", response_format=same).text


def test_b13_a_forced_call_without_a_marker_that_is_cut_is_invalid():
    with family_engine("llama3", "text") as engine:
        result = engine.generate(ASK, tools=[TOOL], tool_choice="required", max_tokens=20, **LOOSE)
        assert result.finish_reason == "length"
        assert result.tool_calls == ()
        assert [call.raw for call in result.invalid_tool_calls] == [engine.tokenizer.decode(result.token_ids)]
        assert result.text == ""
