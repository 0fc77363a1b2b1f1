#!/bin/sh
# Writes the four lock files anew from pyproject.toml. Needs uv (a development dependency):
#     scripts/lock.sh              keeps every pinned version that still fits
#     scripts/lock.sh --upgrade    takes current releases
set -eu
cd "$(dirname "$0")/.."

uv=uv
if [ -x .venv/bin/uv ]; then uv=.venv/bin/uv; fi

lock() {
    "$uv" pip compile --universal --generate-hashes --python-version 3.12 --quiet \
        --no-emit-index-url --no-emit-find-links --custom-compile-command scripts/lock.sh "$@"
}

# What builds this project, and the one dependency that is published as source only.
echo 'setuptools>=80' | lock --output-file requirements-build.lock "$@" -
lock --output-file requirements.lock "$@" pyproject.toml
lock --output-file requirements-dev.lock --extra dev --constraint requirements.lock "$@" pyproject.toml
# What the image adds for TPUs: libtpu, with the same jax.
echo 'jax[tpu]' | lock --constraint requirements.lock --no-annotate --output-file k8s/requirements-tpu.lock "$@" -

if grep -n '://' requirements-build.lock requirements.lock requirements-dev.lock k8s/requirements-tpu.lock; then
    echo "scripts/lock.sh: error: a lock file names a host (see above)" >&2
    exit 1
fi
