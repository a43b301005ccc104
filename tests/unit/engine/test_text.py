"""Text that is shown piece by piece is, put together, the text of all tokens.

Catches: half a character shown as a replacement sign, text lost or doubled at the border of the
window that is decoded, a special token that swallows what was held back, a partial stop text that
is shown and cannot be taken back, and a stop text that is found too late or not at all.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.engine.text import Detokenizer, find_stop, num_safe
from fledge.models.tokenizer import TargetTokenizer
from fledge.testing import tiny_tokenizer

TOKENIZER = TargetTokenizer(tiny_tokenizer())
NUM_SPECIAL = 6
EOS = 2


def streamed(token_ids: list[int]) -> list[str]:
    """The text after each token, then after the flush."""
    detokenizer = Detokenizer(TOKENIZER.decode)
    said: list[int] = []
    detokenizer.follow(said)
    texts = []
    for token_id in token_ids:
        said.append(token_id)
        texts.append(detokenizer.text)
    detokenizer.flush()
    return [*texts, detokenizer.text]


@pytest.mark.parametrize("text", ["naïve café", "日本語", "👩‍👩‍👧 family", "a\n\tb  c ", "e\u0301"])
def test_characters_appear_whole(text: str) -> None:
    """The tokenizer has one token per byte, so every character beyond ASCII is split."""
    token_ids = TOKENIZER.encode(text)
    assert len(token_ids) == len(text.encode())
    shown = streamed(token_ids)
    assert shown[-1] == text
    assert all(text.startswith(part) for part in shown)
    for i, part in enumerate(shown[:-1]):
        arrived = text.encode()[: i + 1].decode(errors="ignore")
        assert part == arrived, "a character is shown as soon as it is whole, and not before"


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=30)
)
def test_any_text_comes_out_again(text: str) -> None:
    """Without "<": a text that spells a special token is read as that token."""
    token_ids = TOKENIZER.encode(text)
    assert streamed(token_ids)[-1] == TOKENIZER.decode(token_ids) == text


@given(st.lists(st.integers(0, TOKENIZER.num_tokens - 1), max_size=30))
def test_random_tokens_stream_to_what_they_decode_to(token_ids: list[int]) -> None:
    """Random bytes are mostly no text at all: replacement signs must come out as often as in one
    decoding of everything. Special tokens are among them and show nothing."""
    shown = streamed(token_ids)
    assert shown[-1] == TOKENIZER.decode(token_ids)
    for earlier, later in zip(shown, shown[1:], strict=False):
        assert later.startswith(earlier), "shown text was taken back"


@given(st.lists(st.integers(NUM_SPECIAL, TOKENIZER.num_tokens - 1), max_size=12))
def test_text_before_the_flush_never_ends_inside_a_character(token_ids: list[int]) -> None:
    for part in streamed(token_ids)[:-1]:
        assert not part.endswith("\ufffd")


def test_an_answer_that_ends_inside_a_character_shows_the_replacement_sign_once() -> None:
    token_ids = TOKENIZER.encode("a日")[:-1]
    assert streamed(token_ids) == ["a", "a", "a", "a\ufffd"]


def test_special_tokens_between_the_bytes_of_a_character() -> None:
    first, *rest = TOKENIZER.encode("é")
    assert streamed([first, EOS, *rest])[-1] == TOKENIZER.decode([first, EOS, *rest])


def test_flushing_twice_adds_nothing() -> None:
    detokenizer = Detokenizer(TOKENIZER.decode)
    detokenizer.follow(TOKENIZER.encode("ab日")[:-1])
    detokenizer.flush()
    text = detokenizer.text
    detokenizer.flush()
    assert detokenizer.text == text


def test_an_answer_that_nobody_streams_is_decoded_once() -> None:
    decoded: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return TOKENIZER.decode(token_ids)

    detokenizer = Detokenizer(decode)
    token_ids = TOKENIZER.encode("a whole answer")
    detokenizer.follow(token_ids)
    detokenizer.flush()
    assert detokenizer.text == "a whole answer"
    assert decoded == [len(token_ids)]


# Two letters and short stops, so that overlaps and repeated beginnings are the rule.
letters = st.text(alphabet="ab", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(letters, stop_lists, st.integers(0, 12))
def test_find_stop_is_the_earliest(text: str, stops: list[str], start: int) -> None:
    places = [
        i for i in range(start, len(text) + 1) if any(text.startswith(stop, i) for stop in stops)
    ]
    assert find_stop(text, stops, start) == (places[0] if places else None)


@given(letters, stop_lists)
def test_num_safe_holds_back_the_longest_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    held = [
        length
        for length in range(len(text) + 1)
        if any(len(stop) > length and stop.startswith(text[len(text) - length :]) for stop in stops)
    ]
    assert num_safe(text, stops) == len(text) - max(held)


@given(letters, letters, stop_lists)
def test_safe_text_survives_whatever_comes(text: str, more: str, stops: list[str]) -> None:
    """Text without a stop, then more text with one: what was safe is before the stop."""
    if find_stop(text, stops) is not None:
        return
    position = find_stop(text + more, stops)
    assert position is None or num_safe(text, stops) <= position


def test_num_safe_without_stops_is_everything() -> None:
    assert num_safe("anything", ()) == len("anything")
