#!/usr/bin/env bash
# apt-get, one at a time: `make test` sets several things up at once, and apt does not wait for the lock of its lists.
exec flock /var/lib/apt apt-get "$@"
