"""Distributions over the vocabulary, for distillation: the policy's p and the teacher's q.

A distribution is either whole, log-probs (..., V), or K tokens and the rest: log-probs (..., K + 1), of which the last
is of all other tokens together. Both sum to 1, so the KLs below take both. By the log sum inequality that of K tokens
and the rest is at most the whole one, and 0 if p = q."""

import torch
from torch import Tensor

NEVER = -1e30  # log-prob of no token: its probability is 0, and 0 x -1e30 is 0


def at_ids(log_p: Tensor, ids: Tensor) -> Tensor:
    """(n, K + 1): log_p (n, V) at the ids (n, K), which differ within a token, and at the rest of the vocabulary.

    The rest is a sum over the other tokens: 1 - sum of p would round to 0 or below it where the K tokens are likely."""
    rest = log_p.scatter(-1, ids, NEVER).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), rest], -1)


def top_k(log_p: Tensor, k: int, vocab_size: int | None = None) -> tuple[Tensor, Tensor]:
    """The ids (n, k) of the k likeliest tokens of log_p (n, V), and its log-probs at these and at the rest (n, k + 1).

    vocab_size: take ids below it only. Models of one tokenizer may have heads of different, padded sizes, and an id of
    the teacher's padding would be outside the policy's head."""
    ids = log_p[:, :vocab_size].topk(k).indices
    return ids, at_ids(log_p, ids)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q ‖ p) = sum of q (log q − log p) over the last dimension: the policy covers all that the teacher does (GKD,
    arXiv 2306.13649). With K tokens and the rest, take the teacher's likeliest."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) = sum of p (log p − log q) over the last dimension: the policy leaves out what the teacher finds
    unlikely (MiniLLM, arXiv 2306.08543). It is the expectation of `kl_penalty`'s k1 over tokens of p, and its gradient
    that of k2 (thinkingmachines.ai/blog/on-policy-distillation samples it).

    Keep the rest: without it (log-probs [..., :-1]) the sum is lowest where p has no mass on the K tokens."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
