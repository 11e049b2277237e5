"""Memory, FLOPs and seconds of a step, before a model loads: --dry-run, and the check of a GPU's memory."""

traces = False  # python -m planner ... --trace: a step of the script is run without values
