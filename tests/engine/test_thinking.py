"""The splitter, at every split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.thinking import Channel, Markers, ThinkingSplitter

MARKERS = Markers("◁think▷", "◁/think▷")


def split(pieces: list[str], **options: bool) -> tuple[str, str]:
    splitter = ThinkingSplitter(MARKERS, **options)
    deltas = [delta for piece in pieces for delta in splitter.feed(piece)] + splitter.finish()
    texts = ["".join(delta.text for delta in deltas if delta.channel is channel) for channel in Channel]
    return texts[0], texts[1]


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("◁think▷I see a sign.◁/think▷OPEN", "I see a sign.", "OPEN"),
        ("  \n◁think▷\nwhy\n◁/think▷\n\nOPEN\n", "why\n", "OPEN\n"),
        ("OPEN", "", "OPEN"),
        ("◁think▷never closed", "never closed", ""),
        ("◁think▷a◁think▷b◁/think▷c◁/think▷d", "a b", "c d"),
        ("text ◁think▷x", "", "text  x"),
        ("◁thi", "", "◁thi"),
        ("◁think▷5 ◁ 6◁/think▷yes ◁", "5 ◁ 6", "yes ◁"),
        ("◁think▷◁/think▷no thoughts", "", "no thoughts"),
        ("answer ◁th◁think▷ink▷ end", "", "answer ◁th ink▷ end"),
        ("", "", ""),
    ],
)
def test_text_is_split_the_same_at_every_cut(text: str, reasoning: str, answer: str) -> None:
    for cut in range(len(text) + 1):
        assert split([text[:cut], text[cut:]]) == (reasoning, answer)
    assert split(list(text)) == (reasoning, answer)


@given(
    st.lists(st.sampled_from(["◁", "think", "/", "▷", "◁think▷", "◁/think▷", "a", " ", "◁/"]), max_size=20), st.data()
)
def test_no_marker_text_leaves_the_splitter_however_it_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reasoning, answer = split(pieces)
    for marker in (MARKERS.open, MARKERS.close):
        assert marker not in reasoning
        assert marker not in answer
    assert (reasoning, answer) == split([text])


def test_after_a_prefilled_block_everything_is_the_answer() -> None:
    assert split(["red", " circle"], answering=True) == ("", "red circle")


def test_a_cut_off_thinking_continues_with_the_answer() -> None:
    splitter = ThinkingSplitter(MARKERS)
    splitter.feed("◁think▷long thoughts ◁/th")
    splitter.close()
    assert [(delta.channel, delta.text) for delta in splitter.feed(" OPEN")] == [(Channel.ANSWER, "OPEN")]
