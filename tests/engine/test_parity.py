"""vLLM computes what the training code computes: log-probabilities in float32 on 50 prompts."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import parity_engine
import torch

from support import ROOT
from training.export import load_checkpoint
from training.inputs import to_patches

TOLERANCE = 1e-3


def test_log_probabilities_equal_the_training_codes(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine.npz"
    command = [sys.executable, str(Path(parity_engine.__file__)), str(model_dir), str(out)]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    engine = np.load(out)
    model, _ = load_checkpoint(model_dir)
    model.eval()
    worst = []
    for number, (image, _, _) in enumerate(parity_engine.cases()):
        prompt, output = engine[f"prompt{number}"], engine[f"output{number}"]
        patches, grid = to_patches(image.convert("RGB"))
        with torch.no_grad():
            features = model.image_features(torch.from_numpy(patches)[None].float() / 127.5 - 1, *grid)
            ids = torch.from_numpy(np.concatenate([prompt, output[:-1]]))[None].long()
            expected = model(ids, features)[0, len(prompt) - 1 :].log_softmax(-1).numpy()
        worst.append(np.abs(expected - engine[f"logprobs{number}"]).max())
    assert len(worst) == parity_engine.PROMPTS
    print(f"largest difference of a log-probability: {max(worst):.1e}, median of prompts {np.median(worst):.1e}")
    assert max(worst) < TOLERANCE
