"""The demo on a tiny model, and the documents: their code runs, their commands exist."""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from llama_index.core import Settings
from rich.console import Console
from tiny_models import tiny_llama, tiny_tokenizer

from fly_llm.cli import app
from fly_llm.config import FLY_FIELDS, FLyConfig
from langchain_fly import ChatFLy

pytest.importorskip("bm25s")
pytest.importorskip("langchain_text_splitters")

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ").split(" #")[0].strip()
    for block in re.findall(r"```console\n(.*?)```", DOCUMENTS, re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def rag():
    spec = importlib.util.spec_from_file_location("rag_langchain", ROOT / "examples" / "rag_langchain.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model on disk whose context holds the demo's prompts in its byte-sized tokens."""
    path = tmp_path_factory.mktemp("tiny")
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    model.config.max_position_embeddings = tokenizer.model_max_length = 4096
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_retriever_finds_the_passages_that_answer(rag):
    retriever = rag.make_retriever(rag.TEXT.read_text(encoding="utf-8"))
    for question, words in zip(rag.QUESTIONS, ("product owner", "automated tests", "technology stack"), strict=True):
        found = retriever.invoke(question)
        assert len(found) == 2 and words in rag.join(found).lower()


def test_demo_end_to_end(rag, folder):
    out = io.StringIO()
    rag.main(["--model", str(folder), "--max-tokens", "12"], Console(file=out, width=100))
    text = out.getvalue()
    for number, question in enumerate([*rag.QUESTIONS, rag.OPEN_ENDED], 1):
        printed = re.search(rf"^{number}\. {re.escape(question)}\n(.+)$", text, re.MULTILINE)
        assert printed, f"no answer below {question!r}"
        assert f"{number}. relaxed tokens: " in text
    rows = re.findall(r"│ (\w+) +│ (plain|strict|FLy) +│ +(\d+) │ +([\d.]+) │ +(\d+) │ +([\d.]+) │", text)
    assert [row[1] for row in rows] == ["plain", "strict", "FLy"] * 5
    assert [row[0] for row in rows[::3]] == ["1", "2", "3", "4", "all"]
    for plain, strict, _ in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert plain[3:] == ("1.00", "0", "1.00")
        assert strict[2] == plain[2] and strict[4] == "0"
    assert "FLy is lossy" in text and "equals plain for 4 of 4 prompts" in text


def test_measure_compares_the_three_modes_and_relaxed_text_is_shown(rag, folder):
    llm = ChatFLy(model=str(folder), max_tokens=60, theta=0.0, window=1, dtype="float32")
    imagine = rag.ChatPromptTemplate.from_messages([("user", "{request}")])
    prompts = [imagine.invoke(f"say the {word} and the {word} again") for word in ("fox", "dog", "sun", "day")]
    measured = rag.measure(llm, prompts, seconds=0.0)
    for answers in measured:
        assert answers["plain"].content == answers["strict"].content
        fly = {mode: message.response_metadata["fly"] for mode, message in answers.items()}
        assert fly["plain"]["num_rounds"] == fly["plain"]["num_output_tokens"]
        assert fly["plain"]["num_relaxed_tokens"] == fly["strict"]["num_relaxed_tokens"] == 0
    assert rag.total([answers["strict"] for answers in measured], "num_accepted_tokens") > 0
    relaxed = [a["FLy"] for a in measured if a["FLy"].response_metadata["fly"]["num_relaxed_tokens"]]
    assert relaxed, "nothing was relaxed, so this test shows nothing"
    for message in relaxed:
        out = io.StringIO()
        rag.show_relaxed(message, Console(file=out, width=100))
        for change in message.response_metadata["fly"]["relaxations"]:
            assert f"kept {change['text']!r}, the target alone would have gone on with" in out.getvalue()


def test_the_text_of_the_demo_says_where_it_is_from(rag):
    about = (rag.TEXT.parent / "README.md").read_text(encoding="utf-8")
    assert rag.TEXT.name in about and "public domain" in about


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_readme_python(snippet, folder, monkeypatch, capsys):
    code = compile(snippet, "README.md", "exec")
    if re.search(r'^(?!.*#).*"[\w-]+/[\w.-]+"', snippet, re.MULTILINE):
        return  # needs a hub model
    if "with_structured_output" not in snippet:  # which takes a model that comes to an end
        monkeypatch.setattr("fly_llm.models.bundled.default_target", lambda: folder)
    exec(code, {"__name__": "readme"})
    Settings._llm, Settings.tokenizer = None, None  # LlamaIndex's belong to the process
    assert capsys.readouterr().out


def test_most_readme_snippets_run():
    bundled = [s for s in SNIPPETS if any(name in s for name in ("from_pretrained()", "ChatFLy(", "FLyLLM("))]
    assert (len(SNIPPETS), len(bundled)) == (6, 5)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_documents_exist(command):
    program, *arguments = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "fly-llm":
        commands = typer.main.get_command(app).commands
        commands[arguments[0]].make_context(arguments[0], arguments[1:])  # raises for an unknown option
    else:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert program == "pip" and arguments[0] == "install"
        assert all(extra in extras for extra in re.findall(r"\w+", "".join(re.findall(r"\[([\w,]+)\]", command))))


def test_make_targets_named_in_passing_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([\w-]+)`", DOCUMENTS))
    assert named >= {"lint", "test", "demo", "test-oldest"}
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in named)


def test_readme_table_of_settings_has_the_defaults():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", README, re.MULTILINE))
    assert set(rows) == set(FLY_FIELDS)
    for name, shown in rows.items():
        default = getattr(FLyConfig(), name)
        if name == "strict_zones":
            shown, default = shown.replace("`", ""), ", ".join(default)
        assert shown.strip('`"') == (str(default) if name != "window" else "min(6, K−1)")
    assert FLyConfig().effective_window == 6


def test_readme_says_lossy_first():
    first = README.split("\n\n")[1]
    assert "lossy" in first and "lossless=True" in first
