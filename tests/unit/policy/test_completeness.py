"""A plan is met by what the ranks wrote, or the save fails and says which part is wrong."""

from collections.abc import Sequence

import pytest
from awscrt.checksums import crc32c

from dcp_tiered.errors import ConflictError, CorruptError, IncompleteError, TieredError
from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.manifest import Chunk, Entries, Entry
from dcp_tiered.format.shardfile import END_MAGIC, Builder, Index, decode_index, join_run
from dcp_tiered.policy.completeness import match
from tests.unit.format.samples import HEADER

Written = tuple[str, str | None, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Key, dtype, offsets, sizes, shape."""

LEFT: Written = ("w", "int8", (0, 0), (2, 2), (2, 4))
RIGHT: Written = ("w", "int8", (0, 2), (2, 2), (2, 4))
SCALAR: Written = ("s", "int8", (), (), ())
OBJECT: Written = ("o", None, (), (), ())
ALL = (LEFT, RIGHT, SCALAR, OBJECT)
PLAN = [
    Entry(
        fqn="w",
        dtype="int8",
        shape=(2, 4),
        requires_grad=True,
        chunks=(Chunk((0, 0), (2, 2), 0, 0), Chunk((0, 2), (2, 2), 0, 0)),
    ),
    Entry(fqn="s", dtype="int8", chunks=(Chunk((), (), 0, 0),)),
    Entry(fqn="o", dtype=None, chunks=(Chunk((), (), 0, 0),)),
]


def index(*written: Written) -> Index:
    """Return the footer of a shard file with these items, as it is read back."""
    builder = Builder(HEADER)
    for fqn, dtype, offsets, sizes, shape in written:
        data = bytes((len(sizes) and sizes[0] * sizes[1]) or 1)
        run = [(fqn, dtype, data, offsets, sizes, shape)]
        builder.add_run(run, [crc32c(data)], crc32c(join_run([data])))
    start = builder.cursor
    tail = builder.finish()
    trailer = decode_trailer(tail[-TRAILER_BYTES:], start + len(tail), END_MAGIC)
    return decode_index(trailer, tail[: trailer.stored_length])


def refusal(*shards: Sequence[Written]) -> TieredError:
    with pytest.raises(TieredError) as raised:
        match(Entries.of(PLAN), [index(*written) for written in shards])
    return raised.value


def test_every_chunk_gets_the_place_where_it_lies() -> None:
    found = match(Entries.of(PLAN), [index(OBJECT, RIGHT), index(), index(SCALAR, LEFT)])
    assert [entry._replace(chunks=()) for entry in found] == [
        entry._replace(chunks=()) for entry in PLAN
    ]
    places = [[(chunk.shard, chunk.row) for chunk in entry.chunks] for entry in found]
    assert places == [[(2, 1), (0, 1)], [(2, 0)], [(0, 0)]]


def test_nothing_planned_and_nothing_written_match() -> None:
    assert list(match(Entries.of([]), [])) == []


def test_a_chunk_that_two_ranks_wrote_is_a_conflict() -> None:
    error = refusal(ALL, [RIGHT])
    assert isinstance(error, ConflictError)
    assert error.key == "w at (0, 2)"


@pytest.mark.parametrize(
    ("missing", "where"), [(LEFT, "w at (0, 0)"), (SCALAR, "s at ()"), (OBJECT, "o at None")]
)
def test_a_part_that_nobody_wrote_is_named(missing: Written, where: str) -> None:
    error = refusal([one for one in ALL if one is not missing])
    assert isinstance(error, IncompleteError)
    assert error.key == where


def test_nothing_written_at_all_is_incomplete() -> None:
    assert isinstance(refusal(), IncompleteError)


@pytest.mark.parametrize(
    ("more", "where"),
    [
        (("x", "int8", (0, 0), (2, 2), (2, 2)), "x at (0, 0)"),
        (("w", "int8", (1, 1), (1, 1), (2, 4)), "w at (1, 1)"),
        (("w", None, (), (), ()), "w at None"),
        (("o", "int8", (), (), ()), "o at ()"),
    ],
)
def test_a_part_that_nobody_planned_is_named(more: Written, where: str) -> None:
    error = refusal((*ALL, more))
    assert isinstance(error, CorruptError)
    assert error.message == "written and not planned"
    assert error.key == where


def test_two_unknown_keys_at_the_same_place_are_no_conflict() -> None:
    both = [(name, "int8", (0, 0), (2, 2), (2, 2)) for name in ("x", "y")]
    assert isinstance(refusal([*ALL, *both]), CorruptError)


@pytest.mark.parametrize(
    "other",
    [
        ("w", "uint8", (0, 0), (2, 2), (2, 4)),
        ("w", "int8", (0, 0), (2, 1), (2, 4)),
        ("w", "int8", (0, 0), (2, 2), (2, 5)),
    ],
    ids=["dtype", "sizes", "shape"],
)
def test_a_chunk_that_is_not_as_planned_is_named(other: Written) -> None:
    error = refusal([other, RIGHT, SCALAR, OBJECT])
    assert isinstance(error, CorruptError)
    assert error.message == "a chunk differs from its plan"
    assert error.key == "w at (0, 0)"


def test_an_object_where_a_tensor_was_planned_is_incomplete() -> None:
    error = refusal([LEFT, RIGHT, OBJECT, ("s", None, (), (), ())])
    assert isinstance(error, IncompleteError)
    assert error.key == "s at ()"


def test_a_chunk_planned_twice_is_not_met_by_one() -> None:
    whole = Chunk((), (), 0, 0)
    plan = [Entry(fqn="s", dtype="int8", chunks=(whole, whole))]
    with pytest.raises(IncompleteError):
        match(Entries.of(plan), [index(SCALAR)])


def test_a_plan_whose_chunks_have_other_dimensions_is_refused() -> None:
    plan = [Entry(fqn="w", dtype="int8", shape=(2, 4), chunks=(Chunk((0,), (8,), 0, 0),))]
    with pytest.raises(CorruptError, match="other dimensions"):
        match(Entries.of(plan), [index(LEFT)])
