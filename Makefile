# Works on a fresh Debian 12 or Ubuntu with git, make and python3 with venv. `make` alone lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

RUN := .venv/bin/python -m
SCRIPTS = $(shell git ls-files --cached --others --exclude-standard -- '*.sh') .ci/run

# One environment, made once. Its stamp is named by the pins and written last: changed pins or an install that was killed
# half-way leave no such stamp, and the environment is made anew. The lock makes a second `make` wait for the first.
PINS := $(shell cat requirements.txt requirements-dev.txt | sha256sum | cut -c 1-16)
STAMP := .venv/pins-$(PINS)

# Debian 12's 3.11 is what the image has, so it is taken where it is there; anything newer does as well.
define MAKE_ENVIRONMENT
exec 9> .venv.lock; flock 9
[ ! -e $(STAMP) ] || exit 0
for python in "$${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
    [ -n "$$python" ] && "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && break
    python=
done
if [ -z "$$python" ]; then
    echo "fluxpod needs Python 3.11 or newer with venv; found: $$(python3 --version 2> /dev/null || echo none)." >&2
    echo "On Debian 12, or Ubuntu 24.04 and newer: apt-get install python3 python3-venv. Or name one: make PYTHON=/path/to/python3.12 ..." >&2
    exit 1
fi
echo "Making .venv with $$("$$python" --version), once for these pins. torch is large: this may take minutes."
rm -rf .venv
"$$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
touch $(STAMP)
endef
export MAKE_ENVIRONMENT
export PYTHON

.PHONY: help demo score test test-slow check format test-image push bench bench-gpus bench-volume trials reference template pod clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## teach flux-tiny a thing it has never seen, full and LoRA, on CPU with two processes
	@$(RUN) tiny.demo --volume demo/volume

score: $(STAMP) ## the judge's table: what flux-tiny draws of 200 prompts, on CPU
	@$(RUN) tiny.score

# Three for two cores: much of what a test does is to wait for processes that it started (of two, 62 % of the cores' time).
WORKERS := -n $(shell nproc | awk '{print int(1.5 * $$1)}') --maxprocesses 8

test: $(STAMP) ## run the tests (no GPU, no account; about 10 minutes on two cores)
	@$(RUN) pytest $(WORKERS) -m "not slow" tests --ignore tests/image --ignore tests/gpu --ignore tests/browser

test-slow: $(STAMP) ## the tests of make test that take longest: whole trainings that fail, are killed, or go many ways
	@$(RUN) pytest $(WORKERS) -m slow tests --ignore tests/image --ignore tests/gpu --ignore tests/browser

check: $(STAMP) ## lint, format, types, layers, shell scripts, Dockerfile
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	.venv/bin/lint-imports
	.venv/bin/shellcheck $(SCRIPTS)
	.venv/bin/hadolint Dockerfile

format: $(STAMP) ## format the code and fix what ruff can fix
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

# RESTARTS=100 TESTS=restarts: that many restarts of one container, a quarter of an hour.
test-image: $(STAMP) ## build the real image with podman and run jobs in it (root; podman, buildah, runc, debootstrap)
	@$(RUN) pytest tests/image $(if $(TESTS),-k "$(TESTS)")

# With docker, layers of earlier releases come from and go to the registry (IMAGE:cache), so that a release on any machine
# moves megabytes; podman's own are on its machine. Log in first (`docker login`, `podman login`).
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?=
TORCH_INDEX ?=
CUDA = $(addprefix -,$(notdir $(TORCH_INDEX:/=)))
TAG = $(IMAGE):$(VERSION)$(CUDA)
CACHE = type=registry,ref=$(IMAGE):cache$(CUDA)
BUILD_ARGUMENTS = --build-arg VERSION=$(VERSION) --build-arg TORCH_INDEX=$(TORCH_INDEX) --tag $(TAG)

push: ## build and push the image, tagged with the version: make push IMAGE=registry/name
	@case "$(notdir $(IMAGE))" in \
	    '' | *:*) echo "Name the image, without a tag: make push IMAGE=registry/name" >&2; exit 2 ;; \
	esac
	@if command -v docker > /dev/null; then \
	    set -x; docker buildx build $(BUILD_ARGUMENTS) --provenance=false --push \
	        --cache-from $(CACHE) --cache-to $(CACHE),mode=max . ; \
	elif command -v podman > /dev/null; then \
	    set -x; podman build --layers --format docker $(BUILD_ARGUMENTS) . && podman push $(TAG); \
	else \
	    echo "make push needs docker (with buildx) or podman." >&2; exit 2; \
	fi
	@echo "pushed $(TAG)"

bench-volume: $(STAMP) ## fetching and loading weights against curl and dd (FOLDER=/workspace, on the volume to measure)
	@$(RUN) bench.volume $(if $(FOLDER),--folder "$(FOLDER)") $(MORE)

trials: $(STAMP) ## a hundred seeded fetches from a hub that misbehaves, killed at random moments
	@TRIALS=100 $(RUN) pytest $(WORKERS) tests/bootstrap/test_fetch_trials.py

bench: $(STAMP) ## speed and memory of real-size FLUX on this machine's GPU
	@$(RUN) bench.gpu $(MORE)

bench-gpus: $(STAMP) ## what several GPUs of this machine give over one, directly linked and through the host's memory
	@$(RUN) bench.gpus $(MORE)

reference: $(STAMP) ## write jobs/reference.yaml and jobs/job.schema.json anew from the schema
	@$(RUN) jobs.reference

# IMAGE is where `make push` put the image; the key is FLUXPOD_RUNPOD_API_KEY in the environment. MORE: see --help.
template: $(STAMP) ## print RunPod's template (IMAGE=you/fluxpod:0.1.0); with an API key, save it
	@$(RUN) entrypoint.cli template $(if $(IMAGE),--image "$(IMAGE)") $(MORE)

pod: $(STAMP) ## create a RunPod pod with a job inside (IMAGE=... JOB=my-job.yaml GPU="2xA100 80GB"); it is billed
	@$(RUN) entrypoint.cli create-pod "$(JOB)" --gpu "$(GPU)" $(if $(IMAGE),--image "$(IMAGE)") $(MORE)

clean: ## remove the environment, the demo's volume and what tools left
	rm -rf .venv .venv.lock demo build dist *.egg-info .*_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(STAMP):
	@bash -eu -o pipefail -c "$$MAKE_ENVIRONMENT"
