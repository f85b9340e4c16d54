#!/bin/sh
# Debian packages that some tests use. Without root, or without apt, those tests skip and say why.
set -eu
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
want=""
for pair in "c++:g++" "cmake:cmake" "ninja:ninja-build" "openssl:openssl" "chromium:chromium" "java:default-jre-headless"; do
  command -v "${pair%%:*}" >/dev/null || want="$want ${pair##*:}"
done
[ -e /usr/share/java/zookeeper.jar ] || want="$want zookeeper" # discovery is tested against a real one
[ -z "$want" ] && exit 0
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $want >/dev/null
