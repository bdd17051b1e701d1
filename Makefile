# kv-calibrate: `make` lists what there is. Every target makes .venv first (docs/environment.md).
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
export PYTHON ?= python3

CLI := .venv/bin/kv-calibrate
# q: the variable's value, untouched, as one shell word. opt: --NAME VALUE when the variable is set, else nothing.
q = '$(subst ','\'',$(value $(1)))'
opt = $(if $(value $(2)), --$(1) $(call q,$(2)))
need = $(if $($(1)),,$(error $(1) is not set: make $@ $(1)=$(2)))

# Another engine asked for than installed: make the environment again.
INSTALLED := $(shell cat .venv/.engine 2>/dev/null)
ifneq ($(filter-out auto $(INSTALLED),$(KV_CALIBRATE_ENGINE)),)
REMAKE := remake
endif

.PHONY: help remake llmcompressor calibrate verify compare niah gate report inspect doctor test test-fast families lint bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.venv/.ready: pyproject.toml $(filter-out env/llmcompressor.%,$(wildcard env/*)) $(REMAKE)
	@env/setup.sh

# Quantizing weights needs an environment of its own; it is made when something asks for it.
.venv-llmcompressor/.ready: $(wildcard env/llmcompressor.* env/common.sh env/cpu-*)
	@env/llmcompressor.sh

llmcompressor: .venv-llmcompressor/.ready ## the environment that quantizes weights (calibrate WEIGHTS= makes it too)

calibrate: .venv/.ready $(if $(value WEIGHTS),.venv-llmcompressor/.ready) ## calibrate [MODEL=] [DATA=] [WEIGHTS= RECIPE= OUTPUT= POLICY= GRANULARITY= ARGS=]; with neither: the embedded model and text
	$(CLI) run$(if $(value MODEL), $(call q,MODEL))$(call opt,data,DATA)$(call opt,weights,WEIGHTS)$(call opt,recipe,RECIPE)$(call opt,output,OUTPUT)\
$(call opt,policy,POLICY)$(call opt,granularity,GRANULARITY) $(ARGS)

verify: .venv/.ready ## vLLM reads back every scale of CHECKPOINT=
	$(call need,CHECKPOINT,FOLDER)$(CLI) verify $(call q,CHECKPOINT) $(ARGS)

compare: .venv/.ready ## CHECKPOINT= against the 16-bit cache, scale 1.0 and random-token scales [DATA=]
	$(call need,CHECKPOINT,FOLDER)$(CLI) compare $(call q,CHECKPOINT)$(call opt,data,DATA) $(ARGS)

niah: .venv/.ready ## needles in haystacks with CHECKPOINT='s cache and the 16-bit one
	$(call need,CHECKPOINT,FOLDER)$(CLI) niah $(call q,CHECKPOINT) $(ARGS)

gate: .venv/.ready ## yes or no, with reasons, for CHECKPOINT= [POLICY=FILE]
	$(call need,CHECKPOINT,FOLDER)$(CLI) gate $(call q,CHECKPOINT)$(call opt,policy,POLICY) $(ARGS)

report: .venv/.ready ## one HTML page of all evidence about CHECKPOINT=
	$(call need,CHECKPOINT,FOLDER)$(CLI) report $(call q,CHECKPOINT) $(ARGS)

inspect: .venv/.ready ## scales, ranges and warnings of CHECKPOINT= (a checkpoint or a statistics file)
	$(call need,CHECKPOINT,PATH)$(CLI) inspect $(call q,CHECKPOINT) $(ARGS)

doctor: .venv/.ready ## what this machine has, and what each stage can do on it
	$(CLI) doctor $(ARGS)

# Most of a run is starting things, which keeps one core busy: two files at a time. A file's tests share its fixtures.
WORKERS ?= 2
test: .venv/.ready ## every test that can run here [WORKERS=2] [ARGS=]
	.venv/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-fast: .venv/.ready ## without vLLM and without downloads
	.venv/bin/python -m pytest -m 'not vllm and not weights' $(ARGS)

families: .venv/.ready ## every recipe through the whole job and vLLM; writes the support table into docs/families.md
	$(CLI) recipes check --table docs/families.md $(ARGS)

lint: .venv/.ready ## ruff: rules and formatting
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

bench: .venv/.ready ## the measurements in benchmarks/
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; .venv/bin/python "$$script" $(ARGS); done

clean: ## remove the environment and what tools left (calibrated checkpoints and the model cache stay)
	rm -rf .venv .venv-llmcompressor .uv build dist .pytest_cache .ruff_cache .hypothesis
