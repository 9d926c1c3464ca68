"""Kimi-VL inside vLLM 0.32 without remote code: tokenizer, prompt, patches, model and the vLLM plugin."""
