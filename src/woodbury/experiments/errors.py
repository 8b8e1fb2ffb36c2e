"""Errors that a user can resolve: a command ends with their message, which is one line."""

_LONGEST = 2000  # characters of a message; a file may hold a name of any length


class _OneLineError(Exception):
    """An error whose message is one line whatever it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _LONGEST))


class DataError(_OneLineError):
    """A data file is absent or damaged, or cannot be downloaded."""


class RunFolderError(_OneLineError):
    """A run folder cannot be read, or holds another run."""


def printable(text: str, longest: int) -> str:
    """The text on one line: control characters as their escapes, the middle of a long text left out."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in _shortened(text, longest))
    return _shortened(shown, longest)


def one_line(error: BaseException) -> str:
    """The message of an error on one line (an OSError: without its path), or its type if it has none."""
    message = getattr(error, "strerror", None) or str(error)
    return printable(" ".join(message.split()), _LONGEST) or type(error).__name__


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = (longest - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
