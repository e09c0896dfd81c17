#!/usr/bin/env bash
# A program that tests need, out of Debian's packages. Does nothing where there is one.
#   scripts/debian.sh COMMAND PACKAGE...      "COMMAND OTHER", where another program does as well
set -euo pipefail
programs=$1
shift
there() {
  for program in $programs; do command -v "$program" >/dev/null && return 0; done
  return 1
}
there && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "${programs// / or } is needed for the tests: install it; Debian and Ubuntu have it in: $*" >&2
  exit 1
fi
apt=$(cd "$(dirname "$0")" && pwd)/apt.sh
"$apt" update -qq
"$apt" install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
