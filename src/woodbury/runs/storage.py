"""Errors of one line, and what files of a run have in common."""

FORMAT = 7  # of all files of a run; raised whenever another version would misread one of them
_LONGEST = 2000  # characters of a message; a file may hold a name of any length


class OneLineError(Exception):
    """An error that a user can resolve: a command ends with its message, one line whatever it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class RunFolderError(OneLineError):
    """A run folder has no run or another one, is damaged, or in use."""


def printable(text: str) -> str:
    """The text on one line of bounded length, with spaces for control characters."""
    return "".join(char if char.isprintable() else " " for char in text[:_LONGEST])


def one_line(error: BaseException) -> str:
    """The message of an error on one line (an OSError: without its path), or its type if it has none."""
    message = getattr(error, "strerror", None) or str(error)
    return printable(" ".join(message.split())) or type(error).__name__
