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

import torch
from torch import Tensor, nn

from training.config import ModelConfig
from training.decoder import LanguageModel, MixtureOfExperts
from training.rotary import unit_rotation
from training.vision import Projector, VisionTower


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
