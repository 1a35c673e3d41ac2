"""Reads and writes through the page cache: the engine that works everywhere."""

import os


class BufferedEngine:
    """Moves bytes with pread and pwrite; short reads and writes are carried on."""

    def write(self, fd: int, start: int, data: memoryview) -> None:
        """Write all of `data` at `start`, or raise `OSError`."""
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], start + done)

    def read_into(self, fd: int, start: int, buffer: memoryview) -> int:
        """Fill `buffer` from `start`; return the bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], start + done)
            if not count:
                break
            done += count
        return done
