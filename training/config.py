"""Sizes of the demo model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network. kv_lora_rank 512 and rope_dim 64 are what vLLM's MLA kernels for CPUs demand."""

    vocab_size: int = 640
    media_token_id: int = 637
    # decoder
    hidden_size: int = 192
    layers: int = 4
    dense_layers: int = 1
    heads: int = 4
    nope_dim: int = 64
    rope_dim: int = 64
    value_dim: int = 64
    kv_lora_rank: int = 512
    mlp_size: int = 512
    expert_size: int = 128
    experts: int = 6
    experts_per_token: int = 2
    shared_experts: int = 1
    routed_scale: float = 2.446
    rope_theta: float = 800_000.0
    rms_eps: float = 1e-5
    # vision tower
    vision_hidden: int = 192
    vision_layers: int = 5
    vision_heads: int = 4
    vision_mlp: int = 512
    position_grid: int = 16
    patch_size: int = 14
