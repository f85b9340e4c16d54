#!/bin/sh
# environment.sh VENV PYTHON PACKAGES...: install packages into a virtual environment, creating it if needed.
# A killed run leaves a partial package that pip can neither use nor replace, so the next run starts from scratch
# (only in an environment that this script created).
set -eu
venv=$1 python=$2
shift 2
here=$(dirname "$0")
[ ! -e "$venv/.unfinished" ] || rm -rf "$venv" "$here"/../build/cp3*
if ! [ -x "$venv/bin/pip" ]; then
  "$python" -m venv "$venv"
  touch "$venv/.made-here" "$venv/.unfinished"
  sh "$here/retry.sh" 4 "$venv/bin/pip" install -q --upgrade pip
fi
[ ! -e "$venv/.made-here" ] || touch "$venv/.unfinished"
status=0
sh "$here/retry.sh" 3 "$venv/bin/pip" install -q "$@" || status=$?
rm -f "$venv/.unfinished"
exit "$status"
