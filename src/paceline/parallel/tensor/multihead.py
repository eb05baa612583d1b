"""torch's own multi-head attention, its heads divided among workers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.parallel.tensor.exchange import Exchange, all_gather, local_slice, redistribute_rows
from paceline.parallel.tensor.linear import Output
from paceline.parallel.tensor.sequence_region import drop_slice
from paceline.parallel.tensor.slices import slice_of


class DividedAttention(nn.MultiheadAttention):
    """Computes this worker's heads; takes and returns what `nn.MultiheadAttention` does, whole.

    Dropout of attention weights draws the mask of all heads, as torch does on a CPU, and uses that of its own.
    """

    axis: DeviceMesh
    take_input: Exchange
    give_output: Output

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
        weight, bias = redistribute_rows(local_slice(self.in_proj_weight), 3, self.axis), None
        if self.in_proj_bias is not None:
            bias = redistribute_rows(local_slice(self.in_proj_bias), 3, self.axis)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        # The gradient of what is the same tensor is summed once.
        given = {id(tensor): tensor for tensor in (query, key, value)}
        taken = {at: self.take_input(tensor) for at, tensor in given.items()}
        own = [
            self._heads(F.linear(taken[id(tensor)], matrix, vector))
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
                weights = drop_slice(weights, 1, self.num_heads, self.dropout, self.axis)
            seen = weights @ own[2]
        else:
            seen = F.scaled_dot_product_attention(own[0], own[1], own[2], mask)
        # Length before batch, as torch lets it lie in memory: a dropout behind it draws in that order.
        seen = seen.permute(2, 0, 1, 3).flatten(-2)
        output = F.linear(seen, local_slice(self.out_proj.weight))
        if query.dim() == 2:
            output = output.squeeze(1)
        elif self.batch_first:
            output = output.transpose(0, 1)
        output = self.give_output(output, self.out_proj.bias)
        if not need_weights or weights is None:
            return output, None
        weights = all_gather(weights, 1, self.num_heads, self.axis)
        weights = weights.mean(1) if average_attn_weights else weights
        return output, weights.squeeze(0) if query.dim() == 2 else weights

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
                start, stop = slice_of(self.num_heads, self.axis.size(), self.axis.get_local_rank())
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


def has_divisible_heads(layer: nn.MultiheadAttention) -> bool:
    """Query, key and value are of one width, and nothing is added to keys and values."""
    return layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn
