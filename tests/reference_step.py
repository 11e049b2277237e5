"""Training steps after the rollout, as a specification of grpo.py, ppo.py, remax.py and dapo.py with all of their
flags: plain loops over responses and tokens in float64, which call nothing of lib. Formulas:
tests/reference_formulas.py.

tests/scripts/test_flag_pairs.py compares it with what the scripts do. Rows stand in the order of their ranks; a
mini-batch is a share of every rank's rows. There are no micro-batches here: no result may depend on them.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, fsum, sqrt
from typing import Any

import torch

from tests import reference_formulas as formulas
from tests.reference_formulas import Numbers, Token, mean, r_of, variance


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

    @property
    def turn_numbers(self) -> list[int]:
        """By position: a tool's answer is between two turns."""
        starts = [own and not before for own, before in zip(self.sampled, [False, *self.sampled])]
        return [sum(starts[: t + 1]) * own for t, own in enumerate(self.sampled)]

    @property
    def anchor_states(self) -> list[int]:
        """By position: the state in which a token's turn began. Here tools answer odd and even."""
        states, seen = [], 0
        for token, own in zip(self.response, self.sampled):
            seen = seen if own else 1 + token % 2
            states.append(seen)
        return states


class Bigram:
    """A model without layers: hidden state h(x) = scale table[x] / rms(table[x]) of the last token x alone, then a
    head: logits over the vocabulary, or a critic's value."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self.weights = {name: w.clone().requires_grad_() for name, w in weights.items()}

    def outputs(self, rows: list[Row], tokens: list[Token]) -> torch.Tensor:
        """(n, V) or (n, 1): of what stands before each token."""
        x = [[*rows[i].prompt, *rows[i].response][len(rows[i].prompt) + t - 1] for i, t in tokens]
        table, scale, head, *bias = self.weights.values()
        h = scale * table[x] / (table[x].square().mean(1, keepdim=True) + 1e-6).sqrt()
        return h @ head.T + (bias[0] if bias else 0)

    def nothing(self) -> torch.Tensor:
        """A loss of 0, which has a gradient."""
        return sum((w.sum() * 0 for w in self.weights.values()), torch.zeros((), dtype=torch.float64))

    def descend(self, loss: torch.Tensor, lr: float, max_norm: float) -> tuple[dict[str, torch.Tensor], float]:
        """One step of SGD -> the clipped gradient, and its norm before."""
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        norm = sqrt(fsum(g.square().sum().item() for g in gradients))
        clipped = {name: g * min(1, max_norm / (norm + 1e-6)) for name, g in zip(self.weights, gradients)}
        for name, w in self.weights.items():
            w.data -= lr * clipped[name]
        return clipped, norm


def kept_logits(logits: list[float], top_p: float, top_k: int, min_p: float) -> list[float]:
    """Of the tokens that can be sampled: min-p cuts first, then top-k, then top-p, each by what is left."""
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
    """The policy at one token. One that is outside of what can be sampled extends that set down to itself."""

    log_prob: torch.Tensor
    entropy: torch.Tensor
    squared_score: float  # |d log p / d logits|^2
    outside: bool


def at_tokens(model: Bigram, rows: list[Row], tokens, rollout, truncated: bool = True) -> dict[Token, Sampled]:
    """The model at these tokens, at the sampling temperature; truncated: by --top-p, --top-k and --min-p."""
    z = model.outputs(rows, tokens) / rollout.temperature
    z_y = z[range(len(tokens)), [rows[i].response[t] for i, t in tokens]]
    cut = (rollout.top_p, rollout.top_k, rollout.min_p) if truncated else (1, -1, 0)
    least = torch.tensor([kept_logits(logits, *cut)[-1] for logits in z.tolist()], dtype=z.dtype)
    z = z.masked_fill(z < torch.minimum(least, z_y.detach())[:, None], -1e30)
    log_p, log_prob = z.log_softmax(1), z_y - z.logsumexp(1)
    entropy, squares = -(log_p.exp() * log_p).sum(1), log_p.exp().square().sum(1)
    squared_score = (1 - 2 * log_prob.exp() + squares).tolist()
    parts = zip(log_prob.unbind(), entropy.unbind(), squared_score, (z_y < least).tolist())
    return {token: Sampled(*of) for token, of in zip(tokens, parts)}


# ---- rewards and groups --------------------------------------------------------------------------
def token_rewards(args, row: Row) -> dict[int, float]:
    """By position: of tools, and on the last token those of the scorer and the reward model."""
    last = max(t for t, s in enumerate(row.sampled) if s)
    of_tools = args.multi_turn.reward_coef if args.multi_turn.enabled else 0.0
    rewards = {t: of_tools * row.turn_rewards[t] for t, s in enumerate(row.sampled) if s}
    rewards[last] += row.score + (args.reward.reward_model_coef * row.reward_model if args.reward.reward_model else 0)
    return rewards


def signal(args, row: Row) -> tuple[float, ...]:
    """What tells a response from the others of its group: its score, or with gdpo all of its reward_keys."""
    return tuple(row.components[key] for key in args.reward_keys) or (fsum(token_rewards(args, row).values()),)


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
            has_signal = len(live) == 1 or len({signal(args, row) for row in live}) > 1
            (informative if has_signal or args.zero_variance != "refill" else others).extend(group)
    filled = max(needed - len(informative), 0)
    rows = informative + others[:filled]
    groups, parts = [rows[i : i + size] for i in range(0, needed, size)], args.num_mini_batches
    dealt = [[] for _ in range(parts)]  # from the last group, which is new, to the first
    for n, group in enumerate(reversed(groups)):
        dealt[n % parts] = group + dealt[n % parts]
    metrics = {"training/rows_in": sampled * needed + len(pool), "training/gen_batches": sampled}
    metrics |= {"training/rows_dropped/refilled": len(others) - filled, "training/rows_left_over": len(rows) - needed}
    return [row for part in dealt for row in part], rows[needed:], metrics


# ---- the step ------------------------------------------------------------------------------------
@dataclass
class Batch:
    """A step's rows, and what is known of their tokens before the updates."""

    rows: list[Row]
    mask: list[Token]  # sampled, of rows with a score
    rollout: Numbers  # log-probs of the engine
    old: Numbers  # log-probs of pi_old
    ref: Numbers  # log-probs of the start model
    values: Numbers  # of PPO's critic
    start: dict[Token, Sampled]  # the policy
    kept: list[Token] = field(default_factory=list)  # trained on
    counted: list[Token] = field(default_factory=list)  # in the denominators
    valid: list[Token] = field(default_factory=list)  # of rows that are in a group: at least one token is kept
    weights: Numbers | None = None  # of the rollout correction
    advantages: Numbers = field(default_factory=dict)
    returns: Numbers = field(default_factory=dict)
    cov_keep: set[Token] = field(default_factory=set)
    cov_pick: set[Token] = field(default_factory=set)


