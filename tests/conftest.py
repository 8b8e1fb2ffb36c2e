import os
import sys
from pathlib import Path

# Before torch is imported: spinning threads of small products slow the tests down on a shared machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

# The same draws in every run: `HYPOTHESIS_PROFILE=random` makes new ones.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("random")
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
