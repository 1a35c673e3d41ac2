"""Object stores as other people's packages bring them to fsspec: found by entry points alone.

They are S3 underneath, under names that nothing of ours knows.
"""

import functools
import os
from typing import Any

from aiobotocore.session import AioSession
from fsspec.spec import AbstractBufferedFile
from s3fs import S3FileSystem


@functools.cache
def _session(process: int) -> AioSession:
    """Return the one session of a process: a new one reads megabytes of descriptions."""
    return AioSession()


class ShelfFileSystem(S3FileSystem):
    """All that s3fs can do: create-only writes, and files that are seen when they are committed."""

    protocol = ("shelf",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, session=_session(os.getpid()))


class PlainFile(AbstractBufferedFile):
    """A file that would be there from its first block on, and grow."""

    def _upload_chunk(self, final: bool = False) -> bool:
        raise AssertionError("readers would see half an object now")


class PlainFileSystem(S3FileSystem):
    """What most implementations can do: no write is create-only, no file waits for a commit.

    Every refusal of a look is "not found", and a listing is remembered whatever the options say.
    """

    protocol = ("plainshelf",)

    def __init__(self, **options: Any) -> None:
        options["use_listings_cache"] = True
        super().__init__(**options, session=_session(os.getpid()))

    async def _pipe_file(self, path: str, value: bytes, **more: Any) -> None:
        if more:
            raise TypeError(f"unexpected {sorted(more)}")
        await super()._pipe_file(path, value)

    async def _info(self, path: str, **more: Any) -> Any:
        try:
            return await super()._info(path, **more)
        except PermissionError:
            raise FileNotFoundError(path) from None

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        return PlainFile(self, path, mode)
