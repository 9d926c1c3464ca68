"""Rotary position embedding on interleaved (GPT-J style) pairs, as both towers of Kimi-VL use it."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn interleaved pairs of x (..., T, heads, D) by unit complex numbers (T, 1, D/2), in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def unit_rotation(angles: Tensor) -> Tensor:
    """Angles (T, D/2) as complex numbers (T, 1, D/2) of length 1."""
    return torch.polar(torch.ones_like(angles), angles)[:, None]
