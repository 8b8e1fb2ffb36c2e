"""Errors that a user can resolve: a command ends with their message, which is one line."""


class DataError(Exception):
    """A data file is absent or damaged, or cannot be downloaded."""


class RunFolderError(Exception):
    """A run folder cannot be read, or holds another run."""


def one_line(error: Exception) -> str:
    """The message of an error on one line (an OSError: without its path), or its type if it has none."""
    message = getattr(error, "strerror", None) or str(error)
    return " ".join(message.split()) or type(error).__name__
