#!/bin/sh
# environment.sh VENV PYTHON PACKAGES...: packages in a virtual environment, which is made if it is not there.
# A run that was killed leaves half a package behind, which pip can neither use nor replace: the next one starts afresh
# (in an environment that was made here; another one is never removed).
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
