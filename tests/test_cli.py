"""The command line: what goes to which stream, what ends with which code, and that help comes at once."""

import importlib.metadata
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import time
from io import StringIO

import pytest
from rich.console import Console
from tiny_models import noisy_copy, tiny_llama, tiny_tokenizer
from typer.testing import CliRunner

from fly_llm import FLyEngine
from fly_llm.cli import app, options
from fly_llm.cli.chat import Chat, parse
from fly_llm.cli.output import _VISIBLE, Printer, clean
from fly_llm.config import FLY_FIELDS, KNOBS, FLyConfig, SamplingConfig
from fly_llm.errors import ConfigError, FLyError, ModelLoadError
from fly_llm.types import Event

PROMPT = "the quick brown fox"
MESSAGES = [{"role": "user", "content": PROMPT}]
LOOSE = {"theta": 0.0, "window": 1, "max_tokens": 60, "num_speculative_tokens": 6}
LOOSE_OPTIONS = ("--theta", "0", "--window", "1", "--max-tokens", "60", "-k", "6")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders: a target, a draft model for it, and a model of another tokenizer."""
    target = tiny_llama(eos_token_id=1)
    kinds = {"target": target, "draft": noisy_copy(target), "other": tiny_llama(300)}
    folders = {}
    for name, model in kinds.items():
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        tiny_tokenizer(model.config.vocab_size).save_pretrained(folder)
        folders[name] = str(folder)
    return folders


@pytest.fixture(scope="module")
def engine(models):
    return FLyEngine.from_pretrained(models["target"], models["draft"])


@pytest.fixture
def pair(models):
    return ("--model", models["target"], "--draft", models["draft"])


@pytest.fixture
def run():
    def invoke(*arguments, **kwargs):
        result = CliRunner(env={"FORCE_COLOR": None, "NO_COLOR": None, "TERM": "xterm-256color"}).invoke(
            app, [str(argument) for argument in arguments], **kwargs
        )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def process(*arguments, **kwargs):
    command = [sys.executable, "-m", "fly_llm.cli", *arguments]
    kwargs["env"] = os.environ | {"OMP_NUM_THREADS": "1"} | kwargs.get("env", {})
    return subprocess.run(command, capture_output=True, timeout=120, check=False, **kwargs)


# -- help and version --------------------------------------------------------------------------------------------------


def test_help_answers_within_a_second():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = process("--help")
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0 and b"generate" in done.stdout
    assert statistics.median(seconds) < 1.0


def test_help_and_settings_errors_import_no_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom fly_llm.cli import app\n"
        "for args in (['--help'], ['generate', '--help'], ['chat', '--help'], ['info', '--help'], ['--version'],\n"
        "             ['generate', 'x', '--theta', '-1']):\n    CliRunner().invoke(app, args)\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_names_every_setting_with_its_default(run, command):
    shown = run(command, "--help", env={"COLUMNS": "250"}).stdout
    for knob in KNOBS:
        assert knob == "logit_bias" or f"--{knob.replace('_', '-')}" in shown
    for default in ("0.3]", "15]", "(min(6, k - 1))]", "top3]", "(1024, or the room left in the context)]"):
        assert default in shown


def test_every_setting_is_an_option_of_the_same_default():
    given = options.Options().knobs()
    assert set(given) == set(KNOBS) - {"logit_bias"}
    for name, value in given.items():
        if name == "strict_zones":
            value = tuple(value)
        assert value == getattr(FLyConfig() if name in FLY_FIELDS else SamplingConfig(), name)


def test_version(run):
    assert run("--version").stdout == f"fly-llm {importlib.metadata.version('fly-llm')}\n"


# -- generate ----------------------------------------------------------------------------------------------------------


def test_stdout_is_the_text_and_stderr_the_statistics(run, pair, engine):
    expected = engine.generate(MESSAGES, **LOOSE)
    done = run("generate", PROMPT, *pair, *LOOSE_OPTIONS)
    assert done.exit_code == 0
    assert done.stdout_bytes == f"{expected.text}\n".encode()
    assert done.stderr.count("\n") == 1
    for part in (
        f"{len(expected.token_ids)} tokens",
        f"mean acceptance length {expected.stats.mean_acceptance_length:.2f}",
        f"{len(expected.relaxed)} relaxed",
        f"finish reason: {expected.finish_reason}",
        "tokens/s",
        "prefill",
    ):
        assert part in done.stderr


def test_no_stats_leaves_stderr_empty(run, pair):
    done = run("generate", PROMPT, *pair, "--max-tokens", 5, "--no-stats")
    assert done.exit_code == 0 and done.stderr == ""


def test_raw_and_system_reach_the_prompt(run, pair, engine):
    raw = run("generate", PROMPT, *pair, "--raw", "--max-tokens", 12)
    assert raw.stdout == engine.generate(PROMPT, max_tokens=12).text + "\n"
    told = run("generate", PROMPT, *pair, "--system", "be brief", "--max-tokens", 12)
    messages = [{"role": "system", "content": "be brief"}, *MESSAGES]
    assert told.stdout == engine.generate(messages, max_tokens=12).text + "\n"
    assert run("generate", PROMPT, *pair, "--raw", "--system", "be brief").exit_code == 2


def test_prompt_from_stdin(run, pair, engine):
    chat = run("generate", "-", *pair, "--max-tokens", 12, input=f"{PROMPT}\n")
    assert chat.stdout == engine.generate(MESSAGES, max_tokens=12).text + "\n"
    raw = run("generate", "-", *pair, "--raw", "--max-tokens", 12, input=f"{PROMPT}\n")
    assert raw.stdout == engine.generate(f"{PROMPT}\n", max_tokens=12).text + "\n"
    empty = run("generate", "-", *pair, input="\n")
    assert empty.exit_code == 1 and "error: the prompt is empty" in empty.stderr


def test_json_is_one_complete_document(run, pair, engine):
    done = run("generate", PROMPT, *pair, *LOOSE_OPTIONS, "--temperature", 0.8, "--seed", 5, "--stop", "zq", "--json")
    assert done.stderr == "" and done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    expected = engine.generate(MESSAGES, **LOOSE, temperature=0.8, seed=5, stop=["zq"])
    assert found["text"] == expected.text
    assert found["token_ids"] == list(expected.token_ids)
    assert found["finish_reason"] == expected.finish_reason
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + len(expected.token_ids)
    assert [change["position"] for change in found["relaxations"]] == list(expected.relaxed)
    assert found["relaxed_spans"] == [list(span) for span in expected.relaxed_spans]
    assert found["settings"] == expected.settings
    assert found["settings"]["seed"] == 5 and found["settings"]["stop"] == ["zq"]
    stats = found["stats"]
    assert stats["mean_acceptance_length"] == pytest.approx(stats["num_output_tokens"] / stats["num_rounds"])
    assert {"acceptance_rate", "relaxed_share", "tokens_per_second", "prefill_seconds"} <= stats.keys()


def test_relaxed_text_is_marked_on_a_terminal(engine):
    console = Console(force_terminal=True, color_system="standard", file=StringIO(), soft_wrap=True)
    printer = Printer(console)
    for event in engine.stream(MESSAGES, **LOOSE):
        printer.write(event)
        result = event.result
    assert result.relaxed_spans and printer.text == result.text
    written, shown = console.file.getvalue(), result.text.translate(_VISIBLE)
    assert re.sub("\x1b.*?m", "", written) == shown
    marked = "".join(re.findall("\x1b\\[4;33m(.*?)\x1b\\[0m", written, re.DOTALL))
    assert marked == "".join(shown[start:end] for start, end in result.relaxed_spans)


def test_force_color_counts_as_a_terminal(run, pair):
    done = run("generate", PROMPT, *pair, *LOOSE_OPTIONS, env={"FORCE_COLOR": "1"})
    assert done.exit_code == 0 and "\x1b[4;33m" in done.stdout


def write(text, *, terminal, spans=()):
    console = Console(force_terminal=terminal, color_system="standard" if terminal else None, file=StringIO(), width=20)
    printer = Printer(console)
    printer.write(Event(text, relaxed_spans=spans))
    printer.end()
    assert printer.text == text
    return console.file.getvalue()


def test_text_is_never_markup_and_never_wrapped():
    text = "[bold]a[/bold] :smile:\t" + "word " * 20 + " \n\n"
    assert write(text, terminal=False) == text + "\n"
    assert write(text, terminal=True) == text + "\n"


def test_spans_mark_their_characters():
    assert write("abcdef", terminal=True, spans=((1, 3), (5, 6))) == "a\x1b[4;33mbc\x1b[0mde\x1b[4;33mf\x1b[0m\n"


def test_control_characters_cannot_steer_a_terminal():
    assert write("a\x1b]0;title\x07b\x9b", terminal=True) == "a␛]0;title␇b\ufffd\n"
    assert write("a\x1b[1mb", terminal=False) == "a\x1b[1mb\n"


def test_bytes_that_are_no_text_are_replaced():
    assert clean(b"a\xffb\xc3\xa9".decode("utf-8", "surrogateescape")) == "a\ufffdbé"


def test_any_encoding_of_stdout_will_do(pair, engine):
    done = process("generate", PROMPT, *pair, "--max-tokens", "60", env={"PYTHONIOENCODING": "ascii"})
    expected = engine.generate(MESSAGES, max_tokens=60).text
    assert done.returncode == 0
    assert done.stdout == (expected + "\n").encode("ascii", "replace")


def test_a_reader_that_leaves_ends_it_quietly(pair):
    command = [sys.executable, "-m", "fly_llm.cli", "generate", PROMPT, *pair, "--max-tokens", "200"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stdout.close()
    with running.stderr:
        complaint = running.stderr.read()
    assert running.wait(timeout=120) == 141
    assert complaint == b""


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--theta", "-1"), "theta must be a number of at least 0, got -1.0"),
        (("--window", "8", "-k", "8"), "window=8 must be smaller than num_speculative_tokens=8"),
        (("--entropy", "top4"), "entropy must be"),
        (("--dtype", "int3"), "dtype must be one of"),
        (("--device", "abacus"), "device_map must be a device"),
        (("--model", "./nowhere"), "'./nowhere' does not exist"),
    ],
)
@pytest.mark.parametrize("command", [("generate", "x"), ("chat",)])
def test_errors_are_one_message_and_code_1(run, command, arguments, message):
    done = run(*command, *arguments)
    assert done.exit_code == 1
    assert done.stdout == "" and done.stderr.startswith(f"error: {message}")
    assert "Traceback" not in done.stderr


def test_usage_errors_are_code_2(run):
    assert run("generate").exit_code == 2
    assert run("generate", "x", "--thetta", "1").exit_code == 2
    assert run("generate", "x", "--window", "few").exit_code == 2
    assert run("unknown").exit_code == 2


def test_mismatched_draft_model_is_refused(run, models):
    done = run("generate", "x", "--model", models["target"], "--draft", models["other"])
    assert done.exit_code == 1 and "does not share the tokenizer" in done.stderr


def test_a_prompt_that_does_not_fit(run, pair):
    done = run("generate", "word " * 600, *pair)
    assert done.exit_code == 1 and "leaves no room for an answer" in done.stderr


def test_log_level(run, monkeypatch):
    def examine(*_):
        logging.getLogger("fly_llm").debug("seen")
        raise ModelLoadError("no such model")

    monkeypatch.setattr("fly_llm.cli.info.examine", examine)
    assert "seen" not in run("info", "x").stderr
    assert "DEBUG: seen" in run("info", "x", "-v").stderr
    assert "DEBUG: seen" in run("info", "x", env={"FLY_LLM_LOG": "debug"}).stderr
    wrong = run("info", "x", env={"FLY_LLM_LOG": "loud"})
    assert wrong.exit_code == 1 and "FLY_LLM_LOG must be" in wrong.stderr


# -- info --------------------------------------------------------------------------------------------------------------


def test_info_of_one_model(run, models):
    done = run("info", models["target"])
    assert done.exit_code == 0 and done.stderr == ""
    for fact in ("LlamaForCausalLM", "float32", "512 tokens", "320 ids", "chat template    yes"):
        assert fact in done.stdout
    found = json.loads(run("info", models["target"], "--json").stdout)
    assert found["target"]["eos_ids"] == [1]
    assert found["draft"] is None and found["compatible"] is None


def test_info_of_a_pair_that_fits(run, models):
    done = run("info", models["target"], models["draft"])
    assert done.exit_code == 0 and "the tokenizers agree" in done.stdout
    found = json.loads(run("info", models["target"], models["draft"], "--json").stdout)
    assert found["compatible"] is True and found["problem"] is None
    assert found["draft"]["name"] == models["draft"]


def test_info_of_a_pair_that_does_not_fit(run, models):
    done = run("info", models["target"], models["other"])
    assert done.exit_code == 1 and "does not share the tokenizer" in done.stderr
    assert done.stdout.count("LlamaForCausalLM") == 2
    found = run("info", models["target"], models["other"], "--json")
    assert found.exit_code == 1 and json.loads(found.stdout)["compatible"] is False


def test_info_loads_no_weights(run, models, monkeypatch):
    monkeypatch.setattr("transformers.LlamaForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert run("info", models["target"], models["draft"]).exit_code == 0


@pytest.mark.parametrize("arguments", [(), ("default",)])
def test_info_without_a_name_is_about_the_default(run, models, monkeypatch, arguments):
    monkeypatch.setattr("fly_llm.models.bundled.default_target", lambda: models["target"])
    shown = run("info", *arguments).stdout
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in shown and "39,072" in shown  # the name that it goes by
    assert models["target"] not in shown


def test_info_of_nothing(run):
    done = run("info", "./nowhere")
    assert done.exit_code == 1 and done.stderr.startswith("error: './nowhere' does not exist")


# -- chat --------------------------------------------------------------------------------------------------------------


def test_chat_keeps_history_and_obeys_commands(run, pair, engine):
    first = engine.generate(MESSAGES, max_tokens=20)
    turns = [*MESSAGES, {"role": "assistant", "content": first.text}, {"role": "user", "content": "and then"}]
    second = engine.generate([{"role": "system", "content": "be brief"}, *turns], max_tokens=8, theta=0.1)
    lines = [PROMPT, "", "/system be brief", "/max-tokens 8", "/theta 0.1", "and then", "/stats", "/exit", "never"]
    done = run("chat", *pair, "--max-tokens", 20, input="\n".join(lines))
    assert done.exit_code == 0
    assert done.stdout == f"{first.text}\n{second.text}\n"
    assert done.stderr.splitlines()[1:4] == ["system message: be brief", "max_tokens = 8", "theta = 0.1"]
    assert done.stderr.splitlines()[4] == done.stderr.splitlines()[5]  # shown by itself, and by /stats


def test_chat_goes_on_after_errors(run, pair, engine):
    answer = engine.generate([{"role": "user", "content": "/path"}], max_tokens=5)
    lines = ["/thetta 1", "/exot", "/theta -1", "/window 99", "/k few", "/lossless maybe", "/retry", "/stats", "//path"]
    done = run("chat", *pair, "--max-tokens", 5, "--no-stats", input="\n".join(lines))
    assert done.exit_code == 0 and done.stdout == answer.text + "\n"
    errors = done.stderr.splitlines()
    assert errors[0].startswith("error: unknown setting 'thetta': did you mean 'theta'?")
    assert errors[1].startswith("error: unknown command '/exot': did you mean '/exit'?")
    assert errors[2] == "error: theta must be a number of at least 0, got -1.0"
    assert errors[3].startswith("error: window=99 must be smaller")
    assert errors[4] == "error: num_speculative_tokens must be a whole number, got 'few'"
    assert errors[5] == "error: lossless must be on or off, got 'maybe'"
    assert errors[6] == "error: there is no question to answer again"
    assert errors[7] == "there is no finished answer yet"


def test_chat_lists_settings_and_help(run, pair):
    lines = ["/k 8", "/k", "/lossless on", '/stop ["a", "b"]', "/stop x y", "/stop none", "/settings", "/help"]
    shown = run("chat", *pair, input="\n".join(lines)).stderr
    for line in ("num_speculative_tokens = 8\nnum_speculative_tokens = 8", "lossless = on", 'stop = ["x y"]'):
        assert line in shown
    assert 'stop = ["a", "b"]' in shown and "stop = none" in shown
    for knob in KNOBS:
        assert f"\n{knob:<24}" in shown
    assert "Ctrl-C stops an answer" in shown


def test_retry_and_clear(run, pair, engine):
    first = engine.generate(MESSAGES, max_tokens=12)
    lines = [PROMPT, "/retry", "/clear", PROMPT]
    done = run("chat", *pair, "--max-tokens", 12, input="\n".join(lines))
    assert done.stdout == f"{first.text}\n" * 3


class StubStream(list):
    """Events, the last of which may be an exception."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def __iter__(self):
        for event in super().__iter__():
            if isinstance(event, BaseException):
                raise event
            yield event


