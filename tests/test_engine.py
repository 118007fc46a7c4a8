"""The engine on tiny models: text, ends of answers, streams, errors."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import time

import pytest
import torch
from tiny_models import noisy_copy, random_prompts, tiny_llama, tiny_tokenizer
from transformers import MambaConfig, MambaForCausalLM

from fly_llm import (
    ConfigError,
    ContextOverflowError,
    FLyConfig,
    FLyEngine,
    ModelLoadError,
    PromptError,
    TokenizerMismatchError,
    UnsupportedCacheError,
)

DRAFTINGS = ("lookup", "model", "nested")
EOS = 1


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama()
    return target, noisy_copy(target), tiny_tokenizer()


@pytest.fixture(scope="module")
def engine(pair):
    target, draft, tokenizer = pair
    with FLyEngine.from_pretrained(target, draft, tokenizer=tokenizer, max_tokens=40) as engine:
        yield engine


PROMPTS = [prompt * 2 for prompt in random_prompts(4, 8)]


def with_eos(pair, ids):
    """An engine of the same weights for which these tokens end an answer."""
    import copy

    target, draft, tokenizer = pair
    target = copy.copy(target)
    target.config = copy.deepcopy(target.config)
    target.config.eos_token_id = ids
    return FLyEngine.from_pretrained(target, draft, tokenizer=tokenizer, max_tokens=40)


def test_plain_decoding_equals_generate(engine, pair):
    target, _, tokenizer = pair
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        expected = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
        )[0, len(prompt) :]
        result = engine.generate(prompt, num_speculative_tokens=0)
        assert result.token_ids == tuple(expected.tolist())
        assert result.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert result.stats.num_draft_tokens == 0
        assert (result.finish_reason, result.usage.prompt_tokens, result.usage.completion_tokens) == ("length", 16, 40)


STREAM_OPTIONS = [
    {"num_speculative_tokens": 1},
    {"num_speculative_tokens": 4, "window": 1},
    {"num_speculative_tokens": 15, "window": 6},
    {"window": 2, "theta": 0.0},
    {"lossless": True},
    {"temperature": 0.8, "seed": 4, "window": 2},
]


@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("options", STREAM_OPTIONS, ids=str)
def test_the_joined_stream_equals_the_answer(engine, pair, drafting, options):
    relaxed = 0
    for prompt in PROMPTS:
        whole = engine.generate(prompt, drafting=drafting, **options)
        events = list(engine.stream(prompt, drafting=drafting, **options))
        assert "".join(event.text for event in events) == whole.text == events[-1].result.text
        assert pair[2].decode(whole.token_ids, skip_special_tokens=True) == whole.text
        assert [t for event in events for t in event.token_ids] == list(whole.token_ids)
        assert all(event.result is None for event in events[:-1])
        assert whole.stats.num_output_tokens == len(whole.token_ids) == whole.usage.completion_tokens
        relaxed += len(whole.relaxed)
        if options.get("lossless") or options.get("num_speculative_tokens") == 1:
            assert whole.token_ids == engine.generate(prompt, num_speculative_tokens=0).token_ids
    assert relaxed == 0 or "window" in options
    assert relaxed > 0 or "window" not in options or drafting == "lookup"


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_ends_alone_and_together(engine, pair, drafting):
    """End-of-sequence, stop string and budget at every position: the earliest wins, in the middle of rounds too."""
    prompt, options = PROMPTS[1], {"drafting": drafting, "lossless": True, "num_speculative_tokens": 6}
    full = engine.generate(prompt, **options)
    tokenizer = pair[2]
    middle = 0
    for n in range(1, 24):
        short = engine.generate(prompt, max_tokens=n, **options)
        assert (short.token_ids, short.finish_reason) == (full.token_ids[:n], "length")
        assert short.text == tokenizer.decode(full.token_ids[:n], skip_special_tokens=True)
        rounds = [len(event.token_ids) for event in engine.stream(prompt, max_tokens=n, **options)]
        middle += rounds[-2] > 1

        eos = full.token_ids[n]
        first = full.token_ids.index(eos)
        ended = with_eos(pair, [319, eos]).generate(prompt, **options)
        assert (ended.token_ids, ended.finish_reason) == (full.token_ids[: first + 1], "stop")
        assert ended.usage.completion_tokens == first + 1
        capped = with_eos(pair, eos).generate(prompt, max_tokens=first + 1, **options)
        assert (capped.token_ids, capped.finish_reason) == (ended.token_ids, "stop")
        capped = with_eos(pair, eos).generate(prompt, max_tokens=max(first, 1), **options)
        assert capped.finish_reason == ("length" if first else "stop")
    assert middle >= 5


@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("lossless", [True, False])
def test_stop_strings_across_tokens_and_rounds(engine, pair, drafting, lossless):
    """Every piece of the answer's text is a stop string once: what comes before it is the answer, in both modes."""
    options = {"drafting": drafting, "lossless": lossless, "window": 2, "num_speculative_tokens": 6}
    checked = across = 0
    for prompt in PROMPTS[:2]:
        full = engine.generate(prompt, **options)
        for start in range(0, len(full.text) - 4, 3):
            stop = full.text[start : start + 4]
            expected = full.text[: full.text.index(stop)]
            if not lossless:  # a position that completes a stop string is strict, so the text before may change
                result = engine.generate(prompt, stop=(stop,), **options)
                assert stop not in result.text
                assert result.text == "".join(event.text for event in engine.stream(prompt, stop=[stop], **options))
                continue
            result = engine.generate(prompt, stop=[stop, "never to be seen"], **options)
            assert result.text == expected, (start, stop)
            assert result.finish_reason == "stop"
            assert full.token_ids[: len(result.token_ids)] == result.token_ids
            events = list(engine.stream(prompt, stop=stop, **options))
            assert "".join(event.text for event in events) == expected
            checked += 1
            across += len(events) > 2
    assert checked >= 10 or not lossless
    assert across >= 5 or not lossless


