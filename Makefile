# make demo and make test set everything up by themselves, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types packages alone unit soak bench docs clean

help:
	@echo "make demo   train a small CNN between two ranks over links of 100 Mbit/s, and again dense: time, bytes, accuracy"
	@echo "make test   lint, types and tests"
	@echo "make test-all  the same with slow variants"
	@echo "make soak   attacks, for MINUTES=30 from SEED=0; goes on where it was stopped"
	@echo "make bench  the codec benchmark (minutes)"
	@echo "make docs   the docs as a site, with search and a reference: site/index.html"
	@echo "make clean  remove .venv and caches"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "thinwire needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=..."'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/thinwire train --link 100mbit --steps 200 --compare-dense

# The tests that count bytes of the loopback interface run beside the check of types, which sends none.
test:
	@for parts in lint packages "-j2 -Otarget types alone" unit; do \
		start=$$(date +%s); $(MAKE) --no-print-directory $$parts || exit 1; echo "$$parts: $$(($$(date +%s) - start)) s"; \
	done

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=tests:src $(BIN)/python -m support.budget

types: $(READY)
	$(BIN)/mypy

# A browser for the tests of pages, tools for links, and images to train on; where they cannot be installed those tests are
# skipped, but not in CI.
packages:
	@{ command -v chromium && command -v tc && ls /usr/share/datasets/fashion-mnist; } >/dev/null 2>&1 || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends chromium iproute2 dataset-fashion-mnist >/dev/null; }

WHICH := not slow
unexport PYTHONDONTWRITEBYTECODE  # where it is set, each process of a test would compile its modules anew

alone: $(READY)
	$(BIN)/python -m pytest -m "alone and ($(WHICH))" $$(grep -rl --include='*.py' pytest.mark.alone tests)

# Three processes of pytest on two cores: some tests wait for a link or a time-out. Each takes a file of tests at a time,
# the longest ones first.
unit: $(READY)
	$(BIN)/python -m pytest -m "not alone and ($(WHICH))" -n 3 --dist loadfile --no-loadscope-reorder --durations=30 \
		tests src

test-all:
	$(MAKE) test WHICH="slow or not slow"

# Some kinds: make soak ONLY="kill nan". One case again: make soak CASE=kill:0/17. docs/reliability.md says more.
MINUTES := 30
SEED := 0

soak: $(READY) packages
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES) --seed $(SEED) $(if $(ONLY),--only $(ONLY)) $(if $(CASE),--case $(CASE))

bench: $(READY)
	$(BIN)/python -m benchmarks codec

# The variable switches off a notice about another program, which is not about this site.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +
