"""Training code of the askimage demo model: a small Kimi-VL taught on synthetic scenes."""
