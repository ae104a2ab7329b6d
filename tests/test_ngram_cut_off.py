"""An index file that another program cuts off or overwrites while it is open: what is left is read, nothing ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
import numpy as np
from dartspec import _core
from dartspec.ngram import NgramIndex

path, how = sys.argv[1:]
random = np.random.default_rng(0)
index = NgramIndex.build(
    [random.integers(0, 5000, 60_000)], vocab_size=5000, fingerprint="f", name="n", description="d"
)
index.save(path)
index = NgramIndex.open(path)
contexts = np.array([[i, i + 1] for i in range(4900)], dtype=np.int32)
tokens = np.array([range(20)] * len(contexts), dtype=np.int32)
before = index.score(contexts, tokens)
size = len(open(path, "rb").read())
assert size > 40_000
with open(path, "r+b") as file:
    if how == "cut":
        file.truncate(5000)
    else:
        file.write(random.integers(0, 256, size, dtype=np.uint8).tobytes())
after = index.score(contexts, tokens)
assert after.shape == before.shape
assert (after != before).any()
for i in range(4900):
    index.continuations([i, i + 1], 5)
assert (_core.num_lost_pages() > 0) == (how == "cut")
other = NgramIndex.build([[1, 2, 3]], vocab_size=5, fingerprint="f", name="n", description="d")
assert other.score(np.array([[1, 2]], np.int32), np.array([[3]], np.int32)).shape == (1, 1)
print("read on")
"""


@pytest.mark.parametrize("how", ["cut", "overwrite"])
def test_reading_goes_on(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", CODE, str(tmp_path / "x.ngram"), how]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, (made.returncode, made.stderr)
    assert made.stdout == "read on\n"


def test_other_bus_errors_still_end_the_program(tmp_path: Path) -> None:
    """Ours alone are taken: a mapping of somebody else's that is cut off ends the program, as it did before."""
    code = """
import mmap, sys
from dartspec.ngram import NgramIndex
index = NgramIndex.build([[1, 2, 3]], vocab_size=5, fingerprint="f", name="n", description="d")
index.save(sys.argv[1])
index = NgramIndex.open(sys.argv[1])
with open(sys.argv[2], "w+b") as file:
    file.write(b"x" * 100_000)
    file.flush()
    view = mmap.mmap(file.fileno(), 100_000)
    file.truncate(10)
    print(view[50_000])
"""
    made = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.ngram"), str(tmp_path / "other")],
        capture_output=True,
        timeout=120,
    )
    assert made.returncode == -7
