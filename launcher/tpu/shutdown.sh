#!/bin/sh
# Shutdown script of a TPU VM: asks the worker to save and leave, and keeps the machine up until it has.
state=/var/lib/muster
# As the startup script chooses it.
[ "$(id -u)" -eq 0 ] && [ -z "${GCE_METADATA_HOST:-}" ] || state="$HOME/.muster-vm"
lock="$state/lock"
# Whoever runs here holds the lock that its number is written in; a number of an earlier boot says nothing.
[ -s "$lock" ] || exit 0
read -r pid <"$lock"
case "$pid" in '' | *[!0-9]*) exit 0 ;; esac
flock -n "$lock" true && exit 0
kill -TERM "$pid" || exit 0
# Again and again: a signal that comes between two attempts may find nobody who listens.
until flock -w 2 "$lock" true; do
    kill -TERM "$pid" || exit 0
done
