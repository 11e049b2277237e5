"""Training steps after the rollout, as a specification: plain loops over responses and tokens in float64.

From the papers and docs/algorithms.md, for all four scripts and all of their flags; nothing of lib is called. Only
gradients are left to autograd, and `.detach()` is a stop-gradient. tests/scripts/test_flag_pairs.py compares it with
what the scripts do.

A token is (row, position in the response), and a number per token is a dict of tokens. Rows stand in the order of their
ranks; a mini-batch is a share of every rank's rows. There are no micro-batches here: no result may depend on them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, fsum, sqrt

import torch

Token = tuple[int, int]
Numbers = dict[Token, float]


def mean(values) -> float:
    values = list(values)
    return fsum(values) / len(values)


def variance(values) -> float:
    """With N - 1."""
    values = list(values)
    center = mean(values)
    return fsum((x - center) ** 2 for x in values) / (len(values) - 1)


def stdev(values) -> float:
    return sqrt(variance(values))


@dataclass
class Row:
    """A response as the engine, the scorers and the tools leave it."""

    uid: str
    prompt: list[int]
    response: list[int]
    sampled: list[bool]  # by the policy; the others are tool output
    rollout_log_probs: list[float]
    score: float | None  # None: the scorer failed, and nothing of the row is trained on
    components: dict[str, float] = field(default_factory=dict)  # what else the scorer returned
    turn_rewards: list[float] = field(default_factory=list)  # of tools, by position
    reward_model: float = 0.0
    greedy_score: float | None = 0.0  # ReMax: of the greedy response to the same prompt
    truncated: bool = False
    fresh: bool = True  # DAPO: sampled in this step, by these weights


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


class Bigram:
    """A model without layers: hidden state h(x) = table[x] / rms(table[x]) of the last token x, logits or value W h."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self.weights = {name: w.clone().requires_grad_() for name, w in weights.items()}

    def outputs(self, rows: list[Row], tokens: list[Token]) -> torch.Tensor:
        """(n, V) or (n, 1): W h of what stands before each token: logits, or the critic's value."""
        x = [[*rows[i].prompt, *rows[i].response][len(rows[i].prompt) + t - 1] for i, t in tokens]
        table, scale, head, *bias = self.weights.values()
        h = scale * table[x] / (table[x].square().mean(1, keepdim=True) + 1e-6).sqrt()
        return h @ head.T + (bias[0] if bias else 0)

    def step(self, loss: torch.Tensor, lr: float, max_norm: float) -> tuple[dict[str, torch.Tensor], float]:
        """One step of SGD -> the clipped gradient, and its norm before."""
        gradients = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True, materialize_grads=True)
        norm = sqrt(fsum(g.square().sum().item() for g in gradients))
        clipped = {name: g * min(1, max_norm / (norm + 1e-6)) for name, g in zip(self.weights, gradients)}
        for name, w in self.weights.items():
            w.data -= lr * clipped[name]
        return clipped, norm


def kept_logits(logits: list[float], top_p: float, top_k: int, min_p: float) -> list[float]:
    """Of the tokens that can be sampled: min-p cuts first, then top-k, then top-p, by what is left."""
    ranked = sorted(logits, reverse=True)
    ranked = [z for z in ranked if exp(z - ranked[0]) >= min_p]
    if top_k > 0:
        ranked = ranked[:top_k]
    total, mass = fsum(map(exp, ranked)), 0.0
    for n, z in enumerate(ranked):
        mass += exp(z) / total
        if top_p < 1 and mass >= top_p:
            return ranked[: n + 1]
    return ranked


@dataclass
class Sampled:
    """The policy at one token. A token outside the set that can be sampled extends the set down to itself."""

    log_prob: torch.Tensor
    entropy: torch.Tensor
    sum_pi_squared: float
    outside: bool


def at_tokens(model: Bigram, rows: list[Row], tokens, rollout, truncated: bool = True) -> dict[Token, Sampled]:
    z = model.outputs(rows, tokens) / rollout.temperature
    z_y = z[range(len(tokens)), [rows[i].response[t] for i, t in tokens]]
    cut = (rollout.top_p, rollout.top_k, rollout.min_p) if truncated else (1, -1, 0)
    least = torch.tensor([kept_logits(logits, *cut)[-1] for logits in z.tolist()], dtype=z.dtype)
    kept = z >= torch.minimum(least, z_y.detach())[:, None]
    log_p = z.masked_fill(~kept, -1e30).log_softmax(1)
    p = log_p.exp()
    log_probs, entropies = (z_y - z.masked_fill(~kept, -1e30).logsumexp(1)).unbind(), -(p * log_p).sum(1)
    parts = zip(log_probs, entropies.unbind(), p.square().sum(1).tolist(), (z_y < least).tolist())
    return {token: Sampled(*of) for token, of in zip(tokens, parts)}