class StubEngine:
    def __init__(self, *streams):
        self.streams, self.asked = list(streams), []

    def stream(self, messages, **_):
        self.asked.append(messages)
        return self.streams.pop(0)


def test_ctrl_c_keeps_what_the_answer_has(capsys):
    stopped = StubStream([Event("once upon"), KeyboardInterrupt()])
    engine = StubEngine(stopped, StubStream([Event("a time")]))
    chat = Chat(engine, {})
    chat.take("tell a story")
    assert stopped.closed
    chat.take("go on")
    assert engine.asked[1] == [
        {"role": "user", "content": "tell a story"},
        {"role": "assistant", "content": "once upon"},
        {"role": "user", "content": "go on"},
    ]
    out, err = capsys.readouterr()
    assert out == "once upon\na time\n" and err == "stopped\n"


def test_an_answer_without_a_character_leaves_no_trace(capsys):
    engine = StubEngine(
        StubStream([Event("fine")]), StubStream([KeyboardInterrupt()]), StubStream([FLyError("no")]), StubStream([])
    )
    chat = Chat(engine, {})
    chat.take("one")
    before = list(chat.messages)
    chat.take("two")
    assert chat.messages == before
    with pytest.raises(FLyError):
        chat.take("/retry")
    assert chat.messages == before
    chat.take("/retry")
    assert engine.asked[-1] == [*before, {"role": "user", "content": "two"}]


