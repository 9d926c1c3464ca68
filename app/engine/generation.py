"""One question through the engine: thinking first, then the answer.

Usually that is one engine request. A second one follows, on prompt and thinking (cheap where the engine has a prefix
cache), when the answer has rules that the thinking must not have (`stop`, `json_schema`), or when the thinking used up
its budget and the answer is forced.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from app.engine.adapter import Adapter, Rendered
from app.engine.request import PRIORITIES, EnginePhase, FinishReason, GenerationRequest, Result, Timings, Usage
from app.engine.thinking import Channel, Delta, Markers, ThinkingSplitter
from app.errors import EngineDead, EngineError, InvalidField, PromptTooLong

Events = AsyncGenerator[Delta | Result, None]
"""Deltas as they come, then the result."""


class Generation:
    """Runs one request; iterate `run` once.

    Args:
        engine: vLLM's `AsyncLLMEngine`.
        adapter: Renders prompts and images for the model.
        request: The question.
        markers: The model's thinking markers.
        temperature: Sampling temperature where the request names none.
        max_tokens: Bound on thinking and answer where the request names none.
        context: Most tokens of prompt and output together.
    """

    def __init__(
        self,
        engine: Any,
        adapter: Adapter,
        request: GenerationRequest,
        *,
        markers: Markers,
        temperature: float,
        max_tokens: int,
        context: int,
    ) -> None:
        self._engine = engine
        self._adapter = adapter
        self._request = request
        self._markers = markers
        self._temperature = temperature if request.temperature is None else request.temperature
        self._max_tokens = request.max_tokens or max_tokens
        self._context = context
        self._answer_has_rules = bool(request.stop) or request.json_schema is not None
        answering = request.thinking == "off" or request.thinking_budget == 0
        self._splitter = ThinkingSplitter(markers, answering=answering)
        self._closed_thinking = markers.closed("") if answering else None
        self._texts: dict[Channel, list[str]] = {channel: [] for channel in Channel}
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._rendered: Rendered | None = None
        self._params: Any = None
        self._prompt: Rendered | None = None
        self._cached_tokens = 0
        self._ttft = 0.0
        self._phases: list[EnginePhase] = []
        self._finish: FinishReason | None = None

    async def prepare(self) -> None:
        """Render the prompt, so that what does not fit is refused before a stream begins.

        Raises:
            PromptTooLong: The prompt leaves no room for an answer.
            InvalidField: The model's template or processor refuses the request.
        """
        self._rendered = await self._adapter.render(self._request.turns, self._request.images, self._closed_thinking)
        self._prompt = self._prompt or self._rendered
        self._params = self._sampling_params(self._rendered.prompt_tokens)

    @property
    def image_tokens(self) -> int:
        """Tokens of all images; known after `prepare`."""
        return sum(self._prompt.image_tokens) if self._prompt is not None else 0

    async def run(self) -> Events:
        """After `prepare`: yield the deltas and, last, the result.

        Raises:
            InvalidField: The engine refuses a parameter.
            EngineDead: The engine ended.
        """
        while True:
            async with aclosing(self._phase()) as deltas:
                async for delta in deltas:
                    self._texts[delta.channel].append(delta.text)
                    yield delta
            if self._finish is not None:
                break
            await self.prepare()
        yield self._result(self._finish)

    async def _phase(self) -> AsyncGenerator[Delta, None]:
        """One engine request. It ends with `_finish` set, or `_closed_thinking` set for the next one to go on from."""
        answering = self._splitter.channel is Channel.ANSWER
        output = None
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    deltas = self._take(output)
                    switch = self._answer_has_rules and not answering and self._splitter.channel is Channel.ANSWER
                    for delta in deltas:
                        if not (switch and delta.channel is Channel.ANSWER):
                            yield delta
                    answer_apart = switch and self._completion_tokens < self._max_tokens
                    if answer_apart or (self._budget_is_spent and not output.finished):
                        thought = self._splitter.thought or not answer_apart
                        self._closed_thinking = self._markers.closed(self._text(Channel.REASONING)) if thought else None
                        self._splitter.close()
                        return
        finally:
            if output is not None and output.metrics is not None:
                stats = output.metrics
                times = stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts
                self._phases.append(EnginePhase(*times))
        assert output is not None
        reason = output.outputs[0].finish_reason
        if reason == "length":  # text held back as a possible marker is not shown
            self._finish = "length" if self._splitter.channel is Channel.ANSWER else "thinking_length"
        elif reason == "error":
            if self._request.json_schema is not None:
                raise InvalidField("json_schema: the engine could not compile it", field="json_schema")
            raise EngineError("the engine gave up on this request")
        else:
            for delta in self._splitter.finish():
                yield delta
            self._finish = "cancelled" if reason == "abort" else "stop"

    async def _outputs(self) -> AsyncGenerator[Any, None]:
        """vLLM's outputs, with its errors as ours."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        assert self._rendered is not None
        request = self._request
        try:
            stream = self._engine.generate(
                self._rendered.engine_input,
                self._params,
                request.id,
                priority=PRIORITIES[request.priority],
                trace_headers=request.trace_headers,
            )
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    yield output
        except EngineDeadError:
            raise EngineDead("the inference engine has ended; the service is restarting") from None
        except (VLLMClientError, ValueError) as error:
            raise InvalidField(str(error)) from error
        except EngineGenerateError as error:
            raise EngineError(f"the engine could not run this request: {error.__cause__ or error}") from error

    def _text(self, channel: Channel) -> str:
        return "".join(self._texts[channel])

    def _take(self, output: Any) -> list[Delta]:
        """Account for one engine output and split its text."""
        completion = output.outputs[0]
        if not self._completion_tokens:
            self._ttft = time.monotonic() - self._request.arrived
            self._cached_tokens = output.num_cached_tokens or 0
        thinking = self._splitter.channel is not Channel.ANSWER
        self._completion_tokens += len(completion.token_ids)
        deltas = self._splitter.feed(completion.text)
        if thinking and self._splitter.thought:
            self._reasoning_tokens = self._completion_tokens
        return deltas

    @property
    def _budget_is_spent(self) -> bool:
        """Asked after each engine output, which under load can hold a few tokens more than the budget."""
        budget = self._request.thinking_budget
        thinking = self._splitter.channel is not Channel.ANSWER
        return budget is not None and thinking and self._completion_tokens >= budget

    def _sampling_params(self, prompt_tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        room = self._context - prompt_tokens
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens, images included; the model's context holds {self._context}, "
                "answer included. Shorten the question or send fewer or smaller images",
                field="question",
                limit=self._context,
            )
        request, schema = self._request, self._request.json_schema
        answering = self._splitter.channel is Channel.ANSWER
        return SamplingParams(
            max_tokens=min(self._max_tokens - self._completion_tokens, room),
            temperature=self._temperature,
            top_p=request.top_p,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            seed=request.seed,
            stop=list(request.stop) if answering else None,
            structured_outputs=StructuredOutputsParams(json=schema) if answering and schema is not None else None,
            output_kind=RequestOutputKind.DELTA,
        )

    def _result(self, finish_reason: FinishReason) -> Result:
        assert self._prompt is not None
        answered = self._splitter.channel is Channel.ANSWER
        queue = self._request.admission_seconds + sum(phase.queued_seconds for phase in self._phases)
        prefill = sum(phase.first_token - phase.scheduled for phase in self._phases)
        decode = sum(phase.last_token - phase.first_token for phase in self._phases)
        return Result(
            answer=self._text(Channel.ANSWER) if answered else None,
            reasoning=self._text(Channel.REASONING),
            finish_reason=finish_reason,
            usage=Usage(
                prompt_tokens=self._prompt.prompt_tokens,
                image_tokens=self.image_tokens,
                cached_tokens=self._cached_tokens,
                reasoning_tokens=self._reasoning_tokens,
                completion_tokens=self._completion_tokens,
            ),
            timings=Timings(
                preprocess_ms=round(self._request.preprocess_seconds * 1e3, 2),
                queue_ms=round(queue * 1e3, 2),
                prefill_ms=round(prefill * 1e3, 2),
                ttft_ms=round(self._ttft * 1e3, 2),
                decode_ms=round(decode * 1e3, 2),
                total_ms=round((time.monotonic() - self._request.arrived) * 1e3, 2),
                tokens_per_second=round((self._completion_tokens - len(self._phases)) / decode, 1) if decode else 0.0,
            ),
            image_tokens=self._prompt.image_tokens,
            phases=tuple(self._phases),
        )
