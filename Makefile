# Two commands do all the set-up: `make demo` and `make test`. The venv is built once, into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Processes that share the tests; tests/conftest.py lets no other test run beside those that are marked `alone`.
WORKERS ?= 2

.PHONY: demo test lint soak test-faults clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,mpi]'
	touch $@

demo: $(READY)
	$(BIN)/serried generate profiles/models/tiny-v3 --ranks 4 --max-num-seqs 8 --max-tokens 48 --temperature 0.4 --table \
	  --prompt 'The "assert" statement' --prompt 'Return a list of' --prompt 'A class definition' --prompt 'This module provides'
	$(BIN)/serried bench throughput profiles/models/tiny-v3 --ranks 4 --num-blocks 64 --max-num-seqs 8 --num-prompts 48 \
	  --max-concurrency 16 --output-len 32 --output-json demo.json --report demo.html

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not soak and not gpu' tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test-faults: $(READY)
	$(BIN)/python -m pytest -m soak tests/launch/test_groups.py -k every_fault

soak: $(READY)
	$(BIN)/python -m pytest -m soak tests

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
