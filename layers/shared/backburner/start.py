"""A function's start, from which Python's garbage collector is kept away."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import and build without looking for garbage, and never look at what was made.

    Nearly all of it stays for as long as the process lives, and looking through it again and again is a tenth of a cold
    start; the first request would look through all of it once more.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
