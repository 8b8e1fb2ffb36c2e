"""The code in the README and in the docs runs as printed; version, citation and wheel agree."""

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

import woodbury
from tests.install import wheel

README = Path(__file__).parent.parent / "README.md"
PAGES = sorted((README.parent / "docs").rglob("*.md"))


def shown_after(text):
    """The blocks of a page, and the indented lines under each: what it prints."""
    found = re.findall(r"^```python\n(.*?)^```\n(?:\n((?:    [^\n]*\n)+))?", text, flags=re.DOTALL | re.MULTILINE)
    return [(code, re.sub("^    ", "", shown, flags=re.MULTILINE)) for code, shown in found]


def test_the_examples_run_and_print_what_they_show(capsys):
    """One after the other, as a reader types them."""
    names = {}
    examples = shown_after(README.read_text(encoding="utf-8"))
    assert len(examples) == 4 and all(shown for _, shown in examples)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the README has none: what it shows holds for any
        for code, shown in examples:
            exec(compile(code, str(README), "exec"), names)
            assert capsys.readouterr().out == shown
    assert torch.sin(torch.tensor(0.3 * torch.pi)).item() == pytest.approx(0.80902, abs=1e-5)  # u(0.3), shown


def test_the_first_screen_is_short():
    """The claim, its figure and six lines of code come first, and all of it is 130 lines at most."""
    lines = README.read_text(encoding="utf-8").splitlines()
    first = shown_after("\n".join(lines) + "\n")[0][0]
    assert len(lines) <= 130 and len([line for line in first.splitlines() if line]) == 6
    assert lines.index("## Which one for what") <= 40


# with blocks marked "py"
BY_THEIR_OWN_TESTS = {"deepxde.md", "doors.md", "models.md", "pina.md", "precision.md"}

NEEDED = {"tracking.md": ("tensorboard", "wandb")}  # packages that a page is about


def blocks(page, mark):
    return re.findall(rf"^```{mark}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_code_in_the_docs_runs(page, tmp_path, monkeypatch):
    """The blocks of a page one after the other, as a reader types them; what they assert holds."""
    for package in NEEDED.get(page.name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    names = {"__name__": "__main__"}
    with torch.random.fork_rng():
        for number, example in enumerate(blocks(page, "python"), start=1):
            exec(compile(example, f"{page.name}, block {number}", "exec"), names)
    if page.name == "extending.md":
        assert names["optimizer"].verify(names["inputs"], names["counts"]) < 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["lightning", "skorch", "transformers"])
def test_code_for_other_libraries_runs(library, tmp_path, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    page = README.parent / "docs" / "doors.md"
    imported = re.compile(rf"^import .*\b{library}\b", re.MULTILINE)
    (example,) = [block for block in blocks(page, "py") if imported.search(block)]
    with torch.random.fork_rng():
        exec(compile(example, f"{page.name}, {library}", "exec"), {"__name__": "__main__"})


def test_no_code_is_left_out():
    """A fenced block is marked as what some test runs; commands are indented."""
    for page in PAGES:
        fences = re.findall(r"^ *```(\S*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        marks = {"", "py", "python"} if page.name in BY_THEIR_OWN_TESTS else {"", "python"}
        assert set(fences) <= marks, page.name
        assert len(fences) == 2 * sum(len(blocks(page, mark)) for mark in ("py", "python")), page.name


def test_links_hold_on_a_package_index(monkeypatch):
    """hatch_build.py makes every link of the README absolute: figures as raw files, pages as pages."""
    interface = types.ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", README.parent / "hatch_build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    home, hook, metadata = "https://example.org/us/woodbury", build.CustomMetadataHook(), {}
    hook.root = str(README.parent)
    monkeypatch.setenv(build.VARIABLE, home + "/")
    hook.update(metadata)
    text = metadata["readme"]["text"]
    targets = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    assert len(targets) == len(re.findall(r"\]\(", README.read_text()))
    assert all(re.match("https?://|#", target) for _, target in targets)
    figures = [target for mark, target in targets if mark]
    assert figures and all(target.startswith(f"{home}/raw/main/docs/") for target in figures)
    for target in (own for _, own in targets if own.startswith(home)):
        assert (README.parent / target.split("/main/")[1].partition("#")[0]).exists()
    assert metadata["urls"]["Homepage"] == home
    monkeypatch.setenv(build.VARIABLE, "nowhere")
    with pytest.raises(ValueError, match="WOODBURY_HOME must be an address"):
        hook.update({})
    monkeypatch.delenv(build.VARIABLE)
    hook.update(plain := {})
    assert plain == {"readme": {"content-type": "text/markdown", "text": README.read_text()}}


# -- the version, the citation and the wheel ------------------------------------------------------------


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
