"""The layout is a promise: imports go down only, the core knows no framework, and files stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fly_llm"

BELOW = {
    "errors": set(),
    "config": {"errors"},
    "types": set(),
    "stream": {"errors", "types"},
    "decoding": {"config", "types", "errors"},
    "drafters": {"config", "types", "errors", "decoding"},
    "models": {"config", "types", "errors"},
    "text": {"config", "types", "errors"},
    "answer": {"config", "types", "errors", "models", "text"},
    "request": {"config", "types", "errors", "decoding", "drafters", "models", "text", "answer"},
    "engine": {"config", "types", "errors", "stream", "models", "request", "text"},
    "wrapper": {"config", "errors", "models", "engine"},
    "cli": {"config", "types", "errors", "stream", "models", "engine"},
}
"""Room -> the rooms it may import."""


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    """Every module a file imports, inside functions and type-checking blocks too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            if node.module == "fly_llm":
                yield from (f"fly_llm.{alias.name}" for alias in node.names)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    own = room(path)
    if own == "__init__":
        return
    for name in imports(path):
        first, *rest = name.split(".")
        assert first not in ("langchain_core", "langchain_fly", "llama_index"), f"{path} imports {name}"
        if first == "fly_llm" and rest and rest[0] != own:
            other = rest[0]
            assert other not in BELOW or other in BELOW[own], f"{own} must not import {other} ({path})"


def test_every_room_is_in_the_picture():
    assert {room(path) for path in FILES} - {"__init__"} == set(BELOW)


def test_only_models_and_text_and_sampling_know_transformers():
    users = {
        str(path.relative_to(PACKAGE)) for path in FILES if any(n.startswith("transformers") for n in imports(path))
    }
    assert {name for name in users if not name.startswith(("models/", "text/", "cli/"))} == {"decoding/sampling.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_readable(path):
    source = path.read_text()
    assert source.count("\n") <= 420, f"{path} does two jobs"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno <= 100, f"{path}: {node.name} does two jobs"


@pytest.mark.parametrize("path", [*FILES, *sorted((ROOT / "integrations").rglob("*.py"))], ids=lambda path: path.stem)
def test_no_prints_and_no_root_logger(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called != "print", path
            if called == "logging.getLogger":
                assert ast.unparse(node.args[0]) == "'fly_llm'", path


def test_values_leave_the_device_through_one_helper():
    """`.item()`, `.tolist()` and `.cpu()` on tensors wait for the device; only `host.py` may, and it counts."""
    for folder in ("decoding", "drafters"):
        for path in sorted((PACKAGE / folder).glob("*.py")):
            if path.name == "host.py":
                continue
            called = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            assert not called & {"item", "tolist", "cpu", "numpy"}, path
