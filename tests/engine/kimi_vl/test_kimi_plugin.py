"""Published folders load in vLLM as they are, their Python files unread, and both ways in give the engine the same."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.config import ModelConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.renderers.hf import resolve_chat_template
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tokenizers import registry as tokenizer_registry

from app.engine.kimi_vl.inputs import engine_input, image_hash
from app.engine.kimi_vl.plugin import ARCHITECTURE, TOKENIZER_MODE, register
from app.engine.kimi_vl.processor import patchify
from app.engine.kimi_vl.prompt import Prompt, PromptBuilder, Span
from app.engine.kimi_vl.tokenizer import KimiVLTokenizer, load_tokenizer
from app.engine.request import Turn

AUTO_MAPS = {
    "config.json": {
        "AutoConfig": "configuration_kimi_vl.KimiVLConfig",
        "AutoModel": "modeling_kimi_vl.KimiVLForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_kimi_vl.KimiVLForConditionalGeneration",
    },
    "tokenizer_config.json": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
    "preprocessor_config.json": {
        "AutoProcessor": "processing_kimi_vl.KimiVLProcessor",
        "AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor",
    },
}


@pytest.fixture(scope="module")
def published(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with the published repository's auto_map entries, and Python files that end whoever runs them."""
    folder = tmp_path_factory.mktemp("published") / "kimi-vl"
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, auto_map in AUTO_MAPS.items():
        path = folder / name
        path.chmod(0o644)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto_map}))
        for reference in auto_map.values():
            module = reference[0] if isinstance(reference, list) else reference
            (folder / f"{module.partition('.')[0]}.py").write_text('raise SystemExit("remote code was run")\n')
    return folder


@pytest.fixture(scope="module")
def config(published: Path) -> ModelConfig:
    register()
    return ModelConfig(str(published), dtype="bfloat16", max_model_len=4096)


@pytest.fixture(scope="module")
def processor(config: ModelConfig) -> BaseMultiModalProcessor[Any]:
    return MULTIMODAL_REGISTRY.create_processor(config, tokenizer=cached_tokenizer_from_config(config))


def test_the_folder_loads_without_its_code(config: ModelConfig, published: Path) -> None:
    assert config.trust_remote_code is False
    assert config.hf_config.model_type == "kimi_vl"
    assert config.is_multimodal_model
    assert config.supports_multimodal_inputs  # vLLM falls back to text only when the processor cannot be made
    tokenizer = cached_tokenizer_from_config(config)
    assert isinstance(tokenizer, KimiVLTokenizer)
    text = "A 红色 square<|im_end|>"
    assert tokenizer.encode(text) == load_tokenizer(published).encode(text)
    template = resolve_chat_template(tokenizer, None, None, model_config=config)
    assert template == (published / "chat_template.jinja").read_text()
    model_class, _ = ModelRegistry.resolve_model_cls([ARCHITECTURE], config)
    assert model_class.__module__ == "app.engine.kimi_vl.model"


def test_a_tokenizer_mode_that_was_asked_for_stays(published: Path) -> None:
    register()
    assert tokenizer_registry.cached_resolve_tokenizer_args(str(published))[0] == TOKENIZER_MODE
    assert tokenizer_registry.cached_resolve_tokenizer_args(str(published), tokenizer_mode="hf")[0] == "hf"


def test_other_models_keep_their_tokenizer(published: Path, tmp_path: Path) -> None:
    register()
    folder = tmp_path / "other"
    shutil.copytree(published, folder)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"kimi_vl"', '"kimi_linear"'))
    for name in (folder, tmp_path):
        assert tokenizer_registry.cached_resolve_tokenizer_args(str(name))[0] == "hf"


def test_both_ways_hand_the_engine_the_same(
    config: ModelConfig, published: Path, processor: BaseMultiModalProcessor[Any]
) -> None:
    tokenizer = load_tokenizer(published)
    geometry = processor.info.get_hf_processor().image_processor.geometry
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in ((60, 200), (1300, 900))]
    plans = [geometry.plan(*image.size) for image in images]
    prompt = PromptBuilder(tokenizer).build([Turn("user", "What?", 2)], [plan.tokens for plan in plans])
    ours: Any = engine_input(
        prompt,
        [patchify(image, geometry, plan) for image, plan in zip(images, plans, strict=True)],
        [plan.grid for plan in plans],
        ["a", "b"],
    )
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    stock: Any = processor(text, mm_items=processor.info.parse_mm_data({"image": images}))
    assert ours["prompt_token_ids"] == stock["prompt_token_ids"]
    assert [(p.offset, p.length) for p in ours["mm_placeholders"]["image"]] == [
        (p.offset, p.length) for p in stock["mm_placeholders"]["image"]
    ]
    for mine, its in zip(ours["mm_kwargs"]["image"], stock["mm_kwargs"]["image"], strict=True):
        for key in ("pixel_values", "image_grid_hws"):
            assert mine[key].data.dtype == its[key].data.dtype
            assert torch.equal(mine[key].data, its[key].data)


def test_vllm_sizes_its_encoder_cache_by_the_largest_image(processor: BaseMultiModalProcessor[Any]) -> None:
    geometry = processor.info.get_hf_processor().image_processor.geometry
    dummy: Any = processor.get_dummy_mm_inputs({"image": 1})
    assert dummy["mm_placeholders"]["image"][0].length == geometry.largest()[1]


def test_registering_twice_changes_nothing_for_other_models() -> None:
    def others() -> list[dict[str, Any]]:
        tables = (tokenizer_registry.TokenizerRegistry.tokenizers, RENDERER_REGISTRY.renderers, ModelRegistry.models)
        return [{k: v for k, v in table.items() if k not in (TOKENIZER_MODE, ARCHITECTURE)} for table in tables]

    before = others()
    register()
    resolve = tokenizer_registry.cached_resolve_tokenizer_args
    register()
    assert others() == before
    assert tokenizer_registry.cached_resolve_tokenizer_args is resolve


def test_vllm_finds_the_plugin_and_its_import_is_cheap() -> None:
    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "askimage_kimi_vl"]
    assert found.value == "app.engine.kimi_vl.plugin:register"
    code = "import sys, app.engine.kimi_vl.plugin; sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_prompt_without_images_is_plain_tokens() -> None:
    assert engine_input(Prompt([1, 2], ()), [], [], []) == {"type": "token", "prompt_token_ids": [1, 2]}


def test_images_that_do_not_fit_the_prompt_are_refused() -> None:
    prompt, patches = Prompt([5], (Span(0, 1),)), torch.zeros(4, 3, 14, 14)
    with pytest.raises(ValueError, match="same images"):
        engine_input(prompt, [], [], [])
    with pytest.raises(ValueError, match="same images"):
        engine_input(prompt, [patches], [(2, 2)], [])
    with pytest.raises(ValueError, match="fill its grid"):
        engine_input(prompt, [patches], [(2, 4)], ["a"])


def test_one_file_at_two_sizes_is_two_images(processor: BaseMultiModalProcessor[Any]) -> None:
    geometry = processor.info.get_hf_processor().image_processor.geometry
    assert image_hash("abc", geometry.plan(500, 400)) != image_hash("abc", geometry.plan(500, 400, max_tokens=50))
    assert image_hash("abc", geometry.plan(500, 400)) == image_hash("abc", geometry.plan(500, 400, max_tokens=4000))
