"""The project's page on a package index: its addresses, and a README whose links work there.

    WOODBURY_HOME=https://example.org/owner/woodbury python -m pip wheel --no-deps .

gives the wheel that home: links to files and figures of the README become absolute, in the form that forges share
(HOME/blob/main/FILE, HOME/raw/main/FIGURE), and the project gets its URLs. Without it links stay as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "WOODBURY_HOME"
_LINK = re.compile(r"(?P<figure>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def with_absolute_links(text: str, home: str) -> str:
    """The text of a README in the root of the project with links that hold anywhere."""

    def absolute(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        kind = "raw" if match["figure"] else "blob"
        return f"{match['figure']}[{match['text']}]({home}/{kind}/main/{target})"

    return _LINK.sub(absolute, text)


def addresses(home: str) -> dict[str, str]:
    """The URLs of the project."""
    return {
        "Homepage": home,
        "Documentation": f"{home}/blob/main/docs/index.md",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


class CustomMetadataHook(MetadataHookInterface):
    """Reads the home from the environment."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        home = os.environ.get(VARIABLE, "").rstrip("/")
        if home:
            if not re.match(r"https?://\S+$", home):
                raise ValueError(f"{VARIABLE} must be an address such as https://example.org/us, got {home!r}")
            text, metadata["urls"] = with_absolute_links(text, home), addresses(home)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
