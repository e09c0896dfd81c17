#!/usr/bin/env bash
# The script that the console's pages have from others: fetched from the package registry as it was released, compared
# with its digest, and kept in the repository, so that nothing is built and the pages work without a network.
#   scripts/vendor.sh          (its version and digest stand here; then run the tests and commit)
set -euo pipefail
version=2.0.11
sha256=165a2655073e9e6e55e307a7c74e8ebcdb76afb7701f9c16cfd106a13add408e
static=$(cd "$(dirname "$0")/.." && pwd)/appliance/control/console/static
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm pack --silent "htmx.org@$version"
echo "$sha256  htmx.org-$version.tgz" | sha256sum --check --quiet
tar -xzf "htmx.org-$version.tgz"
cp package/dist/htmx.min.js "$static/htmx.min.js"
cp package/LICENSE "$static/htmx.LICENSE"
