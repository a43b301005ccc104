"""Frames between the processes, and the letter box between the engine and a response."""

import asyncio

import pytest

from fledge.server.answer_response import _merged
from fledge.server.answers import Answers
from fledge.server.api_errors import ClientGoneError, DeadlineError, UnavailableError
from fledge.server.client_sender import ClientSender
from fledge.server.http_guard import TRANSPORT
from fledge.server.wire import Cancel, Finish, FrameBuffer, Piece, pack
from tests.unit.server.made_up import STATS


def piece(number: int, text: str, *, is_last: bool = False) -> Piece:
    return Piece(number, text, (1,), None, Finish("stop", STATS) if is_last else None)


@pytest.mark.parametrize("portion", [1, 3, 1000])
def test_frames_in_any_portions(portion: int) -> None:
    sent = [Cancel((1, 2)), Cancel(()), Cancel(tuple(range(50)))]
    data = b"".join(pack(message) for message in sent)
    buffer = FrameBuffer()
    found = []
    for start in range(0, len(data), portion):
        found += buffer.feed(data[start : start + portion])
    assert found == sent


def test_pieces_are_taken_together_and_what_is_left_is_released() -> None:
    async def run() -> None:
        released: list[range] = []
        with Answers(range(7, 9), released.append) as answers:
            answers.put(piece(7, "a"))
            answers.put(piece(8, "b", is_last=True))
            assert [answers.choice(one) for one in await answers.take()] == [0, 1]
            waiting = asyncio.create_task(answers.take())
            await asyncio.sleep(0)
            answers.put(piece(7, "c", is_last=True))
            assert [one.text for one in await waiting] == ["c"]
            answers.fail(UnavailableError("too late to matter"))
            assert answers.are_over
            assert await answers.take() == []
        assert released == [range(7, 9)]

    asyncio.run(run())


def test_a_failure_comes_after_what_was_there_and_the_first_one_counts() -> None:
    async def run() -> None:
        with Answers(range(1), lambda _: None) as answers:
            answers.put(piece(0, "a"))
            answers.fail_at(asyncio.get_running_loop().time() + 0.01, DeadlineError("late"))
            assert len(await answers.take()) == 1
            with pytest.raises(DeadlineError, match="late"):
                await answers.take()
            answers.fail(UnavailableError("gone"))
            with pytest.raises(DeadlineError, match="late"):
                await answers.take()

    asyncio.run(run())


def test_a_silent_engine_is_noticed() -> None:
    async def run() -> None:
        with Answers(range(1), lambda _: None) as answers:
            answers.stir_every(0.01)
            assert await answers.take() == []
            assert not answers.are_over

    asyncio.run(run())


def test_what_piled_up_goes_out_as_one_piece() -> None:
    first, second = _merged(
        [piece(0, "a"), piece(1, "x"), piece(0, "b"), piece(0, "", is_last=True)]
    )
    assert (first.text, first.token_ids, first.finish is not None) == ("ab", (1, 1, 1), True)
    assert (second.text, second.finish) == ("x", None)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    class Transport:
        is_aborted = False

        def get_write_buffer_size(self) -> int:
            return 1 << 20

        def abort(self) -> None:
            self.is_aborted = True

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        transport = Transport()
        sender = ClientSender({"state": {TRANSPORT: transport}}, never, 0.01)
        with pytest.raises(ClientGoneError, match="does not read"):
            await sender.write(b"text")
        await sender.cut()
        assert transport.is_aborted

    asyncio.run(run())
