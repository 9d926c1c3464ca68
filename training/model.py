"""Kimi-VL in plain PyTorch: the network that is trained, and the float32 reference of the parity test.

Parameter names are the published checkpoint's names, so that export is a plain state dict. Facts that the
published weights rely on, and that vLLM repeats: rotary embeddings are interleaved pairs in both towers (in the
vision tower even pairs turn with the column and odd pairs with the row); the position table is resized with
bicubic interpolation; the vision MLP uses the tanh form of GELU and the projector the erf form; the router's bias
selects experts but never weighs them.

Shapes: B images or sequences, P patches an image (rows x cols), T tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


def rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn interleaved pairs of x (..., T, heads, D) by unit complex numbers (T, 1, D/2), in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def unit_rotation(angles: Tensor) -> Tensor:
    """Angles (T, D/2) as complex numbers (T, 1, D/2) of length 1."""
    return torch.polar(torch.ones_like(angles), angles)[:, None]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class VisionBlock(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        h = c.vision_hidden
        self.heads = c.vision_heads
        self.norm0 = nn.LayerNorm(h, eps=1e-5)
        self.norm1 = nn.LayerNorm(h, eps=1e-5)
        self.mlp = nn.ModuleDict({"fc0": nn.Linear(h, c.vision_mlp), "fc1": nn.Linear(c.vision_mlp, h)})
        self.wqkv = nn.Linear(h, 3 * h)
        self.wo = nn.Linear(h, h)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        b, p, h = x.shape
        q, k, v = self.wqkv(self.norm0(x)).view(b, p, 3, self.heads, -1).unbind(2)
        q, k = rotate_pairs(q, rotation), rotate_pairs(k, rotation)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.wo(attended.transpose(1, 2).reshape(b, p, h))
        return x + self.mlp["fc1"](F.gelu(self.mlp["fc0"](self.norm1(x)), approximate="tanh"))


class PositionTable(nn.Module):
    """Learnt table of absolute positions, resized to the picture's grid (bicubic, no antialiasing).

    Resizing is linear in the table, so its matrix is kept for every grid; the resize itself is slow on a GPU.
    """

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c.position_grid, c.position_grid, c.vision_hidden) * 0.05)
        self._matrices: dict[tuple[int, int, torch.device], Tensor] = {}

    def _matrix(self, rows: int, cols: int) -> Tensor:
        """(P, positions of the table)."""
        key = (rows, cols, self.weight.device)
        if key not in self._matrices:
            h, w = self.weight.shape[:2]
            basis = torch.eye(h * w, device=self.weight.device).view(1, h * w, h, w)
            self._matrices[key] = F.interpolate(basis, size=(rows, cols), mode="bicubic")[0].flatten(1).T.contiguous()
        return self._matrices[key]

    def forward(self, rows: int, cols: int) -> Tensor:
        """(P, vision_hidden)."""
        with torch.autocast(self.weight.device.type, enabled=False):
            return self._matrix(rows, cols) @ self.weight.float().flatten(0, 1)


class VisionTower(nn.Module):
    """MoonViT for images of one grid a batch, so attention needs no mask."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        h, p = c.vision_hidden, c.patch_size
        self.head_dim = h // c.vision_heads
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, h, p, p), "pos_emb": PositionTable(c)})
        blocks = nn.ModuleList(VisionBlock(c) for _ in range(c.vision_layers))
        self.encoder = nn.ModuleDict({"blocks": blocks, "final_layernorm": nn.LayerNorm(h, eps=1e-5)})

    def rotation(self, rows: int, cols: int, device: torch.device) -> Tensor:
        """(P, 1, head_dim/2): column angle in even places, row angle in odd ones."""
        d = self.head_dim
        frequency = 10_000.0 ** (-torch.arange(0, d, 4, device=device).float() / d)
        row = torch.arange(rows, device=device).float().repeat_interleave(cols)
        col = torch.arange(cols, device=device).float().repeat(rows)
        return unit_rotation(torch.stack((torch.outer(col, frequency), torch.outer(row, frequency)), -1).flatten(1))

    def forward(self, patches: Tensor, rows: int, cols: int) -> Tensor:
        """patches (B, P, 588), normalised -> (B, P/4, 4, vision_hidden), 2x2 neighbours together."""
        proj = self.patch_embed["proj"]
        x = F.linear(patches, proj.weight.flatten(1), proj.bias) + self.patch_embed["pos_emb"](rows, cols)
        rotation = self.rotation(rows, cols, patches.device)
        for block in self.encoder["blocks"]:
            x = block(x, rotation)
        x = self.encoder["final_layernorm"](x)
        x = x.view(len(x), rows // 2, 2, cols // 2, 2, -1).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(len(x), rows * cols // 4, 4, -1)


class Projector(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        merged = 4 * c.vision_hidden
        self.pre_norm = nn.LayerNorm(c.vision_hidden, eps=1e-5)
        self.linear_1 = nn.Linear(merged, merged)
        self.linear_2 = nn.Linear(merged, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(self.pre_norm(x).flatten(-2))))


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


class KimiVL(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.vision_tower = VisionTower(c)
        self.multi_modal_projector = Projector(c)
        self.language_model = LanguageModel(c)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Normal weights at 1/sqrt(fan-in), smaller where a branch joins the residual stream."""
        for name, p in self.named_parameters():
            if p.ndim < 2:
                if name.endswith("bias"):
                    p.zero_()
            elif name.endswith("embed_tokens.weight"):
                p.normal_(std=0.5)
            elif "pos_emb" not in name and "gate.weight" not in name:
                std = 1 / math.sqrt(p[0].numel())
                if name.endswith(("o_proj.weight", "wo.weight", "fc1.weight", "down_proj.weight")):
                    std *= 0.4
                if ".experts." in name and name.endswith("down_proj.weight"):
                    std /= self.config.routed_scale
                if name.endswith("lm_head.weight"):
                    std *= 0.5
                p.normal_(std=std)

    def image_features(self, patches: Tensor, rows: int, cols: int) -> Tensor:
        """Normalised patches (B, rows*cols, 588) in row-major order -> (B, rows*cols/4, H) float32."""
        return self.multi_modal_projector(self.vision_tower(patches, rows, cols)).float()

    def hidden_states(
        self,
        ids: Tensor,
        image_features: Tensor | None = None,
        valid: Tensor | None = None,
        media: Tensor | None = None,
    ) -> Tensor:
        """Token ids (B, T) and features (B, M, H), M the media tokens a row -> (B, T, H) before the last norm.

        Rows are padded on the right; the causal mask keeps padding from mattering. ``media`` may give the flat
        positions (B*M) of the media tokens, which spares the GPU a synchronisation.
        """
        c, decoder = self.config, self.language_model.model
        x = decoder.embed_tokens(ids).float()
        if image_features is not None:
            if media is None:
                media = (ids == c.media_token_id).flatten().nonzero().squeeze(1)
            x = x.flatten(0, 1).index_copy(0, media, image_features.flatten(0, 1)).view(x.shape)
        frequency = c.rope_theta ** (-torch.arange(0, c.rope_dim, 2, device=ids.device).float() / c.rope_dim)
        rotation = unit_rotation(torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), frequency))
        for layer in decoder.layers:
            x = layer(x, rotation, valid)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., H) -> logits (..., vocab)."""
        return self.language_model.lm_head(self.language_model.model.norm(hidden))

    def forward(self, ids: Tensor, image_features: Tensor | None = None) -> Tensor:
        """Token ids (B, T), features (B, M, H) -> logits (B, T, vocab)."""
        return self.head(self.hidden_states(ids, image_features))

    def mixtures(self) -> list[MixtureOfExperts]:
        return [m for m in self.modules() if isinstance(m, MixtureOfExperts)]


@torch.no_grad()
def greedy(
    model: KimiVL, prompts: Sequence[Sequence[int]], features: Tensor, stop: set[int], max_tokens: int = 96
) -> list[list[int]]:
    """Greedy continuations, stop token left out. Recomputes the prefix every step: small models only."""
    device = features.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ids = torch.zeros(len(prompts), int(lengths.max()) + max_tokens, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    ids = ids.to(device)
    rows = torch.arange(len(prompts), device=device)
    stops = torch.tensor(sorted(stop), device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    chosen: list[Tensor] = []
    for step in range(max_tokens):
        width = int(lengths.max()) + step
        hidden = model.hidden_states(ids[:, :width], features)
        token = model.head(hidden[rows, lengths + step - 1]).argmax(-1)
        chosen.append(token)
        ended |= torch.isin(token, stops)
        if ended.all():
            break
        ids[rows, lengths + step] = token
    outputs = torch.stack(chosen, 1).tolist()
    return [row[: next((i for i, t in enumerate(row) if t in stop), len(row))] for row in outputs]
