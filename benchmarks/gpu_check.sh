#!/usr/bin/env bash
# Numerics, memory and speed on a GPU machine, in less than 8 minutes, without network: gpu_check/__init__.py says what.
#
#     benchmarks/gpu_check.sh                                     with .venv, or else python3
#     WHEELS=folder benchmarks/gpu_check.sh                       what is missing there, from a folder of wheels, into /tmp
#     benchmarks/gpu_check.sh --device cpu --tiny --output /tmp/check.json       that it works, in seconds
#
# Where there is a network, pip download --no-deps -d folder makes such a folder, with --python-version and --platform
# of the GPU machine. Beside torch, transformers and accelerate the scripts need datasets, dill, docstring-parser,
# eval-type-backport, multiprocess, peft, pyvers, tensordict, torchdata, typeguard and tyro.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export TOKENIZERS_PARALLELISM=false
exec "$PYTHON" -m benchmarks.gpu_check "$@"
