"""Uploads one after the other, and beside one that is held up the next."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dcp_tiered.errors import CorruptError
from dcp_tiered.services.lanes import HeldUpError, Lanes, UnwantedError
from tests.support.workers import await_that

NO_PATIENCE_S = 0.05


@contextmanager
def hanging() -> Iterator[tuple[Callable[[Any], str], threading.Event]]:
    """Give an upload that hangs until its event is set, or the test is over."""
    answer = threading.Event()

    def upload(moved: Callable[[], None]) -> str:
        moved()
        answer.wait()
        return "whole"

    try:
        yield upload, answer
    finally:
        answer.set()


def end(lanes: Lanes, answer: threading.Event) -> None:
    """Let what hangs end."""
    answer.set()
    await_that("the end of all that hangs", lambda: lanes.held_up() == 0)


def refuse(work: Callable[[], Any]) -> HeldUpError:
    with pytest.raises(HeldUpError) as raised:
        work()
    return raised.value


def test_an_upload_that_moves_is_waited_for_however_long_it_takes() -> None:
    lanes = Lanes(NO_PATIENCE_S)

    def upload(moved: Callable[[], None]) -> str:
        for _ in range(20):
            threading.Event().wait(NO_PATIENCE_S / 4)
            moved()
        return "whole"

    assert lanes.run("a", "1", upload) == "whole"
    assert lanes.held_up() == 0


def test_others_go_on_beside_one_that_hangs_and_its_end_is_found() -> None:
    lanes = Lanes(NO_PATIENCE_S)
    with hanging() as (upload, answer):
        error = refuse(lambda: lanes.run("a", "1", upload))
        assert "nothing moved" in error.message
        assert error.key == "a"
        assert error.hint
        assert lanes.is_held_up("a")
        assert lanes.held_up() == 1
        assert lanes.run("b", "1", lambda _: "b") == "b"
        end(lanes, answer)
        never_begun = lanes.run("a", "1", lambda _: "another")
        assert never_begun == "whole", "the same upload was begun twice"
    assert not lanes.is_held_up("a")
    assert lanes.run("a", "1", lambda _: "again") == "again"


def test_what_it_raises_is_raised_where_it_is_waited_for() -> None:
    lanes = Lanes(NO_PATIENCE_S)

    def upload(moved: Callable[[], None]) -> None:
        raise CorruptError("damaged", "local", "a")

    with pytest.raises(CorruptError, match="damaged"):
        lanes.run("a", "1", upload)


def test_a_late_one_is_not_waited_for_although_it_moves() -> None:
    lanes = Lanes(60)
    with hanging() as (upload, _):
        assert "late" in refuse(lambda: lanes.run("a", "1", upload, lambda: True)).message
        assert lanes.is_held_up("a", lambda: True)
        assert not lanes.is_held_up("a")
        assert lanes.run("b", "1", lambda _: "b") == "b"


def test_no_more_than_four_go_on_at_once() -> None:
    lanes = Lanes(NO_PATIENCE_S)
    begun = []
    with hanging() as (upload, answer):
        for name in "abcd":
            refuse(lambda name=name: lanes.run(name, "1", upload))
        refuse(lambda: lanes.run("e", "1", begun.append))
        assert begun == []
        assert lanes.held_up() == 4
        end(lanes, answer)
        assert lanes.run("a", "1", upload) == "whole"
    assert lanes.run("e", "1", lambda _: "e") == "e"


def test_another_attempt_at_an_id_gets_nothing_of_the_one_before() -> None:
    lanes = Lanes(NO_PATIENCE_S)
    with hanging() as (upload, answer):
        refuse(lambda: lanes.run("a", "attempt-1", upload))
        end(lanes, answer)
        assert lanes.run("a", "attempt-2", lambda _: "second") == "second"


def test_what_is_abandoned_ends_when_it_moves_and_holds_up_nothing_of_its_id() -> None:
    lanes = Lanes(NO_PATIENCE_S)
    ended = []

    with hanging() as (upload, answer):

        def two_parts(moved: Callable[[], None]) -> None:
            try:
                upload(moved)
                moved()
            except UnwantedError:
                ended.append("unwanted")
                raise
            ended.append("whole")

        refuse(lambda: lanes.run("a", "attempt-1", two_parts))
        lanes.abandon("a")
        assert not lanes.is_held_up("a")
        assert lanes.held_up() == 1
        assert lanes.run("a", "attempt-2", lambda _: "second") == "second"
        end(lanes, answer)
    assert ended == ["unwanted"]
    assert lanes.run("a", "attempt-1", lambda _: "first") == "first"


def test_what_is_abandoned_counts_among_the_four() -> None:
    lanes = Lanes(NO_PATIENCE_S)
    with hanging() as (upload, answer):
        for name in "abcd":
            refuse(lambda name=name: lanes.run(name, "1", upload))
        lanes.abandon()
        assert lanes.are_taken()
        refuse(lambda: lanes.run("e", "1", upload))
        end(lanes, answer)
        assert not lanes.are_taken()


def test_two_uploads_of_one_id_follow_each_other() -> None:
    lanes = Lanes(NO_PATIENCE_S)
    begun = []
    with hanging() as (upload, answer):
        refuse(lambda: lanes.run("a", "1", upload))
        refuse(lambda: lanes.run("a", "2", begun.append))
        assert begun == []
        end(lanes, answer)
        assert lanes.run("a", "2", lambda _: "second") == "second"


def test_nothing_is_waited_for_when_the_time_is_over() -> None:
    lanes = Lanes(60, lambda: 0.0)
    with hanging() as (upload, _):
        refuse(lambda: lanes.run("a", "1", upload))
        assert lanes.held_up() == 0, "it was left alone because it was silent"
