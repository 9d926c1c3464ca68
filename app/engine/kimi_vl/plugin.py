"""The ``vllm.general_plugins`` entry point: makes published Kimi-VL folders load in vLLM 0.32 as they are.

vLLM 0.32 has the model and its configuration, but takes the tokenizer and the processor from the checkpoint's own
Python files, which do not import under transformers 5. With this plugin the files stay unread and
``trust_remote_code`` false, in ``vllm serve`` as in ours. vLLM calls :func:`register` in every process it starts
(front end, engine core, workers, model inspection); nothing changes for other models.
"""

from typing import Any

ARCHITECTURE = "KimiVLForConditionalGeneration"
MODEL_TYPE = TOKENIZER_MODE = "kimi_vl"
_PACKAGE = "app.engine.kimi_vl"


def register() -> None:
    """Tell vLLM's registries, by name, where our model and tokenizer are. Cheap, and safe to repeat."""
    from vllm import ModelRegistry
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers import registry

    if TOKENIZER_MODE in registry.TokenizerRegistry.tokenizers:
        return
    ModelRegistry.register_model(ARCHITECTURE, f"{_PACKAGE}.model:KimiVLWithCaches")
    registry.TokenizerRegistry.register(TOKENIZER_MODE, f"{_PACKAGE}.vllm_tokenizer", "KimiVLTokenizerLoader")
    RENDERER_REGISTRY.register(TOKENIZER_MODE, "vllm.renderers.hf", "HfRenderer")

    # vLLM chooses the tokenizer mode for a few architectures in a fixed list, and loads the tokenizer while it still
    # builds the model's configuration, before any hook a plugin has (MODELS_CONFIG_MAP is asked later). This is the one
    # function through which every "auto" goes.
    resolve = registry.cached_resolve_tokenizer_args

    def resolve_kimi_vl(tokenizer_name: Any, *args: Any, tokenizer_mode: str = "auto", **kwargs: Any) -> Any:
        if tokenizer_mode == "auto" and _is_kimi_vl(str(tokenizer_name), kwargs.get("revision")):
            tokenizer_mode = TOKENIZER_MODE
        return resolve(tokenizer_name, *args, tokenizer_mode=tokenizer_mode, **kwargs)

    registry.cached_resolve_tokenizer_args = resolve_kimi_vl


def _is_kimi_vl(name: str, revision: str | None) -> bool:
    """Whether this folder or repository is a Kimi-VL checkpoint, by its ``config.json``."""
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    config = get_hf_file_to_dict("config.json", name, revision)
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE
