"""Log-probs and entropies of responses, at the sampling temperature. The full fp32 logits never exist: the vocabulary
projection takes a chunk of tokens at a time, and its backward recomputes the chunks. This is exact."""

import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from textwrap import shorten
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lib import InputError, is_first_on_node
from lib.data import prepare_dynamic_batch
from lib.data_proto import DataProto
from lib.distributed import COMPILED, all_gather_lists
from lib.model.attention import layout
from lib.model.packing import Forward, in_micro_batches, of_responses
from lib.model.vision import with_images
from lib.sampling import Truncation

CPU_CHUNK, GPU_CHUNK = 256, 2048  # tokens whose logits exist at a time; a GPU reads the whole head for each chunk
SIGNAL_CHUNK = 512  # of over_vocabulary, in which autograd keeps several tensors of a chunk's size
Signal = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
NEVER = -1e30  # logit of a token that cannot be sampled. Its probability is 0, and 0 x -1e30 is 0; 0 x -inf is NaN
# How torch.compile compiles what follows the matrix product of LinearLogProbs, by device type. The first two options
# keep the order of a row's sums for any number of rows, with which a resumed run may begin. The third: maximum and sum
# in one loop cost exponentials, and save nothing, as the entropy needs another loop.
OPTIONS = {"split_reductions": False, "dynamic_scale_rblock": False, "online_softmax": False}
COMPILE: dict[str, dict] = {device_type: {"options": OPTIONS} for device_type in COMPILED}
CANDIDATES = 1024  # top-p first sorts only this many likeliest tokens: to sort all takes ten times as long


