"""The caches change nothing but the time: the same encoder output, for any batch, before and after new weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models.moonvit import MoonVitPretrainedModel
from vllm.model_executor.models.vision import run_dp_sharded_mrope_vision_model
from vllm.transformers_utils.configs.moonvit import MoonViTConfig

from app.engine.kimi_vl.model import CachedMoonViT, GridCache

GRIDS = [[(4, 6)], [(4, 6), (8, 8), (4, 6)], [(2, 2)], [(10, 4), (2, 20)], [(4, 6)]]
CONFIG = MoonViTConfig(
    num_attention_heads=2,
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=96,
    init_pos_emb_height=8,
    init_pos_emb_width=8,
)


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """The one-process distributed state that vLLM's layers ask for."""
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    store: Path = tmp_path_factory.mktemp("store") / "store"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield config
    cleanup_dist_env_and_memory()


def towers(dtype: torch.dtype) -> tuple[MoonVitPretrainedModel, CachedMoonViT]:
    """vLLM's tower and ours, with the same random weights."""
    torch.manual_seed(0)
    plain, ours = MoonVitPretrainedModel(CONFIG), MoonVitPretrainedModel(CONFIG)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours.load_state_dict(plain.state_dict())
    for tower in (plain.to(dtype), ours.to(dtype)):
        for module in tower.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
    return plain, CachedMoonViT.take_over(ours)


def patches(grids: list[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(grids))
    return torch.randn(sum(h * w for h, w in grids), 3, 14, 14, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_encoder_output_is_identical(vllm_config: VllmConfig, dtype: torch.dtype) -> None:
    plain, ours = towers(dtype)
    for grids in GRIDS:
        pixels = patches(grids, dtype)
        expected = plain(pixels, torch.tensor(grids))
        output = ours(pixels, torch.tensor(grids))
        assert isinstance(output, list)
        assert len(output) == len(grids)
        for a, b in zip(output, expected, strict=True):
            assert a.shape == b.shape
            assert torch.equal(a, b)
    assert ours.patch_embed.pos_emb.grids.misses == 5  # distinct grids in GRIDS
    assert ours.encoder.rope_2d.grids.misses == 5


@torch.inference_mode()
def test_new_weights_are_used(vllm_config: VllmConfig) -> None:
    plain, ours = towers(torch.float32)
    grids = torch.tensor([(4, 6)])
    pixels = patches([(4, 6)], torch.float32)
    before = ours(pixels, grids)[0]
    for tower in (plain, ours):
        tower.patch_embed.pos_emb.weight.data.mul_(-2)
    ours.forget()
    after = ours(pixels, grids)[0]
    assert torch.equal(after, plain(pixels, grids)[0])
    assert not torch.equal(after, before)


@torch.inference_mode()
def test_the_ways_of_cuda_graphs_and_data_parallel_encoders_work(vllm_config: VllmConfig) -> None:
    plain, ours = towers(torch.float32)
    grids = [(4, 6), (8, 8), (4, 6)]
    pixels = patches(grids, torch.float32)
    expected = torch.cat(plain(pixels, torch.tensor(grids)))
    metadata = ours.prepare_encoder_metadata(grids, max_batch_size=5, max_seqlen_override=64)
    assert torch.equal(ours(pixels, None, encoder_metadata=metadata), expected)
    metadata["pos_embeds"].zero_()  # graphs write into these buffers; the caches must not be them
    metadata["rope_freqs_cis"].zero_()
    single = ours.prepare_encoder_metadata([(4, 6)], max_batch_size=1)
    single["pos_embeds"].zero_()
    shared = run_dp_sharded_mrope_vision_model(ours, pixels, [list(grid) for grid in grids], rope_type="rope_2d")
    assert torch.equal(torch.cat(list(shared)), expected)


def test_the_cache_is_bounded_in_bytes_and_drops_the_least_recently_used() -> None:
    cache = GridCache(max_bytes=3 * 40)
    make = lambda: torch.zeros(10)  # noqa: E731
    for grid in ((1, 1), (2, 2), (3, 3)):
        cache.get(grid, make)
    cache.get((1, 1), make)
    cache.get((4, 4), make)
    assert (cache.misses, len(cache)) == (4, 3)
    cache.get((1, 1), make)
    assert cache.misses == 4
    cache.get((2, 2), make)
    assert cache.misses == 5
    cache.get((9, 9), lambda: torch.zeros(1000))
    assert len(cache) == 1
    cache.clear()
    cache.get((9, 9), make)
    assert (cache.misses, len(cache)) == (7, 1)
