"""The demo and the table of defaults, in small form."""

import pytest

import demo
import no_settings


def test_the_demo_writes_a_figure_and_a_page(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    demo.main(["--seconds", "0.3", "--out", str(tmp_path)])
    page = (tmp_path / "fit.html").read_text(encoding="utf-8")
    assert (tmp_path / "fit.png").stat().st_size > 5000
    assert "data:image/png;base64," in page and "torch Adam" in page and "{" not in page.partition("</style>")[2]
    assert capsys.readouterr().out.count("mean squared error") == 7


def test_the_table_has_a_line_per_problem_and_seed(capsys):
    no_settings.main(["--problems", "sinc,precision", "--seeds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["| problem", "| ---", "| precision", "| sinc"]
    assert "never" not in lines[2] + lines[3]
    with pytest.raises(SystemExit):
        no_settings.main(["--problems", "cosine"])