@torch.compiler.disable
@torch.no_grad()
def least_kept(z: torch.Tensor, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> torch.Tensor:
    """(N, 1): the lowest of the logits z (N, V) that sampling keeps. Min-p first keeps the tokens that are at least
    min_p times as likely as the likeliest, then top-k the top_k likeliest (below 1: all), then top-p the fewest
    likeliest that have top_p of the probability left: the engines' order, after the temperature. Tokens that tie with
    the last one are all kept; an engine may drop some."""
    V, least = z.shape[-1], z.new_full((len(z), 1), -torch.inf)
    if min_p > 0:
        least = z.amax(-1, keepdim=True) + math.log(min_p)
    if 0 < top_k < V:
        least = torch.maximum(least, z.topk(top_k).values[:, -1:])
    if top_p < 1:
        z = z.masked_fill(z < least, NEVER)
        total, ranked = z.logsumexp(-1, keepdim=True), z.topk(min(CANDIDATES, V)).values
        while ranked.shape[-1] < V and ((ranked - total).exp().sum(-1) < top_p).any():
            ranked = z.topk(min(8 * ranked.shape[-1], V)).values
        before_last = ((ranked - total).exp().cumsum(-1) < top_p).sum(-1, keepdim=True)
        least = torch.maximum(least, ranked.gather(-1, before_last.clamp(max=ranked.shape[-1] - 1)))
    return least


def log_probs_of(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(N,): log-probs of tokens y (N,) by scaled logits z (N, V), to the bit as in `LinearLogProbs` (log_softmax rounds
    differently)."""
    top = z.amax(-1, keepdim=True)
    lse = top + (z - top).exp().sum(-1, keepdim=True).log()
    return (z.gather(-1, y[:, None]) - lse)[:, 0]


class LinearLogProbs(torch.autograd.Function):
    """Log-prob of y, entropy and, if asked for, sum_v p_v^2 without gradient, under p = softmax(h W^T / temperature).

    Forward keeps log-sum-exp and entropy per token; backward recomputes each chunk's logits. With z = h W^T / T:
    d logp / dz = onehot(y) - p and d H / dz = -p (log p + H).

    With a truncation, p is renormalised over the tokens that `least_kept` keeps; the gradient takes that set as fixed.
    The sampler kept y. After an update, or by rounding, y may be outside the set here: then the set is extended down
    to y, and the last result is 1 (else 0)."""

    @staticmethod
    def forward(ctx, h, weight, y, inv_temperature, chunk, sum_pi_squared=False, truncation=None):
        ctx.set_materialize_grads(False)  # a loss without entropy costs none of its gradient
        # h (N, D), weight (V, D), y (N,)
        dtype, columns = torch.promote_types(h.dtype, torch.float32), 3 + sum_pi_squared + 2 * (truncation is not None)
        results = [torch.empty(len(h), dtype=dtype, device=h.device) for _ in range(columns)]
        for i in range(0, len(h), chunk):
            s = slice(i, i + chunk)
            parts = with_logits(_of_tokens, h[s], weight, y[s, None], inv_temperature, sum_pi_squared, truncation)
            for result, part in zip(results, parts, strict=True):
                result[s] = part[:, 0]
        lse, logp, entropy, *constants = results
        least = constants.pop() if truncation else None
        ctx.save_for_backward(h, weight, y, lse, entropy, least)
        ctx.inv_temperature, ctx.chunk = inv_temperature, chunk
        ctx.mark_non_differentiable(*constants)
        return logp, entropy, *constants

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy, *_):
        h, weight, y, lse, entropy, least = ctx.saved_tensors
        if grad_logp is None:
            grad_logp = torch.zeros_like(lse)
        of_tokens = (y, lse, entropy, least, grad_logp, grad_entropy)
        dh = torch.empty_like(h)
        dw = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        for i in range(0, len(h), ctx.chunk):
            s = slice(i, i + ctx.chunk)
            parts = [None if x is None else x[s, None] for x in of_tokens]
            dz = with_logits(_gradient, h[s], weight, h.dtype, ctx.inv_temperature, *parts)
            torch.mm(dz, weight, out=dh[s])
            if dw is not None:
                dw += dz.T @ h[s]
            del dz  # before the logits of the next chunk
        return dh, None if dw is None else dw.to(weight.dtype), *[None] * 5


def _of_tokens(logits, y, inv_temperature, sum_pi_squared, truncation):
    """(lse, logp, entropy), sum_v p_v^2 if asked for, and with a truncation whether y is outside the set and the least
    logit in it; each (n, 1). logits (n, V), y (n, 1)."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(inv_temperature)
    z_y, outside_and_least = z.gather(-1, y), []
    if truncation is not None:
        kept = least_kept(z, *truncation)
        outside_and_least = [z_y < kept, torch.minimum(z_y, kept)]
        z.masked_fill_(z < outside_and_least[1], NEVER)
    top = z.amax(-1, keepdim=True)
    exp = z.sub_(top).exp()
    total = exp.sum(-1, keepdim=True)
    lse = top + total.log()
    entropy = total.log() - z.mul_(exp).sum(-1, keepdim=True) / total
    squares = [exp.square_().sum(-1, keepdim=True) / total.square()] if sum_pi_squared else []
    return lse, z_y - lse, entropy, *squares, *outside_and_least


def _gradient(logits, dtype, inv_temperature, y, lse, entropy, least, grad_logp, grad_entropy):
    """d loss / d logits, in dtype. logits (n, V), the others (n, 1); least and grad_entropy may be None."""
    grad_logp = grad_logp * inv_temperature
    grad_entropy = None if grad_entropy is None else grad_entropy * inv_temperature

    def through_p(x: torch.Tensor) -> torch.Tensor:
        """-p (grad_logp + grad_entropy (log p + H)), of logits (n, V) or (n, 1)"""
        z = x.to(lse.dtype).mul_(inv_temperature)
        log_p = (z if least is None else z.masked_fill_(z < least, NEVER)).sub_(lse)
        factor = -grad_logp
        if grad_entropy is not None:
            factor = torch.addcmul(factor - grad_entropy * entropy, log_p, grad_entropy, value=-1)
        return log_p.exp_().mul_(factor)

    at_y = through_p(logits.gather(-1, y)) + grad_logp  # gathered from the result, it would need that in fp32
    return through_p(logits).to(dtype).scatter_(-1, y, at_y.to(dtype))


def over_vocabulary(signal: Callable, h: torch.Tensor, weight: torch.Tensor, inv_temperature: float) -> tuple:
    """signal(log_p, s): tensors (n, ...), by the log-probs (n, V) of a chunk s of tokens, log_softmax(h W^T /
    temperature). Backward recomputes each chunk."""
    whole = weight
    if weight.requires_grad:  # the chunks' gradients add up in fp32
        whole = weight.to(torch.promote_types(h.dtype, torch.float32))

    def of_chunk(h: torch.Tensor, whole: torch.Tensor, s: slice) -> tuple[torch.Tensor, ...]:
        return signal(_log_softmax(torch.mm(h, whole.to(h.dtype).T), inv_temperature), s)

    chunks = [slice(i, i + SIGNAL_CHUNK) for i in range(0, max(len(h), 1), SIGNAL_CHUNK)]
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    parts = [checkpoint(of_chunk, h[s], whole, s, **how) for s in chunks]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _log_softmax(logits: torch.Tensor, inv_temperature: float) -> torch.Tensor:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * inv_temperature
    return z.log_softmax(-1)


def with_logits(fn: Callable, h: torch.Tensor, weight: torch.Tensor, *args):
    """fn(h W^T, *args); fn may overwrite the logits. On the devices of COMPILE it is compiled, into two loops over the
    logits forward and one backward. If that fails, it runs uncompiled from then on."""
    if h.device.type in COMPILE:
        # torch.compile also looks at a view's whole tensor, and compiles anew for other sizes of it
        whole = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        try:
            return _compiled(fn, h.device.type)(torch.mm(h, weight.T), *whole)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  a compiler may raise anything
            COMPILE.clear()
            if is_first_on_node():
                why = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
                print(f"log-probs run uncompiled, which gives the same numbers more slowly: {why}", flush=True)
    # cast here: logits that were only an argument would live until fn has ended
    return fn(torch.mm(h, weight.T).to(torch.promote_types(h.dtype, torch.float32)), *args)


@cache
def _compiled(fn: Callable, device_type: str) -> Callable:
    return torch.compile(fn, dynamic=True, **COMPILE[device_type])


def logits_are_a_plain_product(model: PreTrainedModel) -> bool:
    """False if the head adds a bias or the model caps or scales its logits. Such a model runs its own forward."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    changes = ["final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "unpadded_vocab_size"]
    changes += ["logit_scale", "logits_scaling", "logits_mup_width_multiplier", "lm_head_multiplier"]
    return head.bias is None and all(getattr(config, name, None) in (None, 1.0) for name in changes)


def token_log_probs(
    self, inputs: dict, select, y, temperature: float, sum_pi_squared=False, truncation=None, signal=None
) -> tuple[torch.Tensor, ...]:
    """What `LinearLogProbs` gives for token y[i] after position select[i], each (n,), then that of
    `over_vocabulary`. A method that `load_model` binds. inputs: what the decoder takes, over (b, l)
    positions; select (n,): indices into the b * l; some may repeat."""
    if not logits_are_a_plain_product(self) or self.get_decoder() is self:  # such models see no images
        logits = self(**inputs, use_cache=False).logits.flatten(0, 1)[select]
        results = _by_whole_logits(logits, y, temperature, sum_pi_squared, truncation)
        return results + signal(_log_softmax(logits, 1 / temperature), slice(None)) if signal else results
    h, weight = token_hidden_states(self, inputs, select), self.get_output_embeddings().weight
    chunk = CPU_CHUNK if h.device.type == "cpu" else GPU_CHUNK
    results = LinearLogProbs.apply(h, weight, y, 1 / temperature, chunk, sum_pi_squared, truncation)
    return results + over_vocabulary(signal, h, weight, 1 / temperature) if signal else results


def token_hidden_states(self, inputs: dict, select: torch.Tensor) -> torch.Tensor:
    """What the head multiplies at the selected positions, (n, D). Bound as `token_log_probs` is."""
    inputs = with_images(self, **inputs) if "images" in inputs else inputs
    h = self.get_decoder()(**inputs, use_cache=False).last_hidden_state
    h = F.embedding(select, h.flatten(0, 1))  # (n, D); on a CPU its backward is twice as fast as an index's
    return h.to(self.get_output_embeddings().weight.dtype)  # Mamba-2 keeps it in fp32


def _by_whole_logits(logits, y, temperature: float, sum_pi_squared: bool, truncation) -> tuple[torch.Tensor, ...]:
    """As `LinearLogProbs`, by logits (n, V) that the model caps or scales itself."""
    z, constants = logits.to(torch.promote_types(logits.dtype, torch.float32)).div(temperature), []
    if truncation is not None:
        kept, z_y = least_kept(z, *truncation), z.detach().gather(-1, y[:, None])
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
    sum_pi_squared=False,
    truncation=None,
    signal: Signal | None = None,
    **layout,
) -> tuple[torch.Tensor, ...]:
    """Log-probs and entropies of the policy's own tokens, under the distribution that they were sampled from.

    batch, layout: as in `of_responses`. sum_pi_squared: also the sum of squared probabilities over the vocabulary,
    without gradient, for the optimal token baseline (arXiv 2602.07078). truncation: the sampler's. Do not truncate the
    reference: its log-prob would be -inf outside its set. KL(policy as sampled || whole reference) is finite and has
    the same gradient.
    signal: a function of the whole distribution, such as those of lib/core_algos/vocabulary.py. It gets log-probs
    (n, V) of some tokens, at this temperature and not truncated, and their (n, ...) of the batch's `columns`. It
    returns a tensor (n, ...) or several, in which a token depends on itself alone.

    Returns (log_probs, entropy), sum_pi_squared if asked for, with a truncation a tensor that is 1 at tokens that it
    would not have kept, each (B, T), and the signal's results (B, T, ...). All are zero where response_mask is."""
    return of_responses(model, batch, _forward(model, signal, temperature, sum_pi_squared, truncation), **layout)


def _forward(model: PreTrainedModel, signal: Any, *settings) -> Forward:
    def forward(inputs: dict, select: torch.Tensor, y: torch.Tensor, *of_tokens) -> tuple[torch.Tensor, ...]:
        def of_chunk(log_p: torch.Tensor, s: slice) -> tuple[torch.Tensor, ...]:
            results = signal(log_p, *(x[s] for x in of_tokens))
            return results if isinstance(results, tuple) else (results,)

        # FSDP would cast of_tokens to the compute dtype, were they arguments
        return model.token_log_probs(inputs, select, y, *settings, signal and of_chunk)

    return forward


def batched_log_probs(
    model: PreTrainedModel,
    batch: DataProto,
    temperature: float,
    micro_batch_tokens: int,
    *,
    sum_pi_squared: bool = False,
    truncation: Truncation | None = None,
    signal: Signal | None = None,
    **layout: Any,
) -> list[torch.Tensor]:
    """[log_probs, entropy], sum_pi_squared if asked for, and the signal's results of `response_log_probs`, for a whole
    batch in micro-batches, without gradients. A collective."""
    forward = _forward(model, signal, temperature, sum_pi_squared, truncation)
    results = in_micro_batches(model, batch, forward, micro_batch_tokens, **layout)
    if truncation is not None:
        del results[2 + sum_pi_squared]
    return results


# The greatest mean |log-prob difference| over tokens, in nats: (when only a row's neighbours change, which keeps all
# shapes; against the row computed alone, in other shapes)
ROW_TOLERANCE = {
    torch.float32: (1e-4, 1e-3),  # another order of sums changes them by 1e-7, a leak by 5e-4 or more (docs/models.md)
    torch.float16: (0.005, 0.06),  # three more bits than bfloat16
    torch.bfloat16: (0.02, 0.25),  # other shapes change them by 0.04 in SmolLM2-135M; sync_weights takes 0.25, too
}


@torch.no_grad()
def check_rows(
    model: PreTrainedModel, batch: DataProto, temperature: float, micro_batch_tokens: int, compute_dtype, row_group=None
) -> None:
    """Measures on the first micro-batch that a row's log-probs depend on that row alone, in some 6 forwards. First,
    every second row gets another response of the same shape: the rows between must not change. Second, four rows are
    computed alone, by transformers' own attention. Raises InputError if the log-probs differ by more than
    ROW_TOLERANCE on some rank. A collective."""
    [micro, *_], _ = prepare_dynamic_batch(batch, micro_batch_tokens, **layout(model), row_group=row_group)
    forward = partial(response_log_probs, model, temperature=temperature, row_group=row_group)
    trained = micro.batch["response_mask"].bool()
    T = trained.shape[1]
    other = micro.select()
    other.batch["input_ids"] = ids = micro.batch["input_ids"].clone()
    responses, sampled = ids[1::2, -T:], trained[1::2]
    responses[sampled] = responses[sampled].flip(0)  # placeholders of a tool's images stay
    together = forward(micro)[0]
    neighbours = forward(other)[0] - together
    trained[1::2] = False
    differences = [neighbours[trained]]

    counts, own = [len(micro)], 0  # rows of each rank of the group; a rank may have none of a micro-batch
    if row_group is not None:
        counts, own = all_gather_lists(counts, row_group.ranks), row_group.ranks.rank()
    alone = []
    for i, owner in itertools.product(range(4), range(len(counts))):  # the same number of forwards on each rank
        owner = owner if counts[owner] else counts.index(max(counts))
        rows = [i * len(micro) // 4] if owner == own and len(micro) else []
        row = forward(micro[rows], padding_free=row_group is not None)[0] - together[rows]
        alone.append(row[micro.batch["response_mask"][rows].bool()])
    differences.append(torch.cat(alone))
    means = all_gather_lists([[float(x.abs().mean()) if len(x) else 0.0 for x in differences]])
    whats = ("depend on neighbouring rows", "differ from those of the row alone")
    for mean, allowed, what in zip(torch.tensor(means).amax(0).tolist(), ROW_TOLERANCE[compute_dtype], whats):
        if not mean <= allowed:
            fix = "set --attn-implementation eager" if model.padding_free else "this model cannot be used here"
            kind, by = type(model).__name__.removeprefix("FSDP"), f"by {mean:.2g} nats (allowed: {allowed:g})"
            raise InputError(f"{kind}: the log-probs of a row {what}, {by}; {fix}")
