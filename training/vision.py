"""MoonViT and the projector: from patches to image features.

Shapes: B images, P patches an image (rows x cols, row-major).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import ModelConfig
from training.rotary import rotate_pairs, unit_rotation


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
