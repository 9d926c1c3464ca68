"""Bad input gets a 4xx problem document that names the field and the limit, and never harms the service."""

import asyncio
import io
import struct
import zlib
from typing import Any

import httpx
import pytest
from PIL import Image

from support import picture

QUESTION = "What do you see?"


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has next to no data."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def flat(width: int, height: int, **save: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(file, **({"format": "PNG"} | save))
    return file.getvalue()


async def post(client: httpx.AsyncClient, image: bytes | None, **fields: Any) -> httpx.Response:
    data = {"question": QUESTION} | fields
    if image is None:  # httpx sends a form without files in another encoding
        return await client.post("/v1/ask", files={name: (None, value) for name, value in data.items()})
    return await client.post("/v1/ask", data=data, files={"image": ("picture", image)})


def assert_problem(response: httpx.Response, status: int, field: str | None, text: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem.get("field") == field
    assert text in problem["detail"]
    assert problem["request_id"] == response.headers["x-request-id"]
    assert problem["type"] == f"urn:askimage:error:{problem['code']}"


@pytest.mark.parametrize(
    ("image", "status", "text"),
    [
        (None, 422, "at least one image"),
        (b"", 415, "empty"),
        (b"just some text\n" * 10, 415, "JPEG"),
        (b"%PDF-1.7\n%%EOF", 415, "PNG"),
        (picture(400, 300, format="JPEG")[:2000], 422, "truncated"),
        (picture()[:60], 422, "truncated"),
        (png_header(60_000, 60_000), 413, "60000×60000"),
        (flat(7200, 28), 413, "7140"),
        (flat(8000, 8200, format="JPEG", quality=5), 413, "64000000"),
        (b"\xff\xd8\xff" + bytes(2_100_000), 413, "2000000"),
    ],
    ids=["none", "empty", "text", "pdf", "cut-jpeg", "cut-png", "huge-header", "long-side", "pixels", "bytes"],
)
async def test_a_bad_image_is_refused(client: httpx.AsyncClient, image: bytes | None, status: int, text: str) -> None:
    assert_problem(await post(client, image), status, "image", text)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"question": ""}, "question"),
        ({"question": "  \n"}, "question"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "9"}, "temperature"),
        ({"top_p": "0"}, "top_p"),
        ({"max_tokens": "0"}, "max_tokens"),
        ({"max_tokens": "1e3"}, "max_tokens"),
        ({"seed": str(2**64)}, "seed"),
        ({"stream": "maybe"}, "stream"),
        ({"thinking": "loud"}, "thinking"),
        ({"thinking_budget": "-1"}, "thinking_budget"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"type": "strange"}'}, "json_schema"),
        ({"json_schema": '{"minimum": NaN}'}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"json_schema": '{"enum": ["%s"]}' % ("x" * 20_000)}, "json_schema"),
        ({"json_schema": '{"properties":{"a":' * 200 + "{}" + "}}" * 200}, "json_schema"),
        ({"json_schema": '{"properties": {"\\ud800": {"type": "x"}}}'}, "json_schema"),
        ({"deadline_ms": "9" * 400}, "deadline_ms"),
        ({"history": "[{}]".format(",".join(['{"role": "user", "content": ""}'] * 101))}, "history"),
        ({"history": "[1]"}, "history.0"),
        ({"history": '[{"role": "system", "content": "x"}]'}, "history.0.role"),
        ({"deadline_ms": "soon"}, "deadline_ms"),
        ({"stop": ""}, "stop.0"),
        ({"temprature": "1"}, "temprature"),
        ({"system": ["a", "b"]}, "system"),
        ({"image_id": "0" * 64}, "image_id"),
    ],
)
async def test_a_bad_field_is_named(client: httpx.AsyncClient, fields: dict[str, Any], field: str) -> None:
    response = await post(client, picture(), **fields)
    assert response.status_code == (404 if field == "image_id" else 422), response.text
    assert_problem(response, response.status_code, field, "")


async def test_a_bad_schema_is_refused_before_a_stream_begins(client: httpx.AsyncClient) -> None:
    response = await post(client, picture(), json_schema='{"type": "number", "multipleOf": 3}', stream="true")
    assert_problem(response, 422, "json_schema", "multipleOf")


async def test_a_limit_that_was_passed_is_a_number_in_the_problem(client: httpx.AsyncClient) -> None:
    assert (await post(client, picture(), temperature="9")).json()["limit"] == 2
    assert (await post(client, flat(7200, 28))).json()["limit"] == 7140


async def test_an_unknown_field_names_the_nearest_one(client: httpx.AsyncClient) -> None:
    assert_problem(await post(client, picture(), temprature="1"), 422, "temprature", "temperature")


async def test_a_question_over_the_context_is_refused_in_both_modes(client: httpx.AsyncClient) -> None:
    for stream in ("false", "true"):
        response = await post(client, picture(), question="word " * 5000, stream=stream)
        assert_problem(response, 413, "question", "2048")
        assert response.json()["limit"] == 2048


