#!/bin/sh
# retry.sh TRIES COMMAND...: run the command until it succeeds, at most TRIES times, with growing pauses. It is for
# commands that need the network, or a lock that another program may hold (a new machine runs apt after it boots).
set -u
tries=$1
shift
pause=5
until "$@"; do
  status=$?
  tries=$((tries - 1))
  [ "$tries" -gt 0 ] || exit "$status"
  echo "retry: '$*' failed; trying again in $pause s" >&2
  sleep "$pause"
  pause=$((pause * 2))
done
