"""Conversations in text: what an engine wrote stays the tokens that it was."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from router_script import request, respond
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slime_core.errors import EngineError, ModelError
from slime_core.types.completion import FinishReason
from slime_core.types.sample import VersionSpan
from slime_router.plugin import RadixCache
from slime_router.radix_tree import RadixTree
from slime_router.segment import Segment, token_ids_of


@pytest.fixture
def cache(characters):
    return RadixCache.build(RadixCache.Config(tokenizer=str(characters)))


@pytest.fixture
def ids(characters):
    tokenizer = Tokenizer.from_file(str(characters / "tokenizer.json"))

    def of(*pieces):
        return [tokenizer.token_to_id(piece) for piece in pieces]

    return of


def engine(*responses, **fields):
    left, seen = list(responses), []

    async def call_next(asked):
        seen.append(asked)
        return respond(asked, left.pop(0), **fields)

    return call_next, seen


def text_request(text, **fields):
    return request(token_ids=(), text=text, **fields)


async def test_generated_text_is_not_tokenized_again(cache, ids):
    written = ids("4", "2")
    call_next, seen = engine(written, ids("7"))
    first = await cache(text_request("40+2=", session_id="s"), call_next)
    assert first.prompt_token_ids.tolist() == ids("4", "0", "+", "2", "=")
    second = await cache(text_request("40+2=42?42", session_id="s"), call_next)
    # The engine's 42 is two tokens; the caller's, which is new text, is one.
    expected = ids("4", "0", "+", "2", "=", "4", "2", "?", "42")
    assert seen[1].token_ids.tolist() == expected == second.prompt_token_ids.tolist()
    assert seen[1].token_ids.dtype == np.int32
    found = await cache.retrieve("40+2=42?427+", "s")
    assert found.token_ids.tolist() == [*expected, *ids("7", "+")]
    assert found.loss_mask.tolist() == [0] * 5 + [1, 1] + [0, 0] + [1] + [0]
    in_eighths = [0] * 5 + written + [0, 0] + ids("7") + [0]
    np.testing.assert_array_equal(found.log_probs, -np.array(in_eighths, np.float32) / 8)
    assert found.spans == (VersionSpan(3, 5, 7), VersionSpan(3, 9, 10))
    assert cache.metrics()["known_tokens"] == 7


async def test_sessions_keep_apart_and_share_nothing(cache, ids):
    call_next, seen = engine(ids("4", "2"), ids("42"), ids("1"), ids("1"), ids("1"))
    for session in "ab":
        await cache(text_request("?", session_id=session), call_next)
    for session in ("a", "b", None):
        await cache(text_request("?42+", session_id=session), call_next)
    assert [one.token_ids.tolist() for one in seen[2:]] == [
        ids("?", "4", "2", "+"),
        ids("?", "42", "+"),
        ids("?", "42", "+"),
    ]


async def test_the_end_of_a_turn_may_be_in_the_text_or_not(cache, ids):
    (end,) = ids("<end>")
    call_next, seen = engine([*ids("4", "2"), end], ids("1"), ids("1"))
    await cache(text_request("?"), call_next)
    await cache(text_request("?42<end>+"), call_next)
    await cache(text_request("?42+"), call_next)
    assert seen[1].token_ids.tolist() == [*ids("?", "4", "2"), end, *ids("+")]
    assert seen[2].token_ids.tolist() == ids("?", "4", "2", "+")


async def test_a_response_that_the_caller_changed_is_the_callers(cache, ids):
    call_next, seen = engine(ids("4", "2", "1"), ids("1"))
    await cache(text_request("?"), call_next)
    await cache(text_request("?42+"), call_next)
    assert seen[1].token_ids.tolist() == ids("?", "42", "+")


async def test_spans_of_several_versions_and_an_aborted_response(cache, ids):
    call_next, _ = engine(ids("4", "2", "1"), spans=(VersionSpan(1, 0, 2), VersionSpan(2, 2, 3)))
    await cache(text_request("?"), call_next)
    call_next, _ = engine([], finish_reason=FinishReason.ABORT, spans=())
    ended = await cache(text_request("?421+"), call_next)
    assert ended.finish_reason is FinishReason.ABORT
    found = await cache.retrieve("?421+")
    assert found.spans == (VersionSpan(1, 1, 3), VersionSpan(2, 3, 4))


async def test_requests_with_tokens_pass_and_an_empty_text_is_refused(cache):
    call_next, seen = engine([1], [1])
    asked = request(token_ids=(3, 4))
    await cache(asked, call_next)
    assert seen == [asked]
    with pytest.raises(EngineError, match="has no tokens"):
        await cache(text_request(""), call_next)


async def test_many_conversations_at_once(cache, ids):
    """Three turns of 30 conversations, interleaved, in one session: they are distinguished by their text."""

    async def call_next(asked):
        await asyncio.sleep(0.001 * random.Random(asked.seed).random())
        return respond(asked, ids("4", "2"))

    async def talk(number):
        text, tokens = f"{number}+", ids(*str(number), "+")
        for turn in range(3):
            completion = await cache(text_request(text, seed=number + turn), call_next)
            assert completion.prompt_token_ids.tolist() == tokens
            text, tokens = text + "42=", [*tokens, *ids("4", "2", "=")]

    await asyncio.gather(*(talk(number) for number in range(100, 130)))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A byte-level BPE, with the 256 bytes and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, special_tokens=["<|im_end|>"])
    tokenizer.train_from_iterator(["the end, the beginning, then"], trainer)
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, tokenizer


async def test_characters_of_several_tokens(byte_level):
    folder, tokenizer = byte_level
    cache = RadixCache.build(RadixCache.Config(tokenizer=str(folder)))
    bytewise = [tokenizer.token_to_id(piece) for piece in "theÃ©"]  # the bytes of "theé", as this tokenizer writes them
    assert None not in bytewise
    assert tokenizer.encode("theé").ids != bytewise
    end = tokenizer.token_to_id("<|im_end|>")
    # The last character is cut in two by the end of the first response: what is no character yet is shown as one sign.
    call_next, seen = engine([*bytewise, end], bytewise[:-1], [9])
    await cache(text_request("é: "), call_next)
    await cache(text_request("é: theé<|im_end|>the "), call_next)
    prompt = tokenizer.encode("é: ").ids
    middle = tokenizer.encode("the ").ids
    assert seen[1].token_ids.tolist() == [*prompt, *bytewise, end, *middle]
    await cache(text_request("é: theé<|im_end|>the the\ufffd the"), call_next)
    assert seen[2].token_ids.tolist() == [
        *prompt, *bytewise, end, *middle, *bytewise[:-1], *tokenizer.encode(" the").ids,
    ]  # fmt: skip


def test_tokenizers_that_will_not_do(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json there"):
        RadixCache.build(RadixCache.Config(tokenizer=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        RadixCache.build(RadixCache.Config(tokenizer=str(tmp_path)))
    spaced = Tokenizer(models.WordLevel({"▁a": 0, "a": 1}, unk_token="a"))
    spaced.pre_tokenizer = pre_tokenizers.Metaspace()
    spaced.decoder = decoders.Metaspace()
    spaced.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="a space before every piece"):
        RadixCache.build(RadixCache.Config(tokenizer=str(tmp_path)))


def segment_of(parent, *token_ids, version=None):
    spans = () if version is None else (VersionSpan(version, 0, len(token_ids)),)
    return replace(Segment.written(parent, np.array(token_ids, np.int32)), sampled=version is not None, spans=spans)


def test_the_tree_agrees_with_a_plain_table():
    """Against a dictionary from text to tokens, searched from the longest beginning down."""
    draw, tree, table, numbers = random.Random(7), RadixTree(max_bytes=2**30, keep_versions=9), {}, 0
    hits = 0
    for _ in range(3000):
        text = "".join(draw.choice("ab") for _ in range(draw.randrange(1, 12)))
        known = tree.longest("s", text)
        best = max((length for length in range(1, len(text) + 1) if text[:length] in table), default=0)
        assert known.length == best
        assert (token_ids_of(known.segment).tolist() if known.segment else []) == table.get(text[:best], [])
        hits += best > 0
        if best < len(text) and draw.random() < 0.2:
            numbers += 1
            tree.mark("s", text, segment_of(known.segment, numbers), num_characters=len(text) - best)
            table[text] = [*table.get(text[:best], []), numbers]
    assert len(tree) == len(table) > 200
    assert hits > 1000


def test_the_least_recently_used_is_removed_and_its_memory_is_free():
    room = RadixTree(max_bytes=20_000, keep_versions=9)
    for number in range(100):
        text = f"conversation {number:03d}"
        room.mark(f"s{number}", text, segment_of(None, *range(200)), num_characters=len(text))
        # The first one is used again and again.
        assert room.longest("s0", "conversation 000 continues").length == 16
        assert room.num_bytes <= 20_000
    assert 3 <= len(room) <= 10
    assert room.forgotten == 100 - len(room)
    assert room.longest("s50", "conversation 050").length == 0
    assert room.longest("s99", "conversation 099").length == 16
    # A place of its own for each session that is left, none for the others.
    assert len(room._roots) == len(room)
    # 200 int32 and as many float32 each: the bound is not met by counting too little.
    assert room.num_bytes >= len(room) * 200 * 8


def test_memory_that_a_continuation_needs_still_counts():
    room = RadixTree(max_bytes=2**30, keep_versions=9)
    first = segment_of(None, *range(1000))
    room.mark("s", "a", first, num_characters=1)
    before = room.num_bytes
    room.mark("s", "ab", segment_of(first, 1), num_characters=1)
    # The same text with other tokens takes the place, but the continuation holds on to the old ones.
    room.mark("s", "a", segment_of(None, 5), num_characters=1)
    del first
    assert room.num_bytes >= before + 1000
    assert token_ids_of(room.longest("s", "ab").segment).tolist() == [*range(1000), 1]
    assert token_ids_of(room.longest("s", "ac").segment).tolist() == [5]
    room.mark("s", "ab", segment_of(None, 6), num_characters=1)
    assert room.num_bytes < before


def test_versions_that_have_passed_by_are_forgotten():
    room = RadixTree(max_bytes=2**30, keep_versions=2)
    room.mark("s", "prompt", segment_of(None, 1), num_characters=6)
    for version in (100, 101, 102):
        room.mark("s", f"v{version}", segment_of(None, 1, version=version), num_characters=4)
        room.longest("s", "v100 continues")
    # The prompt was marked before the first version was known, and counts as of that one.
    assert room.longest("t", "prompt").length == 0
    assert len(room) == 4
    room.mark("s", "v103", segment_of(None, 1, version=103), num_characters=4)
    assert len(room) == 4
    assert room.longest("s", "prompt").length == 0
    assert room.longest("s", "v100").length == 4
    room.mark("s", "v105", segment_of(None, 1, version=105), num_characters=4)
    assert [room.longest("s", f"v{n}").length for n in (100, 101, 102, 103, 105)] == [4, 0, 0, 4, 4]
