"""The version of the installed package: that of the last tag, and how far the code is past it."""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("woodbury")
except importlib.metadata.PackageNotFoundError:  # run from the source tree, by PYTHONPATH
    __version__ = "0+unknown"