def test_a_stop_string_that_is_a_special_token_ends_the_answer(pair):
    """Special tokens leave no text, so they are matched by id."""
    target, draft, tokenizer = pair
    bias = {3: 50.0}
    engine = FLyEngine.from_pretrained(target, draft, tokenizer=tokenizer, logit_bias=bias, max_tokens=5)
    assert engine.generate(PROMPTS[0]).token_ids == (3,) * 5
    result = engine.generate(PROMPTS[0], stop=["<|im_end|>"])
    assert (result.token_ids, result.text, result.finish_reason) == ((3,), "", "stop")


def test_a_special_token_as_stop_string_counts_with_ignore_eos(pair):
    target, draft, tokenizer = pair
    engine = FLyEngine.from_pretrained(target, draft, tokenizer=tokenizer, logit_bias={3: 50.0}, max_tokens=5)
    assert engine.generate(PROMPTS[0], stop=["<|im_end|>"], ignore_eos=True).token_ids == (3,)


def test_target_and_draft_model_are_seeded_differently(engine, monkeypatch):
    """Shared noise would correlate what is drafted with what is accepted and recovered."""
    from fly_llm import request
    from fly_llm.drafters import model

    seeds = []

    class Recording(model.Sampler):
        def __init__(self, config, seed, vocab_size):
            seeds.append(seed)
            super().__init__(config, seed, vocab_size)

    monkeypatch.setattr(model, "Sampler", Recording)
    monkeypatch.setattr(request, "Sampler", Recording)
    used = []
    for seed in (7, 8):
        seeds.clear()
        engine.generate(PROMPTS[0], temperature=0.8, seed=seed, max_tokens=4)
        used += [value for value in seeds if value != 0]  # a drafter that waits for a request has seed 0
    assert len(used) == 4
    assert len(set(used)) == 4


def test_a_draft_model_with_a_shorter_context_is_not_fed_beyond_it(pair):
    target, _, tokenizer = pair
    draft = noisy_copy(target)
    draft.config.max_position_embeddings = 40
    longest = []
    draft.register_forward_hook(
        lambda _, __, output: longest.append((output.get("cache") or output.get("past_key_values")).get_seq_length())
    )
    engine = FLyEngine.from_pretrained(target, draft, tokenizer=tokenizer, max_tokens=60, lossless=True)
    result = engine.generate(PROMPTS[0])
    assert result.token_ids == engine.generate(PROMPTS[0], num_speculative_tokens=0).token_ids
    assert len(longest) > 5
    assert max(longest) <= 40


