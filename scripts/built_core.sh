#!/bin/sh
# Print the path of the core library built for the wheel, if it is up to date and was built with warnings as errors.
set -eu
cd "$(dirname "$0")/.."
for library in build/cp3*/libshoal_core.a; do
  [ -e "$library" ] && grep -q '^SHOAL_WERROR:.*=ON' "${library%/*}/CMakeCache.txt" || continue
  [ -z "$(find csrc cmake CMakeLists.txt -path csrc/tests -prune -o -type f -newer "$library" -print | head -1)" ] || continue
  echo "$PWD/$library"
  exit
done