# ---- rollout correction: what sampled is not what trains -----------------------------------------


def r_of(x: float) -> float:
    return exp(min(max(x, -20.0), 20.0))


def passes(xs: list[float], kind: str, limit) -> bool:
    """Of numbers that a criterion looks at one by one: k1 bounds r, k2 and k3 are divergences."""
    if kind == "k1":
        return all(limit[0] <= r_of(x) <= limit[1] for x in xs)
    return all(x <= limit for x in xs)


def survivors(row: dict[int, float], criterion: str, limit) -> set[int]:
    """The positions of a row of log ratios {t: x} that a criterion keeps."""
    scope, kind = criterion.rsplit("_", 1)
    divergence = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: exp(x) - 1 - x}[kind]
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
    for criterion, limit in vars(c.reject).items():
        if limit is not None:
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
        p, q = ([exp(x[at]) - mean(exp(x[at]) for at in mask) for at in mask] for x in (old, rollout))
        if any(p) and any(q):
            dot = lambda a, b: fsum(x * y for x, y in zip(a, b))  # noqa: E731
            values["prob_pearson"] = [dot(p, q) / sqrt(dot(p, p) * dot(q, q))]
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
    return (new - old.detach()).exp() * value if name.endswith("_unbiased") else value


def whitened(values: Numbers) -> Numbers:
    if len(values) < 2:
        return values
    center, var = mean(values.values()), variance(values.values())
    return {at: (x - center) / sqrt(var + 1e-8) for at, x in values.items()}


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


def token_baseline(args, at, mates_of, rewards, policy, weights) -> tuple[Numbers, Numbers]:
    """The optimal token baseline: by position, or by the number of tokens that the policy wrote before ("tir")."""
    to_go, energy, place = rewards_to_go(at, rewards), {}, {}
    for i, steps in at.items():
        total = 0.0
        for n, t in enumerate(steps):
            w = 1.0 if weights is None else weights.get((i, t), 0.0)
            total += (1 - 2 * exp(policy[i, t].log_prob.item()) + policy[i, t].sum_pi_squared) * w**2
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
        if len(mates) == 1 and args.singleton == "zero":
            advantages[token] = 0.0
    return advantages, to_go


def grpo_advantages(args, rows, at, rewards, policy, weights) -> tuple[Numbers, Numbers]:
    """Of every --adv-estimator. at: {live row: positions}."""
    name, kwargs = args.adv_estimator, args.adv_kwargs
    mates_of = lambda i: [j for j in at if rows[j].uid == rows[i].uid]  # noqa: E731
    spread = lambda values: {(i, t): values[i] for i, steps in at.items() for t in steps}  # noqa: E731
    if name.endswith("optimal_token_baseline"):
        return token_baseline(args, at, mates_of, rewards, policy, weights)
    if name == "reinforce_plus_plus":
        returns = rewards_to_go(at, rewards, 1.0 if kwargs.gamma is None else kwargs.gamma)
        return whitened(returns), returns
    epsilon = kwargs.epsilon or (1e-4 if name == "grpo_batch_std" else 1e-6)
    scores = {i: fsum(rewards[i, t] for t in steps) for i, steps in at.items()}

    def relative(i: int, R: dict[int, float]) -> float:
        """The advantage of row i against its group; of a row that is alone, what stands for it."""
        group, others = [R[j] for j in mates_of(i)], [R[j] for j in mates_of(i) if j != i]
        if name == "maxrl":
            return (R[i] - mean(group)) / mean(group) if others and mean(group) > 0 else 0.0
        if not others and (args.singleton == "zero" or name == "grpo_passk"):
            return 0.0
        centre = mean(group) if others else 0.0
        if name in ("grpo", "gdpo"):
            return (R[i] - centre) / ((stdev(group) if others else 1.0) + epsilon)
        if name == "grpo_passk":
            divisor = 1.0 if kwargs.norm_adv_by_std_in_grpo is False else stdev(group) + epsilon
            return max(R[i] - max(others), 0.0) / divisor
        if name in ("rloo", "grpo_leave_one_out"):
            centred = R[i] - (mean(others) if others else 0.0)
            same = len(set(others)) <= 1 or name == "rloo"
            return centred if same else centred / (stdev(others) + epsilon)
        if name == "opo" and others:
            lengths = [len(at[j]) for j in mates_of(i)]
            return R[i] - fsum(n * r for n, r in zip(lengths, group)) / sum(lengths)
        if name == "gpg":
            return (R[i] - centre) * len(R) / max(sum(r != 0 for r in R.values()), 1) / (kwargs.f_norm or 1)
        if name == "grpo_batch_std":
            return (R[i] - centre) / (stdev(R.values()) + epsilon if len(set(R.values())) > 1 else 1)
        return R[i] - centre  # dr_grpo, reinforce_plus_plus_baseline

    if name == "gdpo":
        weighted = zip(args.reward_keys, kwargs.reward_weights or [1] * len(args.reward_keys))
        each = [(w, {i: rows[i].components[key] for i in at}) for key, w in weighted]
        advantages = whitened(spread({i: fsum(w * relative(i, R) for w, R in each) for i in at}))
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