async def test_too_many_images_are_refused(client: httpx.AsyncClient) -> None:
    files = [("image", (f"{n}.png", picture())) for n in range(4)]
    response = await client.post("/v1/ask", data={"question": QUESTION}, files=files)
    assert_problem(response, 413, "image", "at most 3")


async def test_the_bad_one_of_several_images_is_named(client: httpx.AsyncClient) -> None:
    files = [("image", ("a.png", picture())), ("image", ("b.png", b"no image"))]
    response = await client.post("/v1/ask", data={"question": QUESTION}, files=files)
    assert_problem(response, 415, "image", "image 2 of 2")


async def test_a_file_where_text_is_expected_and_the_reverse(client: httpx.AsyncClient) -> None:
    as_text = await client.post("/v1/ask", files={"question": (None, QUESTION), "image": (None, "x")})
    assert_problem(as_text, 422, "image", "must be a file")
    as_file = await client.post("/v1/ask", files={"question": ("q.txt", QUESTION), "image": picture()})
    assert_problem(as_file, 422, "question", "must be text")


async def test_what_is_no_form_is_malformed(client: httpx.AsyncClient) -> None:
    assert_problem(await client.post("/v1/ask", json={"question": QUESTION}), 400, None, "multipart/form-data")
    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert_problem(await client.post("/v1/ask", content=b"nonsense", headers=headers), 400, None, "cannot be parsed")
    headers = {"content-type": "multipart/form-data"}
    assert_problem(await client.post("/v1/ask", content=b"nonsense", headers=headers), 400, None, "boundary")


async def test_a_form_that_breaks_off_is_malformed(client: httpx.AsyncClient) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="question"\r\n\r\nwhat?\r\n'
    headers = {"content-type": "Multipart/Form-Data; boundary=x"}
    assert_problem(await client.post("/v1/ask", content=part, headers=headers), 400, None, "breaks off")
    headers = {"content-type": "multipart/form-data; charset=utf-7; boundary=x"}
    assert_problem(await client.post("/v1/ask", content=part + b"--x--\r\n", headers=headers), 400, None, "UTF-8")


async def test_a_text_field_over_its_cap_is_too_large(client: httpx.AsyncClient) -> None:
    response = await post(client, picture(), question="x" * 1_100_000)
    assert_problem(response, 413, None, "1048576")


async def test_far_too_many_images_are_refused_like_one_too_many(client: httpx.AsyncClient) -> None:
    files = [("image", (f"{number}.png", b"x")) for number in range(60)]
    response = await client.post("/v1/ask", data={"question": QUESTION}, files=files)
    assert_problem(response, 413, "image", "at most 3")


async def test_a_client_that_leaves_while_it_sends_harms_nobody(server: str, client: httpx.AsyncClient) -> None:
    async def server_errors() -> list[str]:
        page = (await client.get("/metrics")).text
        return [line for line in page.splitlines() if line.startswith("http_requests_total{") and '"5xx"' in line]

    before = await server_errors()
    host, port = server.removeprefix("http://").split(":")
    for _ in range(3):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(FORM + b"Content-Length: 900000\r\n\r\n--x\r\n")
        await writer.drain()
        writer.close()
    assert await server_errors() == before


async def exchange(server: str, request: bytes) -> bytes:
    """Send raw bytes, read until the server closes."""
    host, port = server.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(10):
        reply = await reader.read()
    writer.close()
    return reply


FORM = b"POST /v1/ask HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"


async def test_a_body_declared_over_the_cap_is_refused_before_it_is_sent(server: str) -> None:
    for expect in (b"", b"Expect: 100-continue\r\n"):
        reply = await exchange(server, FORM + expect + b"Content-Length: 9000000\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in reply.lower()
        assert b"8000000" in reply


async def test_a_body_of_undeclared_size_is_refused_when_it_passes_the_cap(server: str) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + bytes(8_000_000)
    chunked = FORM + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n" % (len(part), part)
    reply = await exchange(server, chunked)
    assert reply.startswith(b"HTTP/1.1 413 ")


async def test_a_small_body_is_read_away_so_that_the_connection_lives(client: httpx.AsyncClient) -> None:
    response = await client.post("/livez", content=bytes(500_000))
    assert response.status_code == 405
    assert "connection" not in response.headers


async def test_other_routes_answer_with_problems_too(client: httpx.AsyncClient) -> None:
    assert_problem(await client.get("/nothing"), 404, None, "Not Found")
    assert (await client.get("/v1/ask")).status_code == 405


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (5000, 20)])
async def test_tiny_and_thin_images_work(client: httpx.AsyncClient, size: tuple[int, int]) -> None:
    assert (await post(client, flat(*size), max_tokens="4")).status_code == 200
