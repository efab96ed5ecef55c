# Everything a clean checkout needs. `make demo` and `make test` install into .venv first.
#
#   make demo        train GPT-2 on two ranks (about four minutes after the install)
#   make test        the fast tests
#   make test-slow   the tests marked slow
#   make compat      the fast tests on another torch: TORCH=2.11.0; WRITE=--write keeps the result
#   make lint        ruff and mypy
#   make format      let ruff rewrite what it can
#   make bench       step time and compile time, beside hand-written peers; WRITE=--write keeps them
#   make docs        renew the pages that are generated from the code
#   make site        build docs/ as a site that needs no network: open site/index.html
#   make goldens     renew the texts that tests compare with; read the difference
#   make clean       remove .venv and everything that was built

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow compat lint format bench docs site goldens clean

# The system's own Python first: those that were built from source by a version manager, mostly
# without profile-guided optimization, take a quarter longer for the tests. One that has no headers
# (Inductor's C++ needs them) or cannot make environments is passed over.
PYTHONS := /usr/bin/python3.11 python3.11 /usr/bin/python3.12 python3.12
IS_WHOLE := import ensurepip, os, sysconfig; \
  assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
PYTHON ?= $(firstword \
  $(foreach each,$(PYTHONS),$(shell $(each) -c '$(IS_WHOLE)' 2>/dev/null && echo $(each))) python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := setup.py pyproject.toml constraints.txt

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# Tests start many processes, and two workers import 300 modules of tests: compiled once, not each
# time, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

help:
	@sed -n 's/^#   //p' Makefile

install: $(STAMP)

$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' || { \
	  echo "sp_compiler needs Python 3.11 or 3.12, and '$(PYTHON)' is not one;" \
	       "say which to use: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP)
	$(BIN)/torchrun --standalone --nproc-per-node 2 -m examples.train_gpt2

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow'

# Not more workers than cores: many of these tests start ranks, and the ranks of a third worker make
# those of the others wait for each other longer than its own share of the work takes.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m slow

# Other versions than the pinned one are CUDA builds of gigabytes: an environment of its own each.
compat: COMPAT := .compat/$(TORCH)
compat:
	@[[ "$(TORCH)" =~ ^[0-9]+\.[0-9]+\.[0-9]+$$ ]] || { \
	  echo "say which torch, with all three numbers: make compat TORCH=2.11.0" >&2; exit 1; }
	[ -x $(COMPAT)/bin/python ] || $(PYTHON) -m venv $(COMPAT)
	sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^triton==/d' constraints.txt > $(COMPAT)/requirements.txt
	$(COMPAT)/bin/python -m pip install --quiet -r $(COMPAT)/requirements.txt
	$(COMPAT)/bin/python -m pip install --quiet --no-deps -e .
	rm -f $(COMPAT)/report.xml
	-$(COMPAT)/bin/python -m pytest -q -n 2 --dist loadfile -m 'not slow' \
	  --junitxml=$(COMPAT)/report.xml
	$(COMPAT)/bin/python -m docs.generate.torch_versions $(COMPAT)/report.xml $(WRITE)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: export PYTHONWARNINGS := ignore::FutureWarning
bench: $(STAMP)
	$(BIN)/python -m benchmarks.compile_time $(WRITE)
	$(BIN)/python -m benchmarks.verify_time $(WRITE)
	$(BIN)/python -m benchmarks.step_time $(WRITE)
	$(BIN)/python -m benchmarks.inductor_time $(WRITE)
	$(BIN)/python -m benchmarks.region_times $(WRITE)

docs: $(STAMP)
	$(BIN)/python -W ignore -m docs.generate --write

site: export NO_MKDOCS_2_WARNING := 1
site: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	PYTHONPATH=. $(BIN)/mkdocs build --quiet --strict

goldens: $(STAMP)
	REWRITE_GOLDENS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow' \
	  tests/goldens tests/passes

clean:
	rm -rf $(VENV) .compat build dist site demo-output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
