"""One scorer a file, chosen by a row's data_source.

A scorer is `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)` and returns a number, or
a dict with "score"; of its other keys, "pred" is the extracted answer (for maj@k) and numbers are logged by name.
"""

from importlib import import_module

# data_source, or its part before the last slash -> module in this folder
SCORERS = {
    "toy": "arithmetic",
    "reasoning_gym": "reasoning_gym",
    "openai/gsm8k": "gsm8k",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
}


def scorer_module(data_source: str) -> str | None:
    return SCORERS.get(data_source) or SCORERS.get(data_source.rpartition("/")[0])


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The score by this project's scorer for `data_source`."""
    module = import_module(f"rewards.{scorer_module(data_source)}")
    return module.compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
