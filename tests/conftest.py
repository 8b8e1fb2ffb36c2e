import gc
import os
import sys
import zlib
from pathlib import Path
from types import FunctionType

OTHER_KERNELS = "WOODBURY_OTHER_KERNELS"  # set for the processes that pytest-xdist starts as well
if "--other-kernels" in sys.argv:
    os.environ[OTHER_KERNELS] = "1"
# All before torch is imported. One thread: those that wait for small products slow tests down on a shared machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if OTHER_KERNELS in os.environ:
    os.environ["OMP_NUM_THREADS"] = "2"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # several test processes share the cores
    os.environ["ATEN_CPU_CAPABILITY"] = "default"  # torch's own kernels without vector instructions
    os.environ["OPENBLAS_CORETYPE"] = "ARMV8" if os.uname().machine == "aarch64" else "Prescott"
    os.environ["MKL_CBWR"] = "COMPATIBLE"

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if OTHER_KERNELS in os.environ:
    torch.backends.mkldnn.set_flags(False)

# The same draws in every run: `HYPOTHESIS_PROFILE=random` makes new ones.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("random")
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

sys.path.insert(0, str(Path(__file__).parent))

from problems import set_seed  # noqa: E402


def pytest_addoption(parser):
    text = "run a thirtieth of the tests that use tests/bounds.py, with other matrix kernels and two threads"
    parser.addoption("--other-kernels", action="store_true", help=text)


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config, items):
    if OTHER_KERNELS in os.environ:
        chosen = list(_sample(item for item in items if _uses_bounds(item.function, item.module, set())))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_collection_finish():
    """What was imported and collected is never garbage: full collections need not look at its 650,000 objects."""
    gc.freeze()


def _sample(items):
    """The first case of each test function, those in float32, a thirtieth of the others, the same in every run."""
    functions = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        single = any(value is torch.float32 for value in values)
        if function not in functions or single or zlib.crc32(item.nodeid.encode()) % 30 == 0:
            yield item
        functions.add(function)


def _uses_bounds(function, module, seen):
    """Whether a function, or what it uses of its module, takes a bound from tests/bounds.py."""
    function = getattr(function, "hypothesis", function)
    function = getattr(function, "inner_test", function)
    names = set(function.__code__.co_names) - seen
    seen |= names
    if "bounds" in names:
        return True
    used = [vars(module).get(name) for name in names]
    used += [part for own in used if isinstance(own, type) for part in vars(own).values()]
    return any(_uses_bounds(own, module, seen) for own in used if isinstance(own, FunctionType))


@pytest.fixture(autouse=True)
def fixed_seed():
    set_seed(0)
