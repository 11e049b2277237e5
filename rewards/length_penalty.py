"""Group scorer: a long response costs the more, the more responses of its group are right.

    --reward rewards/length_penalty.py:compute_score_group --reward-kwargs '{"coef": 0.2}'

The score of the row's data_source (or of "scorer": "path/to/file.py:function") gets a penalty. With n_i the sampled
tokens of response i, n_min and n_max the fewest and the most of its group, and p the group's pass rate:

    penalty_i = -coef p (n_i - n_min) / (n_max - n_min)        0 if all have the same length

A prompt that no response solves costs nothing, so the policy may think longer; where all are right, the longest pays
`coef`. With coef < 1 and scores of 0 and 1, a right response still beats a wrong one of its group. The factor p is that
of Adaptive Length Penalty (arXiv:2506.05256: -beta n_i max(p, 1 / G)). The length relative to the group is that of Kimi
k1.5's length reward (arXiv:2501.12599), so a penalty does not grow with the limit of tokens.
"""

from lib.reward.scorer import BY_DATA_SOURCE, call, load_scorer


def penalties(right: list[bool], num_tokens: list[int], coef: float) -> list[float]:
    """-coef p (n_i - n_min) / (n_max - n_min) for each response of a group."""
    pass_rate, shortest = sum(right) / len(right), min(num_tokens)
    spread = max(num_tokens) - shortest
    return [-coef * pass_rate * (n - shortest) / spread if spread else 0.0 for n in num_tokens]


def compute_score_group(
    data_source,
    solution_strs,
    ground_truth,
    extra_info=None,
    *,
    num_tokens,
    scorer=BY_DATA_SOURCE,
    scorer_kwargs=None,
    coef=0.2,
    correct_above=0.5,
    time_limit_s=30.0,
    **kwargs,
) -> list[dict]:
    """Each response's result by `scorer`, called with scorer_kwargs, with "score" plus the penalty, "acc" (the scorer's
    own, or its score) and "length_penalty". Right is an "acc" above correct_above. Raises what the scorer raises."""
    function = load_scorer(scorer, [], scorer_kwargs or {}, time_limit_s)
    row = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info}
    results = [call(function, "response", [row | {"solution_str": text}])[0] for text in solution_strs]
    results = [result if isinstance(result, dict) else {"score": result} for result in results]
    accuracies = [result.get("acc", result["score"]) for result in results]
    of_group = penalties([acc > correct_above for acc in accuracies], num_tokens, coef)
    return [
        result | {"score": result["score"] + penalty, "acc": acc, "length_penalty": penalty}
        for result, acc, penalty in zip(results, accuracies, of_group)
    ]
