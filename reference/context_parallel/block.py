"""Attention of some queries to some keys, with what is needed to merge it with attention to other keys.

With scores S = q k^T * scale, a block returns softmax(S) v and the log of the sum of exponentials of each row. Two
blocks over different keys merge exactly:

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

and the gradients of a block need only the merged `out` and `lse`, not the other blocks.

torch's fused kernels are used where they run (Dao et al. 2022, "FlashAttention", algorithms 1 and 4): they give both
numbers, and take the merged ones in the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FUSED_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention and the log-sum-exp of its rows.

    Args:
        query: `[b, heads, s_q, d]`.
        key: `[b, kv_heads, s_k, d]`; `heads` is a multiple of `kv_heads`.
        value: As `key`.
        causal: Query i sees keys up to i; only where `s_q == s_k`.
        scale: What scores are multiplied by.

    Returns:
        `[b, heads, s_q, d]` in the input's dtype, and `[b, heads, s_q]` in float32 or float64.
    """
    key, value = _for_every_head(key, query), _for_every_head(value, query)
    if query.device.type == "cpu":
        return _FUSED_CPU(*map(_in_rows, (query, key, value)), 0.0, causal, scale=scale)
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ value.to(lse.dtype)).to(query.dtype), lse


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's part of the gradients of query, key and value, shaped as those.

    Args:
        gradient: Of the merged output, `[b, heads, s_q, d]`.
        query: As in `attend`.
        key: As in `attend`.
        value: As in `attend`.
        output: The *merged* attention over all keys, `[b, heads, s_q, d]`.
        lse: The *merged* log-sum-exp over all keys, `[b, heads, s_q]`.
        causal: As in `attend`.
        scale: As in `attend`.
    """
    wide_key, wide_value = _for_every_head(key, query), _for_every_head(value, query)
    if query.device.type == "cpu":
        tensors = map(_in_rows, (gradient, query, wide_key, wide_value, output, lse))
        of_query, of_key, of_value = _FUSED_CPU_BACKWARD(*tensors, 0.0, causal, scale=scale)
    else:
        of_query, of_key, of_value = _plain_backward(gradient, query, wide_key, wide_value, output, lse, causal, scale)
    return of_query, _for_own_heads(of_key, key), _for_own_heads(of_value, value)


def merge(output: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge a block into what was merged so far. `output` is float32 or float64: sixteen bits would lose it.

    A row that has seen no key yet has lse -inf; it takes the block as it is.
    """
    merged = torch.logaddexp(lse, block_lse)
    # -inf minus -inf is nan, where neither side has seen a key: such a row has nothing to weigh.
    reference = merged.masked_fill(merged == -torch.inf, 0)
    old = (lse - reference).exp().unsqueeze(-1)
    new = (block_lse - reference).exp().unsqueeze(-1)
    return output * old + block.to(output.dtype) * new, merged


def _in_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with neighbouring elements of a row side by side: the kernels take that for granted."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _for_every_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat key or value heads so that each query head has one (grouped-query attention)."""
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _for_own_heads(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Sum the gradients of the query heads that shared a key or value head."""
    times = gradient.shape[1] // tensor.shape[1]
    return gradient if times == 1 else gradient.unflatten(1, (tensor.shape[1], times)).sum(2)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (query @ key.mT * scale).to(torch.promote_types(query.dtype, torch.float32))
    if not causal:
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~seen, -torch.inf)


def _plain_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 4 of FlashAttention, whole: P = exp(S - lse), dS = P (dP - rowsum(dO O))."""
    weights = (_scores(query, key, causal, scale) - lse.unsqueeze(-1)).exp()
    wide = gradient.to(weights.dtype)
    of_value = weights.mT @ wide
    of_weights = wide @ value.to(weights.dtype).mT
    of_scores = weights * (of_weights - (wide * output).sum(-1, keepdim=True)) * scale
    of_query, of_key = of_scores @ key.to(weights.dtype), of_scores.mT @ query.to(weights.dtype)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)
