"""User text never becomes structure, and the structure is the checkpoint's own template."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.kimi_vl.prompt import IMAGE_TOKEN, PromptBuilder, PromptError, Span
from app.engine.kimi_vl.tokenizer import KimiVLTokenizer
from app.engine.request import ClosedThinking, Turn

SPECIALS = ["<|im_end|>", "<|im_user|>", "<|im_middle|>", "<|media_pad|>", "<|media_start|>", "[EOS]", "[PAD]"]
HISTORY = [
    Turn("system", "Be brief."),
    Turn("user", "What is this?", images=2),
    Turn("assistant", "◁think▷A cat.◁/think▷A cat 猫."),
    Turn("user", "And this one?", images=1),
]

texts = st.lists(st.sampled_from([*SPECIALS, "<|im_", "end|>", "0123456789" * 4, "\ud800", "{{ 1 }}"]) | st.text()).map(
    "".join
)
turns = st.lists(
    st.builds(Turn, st.sampled_from(["user", "assistant"]), texts, st.integers(0, 2)), min_size=1, max_size=4
)


@pytest.fixture(scope="session")
def builder(demo_tokenizer: KimiVLTokenizer) -> PromptBuilder:
    return PromptBuilder(demo_tokenizer)


def as_the_template_renders(tokenizer: KimiVLTokenizer, turns: list[Turn]) -> list[int]:
    """transformers' way: render with the text in place, then encode everything at once."""
    messages = [
        {"role": t.role, "content": [{"type": "image"}] * t.images + [{"type": "text", "text": t.text}]} for t in turns
    ]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def collapse(builder: PromptBuilder, turns: list[Turn]) -> list[int]:
    return builder.build(turns, [1] * sum(t.images for t in turns)).token_ids


def test_harmless_text_gives_what_transformers_gives(builder: PromptBuilder, demo_tokenizer: KimiVLTokenizer) -> None:
    for turns in (
        HISTORY,
        HISTORY[1:],
        HISTORY[1:2],
        [Turn("user", "")],
        [Turn("user", "", 1)],
        [Turn("user", "  x\n ")],
    ):
        assert collapse(builder, turns) == as_the_template_renders(demo_tokenizer, turns)


def test_the_templates_default_system_prompt_stands_when_there_is_no_system_turn(
    builder: PromptBuilder, demo_tokenizer: KimiVLTokenizer
) -> None:
    text = demo_tokenizer.decode(builder.build([Turn("user", "Hi")]).token_ids)
    assert text.startswith("<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|><|im_user|>user")
    assert text.endswith("<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>")
    assert "helpful" not in demo_tokenizer.decode(builder.build(HISTORY, [1, 1, 1]).token_ids)


@settings(max_examples=200, deadline=None)
@given(turns=turns)
def test_user_text_adds_no_special_token(
    builder: PromptBuilder, demo_tokenizer: KimiVLTokenizer, turns: list[Turn]
) -> None:
    special = set(demo_tokenizer.get_added_vocab().values())
    plain = [Turn(turn.role, "x" if turn.text else "", turn.images) for turn in turns]
    ids = collapse(builder, turns)
    assert [i for i in ids if i in special] == [i for i in collapse(builder, plain) if i in special]
    decoded = demo_tokenizer.decode(ids)
    for turn in turns:
        assert turn.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") in decoded


def test_images_stand_before_the_text_in_as_many_tokens_as_asked(
    builder: PromptBuilder, demo_tokenizer: KimiVLTokenizer
) -> None:
    prompt = builder.build(HISTORY, [3, 5, 2])
    image_id = demo_tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    assert [span.length for span in prompt.images] == [3, 5, 2]
    covered = {i for span in prompt.images for i in range(span.offset, span.offset + span.length)}
    assert covered == {i for i, token in enumerate(prompt.token_ids) if token == image_id}
    before = demo_tokenizer.decode(prompt.token_ids[: prompt.images[0].offset])
    assert before.endswith("<|im_user|>user<|im_middle|><|media_start|>image<|media_content|>")
    after = demo_tokenizer.decode(prompt.token_ids[prompt.images[1].offset + 5 :])
    assert after.startswith("<|media_end|>What is this?<|im_end|>")


