"""Build the wheel, install it beside torch alone and run the first example of the README.

    python -m tests.install.wheel python3.10=2.6.0 python3.13=2.10.0
    python -m tests.install.wheel --tests /path/to/environment/bin/python=installed

Each argument is an interpreter and a version of torch: a fresh environment gets that version, without the packages
of CUDA, which torch asks for and a CPU does not need. (Where pip finds builds for CUDA, on x86 and ARM from 2.14
on, they cannot be imported without them: set PIP_INDEX_URL to torch's index of CPU builds, or name a CPU build,
python3.11=2.13.0+cpu.)
"newest" takes the newest version that pip finds, "lowest" the bound in pyproject.toml, and "installed" the torch
that the interpreter has, with the wheel in a folder of its own. With --tests the core tests run there too.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# what torch imports
PLAIN = [
    *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy"),
    "typing-extensions",
]
# what the core tests import
FOR_TESTS = ["hypothesis", "numpy", "pytest", "scipy"]
CORE_TESTS = [
    *("test_layers", "test_losses", "test_rows", "test_smw", "test_chain", "test_attention", "test_recurrent"),
    *("test_optim_contract", "test_state", "test_sharing", "test_laplacian", "test_displacement", "test_fit"),
]
NEEDS_EXTRA = 'The command line needs typer: pip install "woodbury[experiments]"'


@dataclass(frozen=True)
class Place:
    """An interpreter that imports the wheel, and how."""

    python: str
    path: str = ""  # where the wheel is, if not in the environment

    def run(self, *arguments, cwd):
        environment = {**os.environ, "PYTHONPATH": self.path, "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
        settings = {"cwd": cwd, "env": environment, "capture_output": True, "text": True}
        return subprocess.run([self.python, *map(str, arguments)], **settings)


def lowest_torch():
    """The bound of pyproject.toml as a version: "2.6" is 2.6.0."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None
    return found[1] if found[1].count(".") == 2 else found[1] + ".0"


def first_example():
    """The code of the README's first example, and what it prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```\n\n    ([^\n]*\n)", text, flags=re.DOTALL)
    assert found is not None
    return found[1], found[2]


def pip(python, *arguments):
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def install(python, torch, wheel, folder):
    """The wheel where the interpreter, or a new environment of it, finds it; with torch and no extra."""
    if torch == "installed":
        pip(python, "install", "--no-deps", "--target", folder / "site", wheel)
        return Place(python, str(folder / "site"))
    subprocess.run([python, "-m", "venv", folder / "environment"], check=True)
    own = str(folder / "environment" / "bin" / "python")
    version = {"newest": "torch", "lowest": f"torch=={lowest_torch()}"}.get(torch, f"torch=={torch}")
    pip(own, "install", "--no-deps", version, *PLAIN, wheel)
    return Place(own)


def check(place, folder, with_tests):
    """What is wrong, one line each."""
    versions = "sys.version.split()[0], torch.__version__, woodbury.__version__, woodbury.__file__"
    shown = place.run("-c", f"import sys, torch, woodbury; print({versions})", cwd=folder)
    if shown.returncode:
        way = ": a build for CUDA; name one for the CPU" if "libcu" in shown.stderr else ""
        return [f"cannot be imported: {shown.stderr.strip().splitlines()[-1]}{way}"]
    python, torch, version, file = shown.stdout.split()
    print(f"Python {python}, torch {torch}, woodbury {version}", flush=True)
    faults = [] if Path(file).is_relative_to(folder) else [f"not the wheel is imported, but {file}"]
    example, printed = first_example()
    done = place.run("-c", example, cwd=folder)
    print(f"  the first example of the README: {done.stdout.strip()}", flush=True)
    if done.returncode or done.stdout != printed:
        faults.append(f"the first example: {done.stdout}{done.stderr}")
    done = place.run("-m", "woodbury", "--version", cwd=folder)
    has_extra = place.run("-c", "import typer", cwd=folder).returncode == 0
    last = done.stderr.strip().rpartition("\n")[2]  # torch may have warned that there is no numpy
    right = done.stdout.startswith(f"woodbury {version}") if has_extra else done.returncode and last == NEEDS_EXTRA
    if not right:
        faults.append(f"python -m woodbury --version: {done.stdout}{done.stderr}")
    if with_tests:
        pip(place.python, "install", *FOR_TESTS)
        files = [ROOT / "tests" / f"{name}.py" for name in CORE_TESTS]
        done = place.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files, cwd=ROOT)
        print("  " + done.stdout.strip().splitlines()[-1], flush=True)
        if done.returncode:
            faults.append(done.stdout[-3000:])
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="PYTHON=TORCH", help="default: this Python, lowest and newest")
    parser.add_argument("--tests", action="store_true", help="run the core tests as well (about 10 minutes each)")
    arguments = parser.parse_args()
    pairs = arguments.pairs or [f"{sys.executable}=lowest", f"{sys.executable}=newest"]
    faulty = False
    with tempfile.TemporaryDirectory() as name:
        pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", name, ROOT)
        (wheel,) = Path(name).glob("*.whl")
        for number, pair in enumerate(pairs):
            python, _, torch = pair.rpartition("=")
            folder = Path(name) / str(number)
            folder.mkdir()
            faults = check(install(python, torch, wheel, folder), folder, arguments.tests)
            faulty |= bool(faults)
            for fault in faults:
                print(f"{pair}: {fault}", file=sys.stderr)
    return int(faulty)


if __name__ == "__main__":
    raise SystemExit(main())
