"""Writes and reads checkpoints in the layout in which Kimi-VL is published.

python -m training.export RUN/last.pt demo_model
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from training.config import ModelConfig
from training.model import KimiVL
from training.tokenizer import SPECIAL_TOKENS, Tokenizer

CHAT_TEMPLATE = """\
{%- for m in messages -%}
{%- if loop.first and m['role'] != 'system' -%}
<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>
{%- endif -%}
{%- if m['role'] == 'system' -%}<|im_system|>system<|im_middle|>
{%- elif m['role'] == 'user' -%}<|im_user|>user<|im_middle|>
{%- else -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
{%- if m['content'] is string -%}{{ m['content'] }}
{%- else -%}{%- for c in m['content'] -%}
{%- if c['type'] in ['image', 'image_url'] -%}
<|media_start|>image<|media_content|><|media_pad|><|media_end|>
{%- else -%}{{ c['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


def config_json(c: ModelConfig, special: dict[str, int]) -> dict[str, Any]:
    """config.json of the published layout."""
    ends = {"bos_token_id": special["[BOS]"], "eos_token_id": special["[EOS]"], "pad_token_id": special["[PAD]"]}
    text = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.mlp_size,
        "moe_intermediate_size": c.expert_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "n_shared_experts": c.shared_experts,
        "n_routed_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "first_k_dense_replace": c.dense_layers,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": c.routed_scale,
        "kv_lora_rank": c.kv_lora_rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": c.rope_dim,
        "qk_nope_head_dim": c.nope_dim,
        "v_head_dim": c.value_dim,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": c.rms_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "moe_router_dtype": "float32",
        **ends,
    }
    vision = {
        "model_type": "moonvit",
        "patch_size": c.patch_size,
        "init_pos_emb_height": c.position_grid,
        "init_pos_emb_width": c.position_grid,
        "num_attention_heads": c.vision_heads,
        "num_hidden_layers": c.vision_layers,
        "hidden_size": c.vision_hidden,
        "intermediate_size": c.vision_mlp,
        "merge_kernel_size": [2, 2],
        "torch_dtype": "bfloat16",
    }
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "ignore_index": -100,
        "media_placeholder_token_id": c.media_token_id,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **ends,
        "text_config": text,
        "vision_config": vision,
    }


def read_config(config: dict[str, Any]) -> ModelConfig:
    """The sizes in a config.json."""
    text, vision = config["text_config"], config["vision_config"]
    return ModelConfig(
        vocab_size=text["vocab_size"],
        media_token_id=config["media_placeholder_token_id"],
        hidden_size=text["hidden_size"],
        layers=text["num_hidden_layers"],
        dense_layers=text["first_k_dense_replace"],
        heads=text["num_attention_heads"],
        nope_dim=text["qk_nope_head_dim"],
        rope_dim=text["qk_rope_head_dim"],
        value_dim=text["v_head_dim"],
        kv_lora_rank=text["kv_lora_rank"],
        mlp_size=text["intermediate_size"],
        expert_size=text["moe_intermediate_size"],
        experts=text["n_routed_experts"],
        experts_per_token=text["num_experts_per_tok"],
        shared_experts=text["n_shared_experts"],
        routed_scale=text["routed_scaling_factor"],
        rope_theta=text["rope_theta"],
        rms_eps=text["rms_norm_eps"],
        vision_hidden=vision["hidden_size"],
        vision_layers=vision["num_hidden_layers"],
        vision_heads=vision["num_attention_heads"],
        vision_mlp=vision["intermediate_size"],
        position_grid=vision["init_pos_emb_height"],
        patch_size=vision["patch_size"],
    )


def tokenizer_config(special: dict[str, int]) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {str(i): {"content": token, **flags} for token, i in special.items()},
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token.startswith("<|")],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "tokenizer_class": "TikTokenTokenizer",
    }


def export(model: KimiVL, tokenizer_file: Path, folder: Path) -> None:
    """Write the folder: weights in bfloat16, the router's bias in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    special = Tokenizer(tokenizer_file).special
    weights = {
        name: (tensor.float() if "e_score_correction_bias" in name else tensor.to(torch.bfloat16)).cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer_file.resolve() != (folder / "tiktoken.model").resolve():
        shutil.copy(tokenizer_file, folder / "tiktoken.model")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.rstrip("\n"))
    ends = [special["<|im_end|>"], special["[EOS]"]]
    files = {
        "config.json": config_json(model.config, special),
        "tokenizer_config.json": tokenizer_config(special),
        "generation_config.json": {
            "bos_token_id": special["[BOS]"],
            "eos_token_id": ends,
            "pad_token_id": special["[PAD]"],
            "do_sample": False,  # trained to have one right answer
            "max_length": 2048,
        },
        "preprocessor_config.json": {
            "image_processor_type": "KimiVLImageProcessor",
            "patch_size": model.config.patch_size,
            "merge_kernel_size": [2, 2],
            "in_token_limit": 4096,
            "pad_input": True,
            "num_pooled_tokens": 1024,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def load_checkpoint(folder: Path) -> tuple[KimiVL, Tokenizer]:
    """The published folder as a float32 model in eval mode, and its tokenizer."""
    model = KimiVL(read_config(json.loads((folder / "config.json").read_text())))
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model.eval(), Tokenizer(folder / "tiktoken.model")


def save_run(model: KimiVL, path: Path, step: int) -> None:
    """The float32 state of a run, written whole or not at all."""
    temporary = path.with_suffix(".tmp")
    torch.save({"config": asdict(model.config), "state": model.state_dict(), "step": step}, temporary)
    temporary.replace(path)


def load_run(path: Path) -> KimiVL:
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model = KimiVL(ModelConfig(**saved["config"]))
    model.load_state_dict(saved["state"])
    return model


if __name__ == "__main__":
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    export(load_run(run), run.parent / "tiktoken.model", out)
    print(f"{out / 'model.safetensors'}: {(out / 'model.safetensors').stat().st_size / 1e6:.1f} MB")
