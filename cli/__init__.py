"""The operator's tool."""

import sys
from pathlib import Path

sys.path.insert(
    1, str(Path(__file__).resolve().parent.parent / "layers" / "shared")
)  # the program, as the layer has it
