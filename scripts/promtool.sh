#!/usr/bin/env bash
# promtool, for the tests of the alerts. Does nothing where there is one.
# Taken out of Debian's package and not installed with it: the package would start a Prometheus, now and at each boot.
set -euo pipefail
command -v promtool >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  scripts=$(cd "$(dirname "$0")" && pwd)
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  cd "$folder"
  "$scripts/apt.sh" update -qq
  "$scripts/apt.sh" download -qq -o APT::Sandbox::User=root prometheus
  dpkg-deb --extract prometheus_*.deb .
  install usr/bin/promtool /usr/local/bin/promtool
else
  echo "promtool is needed for the tests: install it; Debian and Ubuntu have it in the package prometheus" >&2
  exit 1
fi
