"""Boxes of many tensors at once: where chunks lie, and that they can be."""

import math

import numpy as np

from dcp_tiered.errors import CorruptError
from dcp_tiered.format.columns import Array

NDIM_MAX = 64
TENSOR, BYTES = 0, 1
"""Kinds of items and entries."""
_BYTES_MAX = math.ldexp(1.0, 62)


def exclusive_sum(counts: Array) -> Array:
    """Return where each of consecutive runs starts."""
    total: Array = np.cumsum(counts, dtype="i8") - counts
    return total


def gather(flat: Array, starts: Array, width: int) -> Array:
    """Return the runs of `width` values from `starts` as rows."""
    taken: Array = flat[starts[:, None] + np.arange(width)]
    return taken


def row_ids(rows: Array) -> tuple[Array, Array]:
    """Number the distinct rows of a matrix.

    Returns:
        Where one row of each number is, and the number of each row.
    """
    count, width = rows.shape
    order = np.lexsort(rows.T[::-1]) if width else np.arange(count)
    is_new = np.ones(count, dtype="bool")
    is_new[1:] = np.any(rows[order[1:]] != rows[order[:-1]], axis=1)
    numbers = np.empty(count, dtype="i8")
    numbers[order] = np.cumsum(is_new) - 1
    return order[is_new], numbers


def check_inside(offsets: Array, sizes: Array, shape: Array) -> None:
    """Refuse boxes that do not lie in their tensors; all three have one row per box.

    Raises:
        CorruptError: One is negative or reaches out.
    """
    negative = np.any(offsets < 0) or np.any(sizes < 0) or np.any(shape < 0)
    if negative or np.any(sizes > shape) or np.any(offsets > shape - sizes):
        raise CorruptError("a chunk lies outside its tensor")


def byte_counts(sizes: Array, itemsize: Array) -> Array:
    """Return the size in bytes of boxes, one row each, of no negative sizes.

    Raises:
        CorruptError: One claims more bytes than a 64-bit offset reaches.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # infinite times zero is no claim
        estimate = np.prod(sizes.astype("f8"), axis=1) * itemsize
        if np.any(estimate > _BYTES_MAX):
            raise CorruptError("a tensor or chunk claims an impossible size")
    exact: Array = np.prod(sizes, axis=1) * itemsize
    return exact


def check_disjoint(owner: Array, parts: Array, wholes: Array) -> None:
    """Refuse parts that together claim more bytes than their whole.

    Args:
        owner: Index of the whole that each part belongs to, ascending.
        parts: Bytes of each part.
        wholes: Bytes of each whole.

    Raises:
        CorruptError: Some overlap for sure.
    """
    if not len(wholes):
        return
    estimate = np.bincount(owner, weights=parts, minlength=len(wholes))
    if np.any(estimate > _BYTES_MAX):
        raise CorruptError("chunks of a tensor overlap")
    ends = np.searchsorted(owner, np.arange(len(wholes)), side="right")
    sums = np.concatenate((np.zeros(1, dtype="i8"), np.cumsum(parts, dtype="i8")))
    # Differences stay exact where the running sum wraps: each true sum fits, as just estimated.
    exact = sums[ends] - sums[np.concatenate((np.zeros(1, dtype="i8"), ends[:-1]))]
    if np.any(exact > wholes):
        raise CorruptError("chunks of a tensor overlap")
