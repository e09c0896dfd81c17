# Everything a newcomer needs: `make run` and `make test`; the loop while one writes is `make check`.
# All of them make .venv themselves. The text after ## is what `make help` shows.
PY := .venv/bin/python
VARIANT := default
TEST_PROCESSES := $(shell cores=$$(nproc); echo $$((cores < 2 ? 2 : cores < 4 ? 4 : cores < 16 ? cores : 16)))
# One appliance starts a dozen processes: each would compile all of our source again.
unexport PYTHONDONTWRITEBYTECODE
# What `make test` sets up does not need each other, so it is done side by side; lint begins when `dev` is there. That is
# not handed to the makes that tests start.
ifeq ($(MAKECMDGOALS),test)
MAKEFLAGS += --jobs=2
endif
unexport MAKEFLAGS MFLAGS

.PHONY: help run check test lint format protos bench console-shots soak e2e faults cluster-test clean lock venv dev clients demo ray \
    compiler promtool redis nginx browser image image-parts sbom

help: ## what there is to make
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | awk -F '\t' '{printf "  make %-12s %s\n", $$1, $$2}'

run: venv ## the appliance in the foreground, with a first model
	@exec $(PY) -m appliance --config etc/first-run.toml up

check: dev promtool lint ## format, lint, types, and every test that starts no process of ours: under a minute
	$(PY) -m pytest -n 2 --dist worksteal -m "not processes and not long"

# In two processes for each core, up to four: most tests wait for processes of ours. Files share none; the long ones begin.
test: dev clients demo compiler promtool redis nginx browser lint ## everything that is checked before a change is taken
	$(PY) -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=25

lint: dev ## format, imports between floors, complexity, types
	.venv/bin/ruff format --check --quiet .
	.venv/bin/ruff check --quiet .
	.venv/bin/lint-imports --no-cache --config setup.cfg > .venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
	.venv/bin/mypy --cache-dir .venv/.mypy_cache appliance testing tests scripts examples/code_search examples/image_search

format: dev ## rewrite what ruff can rewrite
	.venv/bin/ruff check --fix --quiet .
	.venv/bin/ruff format --quiet .

protos: dev ## generate the Python of protos/ anew
	$(PY) scripts/protos.py

bench: dev redis demo browser ray ## what the appliance costs, as ratios against the direct path; or some: make bench PARTS="engine control"
	@scripts/venv.sh requirements-bench.lock .venv-bench
	$(PY) scripts/bench.py $(PARTS)

console-shots: dev demo browser ## pictures of every page of the console: build/console
	$(PY) scripts/console_shots.py

soak: dev ## one engine for an hour, with its memory watched
	$(PY) scripts/soak.py

e2e: dev clients compiler nginx ## only the tests of the whole appliance
	$(PY) -m pytest tests/e2e

cluster-test: dev ray ## a cluster of Ray Serve in network namespaces, as root: some minutes
	$(PY) -m pytest tests/cluster/test_ray.py -m "long or not long" --durations=10

faults: dev compiler ray ## every fault at full length, then 200 random kills: some 45 minutes; make test has the short forms
	APPLIANCE_CONTENTION_SECS=60 $(PY) -m pytest tests/faults tests/cluster tests/e2e/test_contention.py tests/operations/test_models.py \
	    tests/drivers/test_sqlitestore.py -m "long or not long"
	$(PY) scripts/faults.py

image: ## the container image, on TEI's for default (CUDA, 8.0 to 8.9), 89 or ada, hopper, cpu: make image VARIANT=cpu
	docker build --build-arg VARIANT=$(VARIANT) --build-arg REVISION="$$(git rev-parse HEAD)" \
	    --build-arg VERSION="$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' appliance/__init__.py)" \
	    --tag tei-appliance:$(VARIANT) .

image-parts: dev ## what can be proved of the image without a container engine: some 40 s more than make test takes
	$(PY) -m pytest tests/test_image.py -m "long or not long"

sbom: dev ## the bill of materials of what the lock installs: build/sbom.json, CycloneDX
	@mkdir -p build
	@sed -n 's/^\([A-Za-z0-9._-]*==[^ ;]*\).*/\1/p' requirements.lock \
	    | .venv/bin/cyclonedx-py requirements --output-reproducible --no-validate -o build/sbom.json - 2> build/sbom.log \
	    || { cat build/sbom.log; exit 1; }
	@echo "build/sbom.json: $$(grep -c '"type": "library"' build/sbom.json) packages"

clean: ## remove what make made
	rm -rf .venv .venv-bench .venv-clients .venv-demo .venv-ray build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

lock: ## resolve the newest versions anew; then run the tests and commit the locks
	scripts/lock.sh

venv:
	@scripts/venv.sh requirements.lock
# What the tests of the gateway run as its users do: other people's clients, in an environment of their own.
clients:
	@scripts/venv.sh requirements-clients.lock .venv-clients
# And the driver of its tests' browser.
ray: # what a machine of a cluster has
	@scripts/venv.sh requirements-ray.lock .venv-ray
demo: ## what examples/code_search needs, the page that the README tells of, in .venv-demo
	@scripts/venv.sh requirements-demo.lock .venv-demo
# A C compiler for the stand-in of NVIDIA's library, and a browser without windows for the page of examples/code_search.
compiler:
	@scripts/debian.sh cc gcc libc6-dev
browser:
	@scripts/debian.sh "chromium-headless-shell chromium google-chrome" chromium-headless-shell
promtool:
	@scripts/promtool.sh
nginx:
	@scripts/debian.sh nginx nginx
# Debian's redis-tools has the server's program as well, and starts none at boot, as the package redis-server would.
redis:
	@scripts/debian.sh redis-check-rdb redis-tools
dev: venv
	@scripts/venv.sh requirements-dev.lock