def test_a_retry_that_fails_keeps_the_old_answer(capsys):
    chat = Chat(StubEngine(StubStream([Event("fine")]), StubStream([FLyError("no")])), {})
    chat.take("one")
    before = list(chat.messages)
    with pytest.raises(FLyError):
        chat.take("/retry")
    assert chat.messages == before


@pytest.mark.parametrize("where", ["generate", "chat"])
def test_ctrl_c_elsewhere(run, pair, monkeypatch, where):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    if where == "generate":
        monkeypatch.setattr(FLyEngine, "stream", interrupted)
        done = run("generate", PROMPT, *pair)
    else:
        monkeypatch.setattr(Chat, "_read", interrupted)
        done = run("chat", *pair)
    assert done.exit_code == (130 if where == "generate" else 0)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        ("theta", "0.2", 0.2),
        ("theta", "inf", float("inf")),
        ("window", "4", 4),
        ("window", "none", None),
        ("entropy", "normalized", "normalized"),
        ("lossless", "on", True),
        ("lossless", "False", False),
        ("top_k", "40", 40),
        ("max_tokens", "default", None),
        ("seed", "7", 7),
        ("stop", "a b", "a b"),
        ("stop", '"\\n"', "\n"),
        ("stop", '["a", "b"]', ("a", "b")),
        ("stop", "none", ()),
        ("logit_bias", '{"42": -Infinity}', {"42": float("-inf")}),
        ("logit_bias", "none", None),
    ],
)
def test_values_are_read_by_the_type_of_their_field(knob, text, value):
    assert parse(knob, text) == value


@pytest.mark.parametrize(("knob", "text"), [("top_k", "1.5"), ("top_k", "none"), ("logit_bias", "{"), ("stop", '["a')])
def test_values_of_another_type_are_refused(knob, text):
    with pytest.raises(ConfigError):
        parse(knob, text)
