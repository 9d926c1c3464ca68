"""Any vision model that vLLM knows works behind the same interface; here a tiny Idefics3 with random weights."""

from pathlib import Path

import httpx
import tiny_idefics

from support import START_SECONDS, answers, picture, serve, wait_for


def test_another_vision_model_answers_through_vllms_own_processor(tmp_path: Path) -> None:
    folder = tmp_path / "idefics"
    folder.mkdir()
    environment = {"ASKIMAGE_ENGINE__LOAD_FORMAT": "dummy", "ASKIMAGE_ENGINE__MAX_MODEL_LEN": "2048"}
    with serve(tiny_idefics.write(folder), tmp_path / "log", **environment) as (address, _):
        wait_for(lambda: answers(f"{address}/readyz", 200), START_SECONDS, "the other model is ready")
        files = [("image", ("a.png", picture())), ("image", ("b.png", picture(80, 40)))]
        fields = {"question": "What is this?", "max_tokens": "24", "thinking": "off", "temperature": "0"}
        reply = httpx.post(f"{address}/v1/ask", data=fields, files=files, timeout=60)
        assert reply.status_code == 200, reply.text
        document = reply.json()
        assert document["usage"]["completion_tokens"] == 24
        assert len(document["images"]) == 2
        assert document["usage"]["image_tokens"] == sum(image["tokens"] for image in document["images"]) > 0
        again = httpx.post(f"{address}/v1/ask", data=fields, files=files, timeout=60)
        assert again.json()["answer"] == document["answer"]
        one = httpx.post(f"{address}/v1/ask", data=fields, files=files[:1], timeout=60)
        assert one.json()["usage"]["prompt_tokens"] < document["usage"]["prompt_tokens"]
