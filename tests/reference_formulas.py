"""The formulas of docs/algorithms.md as loops over rows and tokens, in float64: rollout correction, KL, advantages,
token masks, losses. They are the papers', case by case; nothing of lib is called. tests/reference_step.py makes a step
of them.

A token is (row, position in the response), and numbers of tokens are a dict. `at` has the live rows and the positions
of their tokens. Only gradients are left to autograd, and `.detach()` is a stop-gradient.
"""

import math
from collections import defaultdict
from math import exp, fsum, sqrt
from statistics import correlation, fmean, stdev, variance  # with N - 1

import torch

Token = tuple[int, int]
Numbers = dict[Token, float]


def mean(values) -> float:
    return fmean(values)


# ---- rollout correction: what sampled is not what trains -----------------------------------------
def clamped(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def r_of(x: float) -> float:
    return exp(clamped(x))


def passes(xs: list[float], kind: str, limit) -> bool:
    """Of numbers that a criterion looks at one by one: k1 bounds r, k2 and k3 are divergences."""
    if kind == "k1":
        return all(limit[0] <= r_of(x) <= limit[1] for x in xs)
    return all(x <= limit for x in xs)


def survivors(row: dict[int, float], criterion: str, limit) -> set[int]:
    """The positions of a row of log ratios {t: x} that a criterion keeps."""
    scope, kind = criterion.rsplit("_", 1)
    divergence = {"k1": float, "k2": lambda x: clamped(x) ** 2 / 2, "k3": lambda x: r_of(x) - 1 - clamped(x)}[kind]
    xs = {t: divergence(x) for t, x in row.items()}
    if scope == "token":
        return {t for t, x in xs.items() if passes([x], kind, limit)}
    whole = {"seq_sum": [fsum(xs.values())], "seq_mean": [mean(xs.values())], "seq_max": list(xs.values())}[scope]
    return set(row) if passes(whole, kind, limit) else set()


def correction(c, old: Numbers, rollout: Numbers, mask: list[Token]) -> tuple[Numbers | None, list[Token], dict]:
    """-> weights of the kept tokens, kept tokens, metrics. c: the flags --rollout-correction."""
    rows: dict[int, dict[int, float]] = defaultdict(dict)
    for i, t in mask:
        rows[i][t] = old[i, t] - rollout[i, t]
    kept = set(mask)
    values: dict[str, list[float]] = defaultdict(list)
    for word in c.reject:
        criterion, _, limit = word.partition("=")
        limit = [float(x) for x in limit.split(",")] if criterion.endswith("k1") else float(limit)
        alive = {(i, t) for i, row in rows.items() for t in survivors(row, criterion, limit)}
        units = mask if criterion.startswith("token") else [(i, min(row)) for i, row in rows.items()]
        values[f"rejected_{criterion}"] = [at not in alive for at in units]
        kept &= alive
    values["rejected_tokens"] = [at not in kept for at in mask]
    values["rejected_rows"] = [not any((i, t) in kept for t in row) for i, row in rows.items()]
    weights: Numbers = {}
    if (level := c.level or "token") != "measure":
        low, high = c.bounds or (0, 2)
        ratios = {}
        for i, row in rows.items():
            for t, x in row.items():
                r = r_of({"token": x, "sequence": fsum(row.values()), "geometric": mean(row.values())}[level])
                ratios[i, t] = r
                weights[i, t] = r if low <= r <= high else 0.0 if c.action == "mask" else min(max(r, low), high)
        of_rows = [min(at for at in kept if at[0] == i) for i in {i for i, _ in kept}]
        units = sorted(kept if level == "token" else of_rows)
        norm = mean(weights[at] for at in units) if c.batch_normalize and units else 1.0
        weights = {at: w / max(norm, 1e-300) for at, w in weights.items() if at in kept}
        values["is_clipped"] = [not low <= ratios[at] <= high for at in units]
        values["is_weight"] = [weights[at] for at in units]
    if mask:
        nll = [[-mean(x[i, t] for t in row) for i, row in rows.items()] for x in (old, rollout)]
        ratios = [r_of(x) for row in rows.values() for x in row.values()]
        values["ppl_train"], values["ppl_rollout"] = ([exp(x) for x in of_rows] for of_rows in nll)
        values["log_ppl_diff"] = [a - b for a, b in zip(*nll)]
        values["log_ppl_abs_diff"] = [abs(a - b) for a, b in zip(*nll)]
        values["chi2_seq"] = [r_of(fsum(row.values())) ** 2 - 1 for row in rows.values()]
        values["ess"] = [mean(ratios) ** 2 / mean(r * r for r in ratios)]
        p, q = ([exp(x[at]) for at in mask] for x in (old, rollout))
        if len({*p}) > 1 and len({*q}) > 1:
            values["prob_pearson"] = [correlation(p, q)]
    metrics = {f"rollout/{name}": mean(map(float, x)) for name, x in values.items() if x}
    return weights if level != "measure" else None, sorted(kept), metrics


# ---- KL and advantages ---------------------------------------------------------------------------
def kl_estimate(name: str, new, ref: float, old):
    """joschu.net/blog/kl-approx.html; "+": the gradient of k2. new and old: tensors."""
    d = new - ref
    k2 = d * d / 2
    k3 = torch.clamp((-d).exp() + d - 1, max=10)
    value = {"k1": d, "k2": k2, "k3": k3, "abs": d.abs()}[name.removesuffix("+").removesuffix("_unbiased")]
    if name.endswith("+"):
        return value.detach() + k2 - k2.detach()
    return (new - old.detach()).clamp(-20, 20).exp() * value if name.endswith("_unbiased") else value


def whitened(values: Numbers) -> Numbers:
    """Equal values give exactly 0."""
    if len(values) < 2:
        return values
    first = next(iter(values.values()))
    shifted = [x - first for x in values.values()]
    center, std = mean(shifted), sqrt(variance(shifted) + 1e-8)
    return {at: (x - center) / std for at, x in zip(values, shifted)}


def rewards_to_go(at: dict[int, list[int]], rewards: Numbers, gamma: float = 1.0) -> Numbers:
    """Only tokens of the policy count as time: tool output discounts nothing."""
    sums = {}
    for i, steps in at.items():
        for n, t in enumerate(steps):
            sums[i, t] = fsum(gamma**k * rewards[i, u] for k, u in enumerate(steps[n:]))
    return sums


def gae(at: dict[int, list[int]], rewards: Numbers, values: Numbers, gamma: float, lam) -> Numbers:
    """Not whitened. lam: a function of the row."""
    advantages = {}
    for i, steps in at.items():
        v = [values[i, t] for t in steps] + [0.0]
        delta = [rewards[i, t] + gamma * v[n + 1] - v[n] for n, t in enumerate(steps)]
        for n, t in enumerate(steps):
            advantages[i, t] = fsum((gamma * lam(i)) ** (k - n) * delta[k] for k in range(n, len(steps)))
    return advantages


def ppo_advantages(args, at, rewards, values) -> tuple[Numbers, Numbers]:
    returns = gae(at, rewards, values, args.gamma, lambda i: args.gae_lambda)
    advantages = returns
    if args.gae_lambda_policy is not None:
        advantages = gae(at, rewards, values, args.gamma, lambda i: args.gae_lambda_policy)
    if args.length_adaptive_alpha is not None:
        lam = lambda i: max(0.0, 1 - 1 / (args.length_adaptive_alpha * len(at[i])))  # noqa: E731
        advantages = gae(at, rewards, values, args.gamma, lam)
    return whitened(advantages), {token: a + values[token] for token, a in returns.items()}


def token_baseline(args, at, mates_of, rewards, squared_scores, weights) -> tuple[Numbers, Numbers]:
    """The optimal token baseline: by position, or by the number of tokens that the policy wrote before ("tir")."""
    to_go, energy, place = rewards_to_go(at, rewards), {}, {}
    for i, steps in at.items():
        total = 0.0
        for n, t in enumerate(steps):
            w = 1.0 if weights is None else weights.get((i, t), 0.0)
            total += squared_scores[i, t] * w**2
            place[i, n if args.adv_estimator.startswith("tir") else t] = (i, t)
            energy[i, t] = total
    advantages = {}
    for (i, column), token in place.items():
        mates = mates_of(i)
        others_end = max((c for j, c in place if j in mates and j != i), default=-1)
        here = [place[j, column] for j in mates if (j, column) in place]
        baseline = fsum(to_go[u] * energy[u] for u in here) / (fsum(energy[u] for u in here) + 1e-8)
        baseline = baseline if column <= others_end else 0.0
        advantages[token] = to_go[token] - baseline
        if len(mates) == 1 and args.adv_settings.get("singleton") == "zero":
            advantages[token] = 0.0
    return advantages, to_go


def runs(steps: list[int]) -> list[list[int]]:
    """Positions, cut wherever one is left out: the turns of an episode."""
    turns: list[list[int]] = []
    for t in steps:
        if turns and turns[-1][-1] == t - 1:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def credit_for_turns(args, rows, at, mates_of, rewards) -> Numbers:
    """GiGPO and MT-GRPO: what the episode is worth in its group, and the turn among its peers."""
    k, is_gigpo = args.adv_settings, args.adv_estimator == "gigpo"
    epsilon, by_std = k.get("epsilon", 1e-6), k.get("norm_adv_by_std_in_grpo", True)
    gamma, coef = k.get("gamma", 0.95), k.get("turn_coef", 1.0)

    def against(x: float, peers: list[float], alone: float) -> float:
        if len(peers) == 1:
            return alone
        return (x - mean(peers)) / (stdev(peers) + epsilon if by_std else 1.0)

    turns = {i: runs(steps) for i, steps in at.items()}
    r = {i: [fsum(rewards[i, t] for t in turn) for turn in own] for i, own in turns.items()}
    score, worth, place = {}, {}, {}
    for i, own in turns.items():
        score[i] = fsum(r[i]) if is_gigpo else r[i][-1]
        for n, turn in enumerate(own):
            to_go = fsum(gamma**m * x for m, x in enumerate(r[i][n:]))
            worth[i, n] = to_go if is_gigpo else r[i][n] if n < len(own) - 1 else 0.0
            place[i, n] = rows[i].uid, rows[i].anchor_states[turn[0]] if is_gigpo else n
    advantages = {}
    for (i, n), x in worth.items():
        alone = 0.0 if k.get("singleton") == "zero" else score[i] / (1 + epsilon if by_std else 1)
        episode = against(score[i], [score[j] for j in mates_of(i)], alone)
        turn = against(x, [worth[key] for key in worth if place[key] == place[i, n]], 0.0)
        if not is_gigpo and n == len(turns[i]) - 1:
            turn = 0.0
        advantages |= {(i, t): episode + coef * turn for t in turns[i][n]}
    return advantages


def grpo_advantages(args, rows, at, rewards, squared_scores, weights) -> tuple[Numbers, Numbers]:
    """Of every --adv-estimator. at: {live row: positions}."""
    name, kwargs = args.adv_estimator, args.adv_settings
    mates_of = lambda i: [j for j in at if rows[j].uid == rows[i].uid]  # noqa: E731
    spread = lambda values: {(i, t): values[i] for i, steps in at.items() for t in steps}  # noqa: E731
    if name.endswith("optimal_token_baseline"):
        return token_baseline(args, at, mates_of, rewards, squared_scores, weights)
    if name in ("gigpo", "mt_grpo"):
        advantages = credit_for_turns(args, rows, at, mates_of, rewards)
        return advantages, advantages
    if name == "reinforce_plus_plus":
        returns = rewards_to_go(at, rewards, kwargs.get("gamma", 1.0))
        return whitened(returns), returns
    epsilon = kwargs.get("epsilon", 1e-4 if name == "grpo_batch_std" else 1e-6)
    scores = {i: fsum(rewards[i, t] for t in steps) for i, steps in at.items()}

    def relative(i: int, R: dict[int, float]) -> float:
        """The advantage of row i against its group; of a row that is alone, what stands for it."""
        mates = [j for j in mates_of(i) if j in R]
        group, others = [R[j] for j in mates], [R[j] for j in mates if j != i]
        if name == "maxrl":
            return (R[i] - mean(group)) / mean(group) if others and mean(group) > 0 else 0.0
        if not others and (kwargs.get("singleton") == "zero" or name == "grpo_passk"):
            return 0.0
        centre = mean(group) if others else 0.0
        if name in ("grpo", "gdpo"):
            return (R[i] - centre) / ((stdev(group) if others else 1.0) + epsilon)
        if name == "grpo_passk":
            divisor = stdev(group) + epsilon if kwargs.get("norm_adv_by_std_in_grpo", True) else 1.0
            return max(R[i] - max(others), 0.0) / divisor
        if name in ("rloo", "grpo_leave_one_out"):
            centred = R[i] - (mean(others) if others else 0.0)
            same = len(set(others)) <= 1 or name == "rloo"
            return centred if same else centred / (stdev(others) + epsilon)
        if name == "opo" and others:
            lengths = [len(at[j]) for j in mates_of(i)]
            return R[i] - fsum(n * r for n, r in zip(lengths, group)) / sum(lengths)
        if name == "gpg":
            return (R[i] - centre) * len(R) / max(sum(r != 0 for r in R.values()), 1) / kwargs.get("f_norm", 1)
        if name == "grpo_batch_std":
            return (R[i] - centre) / (stdev(R.values()) + epsilon if len(set(R.values())) > 1 else 1)
        return R[i] - centre  # dr_grpo, reinforce_plus_plus_baseline

    if name == "gdpo":
        weighted = zip(args.reward_keys, kwargs.get("reward_weights") or [1] * len(args.reward_keys))
        each = [(w, {i: x for i in at if (x := rows[i].components[key]) == x}) for key, w in weighted]
        terms = {i: fsum(w * relative(i, R) for w, R in each if i in R) for i in at if any(i in R for _, R in each)}
        advantages = whitened({(i, t): terms[i] for i in terms for t in at[i]})  # the others have 0
    else:
        advantages = spread({i: relative(i, scores) for i in at})
        advantages = whitened(advantages) if name == "reinforce_plus_plus_baseline" else advantages
    return advantages, advantages


# ---- masks over the whole step -------------------------------------------------------------------
def splitmix64(x: int) -> int:
    """As a signed number."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> shift)) * factor % 2**64
    return x - 2**64 if x >= 2**63 else x


def token_masks(args, kept: list[Token], numbers, old, rollout, entropy, advantages, step) -> tuple[set, set, set]:
    """-> tokens that stay, tokens whose Clip-Cov loss stays, tokens that KL-Cov penalises. numbers: of the rows."""
    m, stay, cov_keep, cov_pick = args.mask_settings, set(kept), set(kept), set()
    if not kept:
        return stay, cov_keep, cov_pick
    if "top_entropy" in m:
        places = max(round(m["top_entropy"]["fraction"] * len(kept)), 1)
        stay &= {at for at in kept if sum(entropy[u] > entropy[at] for u in kept) < places}
    if "m2po" in m:
        moments = {at: (old[at] - rollout[at]) ** 2 for at in kept}
        while moments and mean(moments.values()) >= m["m2po"]["threshold"]:
            largest = max(moments.values())
            moments = {at: x for at, x in moments.items() if x < largest}
        stay &= set(moments)
    if "off_policy_sequence" in m:
        for i in {i for i, _ in kept}:
            row = [at for at in kept if at[0] == i]
            if mean(rollout[at] - old[at] for at in row) > m["off_policy_sequence"]["delta"]:
                stay -= {at for at in row if advantages[at] < 0}
    a, p = (mean(x[at] for at in kept) for x in (advantages, old))
    cov = {at: (advantages[at] - a) * (old[at] - p) for at in kept}
    if args.loss == "clip_cov":
        low, high = m["cov_keep"].get("cov_bounds", (1, 5))
        count = max(int(m["cov_keep"].get("cov_ratio", 2e-4) * len(kept)), 1)
        seed = (args.run.seed * 2**20 + step) * 0x9E3779B97F4A7C15
        noise = {(i, t): splitmix64((numbers[i] * 2**32 + t + seed) % 2**64) for i, t in kept if low < cov[i, t] < high}
        cov_keep -= set(sorted(noise, key=lambda at: noise[at])[:count])
    if args.loss == "kl_cov":
        places = max(int(m["cov_pick"].get("cov_ratio", 2e-4) * len(kept)), 1)
        cov_pick = {at for at in kept if sum(c >= cov[at] for c in cov.values()) <= places}
    return stay, cov_keep, cov_pick


# ---- losses --------------------------------------------------------------------------------------
def ppo_clip(a: float, ratio, low: float, high: float, dual: float = math.inf) -> tuple:
    """PPO case by case -> loss, clipped, clipped by the dual clip."""
    if a > 0 and ratio > 1 + high:
        return -a * (1 + high), True, False
    if a < 0 and ratio < 1 - low:
        return -a * (1 - low), True, False
    if a < 0 and ratio > dual:
        return -a * dual, False, True
    return -a * ratio, False, False


def row_losses(args, row: list[Token], new, old, rollout, advantages, cov_keep, cov_pick) -> tuple[dict, dict]:
    """The token losses of one row, and their metrics {name: {token: number}}. new and old: tensors, A: numbers."""
    given = args.loss_settings
    clip = lambda low, high: (given.get("cliprange_low", low), given.get("cliprange_high", high))  # noqa: E731
    d = {at: new[at] - old[at].detach() for at in row}  # log ratios
    near = {at: x.clamp(-20, 20) for at, x in d.items()}
    bounded = {}  # GMPO
    for at in row:
        low, high = clip(0.4, 0.4)
        sign = (advantages[at] > 0) - (advantages[at] < 0)
        bounded[at] = near[at].clamp(max=high) if sign > 0 else near[at].clamp(min=-low) if sign else 0 * d[at]
    losses, metrics = {}, defaultdict(dict)
    for at in row:
        a, lp, ratio, p, q = advantages[at], new[at], near[at].exp(), old[at].exp().item(), new[at].exp().item()
        r, clipped = ratio.item(), None
        match args.loss:
            case "vanilla":
                bounds = args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c
                loss, clipped, metrics["pg_clipfrac_lower"][at] = ppo_clip(a, ratio, *bounds)
            case "two_sided":
                bounds = *clip(0.2, 0.2), given.get("delta", 4.0)
                loss, clipped, metrics["pg_clipfrac_lower"][at] = ppo_clip(a, ratio, *bounds)
            case "decoupled":
                behave = r_of(old[at].item() - rollout[at])
                loss, clipped, _ = ppo_clip(a, ratio, *clip(0.2, 0.2))
                loss = loss * min(behave, given.get("cap", 5.0))
                metrics["behave_ratio"][at], metrics["behave_clipfrac"][at] = behave, behave > given.get("cap", 5.0)
            case "clip_cov":
                loss, clipped, _ = ppo_clip(a, ratio, *clip(0.2, 0.2))
                loss, metrics["cov_clipfrac"][at] = loss * (at in cov_keep), at not in cov_keep
            case "kl_cov":
                loss = -a * ratio + given.get("kl_coef", 1.0) * d[at].abs() * (at in cov_pick)
                metrics["cov_klfrac"][at] = at in cov_pick
            case "gspo":
                s = fsum(x.item() for x in d.values()) / len(row)
                loss, clipped, _ = ppo_clip(a, (s + lp - lp.detach()).clamp(-20, 20).exp(), *clip(3e-4, 4e-4))
            case "geo_mean":
                loss = -a * (sum(bounded.values()) / len(row)).exp()
                clipped = a != 0 and (bounded[at] != near[at]).item()
            case "cispo":
                low, high = clip(1.0, 4.0)
                weight = min(max(r, 1 - low), 1 + high)
                loss, clipped = -weight * a * lp, weight != r
            case "sapo":
                tau = given.get("tau_pos", 1.0) if a > 0 else given.get("tau_neg", 1.05)
                loss = -a * 4 / tau * torch.sigmoid(tau * (ratio - 1))
            case "gpg":
                loss = -a * lp
            case "reinforce":
                loss, clipped = -min(r, given.get("ratio_high", 2.0)) * a * lp, r > given.get("ratio_high", 2.0)
            case "dppo_tv":
                low, high = given.get("delta_low", 0.2), given.get("delta_high", 0.2)
                clipped = (a > 0 and q - p > high) or (a < 0 and q - p < -low)
                loss = -min(r, given.get("ratio_high", 20.0)) * a * lp * (not clipped)
            case "dppo_kl":
                low, high = given.get("delta_low", 0.05), given.get("delta_high", 0.05)
                not_p, not_q = (max(-math.expm1(x.item()), 2**-52) for x in (old[at], lp))  # p or q may be 1
                kl = p * math.log(p / q) + not_p * math.log(not_p / not_q)
                clipped = (a > 0 and q > p and kl > high) or (a < 0 and q < p and kl > low)
                loss = -min(r, given.get("ratio_high", 20.0)) * a * lp * (not clipped)
            case "dro":
                loss = -a * lp + given["dro_beta"] / 2 * d[at] ** 2
        losses[at], metrics["ppo_kl"][at] = loss, -near[at].item()
        if clipped is not None:
            metrics["pg_clipfrac"][at] = clipped
    return losses, metrics


def value_loss(v: torch.Tensor, old: float, target: float, eps: float) -> tuple[torch.Tensor, bool]:
    """PPO's critic -> loss, whether the clip around the old value decides."""
    near = v.clamp(old - eps, old + eps)
    unclipped, clipped = (v - target) ** 2, (near - target) ** 2
    return torch.maximum(unclipped, clipped) / 2, (clipped > unclipped).item()


def token_weight(args, length: int, tokens: int, rows: int) -> float:
    """Of a token's loss in that of its mini-batch. length: of its row; tokens and rows: of the mini-batch."""
    tokens, rows = max(tokens, 1), max(rows, 1)
    return {
        "token-mean": 1 / tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / rows,
        "seq-mean-token-mean": 1 / rows / length,
        "seq-mean-token-sum-norm": 1 / rows / (args.loss_scale_factor or args.rollout.max_response_length),
    }[args.loss_agg_mode]
