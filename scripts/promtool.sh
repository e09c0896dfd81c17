#!/usr/bin/env bash
# promtool and prometheus, for the tests of the alerts and of plots from a Prometheus. Does nothing where they are.
# Taken out of Debian's package, which is not installed: it would start a Prometheus, now and at each boot.
set -euo pipefail
command -v promtool >/dev/null && command -v prometheus >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  scripts=$(cd "$(dirname "$0")" && pwd)
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  cd "$folder"
  "$scripts/apt.sh" update -qq
  "$scripts/apt.sh" download -qq -o APT::Sandbox::User=root prometheus
  dpkg-deb --extract prometheus_*.deb .
  install usr/bin/promtool usr/bin/prometheus /usr/local/bin/
else
  echo "promtool and prometheus are needed for the tests: Debian and Ubuntu have them in the package prometheus" >&2
  exit 1
fi
