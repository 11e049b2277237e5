"""Memory, FLOPs and seconds of a step, before a model loads: --dry-run, and the check of a GPU's memory."""
