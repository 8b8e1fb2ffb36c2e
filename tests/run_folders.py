"""What run folders hold, for tests that compare them."""

import json


def contents(folder):
    """The files of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def records_of(folder, *kinds):
    """The records of these kinds, "step" and "epoch"."""
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] in kinds]


def assert_same_end(first, second):
    """The same weights and records, bit for bit, but for the times in the records."""
    one, other = (records_of(folder, "step", "epoch") for folder in (first, second))
    assert [{**record, "seconds": 0} for record in one] == [{**record, "seconds": 0} for record in other]
    assert (first / "model.pt").read_bytes() == (second / "model.pt").read_bytes()


def invoke(*arguments):
    """What `woodbury ARGUMENTS` ends with and prints, in this process."""
    from typer.testing import CliRunner

    from woodbury import cli

    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def assert_one_line(result, *facts):
    """Status 2, one printable line that names the facts, no traceback."""
    assert result.exit_code == 2, result.output
    assert result.output.startswith("woodbury: ") and len(result.output.splitlines()) == 1, result.output
    assert result.output.strip().isprintable() and len(result.output) < 2100
    for fact in facts:
        assert fact in result.output
