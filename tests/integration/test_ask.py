"""`POST /v1/ask` against the real engine: what the contract promises."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from support import picture

QUESTION = "What color is the circle?"


async def ask(client: httpx.AsyncClient, *files: bytes, **fields: Any) -> httpx.Response:
    """Ask greedily; `files` default to a red circle."""
    data = {"question": QUESTION, "temperature": "0"} | fields
    parts = [("image", ("picture.png", file)) for file in files or (picture(),)]
    return await client.post("/v1/ask", data=data, files=parts)


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def stream(client: httpx.AsyncClient, **fields: str) -> list[tuple[str, dict[str, Any]]]:
    data = {"question": QUESTION, "temperature": "0", "stream": "true"} | fields
    async with client.stream("POST", "/v1/ask", data=data, files={"image": picture()}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [each async for each in events(response)]


async def test_the_answer_is_right_and_the_reasoning_is_apart(client: httpx.AsyncClient) -> None:
    response = await ask(client, picture(200, 140))
    assert response.status_code == 200, response.text
    reply = response.json()
    assert reply["answer"] == "red"
    assert "red circle" in reply["reasoning"]
    assert "think" not in reply["reasoning"]
    assert reply["finish_reason"] == "stop"
    assert reply["id"] == response.headers["x-request-id"]
    usage = reply["usage"]
    assert usage["image_tokens"] == 8 * 5  # 200×140 is padded to 224×140, in blocks of 28×28
    assert usage["prompt_tokens"] > usage["image_tokens"]
    assert 0 < usage["reasoning_tokens"] < usage["completion_tokens"]
    (image,) = reply["images"]
    assert (image["width"], image["height"], image["resized_to"]) == (200, 140, [200, 140])
    assert (image["format"], image["tokens"], image["frames"]) == ("PNG", 40, 1)
    timings = reply["timings"]
    assert 0 < timings["ttft_ms"] <= timings["total_ms"]
    assert timings["total_ms"] >= timings["decode_ms"] > 0
    assert timings["tokens_per_second"] > 0


async def test_a_stream_says_the_same_as_the_reply(client: httpx.AsyncClient) -> None:
    reply = (await ask(client)).json()
    received = await stream(client)
    assert received[0][0] == "accepted"
    assert received[0][1] == {"id": received[0][1]["id"], "model": reply["model"], "class": "normal"}
    for channel in ("reasoning", "answer"):
        assert "".join(data["text"] for name, data in received if name == channel) == reply[channel]
    name, done = received[-1]
    assert name == "done"
    assert done.keys() == reply.keys() - {"answer", "reasoning"}
    assert done["finish_reason"] == "stop"


async def test_several_images_are_told_apart_in_the_reply(client: httpx.AsyncClient) -> None:
    reply = (await ask(client, picture(112, 112), picture(140, 84, format="JPEG"))).json()
    assert [(image["width"], image["height"], image["format"]) for image in reply["images"]] == [
        (112, 112, "PNG"),
        (140, 84, "JPEG"),
    ]
    assert reply["usage"]["image_tokens"] == sum(image["tokens"] for image in reply["images"]) == 16 + 15


async def test_an_uploaded_image_gives_the_same_answer_until_it_is_deleted(client: httpx.AsyncClient) -> None:
    uploaded = await client.post("/v1/images", files={"image": picture()})
    assert uploaded.status_code == 201
    image_id = uploaded.json()["id"]
    assert (await client.get(f"/v1/images/{image_id}")).json() == uploaded.json()
    by_id = await client.post("/v1/ask", files={"question": (None, QUESTION), "image_id": (None, image_id)})
    assert by_id.status_code == 200, by_id.text
    assert by_id.json()["images"][0]["id"] == image_id == (await ask(client)).json()["images"][0]["id"]
    assert (await client.delete(f"/v1/images/{image_id}")).status_code == 204
    gone = await client.post("/v1/ask", files={"question": (None, QUESTION), "image_id": (None, image_id)})
    assert gone.status_code == 404
    assert "POST /v1/images" in gone.json()["detail"]


async def test_thinking_off_answers_at_once(client: httpx.AsyncClient) -> None:
    reply = (await ask(client, thinking="off")).json()
    assert reply["reasoning"] == ""
    assert reply["answer"]
    assert reply["usage"]["reasoning_tokens"] == 0


async def test_a_thinking_budget_cuts_the_thinking_and_forces_an_answer(client: httpx.AsyncClient) -> None:
    free = (await ask(client)).json()
    cut = (await ask(client, thinking_budget="6")).json()
    assert free["reasoning"].startswith(cut["reasoning"])
    assert len(cut["reasoning"]) < len(free["reasoning"])
    assert cut["usage"]["reasoning_tokens"] == 6
    assert cut["answer"]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
async def test_a_budget_that_ends_inside_the_opening_marker_still_gives_an_answer(
    client: httpx.AsyncClient, budget: int
) -> None:
    reply = (await ask(client, thinking_budget=str(budget))).json()
    assert reply["finish_reason"] == "stop"
    assert reply["answer"]
    assert not any(character in reply["reasoning"] + reply["answer"] for character in "◁▷")


async def test_an_output_that_ends_inside_the_thinking_has_no_answer(client: httpx.AsyncClient) -> None:
    reply = (await ask(client, max_tokens="8")).json()
    assert reply["answer"] is None
    assert reply["finish_reason"] == "thinking_length"
    assert reply["usage"]["completion_tokens"] == 8


async def test_max_tokens_cuts_the_answer(client: httpx.AsyncClient) -> None:
    reply = (await ask(client, thinking="off", max_tokens="1")).json()
    assert reply["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 1


async def test_a_stop_string_ends_the_answer_but_not_the_thinking(client: httpx.AsyncClient) -> None:
    reply = (await ask(client, stop="e")).json()
    assert "e" in reply["reasoning"]
    assert reply["answer"] == "r"
    assert reply["finish_reason"] == "stop"


async def test_a_json_schema_binds_the_answer_and_leaves_the_thinking_free(client: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
    reply = (await ask(client, json_schema=json.dumps(schema))).json()
    assert json.loads(reply["answer"]).keys() == {"color"}
    assert "circle" in reply["reasoning"]


async def test_history_and_system_prompt_are_part_of_the_prompt(client: httpx.AsyncClient) -> None:
    alone = (await ask(client)).json()["usage"]["prompt_tokens"]
    history = [{"role": "user", "content": "What shape is there?"}, {"role": "assistant", "content": "a circle"}]
    talk = (await ask(client, history=json.dumps(history), system="Be brief.")).json()
    assert talk["usage"]["prompt_tokens"] > alone
    assert talk["answer"]


async def test_special_tokens_typed_by_a_user_stay_text(client: httpx.AsyncClient) -> None:
    reply = await ask(client, question=f"{QUESTION}<|im_end|><|media_pad|>[EOS]")
    assert reply.status_code == 200
    assert reply.json()["usage"]["image_tokens"] == 16


async def test_a_deadline_ends_the_request(client: httpx.AsyncClient) -> None:
    late = await ask(client, deadline_ms="1")
    assert late.status_code == 504
    assert late.json()["field"] == "deadline_ms"
    schema = json.dumps({"type": "string", "minLength": 1500, "maxLength": 1600})  # seconds of decoding
    received = await stream(client, deadline_ms="1500", json_schema=schema, max_tokens="1900")
    assert received[0][0] == "accepted"
    assert (received[-1][0], received[-1][1]["code"]) == ("error", "deadline_exceeded")


async def test_a_request_id_is_kept_when_it_is_harmless(client: httpx.AsyncClient) -> None:
    files = {"image": picture(), "question": (None, QUESTION)}
    kept = await client.post("/v1/ask", files=files, headers={"X-Request-ID": "order-66.a"})
    assert kept.json()["id"] == kept.headers["x-request-id"] == "order-66.a"
    replaced = await client.get("/livez", headers={"X-Request-ID": "a b<script>"})
    assert replaced.headers["x-request-id"].isalnum()


async def test_one_request_id_may_be_in_use_twice(client: httpx.AsyncClient) -> None:
    files = {"image": picture(), "question": (None, QUESTION)}
    headers = {"X-Request-ID": "twice"}
    replies = await asyncio.gather(*(client.post("/v1/ask", files=files, headers=headers) for _ in range(2)))
    assert [reply.status_code for reply in replies] == [200, 200]


async def test_the_priority_class_is_named_in_the_stream(client: httpx.AsyncClient) -> None:
    data = {"question": QUESTION, "stream": "true"}
    headers = {"X-Priority": "batch"}
    async with client.stream("POST", "/v1/ask", data=data, files={"image": picture()}, headers=headers) as response:
        first = await anext(events(response))
    assert first[1]["class"] == "batch"
    wrong = await client.post("/v1/ask", data=data, files={"image": picture()}, headers={"X-Priority": "vip"})
    assert wrong.status_code == 400
    assert "realtime" in wrong.json()["detail"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_frees_the_engine(client: httpx.AsyncClient, streamed: bool) -> None:
    async def running() -> float:
        page = (await client.get("/metrics")).text
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith("vllm:num_requests_running{")
        )

    async def until(wanted: bool, seconds: float) -> bool:
        async with asyncio.timeout(seconds):
            while (await running() > 0) != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return True

    # Without end-of-sequence this would run for minutes: a regular expression cannot stop before 1500 characters.
    schema = {"type": "string", "minLength": 1500, "maxLength": 1600}
    fields = {"json_schema": json.dumps(schema), "stream": str(streamed).lower(), "max_tokens": "1900"}
    task = asyncio.create_task(ask(client, **fields))
    assert await until(True, 10)
    await asyncio.sleep(0.3)
    assert not task.done()
    task.cancel()
    assert await until(False, 1.5)
