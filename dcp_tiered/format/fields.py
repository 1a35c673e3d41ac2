"""Values that were read from storage, checked before anything uses them (I12)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

from dcp_tiered.errors import CorruptError, InvalidError

NUMBER_MAX = (1 << 62) - 1
"""Bound on every number: sums of two still fit into a signed 64-bit integer."""
CRC_MAX = (1 << 32) - 1


def is_int(value: object, least: int = 0, most: int = NUMBER_MAX) -> TypeGuard[int]:
    """Tell whether `value` is a whole number, no bool, in the closed range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def integer(fields: Mapping[str, Any], name: str, least: int = 0, most: int = NUMBER_MAX) -> int:
    """Return a whole number that must be there.

    Raises:
        CorruptError: It is missing, another type or out of range.
    """
    value = fields.get(name)
    if is_int(value, least, most):
        return value
    raise CorruptError(f"{name!r} is not a whole number from {least} to {most}")


def optional_integer(
    fields: Mapping[str, Any], name: str, least: int = 0, most: int = NUMBER_MAX
) -> int | None:
    """Return a whole number or None; see `integer` for the error."""
    return None if fields.get(name) is None else integer(fields, name, least, most)


def text(fields: Mapping[str, Any], name: str, chars_max: int) -> str:
    """Return a string that must be there.

    Raises:
        CorruptError: It is missing, another type or longer than `chars_max`.
    """
    value = fields.get(name)
    if isinstance(value, str) and len(value) <= chars_max:
        return value
    raise CorruptError(f"{name!r} is not a text of at most {chars_max} characters")


def rows(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list that must be there.

    Raises:
        CorruptError: It is missing or another type.
    """
    value = fields.get(name)
    if isinstance(value, list):
        return value
    raise CorruptError(f"{name!r} is not a list")


def shown(value: object, chars_max: int = 200) -> str:
    """Return a hostile value for a message; never walks into one that is nested without end."""
    if isinstance(value, str):
        return repr(value[:chars_max])
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)[:chars_max]
    return f"a {type(value).__name__}"


@contextmanager
def must_read_back(what: str) -> Iterator[None]:
    """Turn what a reader would call damage into a refusal to write it.

    Raises:
        InvalidError: Decoding what was just encoded raised CorruptError inside the context.
    """
    try:
        yield
    except CorruptError as exc:
        raise InvalidError(f"{what} would not read back: {exc.message}") from exc
