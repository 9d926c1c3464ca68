"""vLLM's side of the parity test, in a process of its own: float32, the settings and adapter of the service.

usage: parity_engine.py MODEL OUT.npz   (writes prompts, greedy outputs, log-probabilities of the whole vocabulary)
"""

import asyncio
import os
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image

PROMPTS = 50
SIZES = [(112, 112), (130, 101), (168, 140), (224, 150), (155, 121)]  # width and height, not only multiples of 28
MAX_TOKENS = 64


def cases() -> list[tuple[Image.Image, str, str | None]]:
    """(picture, question, system prompt): every task, several sizes, with and without a system prompt of one's own."""
    from training.evaluate import TASKS
    from training.fonts import BUILT_IN
    from training.questions import ask
    from training.scenes import draw_scene

    rng, made = random.Random(424_242), []
    while len(made) < PROMPTS:
        task, size = TASKS[len(made) % len(TASKS)], SIZES[len(made) % len(SIZES)]
        text = "OPEN" if task == "read" else None
        shapes = 0 if text else rng.randint(2, 4)
        scene = draw_scene(rng, size, shapes=shapes, text=text, fonts=[BUILT_IN])
        if (item := ask(rng, task, scene)) is not None:
            made.append((scene.image, item.question, "Be brief." if len(made) % 3 == 2 else None))
    return made


async def run(model: str) -> dict[str, np.ndarray]:
    """Greedy outputs of all cases, decoded together in one batch."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine

    from app.engine.adapter import load_adapter
    from app.engine.arguments import engine_arguments
    from app.engine.request import Turn
    from app.images.intake import DecodedImage
    from app.settings import Settings

    settings = Settings(
        model={"path": model}, engine={"dtype": "float32", "max_model_len": 2048, "extra_args": {"max_logprobs": -1}}
    )
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**engine_arguments(settings, "cpu")))
    adapter = load_adapter(engine, None)

    async def one(number: int, image: Image.Image, question: str, system: str | None) -> dict[str, np.ndarray]:
        prepared = adapter.prepare(DecodedImage(str(number), "PNG", image.convert("RGB"), 1))
        turns = (*((Turn("system", system),) if system else ()), Turn("user", question, images=1))
        rendered = await adapter.render(turns, (prepared,), None)
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=-1)
        outputs = [output async for output in engine.generate(rendered.engine_input, params, str(number))]
        output, completion = outputs[-1], outputs[-1].outputs[0]
        steps = [[step[token].logprob for token in range(len(step))] for step in completion.logprobs]
        return {
            f"prompt{number}": np.array(output.prompt_token_ids),
            f"output{number}": np.array(completion.token_ids),
            f"logprobs{number}": np.array(steps, np.float32),
        }

    try:
        results = await asyncio.gather(*(one(number, *case) for number, case in enumerate(cases())))
    finally:
        engine.shutdown()
    return {name: value for result in results for name, value in result.items()}


if __name__ == "__main__":
    os.environ["VLLM_MLA_DISABLE"] = "1"  # the CPU's MLA kernels have no float32
    np.savez(Path(sys.argv[2]), **asyncio.run(run(sys.argv[1])))
