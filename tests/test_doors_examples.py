"""The scripts for loops that users have already run as they are printed."""

import pytest

pytest.importorskip("sklearn")


def test_the_unchanged_loop_learns():
    import unchanged_loop

    assert unchanged_loop.main(epochs=2) > 0.85


def test_the_closure_learns():
    import closure

    assert closure.main(steps=20) < 0.25  # a constant has 0.4


@pytest.mark.filterwarnings("ignore")
def test_the_loop_of_accelerate_learns():
    accelerate = pytest.importorskip("accelerate")
    import accelerate_digits

    try:
        assert accelerate_digits.main(epochs=2) < 1.0
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
