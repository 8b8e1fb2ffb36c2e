import os
import sys
from pathlib import Path

# Before torch is imported: spinning threads of small products slow the tests down on a shared machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