def test_ignore_eos_goes_on(pair):
    full = with_eos(pair, [319]).generate(PROMPTS[1])
    eos = full.token_ids[5]
    engine = with_eos(pair, [eos])
    assert len(engine.generate(PROMPTS[1]).token_ids) < 10
    assert len(engine.generate(PROMPTS[1], ignore_eos=True).token_ids) == 40


def test_relaxed_text_is_marked(engine, pair):
    """Spans cover exactly the characters of relaxed tokens, in the result and in the stream alike."""
    tokenizer = pair[2]
    marked = 0
    for prompt in random_prompts(16, 12):
        events = list(engine.stream(prompt, window=1, theta=0.0, drafting="model"))
        result = events[-1].result
        covered = {i for start, end in result.relaxed_spans for i in range(start, end)}
        for position in result.relaxed:
            before = tokenizer.decode(result.token_ids[:position], skip_special_tokens=True)
            token = tokenizer.decode([result.token_ids[position]], skip_special_tokens=True)
            if "�" in before[-1:] + token or not token:
                continue
            assert result.text[len(before) : len(before) + len(token)] == token
            assert covered >= set(range(len(before), len(before) + len(token)))
            marked += 1
        offset, streamed = 0, set()
        for event in events:
            streamed |= {offset + i for start, end in event.relaxed_spans for i in range(start, end)}
            offset += len(event.text)
        assert streamed == covered
        for change in result.relaxations:
            assert change.token_id == result.token_ids[change.position] != change.own_token_id
            assert change.text == result.text[change.start : change.end]
            assert change.own_text == tokenizer.decode([change.own_token_id])
    assert marked >= 10


def test_strict_prefix_keeps_the_first_tokens(engine):
    options = {"window": 1, "theta": 0.0, "drafting": "model"}
    early = [min(engine.generate(prompt, **options).relaxed, default=99) for prompt in PROMPTS]
    assert min(early) < 8
    for prompt in PROMPTS:
        result = engine.generate(prompt, strict_prefix=12, **options)
        assert min(result.relaxed, default=99) >= 12
        strict = engine.generate(prompt, num_speculative_tokens=0)
        assert result.token_ids[:12] == strict.token_ids[:12]


def test_special_tokens_are_never_relaxed(engine, pair):
    """With every id special, θ = 0 and W = 1 keep the answer strict."""
    target, draft, tokenizer = pair
    from fly_llm.models.registry import Handle  # noqa: F401

    other = FLyEngine.from_pretrained(target, draft, tokenizer=tokenizer, max_tokens=40, window=1, theta=0.0)
    assert other.generate(PROMPTS[0], drafting="model").relaxed
    other.load()._handle.models.pair().target.special_ids = frozenset(range(320))
    result = other.generate(PROMPTS[0], drafting="model")
    assert not result.relaxed
    assert result.stats.num_protected_rejections > 0
    other.load()._handle.models.pair().target.special_ids = frozenset(range(4))


def test_the_answer_is_cut_to_the_context(pair, engine):
    prompt = PROMPTS[0] * 31  # 496 of 512
    result = engine.generate(prompt, max_tokens=100)
    assert len(result.token_ids) == 16
    assert (result.finish_reason, result.settings["max_tokens"]) == ("length", 16)
    one = engine.generate((PROMPTS[0] * 32)[:511])
    assert len(one.token_ids) == 1
    forwards = []
    pair[0].register_forward_hook(hook := lambda *_: forwards.append(1))
    for size in (512, 600):
        with pytest.raises(ContextOverflowError, match=f"{size} tokens and .* window holds 512") as caught:
            engine.generate((PROMPTS[0] * 40)[:size])
        assert (caught.value.prompt_tokens, caught.value.context_window) == (size, 512)
    assert not forwards
    pair[0]._forward_hooks.clear()
    assert hook


def test_default_max_tokens_is_1024_or_the_room_left(pair):
    target, _, tokenizer = pair
    engine = FLyEngine.from_pretrained(target, tokenizer=tokenizer)
    assert engine.generate(PROMPTS[0], stop=["e"]).settings["max_tokens"] == 512 - 16


