"""torch's own multi-head attention, its heads divided among workers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.tensor.axis import Axis, part
from paceline.parallel.tensor.exchange import enter, gather, trade_rows
from paceline.parallel.tensor.linear import local
from paceline.parallel.tensor.positions import Positions, drop_own, total_with_bias


class HeadsAttention(nn.MultiheadAttention):
    """Computes this worker's heads; takes and returns what `nn.MultiheadAttention` does, whole.

    Dropout of attention weights draws the mask of all heads, as torch does on a CPU, and uses that of its own.
    """

    axis: Axis
    positions: Positions | None = None
    """Where it stands in a stretch of them: then query, key and value are this worker's own, and so is the output."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        weight, bias = trade_rows(local(self.in_proj_weight), 3, self.axis), None
        if self.in_proj_bias is not None:
            bias = trade_rows(local(self.in_proj_bias), 3, self.axis)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        # What is the same tensor has one gradient to be summed.
        entered = {id(tensor): self._enter(tensor) for tensor in {id(one): one for one in (query, key, value)}.values()}
        own = [
            self._heads(F.linear(entered[id(tensor)], matrix, vector))
            for tensor, matrix, vector in zip((query, key, value), weight.chunk(3), biases, strict=True)
        ]
        mask = self._mask(own[0], attn_mask, key_padding_mask)
        if mask is None and is_causal:
            mask = own[0].new_full((own[0].shape[2], own[1].shape[2]), float("-inf")).triu(1)
        weights = None
        if need_weights or (self.training and self.dropout > 0):
            scores = own[0] @ own[1].transpose(-2, -1) * self.head_dim**-0.5
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            if self.training:
                weights = drop_own(weights, 1, self.num_heads, self.dropout, self.axis)
            seen = weights @ own[2]
        else:
            seen = F.scaled_dot_product_attention(own[0], own[1], own[2], mask)
        # Length before batch, as torch lets it lie in memory: a dropout behind it draws in that order.
        seen = seen.permute(2, 0, 1, 3).flatten(-2)
        output = F.linear(seen, local(self.out_proj.weight))
        if query.dim() == 2:
            output = output.squeeze(1)
        elif self.batch_first:
            output = output.transpose(0, 1)
        output = total_with_bias(output, self.out_proj.bias, self.axis, self.positions)
        if not need_weights or weights is None:
            return output, None
        weights = gather(weights, 1, self.num_heads, self.axis)
        weights = weights.mean(1) if average_attn_weights else weights
        return output, weights.squeeze(0) if query.dim() == 2 else weights

    def _enter(self, tensor: Tensor) -> Tensor:
        return enter(tensor, self.axis) if self.positions is None else self.positions.gather(tensor)

    def _heads(self, x: Tensor) -> Tensor:
        """(b, L, own width), (L, b, own width) or (L, own width) -> (b, own heads, L, head_dim)."""
        if x.dim() == 2:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def _mask(self, like: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
        """What is added to the scores of this worker's heads: (b or 1, own heads or 1, L or 1, S)."""
        found = None
        if attn_mask is not None:
            found = _additive(attn_mask, like.dtype)
            if found.dim() == 3:
                start, stop = part(self.num_heads, self.axis.degree, self.axis.rank)
                found = found.unflatten(0, (-1, self.num_heads))[:, start:stop]
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, like.dtype)
            padding = (padding if padding.dim() == 2 else padding.unsqueeze(0))[:, None, None]
            found = padding if found is None else found + padding
        return found


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def can_divide(layer: nn.MultiheadAttention) -> bool:
    """Query, key and value are of one width, and nothing is added to keys and values."""
    return layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn
