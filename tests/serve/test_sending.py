"""Responses are sent in pieces: large ones while few responses are sent, small ones otherwise."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Scope

from gpumond.serve.http import FEW_ANSWERS, LARGE_PIECE_BYTES, PIECE_BYTES, SendBuffers, in_pieces

BODY = bytes(3 * LARGE_PIECE_BYTES + 1)


def test_pieces_are_large_for_few_concurrent_responses_and_small_for_many():
    sent: list[int] = []
    taken = asyncio.Event()
    unsent = SendBuffers()

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
        many = [asyncio.create_task(answer(number, slow=True)) for number in range(FEW_ANSWERS + 1)]
        while len(sent) < len(alone) + len(many):
            await asyncio.sleep(0)
        assert set(await answer(0, slow=False)) == {PIECE_BYTES, 1}
        taken.set()
        first, *_, last = await asyncio.gather(*many)
        assert (first[0], last[0]) == (LARGE_PIECE_BYTES, PIECE_BYTES)
        assert await answer(0, slow=False) == alone

    asyncio.run(asyncio.wait_for(run(), 20))
