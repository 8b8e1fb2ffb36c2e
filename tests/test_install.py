"""The version, the citation and the wheel."""

import re
import sys
from pathlib import Path

import pytest
import yaml

import woodbury
from tests.install import wheel

ROOT = Path(__file__).parent.parent


def test_changelog_and_citation_have_the_version_of_the_package():
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.*?)\]", log, flags=re.MULTILINE)
    assert headings[:2] == ["Unreleased", woodbury.__version__]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == woodbury.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format asks for
    (paper,) = citation["references"]
    assert [own["family-names"] for own in paper["authors"]] == ["Ren", "Goldfarb"]
    assert "1906.02353" in paper["url"]


@pytest.mark.slow
def test_the_wheel_alone_runs_the_first_example(monkeypatch, capfd):
    """Installed into an empty folder, beside the torch that is there. `make test-install` takes others."""
    monkeypatch.setattr(sys, "argv", ["wheel", f"{sys.executable}=installed"])
    status = wheel.main()
    said = capfd.readouterr()
    assert status == 0, said.err
    assert f"woodbury {woodbury.__version__}\n" in said.out
