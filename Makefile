# make demo: set up, then the main job on a synthetic tissue. make test: set up, then the checks.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs
DEMO_DIR ?= demo

.PHONY: demo test lint slow docs pythons setup clean

demo: $(READY)
	$(BIN)/alphastomics demo --output_dir $(DEMO_DIR)

test: $(READY) lint
	$(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder --durations=25

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(READY)
	SHAPE_CHECKS=0 $(BIN)/python -m pytest -m slow --timeout=5400

# The site needs no network once it is built; the tools that build it are an extra of their own.
docs: $(READY) $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Slow, and downloads: the newest libraries for every Python of this machine.
pythons: $(READY)
	$(BIN)/python benchmarks/python_matrix.py

setup: $(READY)

# Rebuilt only when what is to be installed changes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: AlphaSTomics needs Python 3.11 or later; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $(DOCS_READY)

clean:
	rm -rf $(VENV) $(DEMO_DIR) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