def token_masks(args, kept: list[Token], old, rollout, entropy, advantages, step: int) -> tuple[set, set, set]:
    """-> tokens that stay, tokens whose Clip-Cov loss stays, tokens that KL-Cov penalises."""
    m, stay, cov_keep, cov_pick = args.token_masks, set(kept), set(kept), set()
    if not kept:
        return stay, cov_keep, cov_pick
    if m.top_entropy is not None:
        places = max(round(m.top_entropy * len(kept)), 1)
        stay &= {at for at in kept if sum(entropy[u] > entropy[at] for u in kept) < places}
    if m.m2po is not None:
        moments = {at: (old[at] - rollout[at]) ** 2 for at in kept}
        while moments and mean(moments.values()) >= m.m2po:
            largest = max(moments.values())
            moments = {at: x for at, x in moments.items() if x < largest}
        stay &= set(moments)
    if m.off_policy_sequence is not None:
        for i in {i for i, _ in kept}:
            row = [at for at in kept if at[0] == i]
            if mean(rollout[at] - old[at] for at in row) > m.off_policy_sequence:
                stay -= {at for at in row if advantages[at] < 0}
    a, p = (mean(x[at] for at in kept) for x in (advantages, old))
    cov = {at: (advantages[at] - a) * (old[at] - p) for at in kept}
    if args.loss == "clip_cov":
        low, high = m.clip_cov_bounds or (1, 5)
        seed = (args.run.seed * 2**20 + step) * 0x9E3779B97F4A7C15
        noise = {(i, t): splitmix64((i * 2**32 + t + seed) % 2**64) for i, t in kept if low < cov[i, t] < high}
        cov_keep -= set(sorted(noise, key=lambda at: noise[at])[: max(int((m.clip_cov_ratio or 2e-4) * len(kept)), 1)])
    if args.loss == "kl_cov":
        places = max(int((m.kl_cov_ratio or 2e-4) * len(kept)), 1)
        cov_pick = {at for at in kept if sum(c >= cov[at] for c in cov.values()) <= places}
    return stay, cov_keep, cov_pick


def token_rewards(args, row: Row) -> dict[int, float]:
    """By position: of tools, and on the last token those of the scorer and the reward model."""
    last = max(t for t, s in enumerate(row.sampled) if s)
    of_tools = args.multi_turn.reward_coef if args.multi_turn.enabled else 0.0
    rewards = {t: of_tools * row.turn_rewards[t] for t, s in enumerate(row.sampled) if s}
    rewards[last] += row.score + (args.reward.reward_model_coef * row.reward_model if args.reward.reward_model else 0)
    return rewards


def outcome(args, row: Row) -> float:
    return fsum(token_rewards(args, row).values())


