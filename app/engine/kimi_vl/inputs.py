"""Hands the engine ready patches, past vLLM's own processor, which runs on one thread (``vllm/renderers/base.py``)."""

from collections.abc import Sequence

import torch
from transformers import BatchFeature
from vllm.inputs.engine import MultiModalInput, TokensInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from app.engine.kimi_vl.geometry import ImagePlan
from app.engine.kimi_vl.prompt import Prompt


def image_hash(content: str, plan: ImagePlan) -> str:
    """The key of an image in the engine's caches: of the file's content, and of the size it was scaled to.

    The engine trusts the key and never looks at the pixels again, so the same file at another resolution needs
    another one.
    """
    return f"{content}:{plan.resized[0]}x{plan.resized[1]}"


def engine_input(
    prompt: Prompt, patches: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]], hashes: Sequence[str]
) -> MultiModalInput | TokensInput:
    """The argument of ``AsyncLLM.generate``: a prompt and its images, in order. There may be none.

    Args:
        prompt: from :meth:`~app.engine.kimi_vl.prompt.PromptBuilder.build`.
        patches: of each image, ``(rows * columns, 3, 14, 14)``.
        grids: (rows, columns) of each image.
        hashes: of each image, from :func:`image_hash`.

    Raises:
        ValueError: the four do not belong together.
    """
    if not len(prompt.images) == len(patches) == len(grids) == len(hashes):
        raise ValueError("the prompt, patches, grids and hashes must be of the same images")
    if not patches:
        return tokens_input(prompt.token_ids)
    sizes = torch.tensor([rows * columns for rows, columns in grids])
    if sizes.tolist() != [len(patch) for patch in patches]:
        raise ValueError("an image's patches do not fill its grid")
    features = BatchFeature(
        # One image is passed on as it is: concatenating would copy it.
        {
            "pixel_values": patches[0] if len(patches) == 1 else torch.cat(list(patches)),
            "image_grid_hws": torch.tensor(grids),
        }
    )
    items = MultiModalKwargsItems.from_hf_inputs(
        features,
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
            "image_grid_hws": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        },
    )
    placeholders = [PlaceholderRange(offset=span.offset, length=span.length) for span in prompt.images]
    return mm_input(prompt.token_ids, items, {"image": list(hashes)}, {"image": placeholders})
