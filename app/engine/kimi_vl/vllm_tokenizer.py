"""vLLM's way to our tokenizer: the class behind ``tokenizer_mode="kimi_vl"``."""

from pathlib import Path
from typing import Any

from vllm.tokenizers.hf import CachedHfTokenizer, get_cached_tokenizer
from vllm.transformers_utils.repo_utils import get_non_weight_snapshot_path

from app.engine.kimi_vl.tokenizer import load_tokenizer


class KimiVLTokenizerLoader(CachedHfTokenizer):  # type: ignore[misc]
    """Loads ``tiktoken.model``; a folder that has only a ``tokenizer.json`` loads as any other model's does."""

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *args: Any,
        trust_remote_code: bool = False,
        revision: str | None = None,
        download_dir: str | None = None,
        **kwargs: Any,
    ) -> Any:
        folder = get_non_weight_snapshot_path(
            str(path_or_repo_id), revision=revision, cache_dir=download_dir, token=kwargs.get("token")
        )
        if not (Path(folder) / "tiktoken.model").is_file():
            return super().from_pretrained(
                folder, *args, trust_remote_code=False, revision=revision, download_dir=download_dir, **kwargs
            )
        options = {name: kwargs[name] for name in ("truncation_side", "padding_side") if name in kwargs}
        tokenizer = load_tokenizer(folder, **options)
        tokenizer.name_or_path = str(path_or_repo_id)
        return get_cached_tokenizer(tokenizer)
