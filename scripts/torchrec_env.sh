#!/bin/sh
# torchrec_env.sh [DIRECTORY] [PYTHON]: install TorchRec and its dependencies into a separate folder (52 MB, build/torchrec), for
# tests/nn/test_torchrec.py and `python -m benchmarks.sharded --only torchrec`. Nothing is installed into an environment:
# TorchRec requires the CUDA build of FBGEMM and other versions than ours. If it cannot be installed, those tests skip.
set -eu
target=${1:-build/torchrec} python=${2:-python3}
[ ! -e "$target/.complete" ] || exit 0
rm -rf "$target"
# Versions that load with the torch version in the Makefile.
sh "$(dirname "$0")/retry.sh" 3 "$python" -m pip install -q --no-deps --target "$target" \
  torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 pyre-extensions==0.0.32 iopath==0.1.10 \
  lightning-utilities typing-inspect mypy-extensions portalocker orjson pyvers cloudpickle importlib_metadata zipp || {
  echo "torchrec_env: pip could not install TorchRec; tests that need it skip" >&2
  rm -rf "$target"
  exit 0
}
touch "$target/.complete"
