import os
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # while torch is imported: no traceback

import tyro  # noqa: E402

from benchmarks.gpu_check.rows import Options  # noqa: E402
from benchmarks.gpu_check.run import main  # noqa: E402

if __name__ == "__main__":
    code = main(tyro.cli(Options, description="What a GPU is to confirm: benchmarks/gpu_check/__init__.py"))
    os._exit(code)  # a part that not even SIGKILL ends would be waited for
