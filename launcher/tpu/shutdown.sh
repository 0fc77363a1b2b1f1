#!/bin/sh
# Shutdown script of a TPU VM: asks the worker to save and leave, and keeps the machine up until it has.
state=/var/lib/muster
# As the startup script chooses it.
[ "$(id -u)" -eq 0 ] && [ -z "${GCE_METADATA_HOST:-}" ] || state="$HOME/.muster-vm"
lock="$state/lock"
# Whoever runs here holds the lock that its number is written in; a number of an earlier boot says nothing.
[ -s "$lock" ] && ! flock -n "$lock" true || exit 0
read -r pid <"$lock"
case "$pid" in '' | *[!0-9]*) exit 0 ;; esac
kill -TERM "$pid" || exit 0
flock "$lock" true
