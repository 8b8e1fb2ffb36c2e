"""The code in the README and in the docs runs as printed."""

import re
from pathlib import Path

import pytest

import woodbury

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run_and_print_what_they_show(capsys: pytest.CaptureFixture[str]) -> None:
    fit, training, loop = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(fit, str(README), "exec"), {})
    line = r"loss \d.* after \d+ steps, .* s, 1000 samples per step: the tolerance is reached\n"
    assert re.fullmatch(line, capsys.readouterr().out)
    assert re.search("^    " + line, README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    names = {}
    exec(compile(training, str(README), "exec"), names)
    exec(compile(loop, str(README), "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(re.fullmatch(r"loss \d.*, damping \d.*, ratio -?\d.*", line) for line in lines)


@pytest.mark.parametrize("page", sorted((README.parent / "docs").glob("*.md")), ids=lambda path: path.name)
def test_code_in_the_docs_runs(page: Path) -> None:
    names: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        if page.name != "regression.md":  # whose blocks follow one another, and assert what they show
            names = {}
        exec(compile(example, str(page), "exec"), names)
        if page.name == "regression.md" or isinstance(names.get("fit"), woodbury.Fit):
            continue
        optimizer = names["optimizer"]
        assert isinstance(optimizer, woodbury.GaussNewton)
        assert optimizer.verify(names["inputs"], names["counts"]) < 1e-4  # type: ignore[arg-type]
