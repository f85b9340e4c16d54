#!/bin/sh
# Debian packages that some tests use. Without root, or without apt, those tests skip and say why.
set -eu
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
want=""
for pair in "c++:g++" "cmake:cmake" "ninja:ninja-build"; do
  command -v "${pair%%:*}" >/dev/null || want="$want ${pair##*:}"
done
[ -z "$want" ] && exit 0
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $want >/dev/null
