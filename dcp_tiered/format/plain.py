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
"""Types that JSON has as they are. What holds only these is done at once: paths, by the million."""


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
    if _SCALARS.issuperset(map(type, parts)):
        return list(parts)
    return [to_tagged(part, where, depth) for part in parts]


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
            if tag == "d":
                return _dict(parts, depth + 1)
            if not _SCALARS.issuperset(map(type, parts)):
                parts = [from_tagged(part, depth + 1) for part in parts]
            if tag in ("t", "l"):
                return tuple(parts) if tag == "t" else parts
    raise CorruptError("plain data is malformed or nested too deep")


def _dict(pairs: list[Any], depth: int) -> dict[Any, Any]:
    if not {list}.issuperset(map(type, pairs)):
        raise CorruptError("plain data has a pair that is none")
    found = {}
    try:
        for key, part in pairs:
            plain = key if type(key) in _SCALARS else from_tagged(key, depth)
            found[plain] = part if type(part) in _SCALARS else from_tagged(part, depth)
    except (TypeError, ValueError) as exc:
        raise CorruptError("plain data has a pair that is none") from exc
    if len(found) != len(pairs):
        raise CorruptError("plain data has a key twice")
    return found
