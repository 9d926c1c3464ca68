"""Write a tiny Idefics3 checkpoint folder without weights: a vision model that is not Kimi-VL, for `load_format=dummy`.

Idefics3 because vLLM's code for it runs without torchvision, which the CPU lock leaves out.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Idefics3Config, Idefics3ImageProcessor, Idefics3Processor, PreTrainedTokenizerFast

IMAGE_SIDE = 56
SPECIALS = ("<s>", "</s>", "<pad>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "<s>{% for message in messages %}{{ message['role'] }}: "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write(folder: Path) -> Path:
    """Write config, tokenizer and processor; returns the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    ids = {token: backend.token_to_id(token) for token in SPECIALS}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )
    images = Idefics3ImageProcessor(
        size={"longest_edge": IMAGE_SIDE}, max_image_size={"longest_edge": IMAGE_SIDE}, do_image_splitting=False
    )
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE).save_pretrained(folder)
    text = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "pad_token_id": ids["<pad>"],
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIDE,
        "patch_size": 14,
    }
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=ids["<image>"], pad_token_id=ids["<pad>"], scale_factor=2
    )
    config.architectures = ["Idefics3ForConditionalGeneration"]
    document = json.loads(config.to_json_string(use_diff=False)) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(document))
    return folder
