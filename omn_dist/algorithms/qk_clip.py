"""The arithmetic of QK-Clip: largest attention logits, and factors of query and key rows.

With S the largest absolute logit of a head, and tau the threshold, ``gamma = min(1, tau / S)``.
Rows are multiplied by a power of gamma, so that the head's logits are multiplied by gamma:

- query and key rows of one head: sqrt(gamma) each;
- key rows that several query heads share (GQA): the square root of the smallest gamma of the group;
- multi-head latent attention: query and key rows without positions sqrt(gamma); rotary query rows
  gamma, since all heads share the rotary key, which does not change.

Source: Kimi K2 (arXiv 2507.20534).

Shape suffixes: B sequences, H query heads, K key heads, T query positions, S key positions, D width
of a head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_BLOCK = 512
"""Positions a side of a block of logits.

Whatever the length, B x H x 512 x 512 numbers are in memory at one time.
"""


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Rows of a weight (or elements of a bias) that belong to heads, with their power of gamma."""

    num_heads: int
    """Query heads, or key heads where they are fewer."""
    sections: tuple[tuple[int, float], ...]
    """Number of rows and power of gamma of each part of one head, in their order."""
    first_row: int = 0
    """First row of the first head."""
    rows_apart: int | None = None
    """Rows from the start of one head to that of the next; ``None``: heads follow one another."""

    @property
    def num_rows_each(self) -> int:
        """Number of rows of one head."""
        return sum(num_rows for num_rows, _ in self.sections)

    @property
    def end(self) -> int:
        """One past the last row of the last head."""
        apart = self.num_rows_each if self.rows_apart is None else self.rows_apart
        return self.first_row + apart * (self.num_heads - 1) + self.num_rows_each


def largest_logits(
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    mask: Tensor | None = None,
    block: int = DEFAULT_BLOCK,
) -> Tensor:
    """The largest absolute attention logit of each query head, over all visible pairs of positions.

    Args:
        query_BHTD, key_BKSD: as ``scaled_dot_product_attention`` takes them. K divides H;
            consecutive query heads share a key head.
        scale: factor of the products; ``None``: 1 / sqrt(D).
        is_causal: a query sees keys up to its own position, aligned at the top left as in torch.
        mask: which pairs are visible, broadcast to ``[B, H, T, S]``: booleans, or numbers, where
            minus infinity hides a pair.
        block: positions a side of the blocks of logits. No tensor of T x S is made.

    Returns:
        ``[H]`` in fp32; products are computed in fp32.

    Not differentiable, not collective, no host synchronisation.
    """
    num_sequences, num_heads, num_queries, width = query_BHTD.shape
    num_key_heads, num_keys = key_BKSD.shape[1], key_BKSD.shape[2]
    if num_heads % num_key_heads:
        raise ValueError(f"query: found {num_heads} heads for {num_key_heads} key heads, expected a multiple")
    scale = 1 / math.sqrt(width) if scale is None else scale
    query, key = query_BHTD.detach(), key_BKSD.detach()
    grouped = query.reshape(num_sequences, num_key_heads, -1, num_queries, width)
    largest = torch.zeros(num_heads, dtype=torch.float32, device=query.device)
    for first in range(0, num_queries, block):
        queries = grouped[..., first : first + block, :].float()
        last = first + queries.size(-2)
        for start in range(0, min(num_keys, last) if is_causal else num_keys, block):
            keys = key[:, :, None, start : start + block].float()
            with torch.autocast(query.device.type, enabled=False):
                logits = (queries @ keys.mT).flatten(1, 2).abs_()
            if is_causal and start + keys.size(-2) > first + 1:
                hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu_(first - start + 1)
                logits.masked_fill_(hidden, 0)
            if mask is not None:
                cut = mask.expand(num_sequences, num_heads, num_queries, num_keys)[..., first:last, start : start + block]
                logits.masked_fill_(~cut if cut.dtype == torch.bool else cut == -math.inf, 0)
            largest = torch.maximum(largest, logits.amax(dim=(0, 2, 3)))
    return largest * abs(scale)


def clip_factors(largest: Tensor, threshold: float) -> Tensor:
    """``gamma = min(1, tau / S)`` of each head: ``[H]``.

    It is exactly one where S is at most the threshold, or not finite.
    """
    return torch.where((largest > threshold) & largest.isfinite(), threshold / largest, 1.0)


def row_factors(gamma: Tensor, rows: HeadRows, num_rows: int) -> Tensor:
    """The factor of each row of a whole stored weight; one for rows of no head.

    Args:
        gamma: ``[H]``, one for each query head.
        rows: the weight's heads. A key head takes the smallest gamma of its query heads, which are
            consecutive.
        num_rows: of the whole weight.

    Returns:
        ``[num_rows]`` in fp32.
    """
    shared = gamma.view(rows.num_heads, -1).amin(dim=1)
    each = torch.cat([shared[:, None].pow(power).expand(-1, count) for count, power in rows.sections], dim=1)
    apart = rows.num_rows_each if rows.rows_apart is None else rows.rows_apart
    factors = torch.ones(num_rows, dtype=torch.float32, device=gamma.device)
    factors.as_strided((rows.num_heads, rows.num_rows_each), (apart, 1), rows.first_row).copy_(each)
    return factors
