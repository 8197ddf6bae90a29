# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUNG   ?= qtip4
CALIB_TOKENS ?= 8192
FUZZ_SECONDS ?= 60
MODEL  := models/smollm2-135m
BAKED  := artifacts/smollm2-135m-$(RUNG)
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup demo test browser lint bench fuzz clean

setup: $(VENV)/.ready-dev

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) --editable '.[dev]'
	touch $@

# A real model, baked to 4 bits, proven, and asked a question.
demo: $(VENV)/.ready
	$(BIN)/python fixtures/make_smollm2.py --out models
	$(BIN)/arctool bake $(MODEL) --isq $(RUNG) --calib-tokens $(CALIB_TOKENS) --output $(BAKED)
	$(BIN)/arctool verify $(BAKED) --source $(MODEL)
	$(BIN)/arctool run $(BAKED) --prompt "What is the capital of France?" --temperature 0

test: $(VENV)/.ready-dev browser
	$(BIN)/python -m pytest

# The chat page is tested in a real browser: Debian's packages where they can be installed, else whatever is on the PATH.
browser:
	@for tool in chromium chromedriver; do command -v $$tool > /dev/null && continue; \
	  { apt-get update -qq && apt-get install -qq -y chromium chromium-driver > /dev/null; } || true; \
	  command -v $$tool > /dev/null || { echo "make: $$tool is missing: install Chromium and its driver (Debian: chromium chromium-driver)" >&2; exit 1; }; \
	done

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.ready-fuzz: $(VENV)/.ready-dev
	$(PIP) --editable '.[fuzz]'
	touch $@

# Everything that reads an artifact, against inputs that nobody thought of. A crash fails and stays in fuzz/crashes/.
fuzz: $(VENV)/.ready-fuzz
	$(BIN)/python fuzz/fuzz_artifact.py -max_total_time=$(FUZZ_SECONDS)

bench: $(VENV)/.ready-dev
	$(BIN)/arctool bench bake
	$(BIN)/python -m arctool.bench.kernels

clean:
	rm -rf $(VENV) artifacts models build dist fuzz/corpus fuzz/crashes
