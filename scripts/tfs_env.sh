#!/bin/sh
# tfs_env.sh DIRECTORY: create a small environment with TensorFlow Serving's own Python client, for one test file:
#
#     scripts/tfs_env.sh /tmp/tfs && SHOAL_TFS_PYTHON=/tmp/tfs/bin/python pytest tests/serving/server/test_tensorflow_client.py
#
# tensorflow-serving-api needs only the generated messages of TensorFlow: they are extracted from its wheel (270 MB to
# download, 1 MB kept), so TensorFlow itself is not installed.
set -eu
target=${1:?usage: scripts/tfs_env.sh DIRECTORY}
python3 -m venv "$target"
"$target/bin/pip" install -q protobuf grpcio numpy
"$target/bin/pip" install -q --no-deps tensorflow-serving-api
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$target/bin/pip" download -q --no-deps -d "$wheels" tensorflow-cpu
"$target/bin/python" - "$wheels" <<'PY'
import pathlib, site, sys, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
into = pathlib.Path(site.getsitepackages()[0])
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.startswith("tensorflow/") and name.endswith("_pb2.py")]
    archive.extractall(into, names)
for folder in {parent for name in names for parent in (into / name).parents if into in parent.parents}:
    (folder / "__init__.py").touch()
PY
"$target/bin/python" -c "import tensorflow_serving.apis.prediction_service_pb2_grpc"
