"""What the pages say exists: every function, test and file that README, CONTRIBUTING and docs/*.md name."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import woodbury
from test_readme import blocks

ROOT = Path(__file__).parent.parent
METHOD = ROOT / "docs" / "method.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

NAME = re.compile(r"(?<![\w./-])woodbury(?:\.[A-Za-z_]\w*)+")
TEST = re.compile(r"\b(tests/\w+\.py)(?:::(\w+))?")
DOORS = {"deepxde", "lightning", "pina", "skorch"}  # whose libraries may not be installed: read, not imported
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")


def names(text):
    """In the inline code of a page, without its fenced blocks."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [name for span in spans for name in NAME.findall(span)]


def resolve(name):
    """The object a dotted name stands for: the longest part of it that is a module, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, something it imports is not
            continue
        for part in parts[length:]:
            # dataclass fields without a default are annotations alone
            is_field = isinstance(found, type) and not hasattr(found, part) and part in found.__annotations__
            found = found.__annotations__[part] if is_field else getattr(found, part)
        return found
    raise AttributeError(name)


def has_test(file, name):
    """Whether tests/file.py exists and, if a name is given, defines it at the top level."""
    return (ROOT / file).is_file() and (not name or name in functions_of(file))


@cache
def functions_of(file):
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def missing_links(page, text):
    targets = [target.partition("#")[0] for target in LINK.findall(text) if "://" not in target]
    return [target for target in targets if target and not (page.parent / target).exists()]


@every_page
def test_names_in_code_named_tests_and_relative_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    assert missing_links(page, text) == []
    for file, name in TEST.findall(text):
        assert has_test(file, name), f"{page.name}: {file}::{name}"
    for name in names(text):
        if name.split(".")[1] in DOORS:
            _, door, *rest = name.split(".")
            source = ast.parse((ROOT / "src" / "woodbury" / f"{door}.py").read_text(encoding="utf-8"))
            kinds = ast.ClassDef | ast.FunctionDef
            assert {*rest} <= {node.name for node in source.body if isinstance(node, kinds)}, name
        else:
            assert resolve(name) is not None, name


def test_the_number_of_cases_is_that_of_the_rows():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    head, cases = page.split("## The cases", 1)
    rows = [line for line in cases.splitlines() if line.startswith("| ") and TEST.search(line)]
    assert len(rows) > 100 and head.count(f"{len(rows)} difficult cases are tested") == 1
    assert len(rows) == len(set(rows))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\[(\d+) cases\]\(docs/reliability.md\)", readme) == [str(len(rows))]


def test_every_item_of_the_paper_has_a_function_and_a_test():
    lines = METHOD.read_text(encoding="utf-8").splitlines()
    start = lines.index("| item | function | test |") + 2
    items = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        item, function, test = (cell.strip() for cell in line.strip("|").split(" | "))
        assert len(names(function)) == 1 if re.match(r"\(\d\)", item) else names(function), item  # one place
        assert all(name for _, name in TEST.findall(test)) and TEST.search(test), item
        items[item] = function
    expected = [f"({number})" for number in range(1, 8)] + [f"Algorithm {number}," for number in range(1, 8)]
    for label in [*expected, "rule for lambda", "its constants", "Lemma 1", "Theorem 1", "footnote", "cost"]:
        assert any(item.startswith(label) for item in items), label


def test_code_about_precision_runs(capsys):
    page = ROOT / "docs" / "precision.md"
    names = {}  # one after the other, as a reader types them
    for code in blocks(page, "py"):
        exec(compile(code, "docs/precision.md", "exec"), names)
    assert names["fit"].reason == "tolerance" and names["info"].loss < 1e-2
    assert names["result"].success and names["many"].x.shape == (1000, 3)
    for line in capsys.readouterr().out.splitlines()[-5:]:
        if "+-" in line:  # four digits of a well-conditioned fit
            assert line in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("number, code", list(enumerate(blocks(ROOT / "docs" / "models.md", "py"))))
def test_code_about_models_runs_and_its_steps_verify(number, code):
    """Each stands on its own; those marked "python" are run by test_readme."""
    torch.manual_seed(number)
    names = {}
    exec(compile(code, "docs/models.md", "exec"), names)
    if "info" in names:
        assert names["info"].accepted
    if "fit" in names:
        assert names["fit"].loss < names["fit"].history[0]["loss"]
        optimizer = woodbury.GaussNewton(names["model"], torch.nn.MSELoss(), forward=names["residuals"])
        names["inputs"], names["targets"] = names["draw"](40)
    else:
        optimizer = names["optimizer"]
    with torch.no_grad():  # away from a minimum: a residual relative to a gradient of zero says nothing
        for parameter in optimizer.param_groups[0]["params"]:
            parameter += 0.1 * torch.randn_like(parameter)
    assert optimizer.verify(names["inputs"], names.get("targets")) < 1e-4


def test_every_example_is_in_the_gallery():
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"harness.py", "equations.py"}  # parts
    assert set(re.findall(r"`python examples/(\w+\.py)", page)) == scripts


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_every_figure_has_its_command(page):
    """In the paragraph below it, or in the one after that (in a card of the gallery)."""
    paragraphs = page.read_text(encoding="utf-8").split("\n\n")
    for index, text in enumerate(paragraphs):
        if re.match(r"\W*!\[", text):
            below = " ".join(paragraphs[index + 1 : index + 3])
            assert re.search(r"`(python|woodbury|fit\.plot)", below), f"{page.name}: {text}"


def test_every_public_name_is_in_the_reference():
    """By a line `::: name`, which says the name itself or the function of that name in its module."""
    pages = (page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    names = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)]
    documented = [resolve(name) for name in names if name.split(".")[1] not in DOORS]
    missing = [name for name in woodbury.__all__ if not any(getattr(woodbury, name) is own for own in documented)]
    assert missing == ["__version__"]
