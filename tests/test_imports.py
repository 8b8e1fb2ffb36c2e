"""The layers of the code import downward only, and the core needs torch alone."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import woodbury
from woodbury import layers
from woodbury.layers import RowForm

ROOT = Path(woodbury.__file__).parent


def read_map():
    """The rooms of the house by name, lowest first, and what CONTRIBUTING.md says of each."""
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## The map")[2].partition("\n## ")[0]
    return dict(re.findall(r"^    (\w+)/? +(.*(?:\n {20}.*)*)", section, flags=re.MULTILINE)[::-1])


# A module imports from lower rooms only, and in a room that is a package never in a circle, without exceptions.
MAP = read_map()
ROOMS = list(MAP)
CORE_MODULES = [*(f"woodbury.{room}" for room in ROOMS[: ROOMS.index("fit") + 1]), "benchmarks.__main__"]


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(path):
    """Names of woodbury's own modules that a file imports, without the leading package name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            assert name.split(".")[0] != "benchmarks", f"{path}: the package imports what lies outside of it"
            if name.split(".")[0] != "woodbury":
                continue
            local = name.removeprefix("woodbury").lstrip(".")
            while local and local not in MODULES:
                local = local.rpartition(".")[0]
            yield local


def test_imports_point_downward_and_never_in_a_circle():
    inside = {}
    for name, path in MODULES.items():
        if path.name == "__init__.py":  # a package lists its public names from anywhere inside it
            continue
        room = name.partition(".")[0]
        for target in imported(path):
            assert target, f"{name} imports the package woodbury itself"
            other = target.partition(".")[0]
            below = ROOMS.index(other) < ROOMS.index(room) or (other == room and "." in target)
            assert below, f"{name} imports {target}, which is not below it"
            if other == room:
                inside.setdefault(name, set()).add(target)
    TopologicalSorter(inside).prepare()  # raises at a circle


def test_the_map_has_every_module_and_no_other():
    assert {name.partition(".")[0] for name in MODULES} - {"__init__"} == set(ROOMS)
    for name in MODULES:
        room, _, inside = name.partition(".")
        assert not inside or inside in re.findall(r"\w+", MAP[room]), name


def test_nobody_outside_layers_asks_which_form_rows_have():
    forms = [own.__name__ for own in vars(layers).values() if isinstance(own, type) and issubclass(own, RowForm)]
    asked = re.compile(rf"(?:isinstance\(|issubclass\(|type\(|case ).*\b(?:{'|'.join(forms)})\b")
    assert asked.search("isinstance(form, (Other, layers.OuterRows))") and len(forms) > 4
    for name, path in MODULES.items():
        assert name.split(".")[0] == "layers" or not asked.search(path.read_text()), name


def test_the_core_needs_torch_alone():
    """With everything but torch (and what torch brings) hidden, the core and the benchmarks still import.

    Where the others are at hand, to import woodbury is to import none of them.
    """
    extras = ["numpy", "scipy", "sklearn", "matplotlib", "typer", "rich", "pandas", "pooch"]
    program = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import woodbury\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        f"assert not new & {set(extras)!r}, new\n"
        "for loaded in [m for m in sys.modules if m.startswith('woodbury')]: del sys.modules[loaded]\n"
        f"for name in {extras!r}:\n"
        "    for loaded in [m for m in sys.modules if m == name or m.startswith(name + '.')]:\n"
        "        del sys.modules[loaded]\n"
        "    sys.modules[name] = None\n"
        f"import importlib\nfor name in {CORE_MODULES!r}: importlib.import_module(name)\n"
        "import woodbury\n"
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = woodbury.GaussNewton(model, torch.nn.MSELoss(), curvature_samples=2)\n"
        "assert optimizer.step(torch.randn(4, 3), torch.randn(4, 2)).accepted\n"
        "optimizer.zero_grad()\noptimizer.load_state_dict(optimizer.state_dict())\n"
        "assert 'torch._dynamo' not in sys.modules  # whose import takes seconds\n"
    )
    command, checkout = [sys.executable, "-W", "ignore", "-c", program], ROOT.parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=checkout)
    assert done.returncode == 0, done.stderr


def test_public_names_are_the_ones_listed():
    for name in woodbury.__all__:
        assert getattr(woodbury, name).__doc__, name
