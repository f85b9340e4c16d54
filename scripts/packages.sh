#!/bin/sh
# packages.sh [build]: install the Debian packages that the build and some tests use; with "build", only those of the build.
# Without root or apt, or if apt keeps failing, those tests are skipped.
set -eu
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
want=""
commands="c++:g++"
if [ "${1:-all}" = all ]; then
  commands="$commands cmake:cmake ninja:ninja-build openssl:openssl chromium:chromium prometheus:prometheus java:default-jre-headless redis-server:redis-server"
  commands="$commands h2load:nghttp2-client"
  [ -e /usr/share/java/zookeeper.jar ] || want="$want zookeeper" # discovery is tested against a real one
fi
for pair in $commands; do
  command -v "${pair%%:*}" >/dev/null || want="$want ${pair##*:}"
done
# For the native front end of `shoal serve`, which is left out of the build without them.
[ -e /usr/include/nghttp2/nghttp2.h ] || want="$want libnghttp2-dev"
[ -e /usr/include/openssl/ssl.h ] || want="$want libssl-dev"
python3 -c "import ensurepip" 2>/dev/null || want="$want python3-venv"
[ -z "$want" ] && exit 0
export DEBIAN_FRONTEND=noninteractive
apt="apt-get -qq -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300"
retry="sh $(dirname "$0")/retry.sh 6"
# Finish an interrupted earlier run first: apt refuses to continue without it.
$retry sh -c "dpkg --configure -a && $apt update && $apt install -y --no-install-recommends $want" >/dev/null ||
  echo "packages: apt could not install$want; tests that need them skip" >&2
