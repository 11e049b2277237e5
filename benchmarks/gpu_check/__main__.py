import sys

import tyro

from benchmarks.gpu_check import main
from benchmarks.gpu_check.rows import Options

if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description="What a GPU is to confirm: benchmarks/gpu_check/__init__.py")))
