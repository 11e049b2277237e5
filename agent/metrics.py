"""Metrics of a batch of episodes."""

from collections import Counter, defaultdict
from enum import Enum
from itertools import chain

from lib.data_proto import DataProto
from lib.distributed import Mean, Metric, Sum, all_gather_lists

OF_AGENTS = ("requests", "forks", "lost_prefixes", "tokens_reused", "tokens_reencoded", "cancelled", "ignored")
OF_COMPACTION = ("compactions", "tokens_before", "tokens_after")
FAILURES = ("timeout", "exit_code", "signal", "exception", "bad_reward", "no_request")  # of an agent
ERROR_KINDS = ("malformed", "unknown_tool", "wrong_arguments", "exception", "timeout")  # of a tool's call


class FinishReason(Enum):
    """What ended an episode. With the last two no token is trained on."""

    STOP = "stop"  # a turn called no tool, or the interaction was over
    LENGTH = "length"  # the row is full, or max_turn_tokens cut a turn that nobody answers
    TOOL_CALL = "tool_call"  # the last allowed turn called a tool, which was not run
    MAX_TURNS = "max_turns"  # the interaction would have gone on after the last allowed turn
    ABORTED = "abort"  # episode_timeout, or the engine gave up
    ERROR = "error"  # an exception


def agent_metrics(batch: DataProto) -> dict[str, Metric]:
    """This rank's metrics of a batch of episodes, for `reduce_metrics`; none for a batch of single turns. A collective.

    Means are per episode, but timing_s/tool_call and agent/tool_rewards/<tool> are per call. agent/tool_errors/<kind>
    counts calls answered with an error, and failures of create, calc_reward and release. agent/failed and agent/aborted
    are episodes that are not trained on. agent/tool/<tool>/<key>, agent/interaction/<key> and agent/program/<key> are
    reported by tools, interactions and agents, as a mean over the episodes that have them: a tool's add up over its
    calls, an interaction's are those of the last turn. agent/turn_rewards_mean adds up rewards of tools and
    interaction. agent/shared_states is the share of the turns after the first that began in the state of another turn
    of their group, which GiGPO compares. agent/compactions_mean is per episode; agent/tokens_before_compaction and
    agent/tokens_after_compaction, of a context, are per compaction. With --agent there are OF_AGENTS, and
    agent/failures/<kind>, which counts episodes."""
    rows, B = batch.non_tensor_batch, len(batch)
    if "agent_metrics" not in rows:
        return {}
    reasons, totals, counts = Counter(rows["finish_reason"]), Counter[str](), Counter[str]()
    for own in rows["agent_metrics"]:
        totals.update(own)
        counts.update(own.keys())
    calls, shared, rewards = totals["tool_calls"], shared_states(batch), defaultdict[str, list[float]](list)
    for call in chain.from_iterable(rows.get("tool_rewards", ())):  # an older recording has none
        rewards[call["tool"]].append(call["reward"])
    of_agents: dict[str, Metric] = {}
    if "answer" in rows:
        of_agents |= {f"agent/{name}_mean": Mean(totals[name], B) for name in OF_AGENTS}
        of_agents |= {f"agent/failures/{kind}": Sum(totals[f"failed_{kind}"]) for kind in FAILURES}
    return {
        "agent/turn_rewards_mean": Mean(float(batch.batch["turn_rewards"].sum()), B),
        "agent/shared_states": Mean(sum(shared), len(shared)),
        "agent/turns_mean": Mean(sum(rows["num_turns"]), B),
        "agent/segments_mean": Mean(sum(map(len, rows["segments"])), B),
        "agent/tool_calls_mean": Mean(calls, B),
        "agent/compactions_mean": Mean(totals["compactions"], B),
        "agent/tokens_before_compaction": Mean(totals["tokens_before"], totals["compactions"]),
        "agent/tokens_after_compaction": Mean(totals["tokens_after"], totals["compactions"]),
        "timing_s/tool_call": Mean(totals["tool_seconds"], calls),
        **{f"agent/tool_errors/{kind}": Sum(totals[kind]) for kind in (*ERROR_KINDS, "too_many")},
        **{f"agent/finish/{reason.value}": Mean(reasons[reason.value], B) for reason in FinishReason},
        "agent/failed": Sum(reasons["error"]),
        "agent/aborted": Sum(reasons["abort"]),
        **of_agents,
        **{f"agent/tool_rewards/{tool}": Mean(sum(own), len(own)) for tool, own in rewards.items()},
        **{f"agent/{key}": Mean(totals[key], counts[key]) for key in totals if "/" in key},
    }


def shared_states(batch: DataProto) -> list[bool]:
    """Of each turn after an answer: whether another turn of its group, on any rank, began in the same state. A
    collective."""
    mask, states = batch.batch["response_mask"].bool(), batch.batch["anchor_states"]
    starts = mask.int().diff(prepend=mask[:, :1].int() * 0) == 1  # (B, T)
    begun = zip(batch.non_tensor_batch["uid"][starts.nonzero()[:, 0].tolist()], states[starts].tolist())
    later = [(uid, state) for uid, state in begun if state]
    counts = Counter(all_gather_lists(later))
    return [counts[turn] > 1 for turn in later]
