"""Traces of a real service, sent to a stand-in for a collector over OTLP."""

import asyncio
import contextlib
import itertools
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support import START_SECONDS, answers, picture, serve, wait_for

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@dataclass
class Span:
    name: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    attributes: dict[str, Any]
    failed: bool
    service: str


@dataclass
class Collector:
    """Takes spans over HTTP, as an OpenTelemetry collector does."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            self.spans += [
                Span(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    began=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    service=service,
                )
                for scope in resource.scope_spans
                for span in scope.spans
            ]

    async def spans_of(self, trace: str, names: set[str]) -> dict[str, Span]:
        def found() -> dict[str, Span]:
            return {span.name: span for span in self.spans if span.trace == trace}

        await asyncio.to_thread(wait_for, lambda: names <= found().keys(), 15, f"{names} of {trace} came")
        return found()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    yield collector
    server.shutdown()


@pytest.fixture(scope="module")
def traced(collector: Collector, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Traced]":
    log = tmp_path_factory.mktemp("traced") / "log"
    settings = {"ASKIMAGE_TRACING__ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with serve(model_dir, log, **settings) as (address, process):
        wait_for(lambda: answers(f"{address}/readyz", 200), START_SECONDS, "the server is ready")
        yield Traced(address, process, log)


@dataclass
class Traced:
    address: str
    process: Any
    log: Path

    async def ask(self, headers: dict[str, str], **fields: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.address, timeout=60) as client:
            data = {"question": "What do you see?"} | fields
            return await client.post("/v1/ask", data=data, files={"image": picture()}, headers=headers)

    async def get(self, path: str, headers: dict[str, str]) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.address) as client:
            return await client.get(path, headers=headers)


CHAT = "chat demo_model"
NAMES = {"POST /v1/ask", "body", "admission", "preprocess", CHAT, "engine queue", "prefill", "decode", "llm_request"}


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_one_trace_from_upload_to_last_token(collector: Collector, traced: Traced, stream: str) -> None:
    trace = f"{int(TRACE, 16) + (stream == 'true'):032x}"
    headers = {"traceparent": f"00-{trace}-{PARENT}-01", "X-Request-ID": f"traced-{stream}", "X-Priority": "realtime"}
    sampling = {"temperature": "0.5", "max_tokens": "100", "seed": "7"}
    reply = await traced.ask(headers, stream=stream, **sampling)
    assert reply.status_code == 200
    spans = await collector.spans_of(trace, NAMES)
    assert spans.keys() == NAMES
    root, chat = spans["POST /v1/ask"], spans[CHAT]
    assert root.parent == PARENT
    assert {spans[name].parent for name in ("body", "admission", "preprocess", CHAT)} == {root.id}
    assert {spans[name].parent for name in ("engine queue", "prefill", "decode", "llm_request")} == {chat.id}
    assert {span.service for span in spans.values()} == {"askimage"}
    order = ["body", "admission", "preprocess", "engine queue", "prefill", "decode"]
    for before, after in itertools.pairwise(order):
        assert spans[before].ended <= spans[after].began + 1_000_000, (before, after)
    for span in spans.values():
        assert root.began - 1_000_000 <= span.began <= span.ended <= root.ended + 1_000_000, span.name
        assert not span.failed
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/ask",
        "url.path": "/v1/ask",
        "http.response.status_code": 200,
        "askimage.request_id": f"traced-{stream}",
        "askimage.class": "realtime",
        "askimage.key": "anonymous",
        "askimage.outcome": "stop",
    }
    said = reply.json() if stream == "false" else json.loads(reply.text.split("event: done\ndata: ")[1].split("\n")[0])
    assert chat.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "askimage",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": "demo_model",
        "gen_ai.request.max_tokens": 100,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": f"traced-{stream}",
        "gen_ai.response.model": "demo_model",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": said["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": said["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": said["usage"]["cached_tokens"],
        "askimage.class": "realtime",
        "askimage.images": 1,
        "askimage.image_tokens": said["usage"]["image_tokens"],
        "askimage.reasoning_tokens": said["usage"]["reasoning_tokens"],
    }
    decode = (spans["decode"].ended - spans["decode"].began) / 1e6
    assert decode == pytest.approx(said["timings"]["decode_ms"], abs=2)


async def test_log_lines_and_exemplars_name_the_trace(traced: Traced) -> None:
    trace = "1" * 32
    await traced.ask({"traceparent": f"00-{trace}-{PARENT}-01"})
    page = (await traced.get("/metrics", {"Accept": "application/openmetrics-text"})).text
    assert f'trace_id="{trace}"' in page
    lines = [json.loads(line) for line in traced.log.read_text().splitlines() if line.startswith("{")]
    assert [line["message"] for line in lines if line.get("trace_id") == trace] == ["request"]


async def test_a_client_may_ask_for_no_trace_and_no_trace_is_needed(collector: Collector, traced: Traced) -> None:
    await traced.ask({"traceparent": f"00-{'2' * 32}-{PARENT}-00"})
    await traced.ask({"traceparent": "nonsense"})
    own = {"X-Request-ID": "own-trace"}
    await traced.ask(own)

    def found() -> list[Span]:
        return [each for each in collector.spans if each.attributes.get("askimage.request_id") == "own-trace"]

    await asyncio.to_thread(wait_for, lambda: len(found()) == 1, 15, "its root came")
    assert found()[0].parent == ""
    assert not [span for span in collector.spans if span.trace == "2" * 32]


async def test_what_goes_wrong_is_in_the_trace(collector: Collector, traced: Traced) -> None:
    trace = "3" * 32
    await traced.ask({"traceparent": f"00-{trace}-{PARENT}-01"}, max_tokens="-1")
    root = (await collector.spans_of(trace, {"POST /v1/ask", "body"}))["POST /v1/ask"]
    assert root.failed
    assert root.attributes["error.type"] == "invalid_field"
    assert root.attributes["http.response.status_code"] == 422
    trace = "4" * 32
    await traced.ask({"traceparent": f"00-{trace}-{PARENT}-01"}, question="word " * 9000)
    chat = (await collector.spans_of(trace, {"POST /v1/ask", CHAT}))[CHAT]
    assert chat.failed
    assert chat.attributes["error.type"] == "prompt_too_long"


async def test_a_client_that_left_is_in_the_trace(collector: Collector, traced: Traced) -> None:
    trace = "7" * 32
    headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
    schema = json.dumps({"type": "string", "minLength": 1500, "maxLength": 1600})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await traced.ask(headers, json_schema=schema, max_tokens="1900")
    root = (await collector.spans_of(trace, {"POST /v1/ask", CHAT}))["POST /v1/ask"]
    assert root.attributes["askimage.outcome"] == "cancelled"


async def test_probes_leave_no_traces(collector: Collector, traced: Traced) -> None:
    assert (await traced.get("/livez", {"traceparent": f"00-{'5' * 32}-{PARENT}-01"})).status_code == 200
    await asyncio.sleep(0.5)
    assert not [span for span in collector.spans if span.trace == "5" * 32]


async def test_the_last_spans_are_sent_before_the_end(collector: Collector, traced: Traced) -> None:
    """The last test: it ends the service."""
    trace = "6" * 32
    with contextlib.suppress(httpx.HTTPError):
        await traced.ask({"traceparent": f"00-{trace}-{PARENT}-01"})
    traced.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(traced.process.wait, 20) == 0
    assert {span.name for span in collector.spans if span.trace == trace} == NAMES
