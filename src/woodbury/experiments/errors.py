"""Errors a user can do something about: a command ends with one line that says what."""


class DataError(Exception):
    """A data file that is absent, damaged or cannot be downloaded; the message is one line."""


class RunFolderError(Exception):
    """A run folder that cannot be read or must not be touched; the message is one line."""


def one_line(error: Exception) -> str:
    """The message of an error on one line, without a path it names again; its type where it has no message."""
    message = getattr(error, "strerror", None) or str(error)
    return " ".join(message.split()) or type(error).__name__