def equal_groups(args, rows: list[Row], at, scores: dict[int, float]) -> set[int]:
    """Live rows of groups of two or more whose scores, or with --reward-keys all of these rewards, are equal."""
    signals = {i: tuple(rows[i].components[key] for key in args.reward_keys) or (scores[i],) for i in at}
    groups = {i: [signals[j] for j in at if rows[j].uid == rows[i].uid] for i in at}
    return {i for i, group in groups.items() if len(group) > 1 and len(set(group)) == 1}


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
    given = {name: value for name, value in vars(args.loss_kwargs).items() if value is not None}
    clip = lambda low, high: (given.get("cliprange_low", low), given.get("cliprange_high", high))  # noqa: E731
    d = {at: new[at] - old[at].detach() for at in row}  # log ratios
    bounded = {}  # GMPO
    for at in row:
        low, high = clip(0.4, 0.4)
        sign = (advantages[at] > 0) - (advantages[at] < 0)
        bounded[at] = d[at].clamp(max=high) if sign > 0 else d[at].clamp(min=-low) if sign else 0 * d[at]
    losses, metrics = {}, defaultdict(dict)
    for at in row:
        a, lp, ratio, p, q = advantages[at], new[at], d[at].exp(), old[at].exp().item(), new[at].exp().item()
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
                loss, clipped, _ = ppo_clip(a, (s + lp - lp.detach()).exp(), *clip(3e-4, 4e-4))
            case "geo_mean":
                loss, clipped = -a * (sum(bounded.values()) / len(row)).exp(), a != 0 and (bounded[at] != d[at]).item()
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
        losses[at], metrics["ppo_kl"][at] = loss, -d[at].item()
        if clipped is not None:
            metrics["pg_clipfrac"][at] = clipped
    return losses, metrics


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


def sample_groups(args, pool: list[Row], batches: list[list[Row]]) -> tuple[list[Row], list[Row], dict[str, float]]:
    """DAPO's dynamic sampling -> the rows of the step, those that wait for the next one, metrics."""
    needed, size = args.prompts_per_step * args.group_size, args.group_size
    informative, others, sampled = list(pool), [], 0
    while len(informative) < needed and sampled < args.max_gen_batches:
        batch = batches[sampled]
        sampled += 1
        for group in (batch[i : i + size] for i in range(0, len(batch), size)):
            live = [row for row in group if row.score is not None and any(row.sampled)]
            live = [row for row in live if not (args.overlong_filtering and row.truncated)]
            signals = {tuple(row.components[k] for k in args.reward_keys) or outcome(args, row) for row in live}
            has_signal = len(signals) > 1 or len(live) == 1 or args.zero_variance != "refill"
            (informative if has_signal else others).extend(group)
    filled = max(needed - len(informative), 0)
    rows = informative + others[:filled]
    metrics = {"training/rows_in": sampled * needed + len(pool), "training/gen_batches": sampled}
    metrics |= {"training/rows_dropped/refilled": len(others) - filled, "training/rows_left_over": len(rows) - needed}
    return rows[:needed], rows[needed:], metrics


