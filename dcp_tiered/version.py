"""The version of this package; kept apart so that every room can name it."""

__version__ = "0.1.0"
