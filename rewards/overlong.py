"""Overlong penalty: a response loses reward in the last tokens before its limit (DAPO, arXiv:2503.14476, eq. 13).

    --reward rewards/overlong.py:compute_score --reward-kwargs '{"overlong_buffer": 4096}'

The score of the row's data_source (or of "scorer": "path/to/file.py:function") gets a penalty. With |y| the response's
tokens up to the last one that the policy sampled, those of tools among them, L_max the limit (--max-response-length; in
validation --val-kwargs max_response_length) and L_buf the buffer:

    penalty = min(0, (L_max - L_buf - |y|) / L_buf * overlong_factor)         0 at L_max - L_buf, -factor at L_max

In dapo.py, --overlong-buffer N has the same penalty, but adds it after dynamic sampling has compared the scores; with
this scorer (and --overlong-buffer 0) scores are compared with it, as in verl.
"""

from lib.reward.scorer import BY_DATA_SOURCE, call, load_scorer


def compute_score(
    data_source,
    solution_str,
    ground_truth=None,
    extra_info=None,
    *,
    response_length,
    max_response_length,
    overlong_buffer,
    overlong_factor=1.0,
    scorer=BY_DATA_SOURCE,
    scorer_kwargs=None,
    time_limit_s=30.0,
    **kwargs,
) -> dict:
    """The result of `scorer`, called with scorer_kwargs, with "score" plus the penalty, "acc" (the scorer's own, or its
    score) and "overlong_penalty". Raises ValueError for a buffer above the limit, and what the scorer raises."""
    if not 0 < overlong_buffer <= max_response_length:
        raise ValueError(f"overlong_buffer {overlong_buffer}: must be in 1..{max_response_length}, the limit of tokens")
    function = load_scorer(scorer, [], scorer_kwargs or {}, time_limit_s)
    row = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info}
    [result] = call(function, "response", [row | {"solution_str": solution_str}])
    result = result if isinstance(result, dict) else {"score": result}
    excess = max(0, response_length - (max_response_length - overlong_buffer))
    penalty = -excess / overlong_buffer * overlong_factor
    score = result["score"]
    return result | {"score": score + penalty, "acc": result.get("acc", score), "overlong_penalty": penalty}
