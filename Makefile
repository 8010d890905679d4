# One command a chore; CI runs the same ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_WORKERS ?= 2

.PHONY: setup demo test test-reference lint format bench bench-grade bench-reference bench-memory images clean

setup: $(VENV)/.ready  ## make .venv with everything

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,lint]"
	touch $@

demo: setup  ## grade a sample submission through the whole path, without Docker
	$(BIN)/python -m grader.demo

test: setup  ## run what this machine can run, and say what was left out
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile

test-reference: setup  ## prove every parallel strategy equal to serial training; prints what was proved
	$(BIN)/python -m pytest tests/reference -n $(PYTEST_WORKERS) --dist loadfile

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

images: setup  ## build the runner images (needs Docker)
	$(BIN)/grader images build

bench: bench-reference bench-memory

bench-reference: setup  ## ours against torch's own: one table, exit 1 where ours is slower
	$(BIN)/python -W ignore -m tests.reference.benchmarks

bench-memory: setup  ## what each rank holds at its peak, against the formulas
	$(BIN)/python -W ignore -m tests.reference.benchmarks.memory

bench-grade: setup  ## make bench-grade URL=...: a cold grade against the plain way, in the same image
	@test -n "$(URL)" || { echo "say which commit: make bench-grade URL=https://github.com/<owner>/TinyInfiniTrain/tree/<commit>"; exit 2; }
	$(BIN)/python -m grader.benchmark "$(URL)"

clean:
	rm -rf $(VENV) runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
