"""A function's start."""

import gc

import pytest

from backburner.start import uncollected


def test_nothing_is_collected_meanwhile_and_everything_is_afterwards() -> None:
    """Also where the start failed: whoever tries again must not run without a collector."""
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(LookupError), uncollected():
        raise LookupError
    assert gc.isenabled()
    gc.unfreeze()


def test_what_a_start_made_is_not_looked_at_again() -> None:
    """It is there to stay."""
    before = gc.get_freeze_count()
    with uncollected():
        made = [[number] for number in range(1_000)]
    assert gc.get_freeze_count() >= before + len(made)
    gc.unfreeze()