def test_settings_and_statistics_are_json_able_and_true(engine):
    result = engine.generate(PROMPTS[0], theta=0.2, window=3, temperature=0.5, seed=9, stop=["zzz"])
    report = json.loads(json.dumps(result.report()))
    assert (report["theta"], report["window"], report["seed"], report["drafting"]) == (0.2, 3, 9, "nested")
    assert report["num_output_tokens"] == 40
    assert report["mean_acceptance_length"] == pytest.approx(40 / report["num_rounds"])
    assert report["num_relaxed_tokens"] == len(report["relaxations"])
    stats = result.stats
    assert stats.decode_seconds >= stats.draft_seconds + stats.verify_seconds
    strict = engine.generate(PROMPTS[0], theta=math.inf)
    assert json.loads(json.dumps(strict.report(), allow_nan=False))["lossless"] is True
    assert engine.generate(PROMPTS[0], num_speculative_tokens=0).settings["drafting"] is None


def test_sampling_repeats_with_a_seed_and_reports_the_seed_it_drew(engine):
    first = engine.generate(PROMPTS[0], temperature=0.9)
    again = engine.generate(PROMPTS[0], temperature=0.9, seed=first.settings["seed"])
    other = engine.generate(PROMPTS[0], temperature=0.9)
    assert first.token_ids == again.token_ids != other.token_ids
    assert engine.generate(PROMPTS[0]).settings["seed"] is None


def test_prompts_as_text_ids_and_messages(engine, pair):
    tokenizer = pair[2]
    text = "the quick brown fox"
    ids = tokenizer(text)["input_ids"]
    assert engine.generate(text).token_ids == engine.generate(ids).token_ids
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert engine.generate(messages).token_ids == engine.generate(rendered).token_ids
    assert engine.count_tokens(messages) == len(rendered)


