"""The language model: multi-head latent attention and a mixture of experts, as in DeepSeek-V3.

Shapes: B sequences, T tokens, H hidden size, N = B*T.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import ModelConfig
from training.rotary import rotate_pairs


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA) without query compression."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.heads * (c.nope_dim + c.rope_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + c.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, c.heads * (c.nope_dim + c.value_dim), bias=False)
        self.o_proj = nn.Linear(c.heads * c.value_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        c, (b, t, _) = self.c, x.shape
        q_nope, q_rope = self.q_proj(x).view(b, t, c.heads, -1).split([c.nope_dim, c.rope_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.rope_dim], -1)
        k_nope, v = (
            self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, c.heads, -1).split([c.nope_dim, c.value_dim], -1)
        )
        q = torch.cat((q_nope, rotate_pairs(q_rope, rotation)), -1)
        k = torch.cat((k_nope, rotate_pairs(k_rope[:, :, None], rotation).expand(-1, -1, c.heads, -1)), -1)
        if x.is_cuda:  # flash attention wants values as wide as keys
            v = F.pad(v, (0, c.nope_dim + c.rope_dim - c.value_dim))
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=(c.nope_dim + c.rope_dim) ** -0.5,
        )[..., : c.value_dim]
        return self.o_proj(attended.transpose(1, 2).reshape(b, t, -1))


class GatedMLP(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the bias (float32, never trained by gradient) only moves the selection ("noaux_tc")."""

    e_score_correction_bias: Tensor

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.scale = c.experts_per_token, c.routed_scale
        self.weight = nn.Parameter(torch.randn(c.experts, c.hidden_size) * c.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(c.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, H) -> weights (N, experts), zero where not chosen, and the choice as 0/1."""
        with torch.autocast(x.device.type, enabled=False):
            scores = (x.float() @ self.weight.float().T).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, -1).indices
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        weights = scores * mask
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale, mask


class MixtureOfExperts(nn.Module):
    """Every expert sees every token and unchosen ones weigh nothing: at this size cheaper than sorting tokens."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(c)
        self.experts = nn.ModuleList(GatedMLP(c.hidden_size, c.expert_size) for _ in range(c.experts))
        self.shared_experts = GatedMLP(c.hidden_size, c.expert_size * c.shared_experts)
        self.load: Tensor | None = None  # tokens an expert got in the last training step

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """x (B, T, H); valid (B, T) leaves padding out of the load count."""
        flat = x.reshape(-1, x.shape[-1])
        weights, mask = self.gate(flat)
        if self.training:
            self.load = (mask if valid is None else mask * valid.reshape(-1, 1)).sum(0)
        gate, up, down = (
            torch.stack([expert.get_submodule(name).weight for expert in self.experts])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        inner = F.silu(torch.einsum("nh,eih->eni", flat, gate)) * torch.einsum("nh,eih->eni", flat, up)
        inner = inner * weights.T[..., None].to(inner.dtype)
        routed = torch.bmm(inner, down.transpose(1, 2)).sum(0)
        return (routed + self.shared_experts(flat)).view(x.shape)


class DecoderLayer(nn.Module):
    def __init__(self, c: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_eps)
        self.self_attn = LatentAttention(c)
        self.mlp = GatedMLP(c.hidden_size, c.mlp_size) if index < c.dense_layers else MixtureOfExperts(c)

    def forward(self, x: Tensor, rotation: Tensor, valid: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        normed = self.post_attention_layernorm(x)
        return x + (self.mlp(normed, valid) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(normed))


class Decoder(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(c, i) for i in range(c.layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_eps)


class LanguageModel(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
