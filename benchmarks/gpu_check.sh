#!/usr/bin/env bash
# Numerics, memory and speed on a GPU machine, in less than 10 minutes, without network: gpu_check/__init__.py says what.
#
#     benchmarks/gpu_check.sh                                     with .venv, or else python3
#     benchmarks/gpu_check.sh --ranks 8                           several GPUs of this node, in 20 minutes
#     WHEELS=folder benchmarks/gpu_check.sh                       what is missing there, from a folder of wheels, into /tmp
#     benchmarks/gpu_check.sh --device cpu --tiny --output /tmp/check.json       that it works, in seconds
#
# What is missing on a machine that has torch, transformers and accelerate is downloaded where there is a network:
#
#     benchmarks/gpu_check.sh --wheels folder                     for Python 3.12
#     benchmarks/gpu_check.sh --wheels folder 3.11 pyarrow        for another one, on a machine that has pyarrow, too
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
if [ "${1:-}" = --wheels ]; then
    exec "$PYTHON" -m benchmarks.gpu_check.wheels "${@:2}"
fi
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export TOKENIZERS_PARALLELISM=false
exec "$PYTHON" -m benchmarks.gpu_check "$@"
