"""python -m planner grpo.py --gpus 8 [flags]: what --dry-run 8 prints. --plan and --trace are flags of the script."""

import runpy
import sys

if __name__ == "__main__":
    script, *flags = sys.argv[1:] or sys.exit(__doc__)
    sys.argv = [script, *("--dry-run" if flag == "--gpus" else flag for flag in flags)]
    runpy.run_path(script, run_name="__main__")
