# The project's commands: `make help` lists them. Each makes .venv by itself when that is missing or out of date, and
# test-timm .venv-timm.
# Another Python: make PYTHON=/path/to/python3.12 test

PYTHON     ?= python3
VENV       := .venv
BIN        := $(VENV)/bin
READY      := $(VENV)/.ready
TIMM_VENV  := .venv-timm
TIMM_READY := $(TIMM_VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-slow test-timm test-all check clean

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile | expand -t 20

# Use it

demo: $(READY) ## train a language model and a vision transformer, too hot and rescued; prints what was found (three minutes)
	$(BIN)/python examples/demo.py

docs: $(READY) ## write what is made of the statistics' own words: docs/statistics.md, the README's table, stubs
	$(BIN)/python docs/generate.py

# Test it

test: $(READY) ## run the tests, all but the slow ones
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadgroup -m "not slow"

test-slow: $(READY) ## run the slow tests, if there are any (pytest exits with 5 when it finds none)
	@if grep -rqw slow tests --include='*.py'; then $(BIN)/pytest -m slow || [ $$? -eq 5 ]; else echo "No slow tests."; fi

test-timm: $(TIMM_READY) ## run the tests of timm's models, in an environment of their own
	$(TIMM_VENV)/bin/pytest -n auto --maxprocesses 4 tests/support/test_timm.py

test-all: test test-slow test-timm ## run all tests

check: $(READY) ## check format, lint, types and the examples in docstrings
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy --strict lightning_attn
	$(BIN)/pytest --doctest-modules lightning_attn

# timm has an environment of its own: it needs torchvision, which cannot be imported where its build does not fit that
# of torch, and transformers cannot be imported then either.

$(READY): EXTRAS := dev,examples,models
$(TIMM_READY): EXTRAS := dev,timm

# Install it: the marker is written last, so an interrupted install is not taken for a finished one. Without the
# marker an environment is made anew; with an old one (pyproject.toml or constraints.txt changed) it is brought up to
# date. pip shows its progress at a terminal and keeps quiet in a log.

$(READY) $(TIMM_READY): %/.ready: pyproject.toml constraints.txt
	$(if $(PYTHON_PROBLEM),$(error $(PYTHON_PROBLEM)))
	@echo "Installing into $*: about two minutes, more where torch must be downloaded first ..."
	@test -f $@ || $(PYTHON) -m venv --clear $*
	@rm -f $@
	@$*/bin/python -m pip install $(if $(MAKE_TERMOUT),,-qq) --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# What is wrong with $(PYTHON), in one line; empty when nothing is. $(error) above then stops make with that one line.

PYTHON_PROBLEM = $(shell \
	version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); \
	if [ -z "$$version" ]; then \
		echo "No working Python at '$(PYTHON)': install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3"; \
	elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then \
		echo "'$(PYTHON)' is Python $$version, but 3.10 or newer is needed: name one with make PYTHON=/path/to/python3"; \
	elif ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "'$(PYTHON)' cannot make virtual environments: on Debian and Ubuntu run: apt install python$$version-venv"; \
	fi)

clean: ## remove the environments, caches and what runs have written
	rm -rf $(VENV) $(TIMM_VENV) build dist demo_output lightning_logs .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