@dataclass
class Trainer:
    """What a run carries from step to step. args: those of the script."""

    args: Any
    policy: Bigram
    reference: Bigram
    critic: Bigram | None = None  # PPO
    ranks: int = 1
    lr: float = 1.0
    steps: int = 0
    updates: list[dict[str, torch.Tensor]] = field(default_factory=list)  # the gradients of every optimizer step

    def __post_init__(self):
        self.beta, self.entropy_coef, self.adaptive_coef = self.args.kl_coef, *[self.args.entropy_coef] * 2

    def step(self, rows: list[Row]) -> dict[str, float]:
        """Trains on the rows of all ranks -> the step's metrics."""
        self.steps += 1
        b = self.before_the_updates(rows)
        metrics = self.add_advantages(b) | {"actor/entropy_coef": self.entropy_coef} | self.update(b)
        if (target := self.args.entropy_target) is not None and "actor/entropy" in metrics:
            entropy = metrics["actor/entropy"]
            self.adaptive_coef = min(max(self.adaptive_coef + (0.005 if entropy < target else -0.005), 0.0), 1.0)
            self.entropy_coef = 0.0 if entropy > target else self.adaptive_coef
        return metrics

    def before_the_updates(self, rows: list[Row]) -> Batch:
        args, needs_greedy = self.args, not (self.args.adv_estimator or self.critic)
        live = {i for i, row in enumerate(rows) if row.score is not None}
        live -= {i for i in live if needs_greedy and rows[i].greedy_score is None}
        mask = [(i, t) for i in sorted(live) for t, s in enumerate(rows[i].sampled) if s]
        rollout = {(i, t): rows[i].rollout_log_probs[t] for i, t in mask}
        start = at_tokens(self.policy, rows, mask, args.rollout)
        ref = {u: x.log_prob.item() for u, x in at_tokens(self.reference, rows, mask, args.rollout, False).items()}
        values = dict(zip(mask, self.critic.outputs(rows, mask)[:, 0].tolist())) if self.critic else {}
        bypass = {i for i in live if args.old_log_probs == "rollout" or not rows[i].fresh}  # pi_old is the sampler
        old = {u: rollout[u] if u[0] in bypass else start[u].log_prob.item() for u in mask}
        return Batch(rows, mask, rollout, old, ref, values, start)

    def add_advantages(self, b: Batch) -> dict[str, float]:
        args, c, rows, metrics = self.args, self.args.rollout_correction, b.rows, dict[str, float]()
        filters = {"dead": b.mask}  # what is left after each
        b.kept = b.counted = b.mask
        if getattr(args, "overlong_filtering", False):
            b.kept = b.counted = filters["overlong"] = [u for u in b.mask if not rows[u[0]].truncated]
        if c.reject or any(x is not None for x in (c.level, c.action, c.bounds, c.batch_normalize)):
            b.weights, b.kept, metrics = formulas.correction(c, b.old, b.rollout, b.kept)
            filters["rollout_correction"] = b.kept
        lives = {i for i, _ in b.kept}  # a row that is rejected is in no group
        b.valid = [u for u in b.mask if u[0] in lives]
        at = {i: [t for j, t in b.valid if j == i] for i in sorted(lives)}

        rewards = {(i, t): r for i in at for t, r in token_rewards(args, rows[i]).items()}
        if args.kl_coef and args.kl_placement == "reward":
            old = {u: torch.tensor(b.old[u], dtype=torch.float64) for u in b.valid}
            kl = {u: formulas.kl_estimate(args.kl_estimator or "k1", x, b.ref[u], x).item() for u, x in old.items()}
            rewards = {u: r - self.beta * kl[u] for u, r in rewards.items()}
            mean_kl = mean(mean(kl[i, t] for t in steps) for i, steps in at.items()) if at else 0.0
            metrics |= {"actor/reward_kl": mean_kl, "actor/kl_coef": self.beta}
            if args.kl_target:
                error = min(max(mean_kl / args.kl_target - 1, -0.2), 0.2)
                self.beta *= 1 + error * len(rows) / args.kl_horizon
        for i, steps in at.items():
            if buffer := args.overlong_buffer:
                excess = max(steps[-1] + 1 - (args.rollout.max_response_length - buffer), 0)
                rewards[i, steps[-1]] -= excess / buffer * args.overlong_factor
        if self.critic:
            b.advantages, b.returns = formulas.ppo_advantages(args, at, rewards, b.values)
            error = [b.returns[u] - b.values[u] for u in b.valid]
            spread = variance(b.returns.values()) if len(error) > 1 else 0.0
            is_spread = spread > 1e-14 * mean(x**2 for x in b.returns.values()) if error else False  # not by rounding
            metrics["critic/explained_variance"] = 1 - variance(error) / spread if is_spread else 0.0
        elif args.adv_estimator:
            scores = {u: x.squared_score for u, x in b.start.items()}
            b.advantages, b.returns = formulas.grpo_advantages(args, rows, at, rewards, scores, b.weights)
        else:
            b.returns = formulas.rewards_to_go(at, rewards)
            b.advantages = {u: x - rows[u[0]].greedy_score for u, x in b.returns.items()}

        if (zero_variance := getattr(args, "zero_variance", "keep")) != "keep":
            signals = {i: [signal(args, rows[j]) for j in at if rows[j].uid == rows[i].uid] for i in at}
            equal = {i for i, group in signals.items() if len(group) > 1 and len(set(group)) == 1}
            b.kept = filters["zero_variance"] = [u for u in b.kept if u[0] not in equal]
            b.counted = b.counted if zero_variance == "mask" else [u for u in b.counted if u[0] not in equal]
        entropy = {u: x.entropy.item() for u, x in b.start.items()}
        in_order = sorted(range(len(rows)), key=lambda i: rows[i].uid)
        numbers = {i: number for number, i in enumerate(in_order)}  # by uid, whichever rank has the row
        selected = formulas.token_masks(args, b.kept, numbers, b.old, b.rollout, entropy, b.advantages, self.steps)
        stay, b.cov_keep, b.cov_pick = selected
        if args.mask_settings:
            b.kept = filters["token_masks"] = [u for u in b.kept if u in stay]

        before = set(range(len(rows)))
        for name, tokens in filters.items():
            after = {i for i, _ in tokens}
            metrics[f"training/rows_dropped/{name}"], before = len(before - after), before & after
        metrics |= {"training/rows_trained": len(before), "training/rows_in": len(rows)}
        if b.mask:
            metrics["training/trained_share"] = len(b.kept) / len(b.mask)
        if b.valid:
            of = {"advantages": b.advantages, "returns": b.returns} | ({"values": b.values} if self.critic else {})
            spread = {name: [column[u] for u in b.valid] for name, column in of.items()}
            spread["token_level_rewards"] = [sum(r for (j, _), r in rewards.items() if j == i) for i in at]
            metrics |= {f"{name}/{f.__name__}": f(x) for name, x in spread.items() for f in (mean, max, min)}
        return metrics

    def update(self, b: Batch) -> dict[str, float]:
        warm_up = self.steps <= getattr(self.args, "critic_warmup_steps", 0)
        means: dict[str, list[float]] = defaultdict(list)
        sums: dict[str, float] = defaultdict(float)
        mini_batches, mismatch = list(self.mini_batches(len(b.rows))), {}

        def descend(model: Bigram, name: str, loss: torch.Tensor, metric: str, trained: list[Token]) -> None:
            gradient, norm = model.descend(loss, self.lr, self.args.optimizer.max_grad_norm)
            if any(i in mine for i, _ in trained):  # else the weights stay
                self.updates.append(gradient)
            means[f"{name}/grad_norm"].append(norm)
            sums[metric] += loss.item() / len(mini_batches)

        for number, mine in enumerate(mini_batches):
            if self.critic:
                descend(self.critic, "critic", self.critic_loss(b, mine, means), "critic/vf_loss", b.valid)
            if not warm_up:
                new = at_tokens(self.policy, b.rows, [u for u in b.mask if u[0] in mine], self.args.rollout)
                if number == 0:
                    mismatch = self.mismatch({u: x for u, x in new.items() if b.rows[u[0]].fresh}, b.rollout)
                descend(self.policy, "actor", self.policy_loss(b, new, mine, means), "actor/loss", b.kept)
        return mismatch | sums | {name: mean(x) for name, x in means.items() if x}

    def mini_batches(self, rows: int) -> Iterator[list[int]]:
        """Row numbers: of each rank's rows, the next share."""
        own = rows // self.ranks
        share = own // self.args.num_mini_batches
        for first in list(range(0, own, share)) * self.args.update_epochs:
            yield [rank * own + i for rank in range(self.ranks) for i in range(first, first + share)]

    def policy_loss(self, b: Batch, new: dict[Token, Sampled], mine: list[int], means) -> torch.Tensor:
        """Of a mini-batch; new: the policy at its tokens."""
        args, total, trained = self.args, self.policy.nothing(), set(b.kept)
        counted = [u for u in b.counted if u[0] in mine]
        sizes = len(counted), len({i for i, _ in counted})  # tokens and rows, of all ranks
        for i in mine:
            row = [u for u in new if u[0] == i]
            log_prob = {u: new[u].log_prob for u in row}
            old = {u: torch.tensor(b.old[u], dtype=torch.float64) for u in row}
            advantages = {u: b.advantages.get(u, 0.0) for u in row}
            losses, metrics = formulas.row_losses(
                args, row, log_prob, old, b.rollout, advantages, b.cov_keep, b.cov_pick
            )
            for name, numbers in metrics.items():
                means[f"actor/{name}"] += [float(x) for x in numbers.values()]
            for u in row:
                loss, entropy = torch.as_tensor(losses[u], dtype=torch.float64), new[u].entropy
                means["actor/pg_loss"].append(loss.item())
                means["actor/entropy"].append(entropy.item())
                loss = loss * (1.0 if b.weights is None else b.weights.get(u, 0.0)) - self.entropy_coef * entropy
                if args.kl_coef and args.kl_placement == "loss":
                    kl = formulas.kl_estimate(args.kl_estimator or "k3+", log_prob[u], b.ref[u], old[u])
                    means["actor/ref_kl"].append(kl.item())
                    loss = loss + args.kl_coef * kl
                if u in trained:
                    total = total + loss * formulas.token_weight(args, len(row), *sizes)
        return total

    def critic_loss(self, b: Batch, mine: list[int], means) -> torch.Tensor:
        tokens, total = [u for u in b.valid if u[0] in mine], self.critic.nothing()
        sizes = len(tokens), len({i for i, _ in tokens})
        for u, v in zip(tokens, self.critic.outputs(b.rows, tokens)[:, 0].unbind()):
            loss, clipped = formulas.value_loss(v, b.values[u], b.returns[u], self.args.cliprange_value)
            means["critic/vf_clipfrac"].append(clipped)
            means["critic/value"].append(v.item())
            total = total + loss * formulas.token_weight(self.args, sum(i == u[0] for i, _ in tokens), *sizes)
        return total

    def mismatch(self, new: dict[Token, Sampled], rollout: Numbers) -> dict[str, float]:
        """How far trainer and engine are apart, before the first update."""
        if not new:
            return {}
        p = {u: x.log_prob.item() for u, x in new.items()}
        x = [p[u] - rollout[u] for u in new]
        r, cut = [r_of(d) for d in x], self.args.rollout
        probs = [abs(exp(p[u]) - exp(rollout[u])) for u in new]
        apart = {"rollout/logp_diff": [abs(d) for d in x], "training/rollout_probs_diff": probs}
        metrics = {"k1": -mean(x), "k3": mean(q - 1 - d for q, d in zip(r, x)), "chi2": mean(q * q - 1 for q in r)}
        metrics |= {"ratio_mean": mean(r), "ratio_max": max(r), "ratio_min": min(r)}
        if (cut.top_p, max(cut.top_k, 0), cut.min_p) != (1, 0, 0):
            metrics["outside_top_p"] = mean(float(s.outside) for s in new.values())
        metrics = {f"rollout/{name}": value for name, value in metrics.items()}
        if len(probs) > 1:
            metrics["training/rollout_probs_diff_std"] = variance(probs) ** 0.5
        return metrics | {f"{name}_{f.__name__}": f(values) for name, values in apart.items() for f in (mean, max)}