# ---- the step ------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """What a run carries from step to step. beta: the KL's coefficient."""

    args: object
    policy: Bigram
    reference: Bigram
    critic: Bigram | None = None  # PPO
    ranks: int = 1
    lr: float = 1.0
    steps: int = 0

    def __post_init__(self):
        self.beta, self.entropy_coef, self.next_entropy_coef = self.args.kl_coef, *[self.args.entropy_coef] * 2
        self.updates: list[dict[str, torch.Tensor]] = []  # the gradients of every optimizer step

    def step(self, rows: list[Row]) -> dict[str, float]:
        """Trains on the rows of all ranks -> the step's metrics."""
        args, c = self.args, self.args.rollout_correction
        self.steps += 1
        remax = not (args.adv_estimator or self.critic)
        is_scored = lambda row: row.score is not None and not (remax and row.greedy_score is None)  # noqa: E731
        mask = [(i, t) for i, row in enumerate(rows) for t, s in enumerate(row.sampled) if s and is_scored(row)]
        rollout = {(i, t): rows[i].rollout_log_probs[t] for i, t in mask}
        start = at_tokens(self.policy, rows, mask, args.rollout)
        ref = {at: x.log_prob.item() for at, x in at_tokens(self.reference, rows, mask, args.rollout, False).items()}
        values = dict(zip(mask, self.critic.outputs(rows, mask)[:, 0].tolist())) if self.critic else {}
        bypass = lambda i: args.old_log_probs == "rollout" or not rows[i].fresh  # noqa: E731
        old = {at: rollout[at] if bypass(at[0]) else start[at].log_prob.item() for at in mask}
        metrics = dict[str, float]()

        # which tokens count, and which are trained on
        filters = {"dead": set(mask)}
        kept = counted = mask
        if getattr(args, "overlong_filtering", False):
            kept = counted = [at for at in mask if not rows[at[0]].truncated]
            filters["overlong"] = set(kept)
        weights = None
        if any(value is not None for value in (*vars(c.reject).values(), *list(vars(c).values())[:-1])):
            weights, kept, metrics = correction(c, old, rollout, kept)
            filters["rollout_correction"] = set(kept)
        lives = {i for i, _ in kept}
        valid = [at for at in mask if at[0] in lives]  # a rejected row is in no group
        at = {i: [t for j, t in valid if j == i] for i in sorted(lives)}

        # rewards and advantages
        scores = {(i, t): r for i in at for t, r in token_rewards(args, rows[i]).items()}
        rewards = dict(scores)
        if args.kl_coef and args.kl_placement == "reward":
            kl = {u: self.kl(number(old[u]), ref[u], number(old[u])) for u in valid}
            kl = {u: x.item() for u, x in kl.items()}
            rewards = {u: scores[u] - self.beta * kl[u] for u in valid}
            mean_kl = mean(mean(kl[i, t] for t in steps) for i, steps in at.items()) if at else 0.0
            metrics |= {"actor/reward_kl": mean_kl, "actor/kl_coef": self.beta}
            if args.kl_target:
                error = min(max(mean_kl / args.kl_target - 1, -0.2), 0.2)
                self.beta *= 1 + error * len(rows) / args.kl_horizon
        if buffer := args.overlong_buffer:
            for i, steps in at.items():
                excess = max(steps[-1] + 1 - (args.rollout.max_response_length - buffer), 0)
                rewards[i, steps[-1]] -= excess / buffer * args.overlong_factor
        if self.critic:
            advantages, returns = ppo_advantages(args, at, rewards, values)
            spread = [variance(x[u] for u in valid) if len(valid) > 1 else 0.0 for x in (returns, values)]
            error = [returns[u] - values[u] for u in valid]
            metrics["critic/explained_variance"] = 1 - variance(error) / spread[0] if spread[0] else 0.0
        elif args.adv_estimator:
            advantages, returns = grpo_advantages(args, rows, at, rewards, start, weights)
        else:
            returns = rewards_to_go(at, rewards)
            advantages = {(i, t): x - rows[i].greedy_score for (i, t), x in returns.items()}

        # masks
        zero_variance = getattr(args, "zero_variance", "keep")
        if zero_variance != "keep":
            equal = equal_groups(args, rows, at, {i: fsum(scores[i, t] for t in steps) for i, steps in at.items()})
            kept = [u for u in kept if u[0] not in equal]
            filters["zero_variance"] = set(kept)
            counted = counted if zero_variance == "mask" else [u for u in counted if u[0] not in equal]
        entropy = {u: x.entropy.item() for u, x in start.items()}
        stay, cov_keep, cov_pick = token_masks(args, kept, old, rollout, entropy, advantages, self.steps)
        if args.token_masks.settings(args.loss):
            kept = [u for u in kept if u in stay]
            filters["token_masks"] = set(kept)
        before = set(range(len(rows)))
        for name, tokens in filters.items():
            after = {i for i, _ in tokens}
            metrics[f"training/rows_dropped/{name}"], before = len(before - after), before & after
        metrics |= {"training/rows_trained": len(before), "training/rows_in": len(rows)}
        if mask:
            metrics["training/trained_share"] = len(kept) / len(mask)
        if valid:
            of = [advantages[u] for u in valid]
            metrics |= {"advantages/mean": mean(of), "advantages/max": max(of), "advantages/min": min(of)}

        # updates
        metrics["actor/entropy_coef"], warm_up = self.entropy_coef, self.steps <= getattr(args, "critic_warmup_steps", 0)
        self.means, updates = defaultdict(list), args.num_mini_batches * args.update_epochs
        sums = Counter()
        for n, mine in enumerate(self.mini_batches(len(rows))):
            here, trained, counts = ([u for u in tokens if u[0] in mine] for tokens in (mask, kept, counted))
            sizes = len(counts), len({i for i, _ in counts})
            if self.critic:
                valid_here = [u for u in valid if u[0] in mine]
                loss = self.value_loss(rows, at, valid_here, values, returns)
                sums["critic/vf_loss"] += loss.item() / updates
                self.descend(self.critic, "critic", loss)
            if warm_up:
                continue
            new = at_tokens(self.policy, rows, here, args.rollout)
            loss = sum(w.sum() for w in self.policy.weights.values()) * 0.0
            for i in mine:
                row = [u for u in here if u[0] == i]
                if not row:
                    continue
                log_prob = {u: new[u].log_prob for u in row}
                log_old = {u: number(old[u]) for u in row}
                A = {u: advantages.get(u, 0.0) for u in row}
                losses, found = row_losses(args, row, log_prob, log_old, rollout, A, cov_keep, cov_pick)
                for name, numbers in found.items():
                    self.means[f"actor/{name}"] += [float(x) for x in numbers.values()]
                for u in row:
                    self.means["actor/pg_loss"].append(torch.as_tensor(losses[u], dtype=torch.float64).item())
                    self.means["actor/entropy"].append(new[u].entropy.item())
                    total = losses[u] * (1.0 if weights is None else weights.get(u, 0.0))
                    total = total - self.entropy_coef * new[u].entropy
                    if args.kl_coef and args.kl_placement == "loss":
                        kl = self.kl(log_prob[u], ref[u], log_old[u])
                        self.means["actor/ref_kl"].append(kl.item())
                        total = total + args.kl_coef * kl
                    loss = loss + total * token_weight(args, len(row), *sizes) * (u in set(trained))
            if n == 0:
                metrics |= self.mismatch({u: new[u] for u in here if rows[u[0]].fresh}, rollout)
            sums["actor/loss"] += loss.item() / updates
            self.descend(self.policy, "actor", loss)
        metrics |= sums | {name: mean(x) for name, x in self.means.items() if x}
        if args.entropy_target is not None and "actor/entropy" in metrics:
            self.adapt_entropy(metrics["actor/entropy"])
        return metrics

    def mini_batches(self, rows: int) -> Iterator[list[int]]:
        """Row numbers: of each rank's rows, the next share."""
        own = rows // self.ranks
        share = own // self.args.num_mini_batches
        for first in list(range(0, own, share)) * self.args.update_epochs:
            yield [rank * own + i for rank in range(self.ranks) for i in range(first, first + share)]

    def kl(self, new, ref: float, old):
        return kl_estimate(self.args.kl_estimator, new, ref, old)

    def descend(self, model: Bigram, name: str, loss: torch.Tensor) -> None:
        gradient, norm = model.step(loss, self.lr, self.args.optimizer.max_grad_norm)
        self.updates.append(gradient)
        self.means[f"{name}/grad_norm"].append(norm)

    def value_loss(self, rows, at, tokens, values, returns) -> torch.Tensor:
        loss = sum(w.sum() for w in self.critic.weights.values()) * 0.0
        sizes, eps = (len(tokens), len({i for i, _ in tokens})), self.args.cliprange_value
        for u, v in zip(tokens, self.critic.outputs(rows, tokens)[:, 0].unbind()):
            near = v.clamp(values[u] - eps, values[u] + eps)
            unclipped, clipped = (v - returns[u]) ** 2, (near - returns[u]) ** 2
            self.means["critic/vf_clipfrac"].append((clipped > unclipped).item())
            self.means["critic/value"].append(v.item())
            loss = loss + torch.maximum(unclipped, clipped) / 2 * token_weight(self.args, len(at[u[0]]), *sizes)
        return loss

    def adapt_entropy(self, entropy: float) -> None:
        step = 0.005 if entropy < self.args.entropy_target else -0.005
        self.next_entropy_coef = min(max(self.next_entropy_coef + step, 0.0), 1.0)
        self.entropy_coef = 0.0 if entropy > self.args.entropy_target else self.next_entropy_coef

    def mismatch(self, new: dict[Token, Sampled], rollout: Numbers) -> dict[str, float]:
        """How far trainer and engine are apart, before the first update."""
        if not new:
            return {}
        x = {u: s.log_prob.item() - rollout[u] for u, s in new.items()}
        r = [r_of(d) for d in x.values()]
        values = {
            "logp_diff": [abs(d) for d in x.values()],
            "prob_diff": [abs(exp(new[u].log_prob.item()) - exp(rollout[u])) for u in new],
        }
        metrics = {f"{name}_{f.__name__}": f(of) for name, of in values.items() for f in (mean, max)}
        metrics |= {"k1": -mean(x.values()), "k3": mean(q - 1 - d for q, d in zip(r, x.values()))}
        metrics |= {"ratio_mean": mean(r), "chi2": mean(q * q - 1 for q in r), "ratio_max": max(r), "ratio_min": min(r)}
        rollout = self.args.rollout
        if (rollout.top_p, max(rollout.top_k, 0), rollout.min_p) != (1, 0, 0):
            metrics["outside_top_p"] = mean(float(s.outside) for s in new.values())
        return {f"rollout/{name}": x for name, x in metrics.items()}
