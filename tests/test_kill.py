"""The short form of `python -m tests.soak.kill`."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path):
    import subprocess

    # in a process of its own: one that has run a model has threads, and must not be forked
    root = Path(__file__).parent.parent
    arguments = ["--kills", "4", "--fit-kills", "4", "--seed", "1"]
    program = f"import sys; from tests.soak.kill import main; sys.exit(main({arguments}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("4 kills") == done.stdout.count("all equal") == 2  # of commands, and of fits
