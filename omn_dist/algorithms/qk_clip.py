"""QK-Clip as pure arithmetic: the largest attention logit of each head, and the factors of query and key rows.

With S_h the largest absolute logit of head h and tau the threshold, gamma_h = min(1, tau / S_h), and rows are multiplied by a
power of it, so that the head's logits are multiplied by gamma_h:

- queries and keys of their own head: sqrt(gamma) each;
- a key head that several query heads share (GQA): sqrt of the smallest gamma of its group, that is of its largest S;
- multi-head latent attention: query and key rows without positions sqrt(gamma); rotary query rows gamma, since the rotary key
  is shared by all heads and left alone.

Source: Kimi K2 (arXiv 2507.20534).

Shape suffixes: B sequences, H query heads, K key heads, T query positions, S key positions, D head width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_BLOCK = 512
"""Positions of a block of logits: B x H x 512 x 512 numbers are there at one time, whatever the length."""


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Rows of one stored weight (or elements of one bias) that belong to heads, and by which power of gamma they are multiplied."""

    num_heads: int
    """Query heads, or key heads where they are fewer."""
    sections: tuple[tuple[int, float], ...]
    """Number of rows and power of gamma, for the parts of one head in their order."""
    first_row: int = 0
    """Of the first head."""
    rows_apart: int | None = None
    """Rows from one head to the next; ``None``: heads follow one another."""

    @property
    def num_rows_each(self) -> int:
        """Rows of one head."""
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
    """The largest absolute attention logit of each query head over all visible pairs of positions: ``[H]`` in fp32.

    Args:
        query_BHTD, key_BKSD: as ``scaled_dot_product_attention`` takes them; K divides H, consecutive query heads share a key head.
        scale: factor of the products; ``None``: 1 / sqrt(D).
        is_causal: a query sees keys up to its own position, aligned at the top left like torch.
        mask: which pairs are visible, broadcast to ``[B, H, T, S]``: booleans, or numbers of which minus infinity hides.
        block: positions a side of the blocks of logits. No tensor of T x S is made.

    Products are made in fp32. Not differentiable, not collective, no host synchronisation.
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
    """``gamma = min(1, tau / S)`` of each head, exactly one at and below the threshold, and where S is not finite."""
    return torch.where((largest > threshold) & largest.isfinite(), threshold / largest, 1.0)


def row_factors(gamma: Tensor, rows: HeadRows, num_rows: int) -> Tensor:
    """The factor of each of the ``num_rows`` rows of a whole stored weight: ``[num_rows]`` in fp32, one where none applies.

    Args:
        gamma: ``[H]``, one a query head.
        rows: the weight's heads; where they are key heads, each takes the smallest gamma of its consecutive query heads.
        num_rows: of the whole weight.
    """
    shared = gamma.view(rows.num_heads, -1).amin(dim=1)
    each = torch.cat([shared[:, None].pow(power).expand(-1, count) for count, power in rows.sections], dim=1)
    apart = rows.num_rows_each if rows.rows_apart is None else rows.rows_apart
    factors = torch.ones(num_rows, dtype=torch.float32, device=gamma.device)
    factors.as_strided((rows.num_heads, rows.num_rows_each), (apart, 1), rows.first_row).copy_(each)
    return factors
