"""The demo and the table of defaults, in small form."""

import json
import re

import pytest
import torch

pytest.importorskip("matplotlib")


import demo
import no_settings

NO_SCREEN = ("CI", "TF_BUILD", "BUILD_NUMBER", "DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION")


@pytest.fixture(autouse=True)
def opened(monkeypatch):
    """The addresses that a browser was asked to open; afterwards torch has its threads again."""
    for name in NO_SCREEN:
        monkeypatch.delenv(name, raising=False)
    addresses = []
    monkeypatch.setattr(demo.webbrowser, "open", addresses.append)
    threads = torch.get_num_threads()
    yield addresses
    torch.set_num_threads(threads)


def test_the_demo_ends_with_one_page_and_opens_it_where_there_is_a_screen(tmp_path, capsys, opened, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(demo, "COMPARISON", [*demo.COMPARISON, "--seeds", "1"])
    demo.main(["--seconds", "0.1", "--steps", "2", "--epochs", "1", "--out", str(tmp_path)])
    page = tmp_path / "index.html"
    assert opened == [page.as_uri()] and f"wrote {page}" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "{{" not in text and not re.search(r"https?:|@import", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert len(data["fits"]) == 7 and (tmp_path / data["report"]).exists()
    assert [row[0] for row in data["digits"]["rows"]] == ["smw-gn", "smw-ng", "smw-ng-bd", "sgd"]
    # the code on the page stands on its own, and begins where the other methods do
    names = {}
    for code in (data["fit_code"], data["equation_code"]):
        exec(code.rpartition("print(")[0], names)
    model, inputs, targets = demo.precision.problem(100)
    start = demo.precision.LOSS(model(inputs), targets).item()
    assert names["fit_function"](0.01).history[0]["loss"] == pytest.approx(start)
    assert names["solve_poisson"](1)[1].steps == 1


def test_the_table_has_a_line_per_problem_and_seed(capsys):
    # they end by what they reach; a busy machine may need longer than a minute
    no_settings.main(["--problems", "sinc,precision", "--seeds", "1", "--seconds", "600"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["| problem", "| ---", "| precision", "| sinc"]
    assert "never" not in lines[2] + lines[3]
    with pytest.raises(SystemExit):
        no_settings.main(["--problems", "cosine"])
