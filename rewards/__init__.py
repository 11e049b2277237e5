"""One scorer per file; a row's data_source chooses it.

A scorer is `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)` and returns a number, or
a dict with "score" and other keys. "pred" is the extracted answer (for maj@k; None if there is none). "acc" says
whether the answer is right, if the score measures more than that. Other numbers are logged by name. Each docstring
says what its scorer takes and returns. format.py, judge.py, length_penalty.py and verifiers.py belong to no data
source: give them as --reward rewards/format.py:compute_score. Nothing is imported before it is needed.
"""

from importlib import import_module

# data_source, or its part before the last slash, or its beginning (if the key ends in *) -> module in this folder
SCORERS = {
    "toy": "arithmetic",
    "reasoning_gym": "reasoning_gym",
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "hendrycks_math": "math",
    "EleutherAI/hendrycks_math": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "HuggingFaceH4/aime_2024": "math",
    "math-ai/aime25": "math",
    "lighteval/MATH": "math",
    "numina_*": "math",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "countdown": "countdown",
    "reverse_text": "similarity",
    "hiyouga/geometry3k": "geometry3k",
    "cais/mmlu": "multiple_choice",
    "TIGER-Lab/MMLU-Pro": "multiple_choice",
    "Idavidrein/gpqa": "multiple_choice",
    "allenai/ai2_arc": "multiple_choice",
    "searchR1_*": "search_qa",
    "nq": "search_qa",
    "triviaqa": "search_qa",
    "popqa": "search_qa",
    "hotpotqa": "search_qa",
    "2wikimultihopqa": "search_qa",
    "musique": "search_qa",
    "bamboogle": "search_qa",
    "code": "code",
    "humaneval": "code",
    "openai_humaneval": "code",
    "openai/openai_humaneval": "code",
    "google-research-datasets/mbpp": "code",
    "mbpp": "code",
    "apps": "code",
    "taco": "code",
    "codecontests": "code",
    "code_contests": "code",
    "codeforces": "code",
    "livecodebench": "code",
}


def scorer_module(data_source: str) -> str | None:
    for name in (data_source, data_source.rpartition("/")[0]):
        if name in SCORERS:
            return SCORERS[name]
    families = (name for name in SCORERS if name.endswith("*") and data_source.startswith(name[:-1]))
    return next((SCORERS[name] for name in families), None)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The score that this folder's scorer for `data_source` gives."""
    module = import_module(f"rewards.{scorer_module(data_source)}")
    return module.compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
