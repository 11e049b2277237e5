"""python -m planner grpo.py --gpus 8 [--trace] [flags]: what --dry-run 8 prints.

--trace also runs a step of the script without values, and prints the memory that it takes and a predicted speed, which
--plan then takes.
"""

import runpy
import sys

import planner

if __name__ == "__main__":
    script, *flags = sys.argv[1:] or sys.exit(__doc__)
    planner.traces = "--trace" in flags
    names = {"--gpus": "--dry-run"}
    sys.argv = [script, *(names.get(flag, flag) for flag in flags if flag != "--trace")]
    runpy.run_path(script, run_name="__main__")