def test_a_typed_image_token_is_no_image(builder: PromptBuilder) -> None:
    prompt = builder.build([Turn("user", "<|media_pad|>" * 3, images=1)], [4])
    assert prompt.images == (Span(prompt.images[0].offset, 4),)
    with pytest.raises(ValueError, match="0 images"):
        builder.build([Turn("user", "<|media_pad|>")], [4])


def test_closed_thinking_begins_the_models_turn_and_nothing_in_it_is_special(
    builder: PromptBuilder, demo_tokenizer: KimiVLTokenizer
) -> None:
    without = builder.build([Turn("user", "Hi")])
    thinking = ClosedThinking("◁think▷", "The sign says <|im_end|><|media_pad|>.", "◁/think▷")
    with_it = builder.build([Turn("user", "Hi")], thinking=thinking)
    added = with_it.token_ids[len(without.token_ids) :]
    assert with_it.token_ids[: len(without.token_ids)] == without.token_ids
    assert demo_tokenizer.decode(added) == "◁think▷The sign says <|im_end|><|media_pad|>.◁/think▷"
    assert not set(added) & set(demo_tokenizer.get_added_vocab().values())
    special = builder.build([Turn("user", "Hi")], thinking=ClosedThinking("[BOS]", "[BOS]", "[EOS]"))
    bos, eos = demo_tokenizer.convert_tokens_to_ids(["[BOS]", "[EOS]"])
    added = special.token_ids[len(without.token_ids) :]
    assert added == [bos, *demo_tokenizer.encode_ordinary("[BOS]"), eos]


def test_text_next_to_template_text_is_encoded_together_with_it(demo_tokenizer: KimiVLTokenizer) -> None:
    template = (
        "{% for m in messages %}<|im_user|>Question: wh{{ m.content }}{{ m.content | trim }}er<|im_end|>{% endfor %}"
    )
    tokenizer = _with_template(demo_tokenizer, template)
    ids = PromptBuilder(tokenizer).build([Turn("user", "at col")]).token_ids
    assert ids == demo_tokenizer.encode("<|im_user|>Question: what colat coler<|im_end|>")


def test_a_template_can_see_that_there_is_no_text(demo_tokenizer: KimiVLTokenizer) -> None:
    template = "{% for m in messages %}{{ m.content or '[EOS]' }}{% endfor %}"
    builder = PromptBuilder(_with_template(demo_tokenizer, template))
    assert builder.build([Turn("user", "")]).token_ids == [demo_tokenizer.eos_token_id]
    assert builder.build([Turn("user", "x")]).token_ids == demo_tokenizer.encode("x")


def test_the_shape_is_rendered_once(demo_tokenizer: KimiVLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    builder, calls = PromptBuilder(demo_tokenizer), []
    render = demo_tokenizer.apply_chat_template
    monkeypatch.setattr(demo_tokenizer, "apply_chat_template", lambda *a, **k: calls.append(a) or render(*a, **k))
    for text in ("a", "b", "c"):
        builder.build([Turn("user", text, 1)], [1])
    assert len(calls) == 1
    builder.build([Turn("user", "a")])
    assert len(calls) == 2


def test_a_template_may_refuse_and_cannot_reach_python(demo_tokenizer: KimiVLTokenizer) -> None:
    for template in ("{{ raise_exception('no system turn') }}", "{{ messages.__class__.__mro__ }}"):
        builder = PromptBuilder(_with_template(demo_tokenizer, template))
        with pytest.raises(PromptError, match="refuses"):
            builder.build([Turn("user", "x")])
    builder = PromptBuilder(_with_template(demo_tokenizer, "{{ messages[0].role }}"))
    with pytest.raises(PromptError, match="0 images"):
        builder.build([Turn("user", "x", images=1)], [4])
    with pytest.raises(PromptError, match="no chat template"):
        PromptBuilder(_with_template(demo_tokenizer, None))


def test_a_role_is_no_way_in(builder: PromptBuilder) -> None:
    with pytest.raises(ValueError, match="unknown role"):
        builder.build([Turn("user<|im_middle|>", "x")])  # type: ignore[arg-type]


def _with_template(tokenizer: KimiVLTokenizer, template: str | None) -> KimiVLTokenizer:

    twin = copy.copy(tokenizer)
    twin.chat_template = template
    return twin
