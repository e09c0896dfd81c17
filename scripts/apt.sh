#!/usr/bin/env bash
# apt-get, one at a time: `make test` sets several things up at once, and apt does not wait for the lock of its lists.
# RUNLEVEL: what it installs is not started as a service.
exec env RUNLEVEL=1 flock /var/lib/apt apt-get "$@"
