"""Shares per user, and bytes of unsent responses."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Scope

from gpumond.serve.http import FEW_RESPONSES, LARGE_PIECE_BYTES, PIECE_BYTES, UnsentResponses, in_pieces
from gpumond.serve.limits import LOOPBACK, SharedResource, user_of

KIB = 1024


@pytest.mark.parametrize(
    ("uid", "address", "user"),
    [
        (1000, "127.0.0.1", "uid:1000"),
        (0, "", "uid:0"),
        (None, "127.0.0.1", LOOPBACK),
        (None, "127.9.8.7", LOOPBACK),
        (None, "::1", LOOPBACK),
        (None, "::ffff:127.0.0.2", LOOPBACK),
        (None, "10.0.0.7", "10.0.0.7"),
        (None, "::ffff:10.0.0.7", "10.0.0.7"),
        (None, "fe80::1%eth0", "fe80::1"),
        (None, "", ""),
    ],
)
def test_user_is_a_uid_or_an_address_and_all_loopback_addresses_are_one(uid: int | None, address: str, user: str):
    assert user_of(uid, address) == user


def test_user_has_at_most_its_share_of_the_whole():
    shares: SharedResource[str] = SharedResource(5, 3)
    for claim in "abc":
        assert shares.admits("greedy")
        shares.add("greedy", claim)
    assert not shares.admits("greedy")
    assert shares.admits("honest", 2)
    assert not shares.admits("honest", 3)
    shares.add("honest", "d", 2)
    assert not shares.admits("another")
    assert (shares.used, shares.used_by("greedy"), shares.users()) == (5, 3, ["greedy", "honest"])
    assert shares.claims("greedy") == ("a", "b", "c")
    assert (shares.remove("greedy", "a"), shares.remove("greedy", "a")) == (True, False)
    assert (shares.used, shares.used_by("greedy"), shares.used_by("unknown")) == (4, 2, 0)


class Reader:
    """Reader that accepts nothing until it is dropped."""

    def __init__(self, unsent: UnsentResponses, user: str, body: bytes) -> None:
        self.dropped = False
        self.sending = unsent.begin(user, body, self.drop)

    def drop(self) -> None:
        self.dropped = True


def test_shared_body_counts_once_for_all_its_readers():
    unsent = UnsentResponses(10 * KIB, 10 * KIB)
    body = bytes(6 * KIB)
    readers = [Reader(unsent, f"uid:{number % 3}", body) for number in range(100)]
    assert unsent.bytes == 6 * KIB
    assert not any(reader.dropped for reader in readers)
    for reader in readers:
        unsent.end(reader.sending)
    assert unsent.bytes == 0


def test_oldest_body_of_the_largest_user_is_dropped_above_the_limit():
    unsent = UnsentResponses(10 * KIB, 10 * KIB)
    honest = Reader(unsent, "honest", bytes(3 * KIB))
    old = bytes(3 * KIB)
    greedy = [Reader(unsent, "greedy", old) for _ in range(5)]
    newer = Reader(unsent, "greedy", bytes(4 * KIB))
    another = Reader(unsent, "another", bytes(3 * KIB))
    assert all(reader.dropped for reader in greedy)
    assert not any(reader.dropped for reader in (honest, newer, another))
    assert unsent.bytes == 10 * KIB
    for reader in greedy:
        unsent.end(reader.sending)  # its task ends later
    assert unsent.bytes == 10 * KIB


def test_unsent_bytes_of_one_user_are_limited_to_its_share():
    unsent = UnsentResponses(100 * KIB, 8 * KIB)
    readers = [Reader(unsent, "greedy", bytes(3 * KIB)) for _ in range(10)]
    assert [reader.dropped for reader in readers] == [True] * 8 + [False] * 2
    assert unsent.bytes == 6 * KIB


def test_response_above_the_limit_drops_all_others():
    unsent = UnsentResponses(10 * KIB, 5 * KIB)
    before = Reader(unsent, "uid:1", bytes(KIB))
    large = Reader(unsent, "uid:2", bytes(20 * KIB))
    assert (before.dropped, large.dropped) == (True, False)
    unsent.end(large.sending)
    assert unsent.bytes == 0


BODY = bytes(3 * LARGE_PIECE_BYTES + 1)


def test_pieces_are_large_for_few_concurrent_responses_and_small_for_many():
    sent: list[int] = []
    taken = asyncio.Event()
    unsent = UnsentResponses()

    async def answer(number: int, slow: bool) -> list[int]:
        sizes: list[int] = []

        async def send(message: Message) -> None:
            sizes.append(len(message["body"]))
            sent.append(number)
            if slow:
                await taken.wait()

        scope: Scope = {"client": ("127.0.0.1", number)}
        await in_pieces(scope, send, unsent)({"type": "http.response.body", "body": BODY})
        assert sum(sizes) == len(BODY)
        return sizes

    async def run() -> None:
        alone = await answer(0, slow=False)
        assert alone == [LARGE_PIECE_BYTES] * 3 + [1]
        many = [asyncio.create_task(answer(number, slow=True)) for number in range(FEW_RESPONSES + 1)]
        while len(sent) < len(alone) + len(many):
            await asyncio.sleep(0)
        assert set(await answer(0, slow=False)) == {PIECE_BYTES, 1}
        taken.set()
        first, *_, last = await asyncio.gather(*many)
        assert (first[0], last[0]) == (LARGE_PIECE_BYTES, PIECE_BYTES)
        assert await answer(0, slow=False) == alone

    asyncio.run(asyncio.wait_for(run(), 20))
