"""Log-probs and entropies of responses, at the sampling temperature.

Full fp32 logits never exist: the vocabulary projection is done in chunks of tokens, and its backward recomputes them.
That is exact.
"""

import itertools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from lib import InputError
from lib.data import prepare_dynamic_batch, restore_dynamic_batch
from lib.data_proto import DataProto
from lib.distributed import RowGroup, all_gather_lists
from lib.model.attention import layout
from lib.model.packing import of_responses

NEVER = -1e30  # logit of a token that is not sampled: its probability is 0, and 0 x -1e30 is 0, where 0 x -inf is NaN
CANDIDATES = 1024  # a nucleus is looked for among so many likeliest tokens first: to sort all takes ten times as long


@torch.no_grad()
def least_kept(z: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """The least of the logits z (N, V) that sampling keeps, (N, 1): of the top_k likeliest tokens (below 1: of all) the
    fewest likeliest that have top_p of their probability. Engines choose so, in this order, after the temperature. All
    tokens that tie with the last one are kept here; an engine may drop some of them."""
    V, least = z.shape[-1], z.new_full((len(z), 1), -torch.inf)
    if 0 < top_k < V:
        least = z.topk(top_k).values[:, -1:]
    if top_p < 1:
        z = z.masked_fill(z < least, NEVER)
        total, ranked = z.logsumexp(-1, keepdim=True), z.topk(min(CANDIDATES, V)).values
        while ranked.shape[-1] < V and ((ranked - total).exp().sum(-1) < top_p).any():
            ranked = z.topk(min(8 * ranked.shape[-1], V)).values
        before_last = ((ranked - total).exp().cumsum(-1) < top_p).sum(-1, keepdim=True)
        least = torch.maximum(least, ranked.gather(-1, before_last.clamp(max=ranked.shape[-1] - 1)))
    return least


class LinearLogProbs(torch.autograd.Function):
    """Log-prob of y and entropy under p = softmax(h W^T / temperature), a chunk of tokens at a time; sum_v p_v^2 too,
    without gradient, if asked for.

    Forward keeps log-sum-exp and entropy per token; backward recomputes each chunk's logits. With z = h W^T / T:
    d logp / dz = onehot(y) - p and d H / dz = -p (log p + H).

    With top_p or top_k p is renormalised over the tokens that `least_kept` leaves; the gradient takes them as fixed.
    The sampler kept y, and so all that is likelier: where y is not among these tokens, by rounding or after an update,
    all down to y are taken. The last result is 1 there, else 0.
    """

    @staticmethod
    def forward(ctx, h, weight, y, inv_temperature, chunk, sum_pi_squared=False, top_p=1.0, top_k=-1):
        # h (N, D), weight (V, D), y (N,)
        dtype = torch.promote_types(h.dtype, torch.float32)
        logp, entropy, lse = (torch.empty(len(h), dtype=dtype, device=h.device) for _ in range(3))
        squares = torch.empty_like(lse) if sum_pi_squared else None
        least, outside = (torch.empty_like(lse) if top_p < 1 or top_k > 0 else None for _ in range(2))
        for i in range(0, len(h), chunk):
            s = slice(i, i + chunk)
            z = torch.mm(h[s], weight.T).to(dtype).mul_(inv_temperature)  # (chunk, V)
            z_y = z.gather(-1, y[s, None])
            if least is not None:
                kept = least_kept(z, top_p, top_k)
                outside[s], least[s] = (z_y < kept)[:, 0], torch.minimum(z_y, kept)[:, 0]
                z.masked_fill_(z < least[s, None], NEVER)
            lse[s] = torch.logsumexp(z, -1)
            logp[s] = z_y[:, 0] - lse[s]
            p = z.sub(lse[s, None]).exp_()
            entropy[s] = lse[s] - torch.einsum("nv,nv->n", p, z)
            if sum_pi_squared:
                squares[s] = torch.einsum("nv,nv->n", p, p)
        ctx.save_for_backward(h, weight, y, lse, entropy, least)
        ctx.inv_temperature, ctx.chunk = inv_temperature, chunk
        constants = [x for x in (squares, outside) if x is not None]
        ctx.mark_non_differentiable(*constants)
        return logp, entropy, *constants

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy, *_):
        h, weight, y, lse, entropy, least = ctx.saved_tensors
        dh = torch.empty_like(h)
        dw = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        for i in range(0, len(h), ctx.chunk):
            s = slice(i, i + ctx.chunk)
            z = torch.mm(h[s], weight.T).to(lse.dtype).mul_(ctx.inv_temperature)
            if least is not None:
                z.masked_fill_(z < least[s, None], NEVER)
            log_p = z.sub_(lse[s, None])
            dz = log_p.add(entropy[s, None]).mul_(-grad_entropy[s, None]).sub_(grad_logp[s, None]).mul_(log_p.exp_())
            dz.scatter_add_(1, y[s, None], grad_logp[s, None]).mul_(ctx.inv_temperature)
            dz = dz.to(h.dtype)
            torch.mm(dz, weight, out=dh[s])
            if dw is not None:
                dw += dz.T @ h[s]
        return dh, None if dw is None else dw.to(weight.dtype), *[None] * 6


