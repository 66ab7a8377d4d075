# `make demo` and `make test` do all the set-up on a machine that has Python 3.11, pip and g++.

PYTHON := .venv/bin/python
READY := .venv/ready

# Where the python3 on PATH keeps a torch that is new enough, or nothing.
FIND_TORCH = from importlib.metadata import distribution; torch = distribution("torch"); \
	major, minor = map(int, torch.version.split(".")[:2]); \
	print(torch.locate_file("") if (major, minor) >= (2, 11) else "")

# Where it is set, each of the hundred processes of the tests compiles the modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-gpu docs lint format clean

demo: $(READY)
	.venv/bin/tilewright optimize examples/transformer_block.py:block

# What to run before each commit: under 90 s on two cores.
check: lint
	$(PYTHON) -m pytest -n 2 -m 'not slow' --ignore=tests/gpu --durations=10

# Lint needs one core for half a minute, at whose end most tests have yet to run. Nothing may follow pytest here but what
# lint finds: its closing line, with the counts, ends the output.
test: $(READY)
	@mkdir -p build; $(MAKE) --no-print-directory lint > build/lint.log 2>&1 & linted=$$!; \
	$(PYTHON) -m pytest -n 2; tested=$$?; \
	wait $$linted || { cat build/lint.log; exit 1; }; \
	exit $$tested

lint: $(READY)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	$(PYTHON) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-logo

format: $(READY)
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

# Into build/site, without a network once the packages are there; index.html in it needs no server.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

.venv/docs: $(READY)
	$(PYTHON) -m pip install -c .venv/constraints.txt -e '.[docs]'
	touch $@

# On the interpreter as it is: a GPU machine comes with its own torch and may reach no package index. Compiling takes
# most of the time, and processes share it; what measures times then has the GPU alone.
MEASURING := $(patsubst %,tests/gpu/test_%.py,anatomy ceilings cheats claims compiled_attention profile races)
test-gpu:
	PYTHONPATH=src python3 -m pytest -p no:benchmark -m gpu -rs -n auto --maxprocesses 8 --dist loadgroup tests/gpu \
		$(MEASURING:%=--ignore=%)
	PYTHONPATH=src python3 -m pytest -p no:benchmark -m gpu -rs $(MEASURING)

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The .pth line matters where python3 is itself a virtual environment: --system-site-packages looks past
# it, at the interpreter below. What torch and Triton are there already is not to be replaced.
$(READY): pyproject.toml constraints.txt
	@reused=$$(python3 -c '$(FIND_TORCH)' 2>/dev/null); set -ex; \
	if [ -n "$$reused" ]; then \
		python3 -m venv --system-site-packages .venv; \
		echo "$$reused" > $$(echo .venv/lib/python3*/site-packages)/reused_torch.pth; \
	else \
		python3 -m venv .venv; \
		$(PYTHON) -m pip install "$$(grep '^torch==' constraints.txt)"; \
	fi; \
	$(PYTHON) -m pip list --format=freeze | grep -oE '^(torch|triton)==' > .venv/present; \
	grep -vFf .venv/present constraints.txt > .venv/constraints.txt; \
	$(PYTHON) -m pip install -c .venv/constraints.txt -e '.[test,check]'; \
	touch $@
