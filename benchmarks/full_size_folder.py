"""Write a full-size Kimi-VL-A3B-Thinking-2506 checkpoint folder without weights, for `load_format=dummy`.

Sizes, special-token ids, chat template and preprocessing are the published checkpoint's; the vocabulary is filler.

usage: python benchmarks/full_size_folder.py OUT
"""

import base64
import itertools
import json
import string
import sys
from pathlib import Path
from typing import Any

BASE_TOKENS = 163_584
VOCABULARY = 163_840
SPECIAL = {
    "[BOS]": 163_584,
    "[EOS]": 163_585,
    "<|im_end|>": 163_586,
    "<|im_user|>": 163_587,
    "<|im_assistant|>": 163_588,
    "<|im_system|>": 163_594,
    "<|im_middle|>": 163_601,
    "<|media_start|>": 163_602,
    "<|media_content|>": 163_603,
    "<|media_end|>": 163_604,
    "<|media_pad|>": 163_605,
    "[UNK]": 163_838,
    "[PAD]": 163_839,
}
TEXT = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131_072,
    "hidden_size": 2048,
    "intermediate_size": 11_264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 800_000.0,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
VISION = {
    "model_type": "moonvit",
    "patch_size": 14,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "torch_dtype": "bfloat16",
}
TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if loop.first and m['role'] != 'system' -%}"
    "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>{%- endif -%}"
    "<|im_{{ m['role'] }}|>{{ m['role'] }}<|im_middle|>"
    "{%- if m['content'] is string -%}{{ m['content'] }}{%- else -%}{%- for c in m['content'] -%}"
    "{%- if c['type'] in ['image', 'image_url'] -%}"
    "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    "{%- else -%}{{ c['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)


def filler_tokens() -> list[bytes]:
    """The 256 bytes, then words of a space and up to four letters, each one letter longer than an earlier one."""
    words = (
        b" " + "".join(letters).encode()
        for length in (1, 2, 3, 4)
        for letters in itertools.product(string.ascii_lowercase, repeat=length)
    )
    return [bytes([byte]) for byte in range(256)] + list(itertools.islice(words, BASE_TOKENS - 256))


def write(folder: Path) -> None:
    """Write all files of the folder."""
    folder.mkdir(parents=True, exist_ok=True)

    def dump(name: str, document: dict[str, Any]) -> None:
        (folder / name).write_text(json.dumps(document, indent=1))

    ids = {"bos_token_id": SPECIAL["[BOS]"], "eos_token_id": SPECIAL["[EOS]"], "pad_token_id": SPECIAL["[PAD]"]}
    dump(
        "config.json",
        {
            "architectures": ["KimiVLForConditionalGeneration"],
            "model_type": "kimi_vl",
            "torch_dtype": "bfloat16",
            "ignore_index": -100,
            "media_placeholder_token_id": SPECIAL["<|media_pad|>"],
            "tie_word_embeddings": False,
            "vocab_size": VOCABULARY,
            "pad_token_id": SPECIAL["[PAD]"],
            "text_config": TEXT | ids,
            "vision_config": VISION,
        },
    )
    dump("generation_config.json", ids | {"eos_token_id": [SPECIAL["<|im_end|>"], SPECIAL["[EOS]"]]})
    added = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    dump(
        "tokenizer_config.json",
        {
            "added_tokens_decoder": {str(index): {"content": name} | added for name, index in SPECIAL.items()},
            "additional_special_tokens": [name for name in SPECIAL if name.startswith("<|")],
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "model_max_length": 131_072,
            "tokenizer_class": "TikTokenTokenizer",
        },
    )
    dump(
        "preprocessor_config.json",
        {
            "in_token_limit": 16_384,
            "patch_size": 14,
            "merge_kernel_size": [2, 2],
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "pad_input": True,
        },
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(filler_tokens()))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
