"""Widens the value heads of a checkpoint with zeros, so that GPUs have a kernel for it. The function stays the same.

vLLM's MLA prefill on NVIDIA GPUs (FlashAttention) knows a few head sizes only: (nope, rope, value) = (64, 64, 128) is
one, the trained (64, 64, 64) is not. The added dimensions are zero and meet zero columns of the output projection.

python -m training.widen TRAINED DEMO_MODEL
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training.export import export, load_checkpoint
from training.model import KimiVL

VALUE_DIM = 128


def widen_values(model: KimiVL, value_dim: int = VALUE_DIM) -> KimiVL:
    """The same function with value heads of ``value_dim``."""
    c = model.config
    extra = value_dim - c.value_dim
    state = model.state_dict()
    for name in list(state):
        if name.endswith("self_attn.kv_b_proj.weight"):  # (heads * (nope + value), rank)
            rows: Tensor = state[name].view(c.heads, c.nope_dim + c.value_dim, c.kv_lora_rank)
            state[name] = F.pad(rows, (0, 0, 0, extra)).flatten(0, 1)
        elif name.endswith("self_attn.o_proj.weight"):  # (hidden, heads * value)
            columns: Tensor = state[name].view(c.hidden_size, c.heads, c.value_dim)
            state[name] = F.pad(columns, (0, extra)).flatten(1)
    wide = KimiVL(replace(c, value_dim=value_dim))
    wide.load_state_dict(state)
    return wide.eval()


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:])
    model, _ = load_checkpoint(source)
    with torch.no_grad():
        export(widen_values(model), source / "tiktoken.model", target)


if __name__ == "__main__":
    main()
