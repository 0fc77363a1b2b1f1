#!/bin/sh
# Makes .venv from a fitting Python and the locked requirements, then installs this project into it.
#
#     scripts/bootstrap.sh          what running Muster needs
#     scripts/bootstrap.sh --dev    and what its tests need
#
# Does nothing, quickly, when nothing changed since it last finished. MUSTER_PYTHON names the Python
# that a new .venv is made from; without it the first fitting one of those found is taken.
set -eu

say() { echo "bootstrap: $*" >&2; }

die() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

mode=runtime
case "$#:${1-}" in
0:) ;;
1:--dev) mode=dev ;;
*) die "scripts/bootstrap.sh does not know the arguments: $*" "the only one there is: --dev" ;;
esac

cd "$(dirname "$0")/.."
marker=.venv/.muster-installing
stamp=.venv/.muster-installed
log=.venv/bootstrap.log

# Prints X.Y.Z and succeeds when $1 runs, is new enough and can make a virtual environment; otherwise prints why not.
# -I: neither PYTHONPATH nor the current directory may decide what is imported.
probe() {
    "$1" -I -c '
import sys
v = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 12):
    print("is Python " + v)
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    print("is Python " + v + " without venv; on Debian and Ubuntu: apt install python3-venv")
    sys.exit(1)
print(v)
' 2>/dev/null && return
    status=$?
    [ "$status" -eq 1 ] || echo "does not run"
    return 1
}

# Sets $python to the first candidate that fits. The version of .python-version is tried first: it is the one tested.
find_python() {
    if [ -n "${MUSTER_PYTHON:-}" ]; then
        version=$(probe "$MUSTER_PYTHON") ||
            die "MUSTER_PYTHON=$MUSTER_PYTHON ${version:-does not run}" "point it at a Python 3.12 or newer, or unset it"
        python=$MUSTER_PYTHON
        return
    fi
    pyenv=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions
    tried=
    # pyenv's shims may exist for versions that are not activated and then do not run, so look behind them too.
    for python in python3.12 python3.13 python3.14 python3 \
        "$pyenv"/3.12*/bin/python "$pyenv"/3.13*/bin/python "$pyenv"/3.14*/bin/python; do
        command -v "$python" >/dev/null 2>&1 || continue
        if version=$(probe "$python"); then
            return
        fi
        tried="$tried
    $python $version"
    done
    die "no Python 3.12 or newer was found; looked at:${tried:- nothing, there is no python3 on PATH}" \
        "install one (your system's packages, or: pyenv install 3.12), or name one: MUSTER_PYTHON=/path/to/python3.12 $0"
}

# What a finished installation looks like; compared whole, so any change of path, lock or project is noticed.
describe() {
    lock=requirements.lock
    [ "$1" = runtime ] || lock=requirements-dev.lock
    echo "$1 in $(pwd -P)"
    cat pyproject.toml scripts/bootstrap.sh requirements-build.lock "$lock"
}

installed() { [ -f "$stamp" ] && describe "$1" | cmp -s - "$stamp"; }

works() { .venv/bin/python -I -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# A .venv is made anew when an earlier run was cut off in it, when it was moved here, or when its Python is gone or too old.
usable() {
    [ ! -e "$marker" ] && works && .venv/bin/python -I -m pip --version >/dev/null 2>&1 || return 1
    [ ! -f "$stamp" ] || head -n 1 "$stamp" | grep -qF " in $(pwd -P)"
}

# The marker holds the ids of the script and of what pip it ran, which may outlive it. What ran under an id is looked
# at too, because ids are given again (in containers, soon) and the dead may linger as zombies.
refuse_a_second_run() {
    [ -e "$marker" ] || return 0
    for other in $(cat "$marker"); do
        [ "$other" != $$ ] || continue
        case $(ps -ww -o args= -p "$other" 2>/dev/null) in
        *bootstrap.sh* | *"pip install"*)
            die "process $other is already installing into .venv" "wait for it, or stop it and run this again"
            ;;
        esac
    done
    say "an earlier run was cut off; starting again"
}

make_venv() {
    find_python
    say "Python $version ($(command -v "$python")) -> .venv"
    rm -rf .venv
    mkdir .venv
    echo $$ >"$marker"
    "$python" -I -m venv .venv >"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        die "could not make .venv" "see above; then run this again"
    }
}

# In the background, so that a signal ends it at once: a shell waits for what runs in the foreground.
pip() {
    .venv/bin/python -I -m pip install --disable-pip-version-check --no-input --no-build-isolation --no-deps "$@" \
        >>"$log" 2>&1 </dev/null &
    child=$!
    echo "$child" >>"$marker"
    wait "$child" || {
        tail -n 20 "$log" >&2
        die "pip failed; its last lines are above, all of them in $log" "see above; then run this again, it starts afresh"
    }
    child=
}

stop() {
    [ -z "$child" ] || kill "$child" 2>/dev/null || true
    [ -z "$child" ] || wait "$child" 2>/dev/null || true
    say "stopped; run this again to finish"
    exit "$1"
}

child=
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
started=$(date +%s)
if works && { installed dev || { [ "$mode" = runtime ] && installed runtime; }; }; then
    exit 0
fi
refuse_a_second_run
if usable; then echo $$ >"$marker"; else make_venv; fi
rm -f "$stamp"
: >"$log"
lock=requirements.lock
[ "$mode" = runtime ] || lock=requirements-dev.lock
say "installing $(grep -c '^[a-zA-Z0-9]' "$lock") packages from $lock (a minute or two the first time; log: $log)"
# No build isolation: pip would fetch an unpinned setuptools into it, past the hashes. The locked one builds the only
# dependency that is published as source, and this project. Nothing else may be compiled here.
pip --require-hashes -r requirements-build.lock
pip --require-hashes --only-binary :all: --no-binary antlr4-python3-runtime -r "$lock"
pip --config-settings editable_mode=compat --editable .
describe "$mode" >"$stamp"
rm -f "$marker"
say "done in $(($(date +%s) - started)) s"
