"""The tree of errors: how they cross ranks, what they say, and how they are found in DCP's."""

import ast
import errno
import os
import pickle
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

import dcp_tiered
from dcp_tiered import errors
from dcp_tiered.errors import CorruptError, InvalidError, TieredError, UnavailableError, cause

PACKAGE = Path(dcp_tiered.__file__).parent


def _tree(root: type[TieredError] = TieredError) -> Iterator[type[TieredError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


CLASSES = list(_tree())
ARGUMENTS = ("store is down", "durable", "step-1/record-1.json", "Try again.", errno.ENOSPC)


def _wrapped(**failures: BaseException) -> CheckpointException:
    """Return what DCP raises: exceptions by rank, each with a stack."""
    stack = traceback.extract_stack(limit=1)
    return CheckpointException(
        "save", {int(rank.removeprefix("rank")): (exc, stack) for rank, exc in failures.items()}
    )


def test_the_tree_is_the_one_that_the_module_draws() -> None:
    drawn = set(re.findall(r"\w+Error", errors.__doc__ or "")) - {"OSError"}
    assert {cls.__name__ for cls in CLASSES if cls.__module__ == errors.__name__} == drawn
    assert drawn | {"cause", "from_os_error"} == set(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_pickle(cls: type[TieredError]) -> None:
    """An error that does not unpickle hangs the other ranks."""
    error = cls(*ARGUMENTS)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert (back.message, back.tier, back.key, back.hint, back.errno) == ARGUMENTS
    assert str(back) == str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_pickle_inside_dcps(cls: type[TieredError]) -> None:
    found = cause(pickle.loads(pickle.dumps(_wrapped(rank1=cls(*ARGUMENTS)))))
    assert type(found) is cls
    assert found.args == ARGUMENTS


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_says_tier_key_errno_and_hint(cls: type[TieredError]) -> None:
    assert str(cls(*ARGUMENTS)) == (
        "store is down [tier=durable] [key=step-1/record-1.json] [errno=ENOSPC]\nHINT: Try again."
    )


def test_an_error_says_nothing_that_it_does_not_know() -> None:
    assert str(InvalidError("no URL")) == "no URL"
    assert str(UnavailableError("odd", None, None, None, 99999)) == "odd [errno=99999]"


def test_the_lowest_rank_speaks_first() -> None:
    late, early = CorruptError("of rank 1"), InvalidError("of rank 0")
    assert cause(_wrapped(rank1=late, rank0=early)) is early
    assert cause(_wrapped(rank10=late, rank2=early)) is early
    assert cause(_wrapped(rank0=KeyError("not ours"), rank3=late)) is late


def test_the_lowest_rank_speaks_first_though_its_error_is_wrapped() -> None:
    inner = InvalidError("of rank 0")
    outer = RuntimeError("wrapped")
    outer.__cause__ = inner
    assert cause(_wrapped(rank0=outer, rank1=CorruptError("of rank 1"))) is inner


def test_our_error_is_found_behind_cause_and_context() -> None:
    ours = InvalidError("ours")
    for link in ("__cause__", "__context__"):
        middle = ValueError("middle")
        setattr(middle, link, ours)
        outer = RuntimeError("outer")
        outer.__context__ = middle
        assert cause(outer) is ours
        assert cause(_wrapped(rank0=outer)) is ours


def test_nothing_of_ours_gives_none_even_in_a_circle() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__cause__ = two, one
    assert cause(one) is None
    assert cause(_wrapped(rank0=one)) is None
    assert cause(None) is None


# ------------------------------------------------------------------------ what they all say


def _raised() -> Iterator[tuple[str, ast.expr]]:
    """Find where the package makes an error of its tree: place, and its message as code."""
    names = {cls.__name__ for cls in CLASSES}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else None
            name = function.id if isinstance(function, ast.Name) else name
            if name in names:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.args[0]


def _ends(message: ast.expr) -> tuple[str, str]:
    """Return the literal text at start and end of a message; empty where it is filled in."""
    if isinstance(message, ast.Constant):
        return str(message.value), str(message.value)
    if isinstance(message, ast.JoinedStr) and message.values:
        return _ends(message.values[0])[0], _ends(message.values[-1])[1]
    if isinstance(message, ast.BinOp):
        return _ends(message.left)[0], _ends(message.right)[1]
    return "", ""


# Names that are written so: they start a message as they are.
_PROPER = ("DCP", "O_DIRECT", "FSSPEC", "S3", "URL", "HTTP")


def test_messages_start_lower_case_and_end_without_a_full_stop() -> None:
    places = list(_raised())
    assert len(places) > 100
    wrong = []
    for place, message in places:
        start, end = _ends(message)
        if (start[:1].isupper() and not start.startswith(_PROPER)) or end.endswith((".", "!")):
            wrong.append(f"{place}: {ast.unparse(message)}")
    assert wrong == []


def test_errors_are_built_from_positional_arguments() -> None:
    """Keyword-only state would not survive the trip between ranks."""
    for cls in CLASSES:
        assert "__init__" not in vars(cls) or cls is TieredError


@pytest.mark.parametrize(
    ("code", "cls", "hint"),
    [
        (errno.ENOSPC, UnavailableError, "Free space"),
        (errno.EDQUOT, UnavailableError, "Free space"),
        (errno.EACCES, InvalidError, "writable"),
        (errno.EROFS, InvalidError, "writable"),
        (errno.ENOENT, InvalidError, "create the directory"),
        (errno.EIO, UnavailableError, "dmesg"),
    ],
)
def test_an_os_error_keeps_what_the_system_said(
    code: int, cls: type[TieredError], hint: str, tmp_path: Path
) -> None:
    """O122: errno, path, bytes asked and bytes free, and a hint for each kind."""
    path = str(tmp_path / "missing" / "file")
    error = errors.from_os_error(
        OSError(code, os.strerror(code), path), "local", path, "write it", bytes_asked=123
    )
    assert type(error) is cls
    assert (error.tier, error.key, error.errno) == ("local", path, code)
    assert re.fullmatch(
        rf"cannot write it: {os.strerror(code)}, 123 bytes asked, \d+ bytes free", error.message
    )
    assert hint in (error.hint or "")
