"""Offline tokenizers: ids are what they promise to be, and text survives the round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from m2flow.models.tokenizer import byte_tokenizer, character_tokenizer

CHARACTERS = "0123456789+=,# \n"
BYTES = byte_tokenizer()
DIGITS = character_tokenizer(CHARACTERS)
# Surrogates cannot be written in UTF-8.
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts)
@example("<eos> is text, <pad> too")
@example("  two  spaces , before . points\r\n\x00")
@example("can't  don’t \N{GRINNING FACE} e\N{COMBINING ACUTE ACCENT}")
def test_bytes_make_the_round_trip_and_are_their_values(text: str) -> None:
    ids = BYTES(text).input_ids
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text
    assert BYTES.decode([*ids, BYTES.eos_token_id], skip_special_tokens=True) == text


@given(st.text(CHARACTERS))
@example("12 , 3\n\n 4")
def test_characters_make_the_round_trip_one_token_each(text: str) -> None:
    ids = DIGITS(text).input_ids
    assert ids == [CHARACTERS.index(character) for character in text]
    assert DIGITS.decode(ids) == text
    assert DIGITS.decode([*ids, DIGITS.eos_token_id], skip_special_tokens=True) == text


@pytest.mark.parametrize(("tokenizer", "plain"), [(BYTES, 256), (DIGITS, len(CHARACTERS))])
def test_special_tokens_follow_the_plain_ones(
    tokenizer: PreTrainedTokenizerFast, plain: int
) -> None:
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (plain, plain + 1)
    assert len(tokenizer) == plain + 2


def test_bytes_that_are_no_text_decode_to_replacement_characters() -> None:
    assert BYTES.decode([0xFF, 0x41]) == "\N{REPLACEMENT CHARACTER}A"


def test_a_batch_is_padded_on_the_left() -> None:
    batch = DIGITS(["1", "123"], padding=True)
    pad = DIGITS.pad_token_id
    assert batch.input_ids == [[pad, pad, 1], [1, 2, 3]]
    assert batch.attention_mask == [[0, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize("text", ["1a", "<eos>"])
def test_a_character_that_is_not_in_the_vocabulary_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="vocabulary"):
        DIGITS(text)


@pytest.mark.parametrize("tokenizer", [BYTES, DIGITS])
def test_hugging_face_layout_reads_back_the_same(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    back = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "12 , 3\n = 4#"
    assert back(text).input_ids == tokenizer(text).input_ids
    assert back.decode(back(text).input_ids) == text
    assert (back.eos_token_id, back.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    assert back.get_vocab() == tokenizer.get_vocab()
    if tokenizer is BYTES:
        assert back("<eos>").input_ids == list(b"<eos>")


@pytest.mark.parametrize("characters", ["", "abca"])
def test_a_vocabulary_needs_each_character_once(characters: str) -> None:
    with pytest.raises(AssertionError, match="each once"):
        character_tokenizer(characters)
