#!/bin/sh
# retry.sh TRIES COMMAND...: the command until it succeeds, with longer and longer pauses: for what needs the network,
# or a lock that another program may hold (a machine that has just booted runs apt by itself).
set -u
tries=$1
shift
pause=5
until "$@"; do
  status=$?
  tries=$((tries - 1))
  [ "$tries" -gt 0 ] || exit "$status"
  echo "retry: '$*' failed; once more in $pause s" >&2
  sleep "$pause"
  pause=$((pause * 2))
done
