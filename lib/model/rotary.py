"""Rotary position embedding (RoFormer, arXiv 2104.09864) of queries and keys, by one Triton kernel forward and one
backward. It rounds as transformers' operations do: each product and each sum to the tensors' dtype."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def _product(a, b):
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@triton.jit
def _rotate(
    x, y, cos, sin, x_stride, y_stride, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr
):
    """One token of x and y (heads, 2 half)."""
    h, i = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    mask, of_table = (h < heads) & (i < half), i < half
    x1 = tl.load(x + h * x_stride + i, mask)
    x2 = tl.load(x + h * x_stride + half + i, mask)
    cos1, cos2 = tl.load(cos + i, of_table), tl.load(cos + half + i, of_table)
    sin1, sin2 = tl.load(sin + i, of_table), tl.load(sin + half + i, of_table)
    if BACKWARD:
        y1 = _product(x1, cos1) + _product(x2, sin2)
        y2 = _product(x2, cos2) - _product(x1, sin1)
    else:
        y1 = _product(x1, cos1) - _product(x2, sin1)
        y2 = _product(x2, cos2) + _product(x1, sin2)
    tl.store(y + h * y_stride + i, y1.to(x1.dtype), mask)
    tl.store(y + h * y_stride + half + i, y2.to(x1.dtype), mask)


@triton.jit
def _kernel(
    q, k, q_out, k_out, cos, sin, tokens, half, q_heads, k_heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    q_out_batch, q_out_token, q_out_head, k_out_batch, k_out_token, k_out_head, table_batch, table_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """One program for each token; by name the strides of each tensor."""
    b, t = tl.program_id(0).to(tl.int64) // tokens, tl.program_id(0).to(tl.int64) % tokens
    cos, sin = cos + b * table_batch + t * table_token, sin + b * table_batch + t * table_token
    q, q_out = q + b * q_batch + t * q_token, q_out + b * q_out_batch + t * q_out_token
    k, k_out = k + b * k_batch + t * k_token, k_out + b * k_out_batch + t * k_out_token
    _rotate(q, q_out, cos, sin, q_head, q_out_head, q_heads, half, Q_HEADS, HALF, BACKWARD)
    _rotate(k, k_out, cos, sin, k_head, k_out_head, k_heads, half, K_HEADS, HALF, BACKWARD)


def _launch(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> tuple:
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    outputs = torch.empty_like(q), torch.empty_like(k)  # in memory as q and k
    rows, tokens, half = q.shape[0], q.shape[2], q.shape[3] // 2
    strides = [s for x in (q, k, *outputs) for s in (x.stride(0), x.stride(2), x.stride(1))]
    sizes = [triton.next_power_of_2(n) for n in (q.shape[1], k.shape[1], half)]
    table = cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)
    heads = q.shape[1], k.shape[1]
    # without fusion, or a product in fp32 would not be rounded before the sum
    _kernel[(rows * tokens,)](
        q, k, *outputs, cos, sin, tokens, half, *heads, *strides, *table, *sizes, backward, enable_fp_fusion=False
    )
    return outputs


class Rotary(torch.autograd.Function):
    """q (B, H, T, D) and k (B, H_kv, T, D), rotated by cos and sin (B or 1, T, D): x cos + rotate_half(x) sin."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _launch(q, k, cos, sin, False)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return *_launch(dq, dk, cos, sin, True), None, None


def rotate(theirs: Callable, q, k, cos, sin, unsqueeze_dim=1):
    """transformers' `apply_rotary_pos_emb`; `theirs` where the kernel does not fit, and on a CPU."""
    fits = unsqueeze_dim == 1 and q.dtype == k.dtype == cos.dtype and q.shape[-1] == cos.shape[-1]
    if fits and (not q.is_cpu or triton.knobs.runtime.interpret):
        return Rotary.apply(q, k, cos, sin)
    return theirs(q, k, cos, sin, unsqueeze_dim)
