"""Plain data as JSON without loss: tuples, lists, dicts with any plain keys, and scalars.

    scalar -> itself    tuple -> {"t": [...]}    list -> {"l": [...]}    dict -> {"d": [[key, value], ...]}

Nothing else is plain: what a checkpoint stores about itself is never executed, only read (I12).
"""

from typing import Any

from dcp_tiered.errors import CorruptError, InvalidError

_DEPTH_MAX = 64


def to_tagged(value: object, where: str, depth: int = 0) -> Any:
    """Return a JSON value for plain data.

    Raises:
        InvalidError: It holds something else; the message says where.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if value - value == 0 else {"f": repr(value)}
    if depth == _DEPTH_MAX:
        raise InvalidError(f"{where} is nested more than {_DEPTH_MAX} levels deep")
    if isinstance(value, tuple):
        return {"t": [to_tagged(part, where, depth + 1) for part in value]}
    if isinstance(value, list):
        return {"l": [to_tagged(part, where, depth + 1) for part in value]}
    if isinstance(value, dict):
        return {
            "d": [
                [to_tagged(key, where, depth + 1), to_tagged(part, where, depth + 1)]
                for key, part in value.items()
            ]
        }
    raise InvalidError(
        f"{where} holds a {type(value).__name__}, which is not plain data",
        None,
        None,
        "Use None, bool, int, float, str and tuples, lists or dicts of them.",
    )


def from_tagged(value: Any, depth: int = 0) -> Any:
    """Return the plain data behind a tagged JSON value.

    Raises:
        CorruptError: It is not one.
    """
    if not isinstance(value, (dict, list)):
        return value
    if depth > _DEPTH_MAX or isinstance(value, list) or len(value) != 1:
        raise CorruptError("plain data is malformed")
    ((tag, parts),) = value.items()
    if tag == "f" and parts in ("inf", "-inf", "nan"):
        return float(parts)
    if tag == "d" and isinstance(parts, list):
        return _dict(parts, depth)
    if tag in ("t", "l") and isinstance(parts, list):
        items = [from_tagged(part, depth + 1) for part in parts]
        return tuple(items) if tag == "t" else items
    raise CorruptError("plain data is malformed")


def _dict(pairs: list[Any], depth: int) -> dict[Any, Any]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):  # noqa: PLR2004
        raise CorruptError("plain data is malformed")
    try:
        return {from_tagged(k, depth + 1): from_tagged(v, depth + 1) for k, v in pairs}
    except TypeError as exc:
        raise CorruptError("plain data has a key that cannot be one") from exc
