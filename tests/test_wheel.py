"""The wheel that users install: what is in it, that it imports beside LlamaIndex, and what it says without an extra.

`make test-wheel` installs it beside the newest and the oldest frameworks, which needs a package index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, cwd=folder)
    (path,) = folder.glob("fly_llm-*.whl")
    return path


def test_it_holds_the_packages_and_nothing_that_hides_llama_index(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "fly_llm/__init__.py",
        "fly_llm/py.typed",
        "langchain_fly/__init__.py",
        "langchain_fly/py.typed",
        "llama_index/llms/fly/__init__.py",
        "llama_index/llms/fly/py.typed",
    } <= names
    assert not names & {"llama_index/__init__.py", "llama_index/llms/__init__.py", "integrations/__init__.py"}
    tops = {name.split("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"fly_llm", "langchain_fly", "llama_index"}
    assert {
        name for name in names if name.startswith("llama_index/") and not name.startswith("llama_index/llms/fly/")
    } == set()


def run(code, path):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=path)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_it_imports_beside_the_frameworks(installed):
    done = run(
        "import llama_index.core, llama_index.llms.fly as a, langchain_fly as b, fly_llm as c\n"
        "print(a.__file__, b.__file__, c.__file__, a.FLyLLM.__name__, b.ChatFLy.__name__, llama_index.core.__file__)",
        installed,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert all(word.startswith(str(installed)) for word in words[:3])
    assert not words[5].startswith(str(installed))


@pytest.mark.parametrize(
    ("missing", "module", "extra"),
    [
        ("langchain_core", "langchain_fly", "fly-llm[langchain]"),
        ("llama_index.core", "llama_index.llms.fly", "fly-llm[llama-index]"),
    ],
)
def test_without_an_extra_the_error_names_it(installed, missing, module, extra):
    done = run(f"import sys\nsys.modules[{missing!r}] = None\nimport {module}", installed)
    assert done.returncode != 0
    assert f"ImportError: {module} needs" in done.stderr
    assert f"pip install '{extra}'" in done.stderr


def test_the_core_needs_neither(installed):
    blocked = "import sys\nfor name in ('langchain_core', 'llama_index', 'pydantic'):\n    sys.modules[name] = None\n"
    done = run(f"{blocked}import fly_llm\nfly_llm.FLyEngine.from_pretrained().close()", installed)
    assert done.returncode == 0, done.stderr
