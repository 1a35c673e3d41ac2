"""Plain data as JSON without loss: tuples, lists, dicts with any plain keys, and scalars.

    scalar                 itself
    tuple                  {"t": [...]}
    list                   {"l": [...]}
    dict                   {"d": [[key, value], ...]}
    inf, -inf, nan         {"f": "inf"} and so on

Nothing else is plain: what a checkpoint stores about itself is never executed, only read (I12).
Subclasses of tuple, list and dict are stored as these.
"""

from typing import Any

from dcp_tiered.errors import CorruptError, InvalidError

_DEPTH_MAX = 64
_SCALARS = frozenset((bool, int, str, type(None)))
"""Types that JSON has as they are. Containers skip the call for them: paths are made of them."""


def to_tagged(value: object, where: str, depth: int = 0) -> Any:
    """Return a JSON value for plain data.

    Raises:
        InvalidError: It holds something else; the message says where.
    """
    if type(value) in _SCALARS:
        return value
    if type(value) is float:
        return value if value - value == 0 else {"f": repr(value)}
    if depth == _DEPTH_MAX:
        raise InvalidError(f"{where} is nested more than {_DEPTH_MAX} levels deep")
    if isinstance(value, tuple):
        return {"t": _all_tagged(value, where, depth + 1)}
    if isinstance(value, list):
        return {"l": _all_tagged(value, where, depth + 1)}
    if isinstance(value, dict):
        return {"d": [_all_tagged(pair, where, depth + 1) for pair in value.items()]}
    raise InvalidError(
        f"{where} holds a {type(value).__name__}, which is not plain data",
        None,
        None,
        "Use None, bool, int, float, str and tuples, lists or dicts of them.",
    )


def _all_tagged(parts: tuple[Any, ...] | list[Any], where: str, depth: int) -> list[Any]:
    return [part if type(part) in _SCALARS else to_tagged(part, where, depth) for part in parts]


def from_tagged(value: Any, depth: int = 0) -> Any:
    """Return the plain data behind a tagged JSON value.

    Raises:
        CorruptError: It is not one.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    if depth < _DEPTH_MAX and isinstance(value, dict) and len(value) == 1:
        ((tag, parts),) = value.items()
        if tag == "f" and parts in ("inf", "-inf", "nan"):
            return float(parts)
        if isinstance(parts, list):
            if tag == "t":
                return tuple(_all_plain(parts, depth + 1))
            if tag == "l":
                return _all_plain(parts, depth + 1)
            if tag == "d":
                return _dict(parts, depth + 1)
    raise CorruptError("plain data is malformed or nested too deep")


def _all_plain(parts: list[Any], depth: int) -> list[Any]:
    return [part if type(part) in _SCALARS else from_tagged(part, depth) for part in parts]


def _dict(pairs: list[Any], depth: int) -> dict[Any, Any]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):  # noqa: PLR2004
        raise CorruptError("plain data is malformed")
    plain = [_all_plain(pair, depth) for pair in pairs]
    try:
        found = {key: value for key, value in plain}  # noqa: C416 - dict() takes no lists as mypy sees it
    except TypeError as exc:
        raise CorruptError("plain data has a key that cannot be one") from exc
    if len(found) != len(pairs):
        raise CorruptError("plain data has a key twice")
    return found
