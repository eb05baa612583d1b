# Two commands for a stranger: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
BIN := .venv/bin
PACKAGE := .venv/.package
READY := .venv/.ready
# Modules are compiled when they are first loaded: to compile all of torch takes longer than to install it.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: demo check test nightly docs bench gpu clean

demo: $(PACKAGE)
	$(BIN)/paceline scale digits-lenet --devices 1,2 --set epochs=5 --out runs/demo-$$(date +%Y%m%d-%H%M%S)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.kit.claims
	$(BIN)/python -m benchmarks.sizes

# Four at a time on two cores: most tests with real workers wait for processes to start or to end. Compiled modules are
# kept even where the environment says otherwise: thousands of processes load them.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadgroup

# What every landing needs.
test: $(READY)
	$(PYTEST) -m "not nightly" tests

# Everything that can run here, with other examples of the properties every night.
nightly: $(READY)
	PACELINE_TEST_PROFILE=nightly $(PYTEST) tests

# The site, in runs/docs; needs no network.
docs: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs runs/docs

# Needs a machine that does nothing else.
bench: $(READY)
	$(BIN)/python benchmarks/side_by_side.py
	$(BIN)/python -m benchmarks.step_costs
	$(BIN)/python -m benchmarks.starts

# What this machine's GPUs do, or simulated ones where there are none, on one page; without .venv, Python needs torch and
# what Paceline imports.
gpu:
	PYTHONPATH=src $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu --out runs/gpu-$$(date +%Y%m%d-%H%M%S) $(if $(DATA),--data $(DATA))

# torch first and by itself: nothing else may choose its build.
$(PACKAGE): pyproject.toml constraints.txt
	@echo "Installing torch and paceline into .venv"
	$(PYTHON) -m venv .venv
	$(PIP) torch setuptools
	$(PIP) --no-build-isolation -e .
	touch $(PACKAGE)

$(READY): $(PACKAGE)
	@echo "Installing what the tests need: other training libraries, launchers, checkers"
	$(PIP) --no-build-isolation -e '.[dev]'
	@echo "Compiling what tests load, once for all the processes that would do it beside each other"
	$(BIN)/python -c 'import torch._dynamo'
	$(BIN)/python -m pytest --collect-only tests >/dev/null
	touch $(READY)

clean:
	rm -rf .venv runs
