"""Fields and reply of `POST /v1/ask`."""

import json
from typing import Annotated, Any, Literal, NoReturn

from fastapi import UploadFile
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from app.engine.request import FinishReason, Timings, Usage

MAX_SCHEMA_CHARACTERS = 16_384  # the engine's time to compile a schema grows faster than its length
MAX_HISTORY_TURNS = 100
_JSON_TEXT = {"type": "string", "contentMediaType": "application/json"}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse_json(value: object) -> object:
    if isinstance(value, str):
        try:
            return json.loads(value, parse_constant=_no_constant)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None
    return value


def _parse_schema(value: object) -> object:
    if isinstance(value, str) and len(value) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"the schema has {len(value)} characters; at most {MAX_SCHEMA_CHARACTERS} are taken")
    return _parse_json(value)


class HistoryTurn(BaseModel):
    """One earlier message."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["user", "assistant"]
    content: str


class AskForm(BaseModel):
    """The multipart fields."""

    model_config = ConfigDict(extra="forbid")

    question: Annotated[str, Field(min_length=1, pattern=r"\S", description="What to answer.")]
    image: Annotated[list[UploadFile], Field(description="One or several image files, in order.")] = []
    image_id: Annotated[list[str], Field(description="Ids of uploaded images, after the files.")] = []
    system: Annotated[str | None, Field(description="System prompt instead of the checkpoint's own.")] = None
    history: Annotated[
        tuple[HistoryTurn, ...],
        BeforeValidator(_parse_json),
        WithJsonSchema(_JSON_TEXT),
        Field(
            max_length=MAX_HISTORY_TURNS,
            description="Earlier turns, as a JSON list of {role, content}; the images belong to the first question.",
        ),
    ] = ()
    max_tokens: Annotated[int | None, Field(ge=1, description="Most tokens of thinking and answer.")] = None
    temperature: Annotated[float | None, Field(ge=0, le=2, description="0 is greedy.")] = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    seed: Annotated[int | None, Field(ge=0, le=2**63 - 1)] = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=16, description="Strings that end the answer; repeatable."),
    ] = []
    stream: Annotated[bool, Field(description="Reply with server-sent events.")] = False
    thinking: Annotated[Literal["auto", "off"], Field(description="`off`: answer at once.")] = "auto"
    thinking_budget: Annotated[int | None, Field(ge=0, description="Most tokens of thinking.")] = None
    json_schema: Annotated[
        dict[str, Any] | None,
        BeforeValidator(_parse_schema),
        WithJsonSchema(_JSON_TEXT),
        Field(description="The answer is JSON of this schema; the thinking stays free."),
    ] = None
    deadline_ms: Annotated[
        int | None, Field(ge=1, le=86_400_000, description="End of the whole request, from its arrival.")
    ] = None

    def sampling(self) -> dict[str, Any]:
        """The fields that `GenerationRequest` takes over by name."""
        fields = self.model_dump(
            exclude={"question", "image", "image_id", "system", "history", "stream", "deadline_ms"}
        )
        return fields | {"stop": tuple(self.stop)}


class ImageInfo(BaseModel):
    """What became of an image."""

    id: str = Field(description="SHA-256 of the file's bytes.")
    width: int
    height: int
    format: str
    frames: int = Field(description="Frames or pages in the file; the first one is used.")
    resized_to: tuple[int, int] | None = Field(description="Width and height before padding.")
    tokens: int


class AskReply(BaseModel):
    """The reply when it is not streamed."""

    id: str
    model: str
    answer: str | None = Field(description="null when the output ended inside the thinking, cut or not.")
    reasoning: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    images: list[ImageInfo]
