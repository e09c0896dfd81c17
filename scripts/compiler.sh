#!/usr/bin/env bash
# A C compiler, for the tests' stand-in of NVIDIA's library. Does nothing where there is one.
set -euo pipefail
command -v cc >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq && apt-get install -y -qq gcc libc6-dev
else
  echo "A C compiler (cc) is needed for the tests: install gcc" >&2
  exit 1
fi