BAD_CALLS = [
    ({"thetta": 0.2}, ConfigError, r"unknown setting 'thetta': did you mean 'theta'\?"),
    ({"zzzz": 4}, ConfigError, "unknown setting 'zzzz': Known settings are"),
    ({"num_draft_tokens": 4}, ConfigError, r"did you mean 'num_speculative_tokens'\?"),
    ({"theta": -0.1}, ConfigError, "theta must be a number of at least 0, got -0.1"),
    ({"theta": float("nan")}, ConfigError, "theta must be a number"),
    ({"theta": "0.3"}, ConfigError, "theta must be a number of at least 0, got '0.3'"),
    ({"window": 15}, ConfigError, "window=15 must be smaller than num_speculative_tokens=15.*window <= 14"),
    ({"window": 4, "num_speculative_tokens": 4}, ConfigError, "window=4 must be smaller"),
    ({"window": 0}, ConfigError, "window must be a whole number of at least 1, got 0"),
    ({"num_speculative_tokens": -1}, ConfigError, "num_speculative_tokens must be a whole number of at least 0"),
    ({"num_speculative_tokens": 2.5}, ConfigError, "num_speculative_tokens must be a whole number"),
    ({"entropy": "top5"}, ConfigError, "entropy must be 'top3' or 'normalized', got 'top5'"),
    ({"drafting": "tree"}, ConfigError, "drafting must be .* got 'tree'"),
    ({"lossless": 1}, ConfigError, "lossless must be True or False, got 1"),
    ({"temperature": -1}, ConfigError, "temperature must be a number of at least 0, got -1"),
    ({"temperature": float("inf")}, ConfigError, "temperature must be a number"),
    ({"top_p": 0.0}, ConfigError, "top_p must be above 0"),
    ({"top_p": 1.5}, ConfigError, "top_p must be a number of at least 0 and at most 1"),
    ({"max_tokens": 0}, ConfigError, "max_tokens must be a whole number of at least 1, got 0"),
    ({"stop": ["ok", ""]}, ConfigError, "stop must be non-empty strings, got ''"),
    ({"seed": 1.5}, ConfigError, "seed must be a whole number of at least 0, got 1.5"),
    ({"seed": -1}, ConfigError, "seed must be a whole number of at least 0, got -1"),
    ({"stop": 5}, ConfigError, "stop must be a string or a list of strings, got 5"),
    ({"repetition_penalty": 0}, ConfigError, "repetition_penalty must be above 0"),
    ({"logit_bias": [3]}, ConfigError, "logit_bias must map token ids to numbers"),
    ({"logit_bias": {3: math.inf}}, ConfigError, "finite or -inf"),
    ({"logit_bias": {9999: 1.0}}, ConfigError, "names token 9999, but the target's vocabulary has 320 ids"),
    ({"tools": []}, ConfigError, "tools: only chat messages go through a template"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD_CALLS, ids=[str(row[0]) for row in BAD_CALLS])
def test_bad_settings(engine, options, kind, message):
    with pytest.raises(kind, match=message):
        engine.generate("hello", **options)
    if options not in ({"logit_bias": {9999: 1.0}}, {"tools": []}):
        with pytest.raises(kind, match=message):
            FLyEngine.from_pretrained("nowhere", **options)


def test_a_window_is_not_checked_where_nothing_is_relaxed():
    assert FLyConfig(window=20, lossless=True).effective_window is None
    assert FLyConfig(window=20, num_speculative_tokens=1).effective_window is None
    assert FLyConfig(num_speculative_tokens=4).effective_window == 3
    assert FLyConfig(num_speculative_tokens=15).effective_window == 6


BAD_PROMPTS = [
    ([], "empty list: give at least one message"),
    (None, "a prompt is a str, .* got NoneType"),
    ([1, "a"], "a prompt is a str"),
    ([True, False], "a prompt is a str"),
    ([5, 320], "token id 320 is not in the target's vocabulary of 320 ids"),
    ([-1], "token id -1"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
    ([{"role": "wizard", "content": "x"}], "wizard"),
    ([{"content": "x"}], "role"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[str(row[0])[:40] for row in BAD_PROMPTS])
def test_bad_prompts(engine, prompt, message):
    with pytest.raises(PromptError, match=message):
        engine.generate(prompt)


def test_models_that_cannot_be_loaded(tmp_path, pair):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 64)
    (tmp_path / "fake.gguf").write_text("not a model")
    cases = {
        str(tmp_path / "missing"): "does not exist",
        str(tmp_path / "missing.gguf"): "there is no file",
        str(tmp_path): "has no config.json",
        str(tmp_path / "broken.gguf"): "damaged: download it again",
        str(tmp_path / "fake.gguf"): "is not a GGUF file",
        "no-such-owner/no-such-model": "could not load the model 'no-such-owner/no-such-model'",
    }
    for name, message in cases.items():
        with FLyEngine.from_pretrained(name) as engine, pytest.raises(ModelLoadError, match=message):
            engine.generate("hello")
    with pytest.raises(ConfigError, match="does not know its tokenizer"):
        FLyEngine.from_pretrained(pair[0]).generate("hello")


def test_a_draft_model_with_another_tokenizer_is_refused(pair):
    target, draft, tokenizer = pair
    other = tiny_tokenizer(300)
    engine = FLyEngine.from_pretrained(target, draft, tokenizer=tokenizer, draft_tokenizer=other)
    with pytest.raises(TokenizerMismatchError, match=r"300.*draft=None"):
        engine.generate("hello")


def test_drafting_with_a_model_needs_one(pair):
    engine = FLyEngine.from_pretrained(pair[0], tokenizer=pair[2])
    with pytest.raises(ConfigError, match="drafting='nested' needs a draft model"):
        engine.generate("hello", drafting="nested")


def test_a_cache_that_cannot_be_rolled_back_is_refused_before_any_text(pair):
    config = MambaConfig(vocab_size=320, hidden_size=32, state_size=4, num_hidden_layers=2)
    model = MambaForCausalLM(config).eval()
    engine = FLyEngine.from_pretrained(model, tokenizer=pair[2], max_tokens=8)
    events = []
    with pytest.raises(UnsupportedCacheError, match=r"MambaForCausalLM.*num_speculative_tokens=0"):
        events.extend(engine.stream("hello there"))
    assert events == []
    assert len(engine.generate("hello there", num_speculative_tokens=0).token_ids) == 8


def test_a_padded_vocabulary_is_fine(pair):
    """A draft model with wider (padded) logits, and one with narrower ones, give the same strict answer."""
    target, _, tokenizer = pair
    expected = FLyEngine.from_pretrained(target, tokenizer=tokenizer).generate(PROMPTS[0], max_tokens=20, lossless=True)
    wide = tiny_llama(352, seed=5)
    with torch.no_grad():
        wide.lm_head.weight[320:] *= 3  # would win often if it were not sliced off
    for sampling in ({}, {"temperature": 0.8, "seed": 1}):
        engine = FLyEngine.from_pretrained(target, wide, tokenizer=tokenizer, max_tokens=20, lossless=True, **sampling)
        result = engine.generate(PROMPTS[0])
        assert max(result.token_ids) < 320
        assert result.stats.num_draft_tokens > 0
        if not sampling:
            assert result.token_ids == expected.token_ids
    wide_target = FLyEngine.from_pretrained(wide, target, tokenizer=tokenizer, max_tokens=20)
    assert len(wide_target.generate(PROMPTS[0], temperature=0.8, seed=1).token_ids) == 20


def test_penalties_of_a_checkpoint_are_not_inherited_and_this_is_logged(pair, tmp_path, caplog):
    target, _, tokenizer = pair
    target.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(config | {"repetition_penalty": 1.7}))
    caplog.set_level(logging.INFO, "fly_llm")
    with FLyEngine.from_pretrained(tmp_path) as engine:
        plain = engine.generate(PROMPTS[0], max_tokens=20)
        engine.generate(PROMPTS[1], max_tokens=4)
        penalised = engine.generate(PROMPTS[0], max_tokens=20, repetition_penalty=1.7)
    assert penalised.token_ids != plain.token_ids
    expected = FLyEngine.from_pretrained(target, tokenizer=tokenizer).generate(PROMPTS[0], max_tokens=20)
    assert plain.token_ids == expected.token_ids
    assert caplog.text.count("not inherited") == 1


def test_an_ordinary_stop_string_does_not_make_the_unknown_token_an_end(pair):
    import copy

    target, draft, tokenizer = pair
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.unk_token = "<s>"
    engine = FLyEngine.from_pretrained(target, draft, tokenizer=tokenizer, logit_bias={0: 50.0}, max_tokens=5)
    for stop in ("never to be seen", "zq"):
        assert engine.generate(PROMPTS[0], stop=stop).token_ids == (0,) * 5
    assert engine.generate(PROMPTS[0], stop="<s>").token_ids == (0,)


def test_a_relative_path_means_what_it_meant_when_the_engine_was_made(pair, tmp_path, monkeypatch):
    for name, seed in (("a", 0), ("b", 5)):
        tiny_llama(seed=seed).save_pretrained(tmp_path / name / "m")
        pair[2].save_pretrained(tmp_path / name / "m")
    answers = []
    engines = []
    for name in "ab":
        monkeypatch.chdir(tmp_path / name)
        engines.append(FLyEngine.from_pretrained("m", max_tokens=12))
        monkeypatch.chdir(tmp_path)
        answers.append(engines[-1].generate(PROMPTS[0]).token_ids)
    assert answers[0] != answers[1]
    for engine in engines:
        engine.close()


def test_weights_without_a_place_are_mentioned(pair, tmp_path, caplog):
    pair[0].save_pretrained(tmp_path)
    pair[2].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": None}))
    with FLyEngine.from_pretrained(tmp_path, max_tokens=2) as engine:
        engine.generate("hello")
    assert "weights that a LlamaForCausalLM has no use for, model.layers.1" in caplog.text


def test_every_setting_in_force_is_reported(engine):
    report = engine.generate(PROMPTS[0], logit_bias={5: 1.0}, ignore_eos=True, seed=7).report()
    assert (report["logit_bias"], report["ignore_eos"], report["seed"]) == ({"5": 1.0}, True, 7)
    from fly_llm.config import KNOBS

    assert set(KNOBS) <= set(report)


def test_importing_the_package_imports_no_torch():
    code = "import sys, fly_llm; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.perf_counter() - start < 2


def test_the_public_names():
    import fly_llm

    assert sorted(fly_llm.__all__) == fly_llm.__all__
    assert all(getattr(fly_llm, name) for name in fly_llm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'FlyEngine'"):
        fly_llm.FlyEngine  # noqa: B018
