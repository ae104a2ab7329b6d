"""dartspec: lossless speculative decoding with DART. Importing this package does nothing but define names.

import dartspec
lm = dartspec.load()                      # or a folder, a hub id, a GGUF file, a model and tokenizer in memory
print(lm.generate([{"role": "user", "content": "What is a token tree?"}]).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dartspec.api import LM, Result, Stream, load
    from dartspec.errors import DartspecError
    from dartspec.types import SamplingParams

__version__ = "0.1.0"
__all__ = ["LM", "DartspecError", "Result", "SamplingParams", "Stream", "__version__", "load"]

_HOME = {
    "LM": "dartspec.api",
    "Result": "dartspec.api",
    "Stream": "dartspec.api",
    "load": "dartspec.api",
    "DartspecError": "dartspec.errors",
    "SamplingParams": "dartspec.types",
}


def __getattr__(name: str) -> Any:
    """torch and transformers are imported when something is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'dartspec' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