def logits_are_a_plain_product(model: PreTrainedModel) -> bool:
    """False where the head adds a bias or the model caps or scales its logits: these go through its own forward."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    changes = ["final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "unpadded_vocab_size"]
    changes += ["logit_scale", "logits_scaling", "logits_mup_width_multiplier", "lm_head_multiplier"]
    return head.bias is None and all(getattr(config, name, None) in (None, 1.0) for name in changes)


def token_log_probs(
    self: PreTrainedModel,
    inputs: dict,
    select: torch.Tensor,
    y: torch.Tensor,
    temperature: float,
    sum_pi_squared: bool = False,
    top_p: float = 1.0,
    top_k: int = -1,
) -> tuple[torch.Tensor, ...]:
    """Bound to a model by `load_model`: what `LinearLogProbs` gives for token y[i] after position select[i], each (n,).

    inputs: what the decoder takes, over (b, l) positions; select (n,): places among the b * l, some of them repeatedly.
    """
    if logits_are_a_plain_product(self) and self.get_decoder() is not self:
        h = self.get_decoder()(**inputs, use_cache=False).last_hidden_state
        h = F.embedding(select, h.flatten(0, 1))  # (n, D); its backward is twice as fast on a CPU as that of an index
        weight = self.get_output_embeddings().weight
        h = h.to(weight.dtype)  # Mamba-2 keeps it in fp32
        return LinearLogProbs.apply(h, weight, y, 1 / temperature, 256, sum_pi_squared, top_p, top_k)
    logits = self(**inputs, use_cache=False).logits.flatten(0, 1)[select]  # (n, V)
    z, constants = logits.to(torch.promote_types(logits.dtype, torch.float32)).div(temperature), []
    if top_p < 1 or top_k > 0:
        kept, z_y = least_kept(z, top_p, top_k), z.detach().gather(-1, y[:, None])
        constants = [(z_y < kept)[:, 0].to(z.dtype)]
        z = z.masked_fill(z < torch.minimum(z_y, kept), NEVER)
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    if sum_pi_squared:
        constants.insert(0, p.detach().square().sum(-1))
    return log_p.gather(-1, y[:, None])[:, 0], -(p * log_p).sum(-1), *constants


def response_log_probs(
    model: PreTrainedModel,
    batch: DataProto,
    temperature: float,
    *,
    padding_free: bool = True,
    share_prompts: bool = True,
    sum_pi_squared: bool = False,
    top_p: float = 1.0,
    top_k: int = -1,
    row_group: RowGroup | None = None,
) -> tuple[torch.Tensor, ...]:
    """Log-probs and entropies of the policy's own tokens, under the distribution that they were sampled from.

    Args:
        batch: `input_ids`, `attention_mask`, `position_ids` (B, L), `responses`, `response_mask` (B, T).
        padding_free, share_prompts: as `load_model` says, if also asked for here.
        sum_pi_squared: also the sum over the vocabulary of the squared probabilities, without gradient, for the
            optimal token baseline (arXiv 2602.07078).
        top_p, top_k: what sampling kept, as in `LinearLogProbs`. Not for a reference, whose log-prob of a token that it
            would not keep is -inf: KL(policy as sampled || whole reference) is finite and has the same gradient.
        row_group: ranks that run their batches as one (packed_sdpa only): a collective, forward and backward. A rank's
            batch may be empty, but not all of them.

    Returns:
        (log_probs, entropy), then sum_pi_squared if asked for, then, with top_p or top_k, 1 at the tokens that these
        would not have kept; each (B, T), zero where response_mask is.
    """

    def forward(inputs: dict, select: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return model.token_log_probs(inputs, select, y, temperature, sum_pi_squared, top_p, top_k)

    return of_responses(model, batch, forward, padding_free, share_prompts, row_group)


@torch.no_grad()
def batched_log_probs(
    model: PreTrainedModel,
    batch: DataProto,
    temperature: float,
    micro_batch_tokens: int,
    *,
    padding_free: bool = True,
    share_prompts: bool = True,
    sum_pi_squared: bool = False,
    top_p: float = 1.0,
    top_k: int = -1,
    row_group: RowGroup | None = None,
) -> tuple[torch.Tensor, ...]:
    """(log_probs, entropy) or (log_probs, entropy, sum_pi_squared) of `response_log_probs` of a whole batch, without
    gradients, in micro-batches. A collective."""
    share_prompts = share_prompts and padding_free and model.share_prompts
    padding_free = padding_free and model.padding_free
    options: dict[str, Any] = {"padding_free": padding_free, "share_prompts": share_prompts, "row_group": row_group}
    micro_batches, rows = prepare_dynamic_batch(batch, micro_batch_tokens, **options)
    options |= {"sum_pi_squared": sum_pi_squared, "top_p": top_p, "top_k": top_k}
    parts = [response_log_probs(model, micro, temperature, **options)[: 2 + sum_pi_squared] for micro in micro_batches]
    return tuple(restore_dynamic_batch(torch.cat(tensors), rows) for tensors in zip(*parts))


ROW_TOLERANCE = {  # nats, mean over tokens: where the rows beside a row change; and against the row alone
    torch.float32: (1e-4, 1e-3),  # another order of sums is 1e-7 of them, and a leak 1e-3 to 1 (docs/models.md)
    torch.bfloat16: (0.02, 0.25),  # shapes are the same, or other ones: 0.04 in SmolLM2-135M; 0.25 is sync_weights' too
}


@torch.no_grad()
def check_rows(
    model: PreTrainedModel,
    batch: DataProto,
    temperature: float,
    micro_batch_tokens: int,
    compute_dtype: torch.dtype,
    row_group: RowGroup | None = None,
) -> None:
    """Measures on the first micro-batch that the log-probs of a row are its own. A collective, of 6 forwards or so.

    Every other row gets another response, in tensors of the same shapes, which must not change the rows between; and
    four rows are computed alone and not packed, by transformers' own attention.

    Raises:
        InputError: they are not, by more than ROW_TOLERANCE on some rank.
    """
    [micro, *_], _ = prepare_dynamic_batch(batch, micro_batch_tokens, **layout(model), row_group=row_group)
    forward = partial(response_log_probs, model, temperature=temperature, row_group=row_group)
    trained = micro.batch["response_mask"].bool()
    T = trained.shape[1]
    ids = micro.batch["input_ids"].clone()
    ids[1::2, -T:] = ids[1::2, -T:].flip(1)
    together = forward(micro)[0]
    beside = forward(DataProto.from_dict(tensors={**micro.batch, "input_ids": ids}))[0] - together
    trained[1::2] = False
    differences = [beside[trained]]

    counts, own = [len(micro)], 0  # rows of each rank of the group, where a rank may have none of a micro-batch
    if row_group is not None:
        counts, own = all_gather_lists(counts, row_group.ranks), row_group.ranks.rank()
    alone = []
    for i, owner in itertools.product(range(4), range(len(counts))):  # as many forwards on each rank
        owner = owner if counts[owner] else counts.index(max(counts))
        rows = [i * len(micro) // 4] if owner == own else []
        row = forward(micro[rows], padding_free=row_group is not None)[0] - together[rows]
        alone.append(row[micro.batch["response_mask"][rows].bool()])
    differences.append(torch.cat(alone))
    means = all_gather_lists([[float(x.abs().mean()) if len(x) else 0.0 for x in differences]])
    whats = ("change with the rows beside it", "are not those of the row alone")
    for mean, allowed, what in zip(torch.tensor(means).amax(0).tolist(), ROW_TOLERANCE[compute_dtype], whats):
        if not mean <= allowed:
            mend = "set --no-padding-free" if model.padding_free else "this model cannot be used here"
            by = f"by {mean:.2g} nats (allowed: {allowed:g})"
            kind = type(model).__name__.removeprefix("FSDP")
            raise InputError(f"{kind}: the log-probs of a row {what}, {by}; {mend}")
