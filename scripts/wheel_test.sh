#!/bin/sh
# Install the wheel in dist/ into a fresh environment, check its contents and run smoke tests outside the source tree.
#   scripts/wheel_test.sh PYTHON     uses torch and the test runner from PYTHON's environment, shoal from the wheel
set -eu
python=$1
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
set -- "$root"/dist/shoal-*.whl
[ $# -eq 1 ] && [ -f "$1" ] || { echo "wheel-test: dist/ must contain exactly one wheel; run make wheel" >&2; exit 1; }
wheel=$1

"$python" - "$wheel" <<'PY'
import re, sys, zipfile
names = [n for n in zipfile.ZipFile(sys.argv[1]).namelist() if not n.endswith("/")]
allowed = re.compile(r"shoal/([\w/]+\.(py|pyi|html|json|yml)|py\.typed|_core\.abi3\.so)|shoal-[\d.]+\.dist-info/[\w./]+")
odd = [name for name in names if not allowed.fullmatch(name)]
assert not odd, f"the wheel contains unexpected files: {odd[:5]}"
needed = {"shoal/_core.abi3.so", "shoal/py.typed", "shoal/observe/page.html", "shoal/observe/monitoring/alerts.yml"}
assert needed <= set(names), f"the wheel does not contain {needed - set(names)}"
assert re.search(r"-cp311-abi3-manylinux_\d+_\d+_\w+\.whl$", sys.argv[1]), f"{sys.argv[1]} is not an abi3 manylinux wheel"
print(f"{len(names)} files, none unexpected")
PY

"$python" -m venv "$work/venv"
site=$("$work/venv/bin/python" -c "import site; print(site.getsitepackages()[0])")
"$python" -c "import site; print(site.getsitepackages()[0])" > "$site/lent.pth" # searched after the fresh environment's own packages
"$work/venv/bin/pip" install -q --no-deps --no-index "$wheel"
cp -r "$root/tests" "$root/pyproject.toml" "$root/scripts/wheel_smoke.py" "$work"
cd "$work"
unset PYTHONPATH
"$work/venv/bin/python" wheel_smoke.py
"$work/venv/bin/python" -m pytest -q -p no:cacheprovider tests/cli/test_table.py tests/test_fid.py tests/test_ragged.py \
  tests/table/test_config.py tests/ops/test_reorder.py tests/nn/test_pooling.py
