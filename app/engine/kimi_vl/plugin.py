"""The ``vllm.general_plugins`` entry point: makes published Kimi-VL folders load in vLLM 0.32 as they are.

vLLM 0.32 has the model and its configuration, but takes the tokenizer and the processor from the checkpoint's own
Python files, which do not import under transformers 5. With this plugin the files stay unread and
``trust_remote_code`` false, in ``vllm serve`` as in ours. vLLM calls :func:`register` in every process it starts
(front end, engine core, workers, model inspection); nothing changes for other architectures.
"""

ARCHITECTURE = "KimiVLForConditionalGeneration"
TOKENIZER_MODE = "kimi_vl"
_PACKAGE = "app.engine.kimi_vl"


def register() -> None:
    """Tell vLLM's registries, by name, where our model and tokenizer are. Cheap, and safe to repeat."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    class KimiVLModelConfig(VerifyAndUpdateConfig):  # type: ignore[misc]
        """vLLM asks this once the architecture is known; a ``--tokenizer-mode`` that was asked for stays."""

        @staticmethod
        def verify_and_update_model_config(model_config: object) -> None:
            if getattr(model_config, "tokenizer_mode", None) == "auto":
                model_config.tokenizer_mode = TOKENIZER_MODE  # type: ignore[attr-defined]

    if TOKENIZER_MODE in TokenizerRegistry.tokenizers:
        return
    ModelRegistry.register_model(ARCHITECTURE, f"{_PACKAGE}.model:KimiVLWithCaches")
    TokenizerRegistry.register(TOKENIZER_MODE, f"{_PACKAGE}.vllm_tokenizer", "KimiVLTokenizerLoader")
    RENDERER_REGISTRY.register(TOKENIZER_MODE, "vllm.renderers.hf", "HfRenderer")
    MODELS_CONFIG_MAP[ARCHITECTURE] = KimiVLModelConfig
