# Everything a newcomer needs: `make run` and `make test`. Both make .venv themselves.
PY := .venv/bin/python

.PHONY: run test lint format protos bench soak e2e faults clean lock venv dev clients compiler promtool image image-parts

run: venv
	@exec $(PY) -m appliance --config etc/first-run.toml up

# In two processes: most tests wait for processes of ours, and files do not share any.
test: dev clients compiler promtool lint
	$(PY) -m pytest -n 2 --dist loadfile

lint: dev
	.venv/bin/ruff format --check --quiet .
	.venv/bin/ruff check --quiet .
	.venv/bin/lint-imports --no-cache --config setup.cfg > .venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
	.venv/bin/mypy --cache-dir .venv/.mypy_cache appliance

format: dev
	.venv/bin/ruff check --fix --quiet .
	.venv/bin/ruff format --quiet .

protos: dev
	$(PY) scripts/protos.py

# All parts, or some: make bench PARTS="engine control". Prints ratios against the direct path of the same run.
bench: dev
	@scripts/venv.sh requirements-bench.lock .venv-bench
	$(PY) scripts/bench.py $(PARTS)

soak: dev
	$(PY) scripts/soak.py

e2e: dev clients compiler
	$(PY) -m pytest tests/e2e

# Every fault at full length, then 200 random kills: some 45 minutes; make test has the short forms.
faults: dev compiler
	$(PY) -m pytest tests/faults tests/e2e/test_contention.py -m "long or not long"
	$(PY) scripts/faults.py

# The image on TEI's for default (CUDA, 8.0 to 8.9), 89 or ada, hopper, cpu: make image VARIANT=cpu
VARIANT := default
image:
	docker build --build-arg VARIANT=$(VARIANT) --build-arg REVISION="$$(git rev-parse HEAD)" \
	    --build-arg VERSION="$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' appliance/__init__.py)" \
	    --tag tei-appliance:$(VARIANT) .

# What can be proved of it without a container engine, with the lock downloaded: some 40 s more than make test takes.
image-parts: dev
	$(PY) -m pytest tests/test_image.py -m "long or not long"

clean:
	rm -rf .venv .venv-bench .venv-clients build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# Resolve the newest versions anew; then run the tests and commit the two files.
lock:
	scripts/lock.sh

venv:
	@scripts/venv.sh requirements.lock
# What the tests of the gateway run as its users do: other people's clients, in an environment of their own.
clients:
	@scripts/venv.sh requirements-clients.lock .venv-clients
compiler:
	@scripts/compiler.sh
promtool:
	@scripts/promtool.sh
dev: venv
	@scripts/venv.sh requirements-dev.lock
