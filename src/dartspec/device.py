"""What crosses to an accelerator and what is repeated there: recorders, staged inputs, one transfer back.

Knows tensors and devices; no model, no tokens. On the CPU all of it works in the same way and saves nothing, so that
what runs on an accelerator is tested without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_WARM_UPS = 2  # runs before a recording: libraries allocate and choose their algorithms in the first ones
_ALIGN = 16

Run = Callable[[], tuple[Tensor, ...]]


class Recording(NamedTuple):
    """`replay` does again what was recorded, on the same memory; `outputs` then hold the new results."""

    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records a function of no arguments whose inputs are tensors that stay where they are."""

    def record(self, run: Run) -> Recording:
        """Calls `run` at least once, so its outputs are right already. Raises where it cannot be recorded: it waits for
        the device, or shapes depend on values."""
        ...


class CudaRecorder:
    """CUDA graphs, all in one memory pool: what one recording needs only while it runs, the others use too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Run) -> Recording:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads may allocate meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = run()
        except Exception:
            torch.cuda.set_stream(current)  # a capture that failed leaves its own stream behind
            raise
        graph.replay()  # capturing ran nothing
        return Recording(outputs, graph.replay)


class TapeRecorder:
    """What a CUDA graph does, by torch's operations on any device: notes each one with its operands and repeats them on
    the same memory, without the Python that called them. It refuses what a CUDA graph refuses: waiting for a value, and
    shapes that depend on values. For tests and dry runs: it saves no time.

    It sees torch's operations only. A model that runs our CPU kernels must not be recorded with it.
    """

    def record(self, run: Run) -> Recording:
        with _Tape() as tape:
            outputs = run()
        return Recording(outputs, tape.replay)


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dynamic = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if dynamic and not _is_gather(func, args):
            raise RuntimeError(f"{func} needs a value from the device while the forward is recorded")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._schema.is_mutable:  # again the same operands, again written where they lie
            self._steps.append((func, args, kwargs, []))
            return out
        # the schema does not tell: `reshape` gives a view or a copy. A view lies in memory that is filled already
        given = {t.untyped_storage()._cdata for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        made = tree_flatten(out)[0]
        places = [t if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given else None for t in made]
        if any(place is not None for place in places):
            self._steps.append((func, args, kwargs, places))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, places in self._steps:
            out = func(*args, **kwargs)
            for place, new in zip(places, tree_flatten(out)[0] if places else [], strict=True):
                if place is not None:
                    place.copy_(new)


def _is_gather(func: Any, args: Any) -> bool:
    """Indexing by numbers; by truth values it would have a shape that depends on them."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1])


class Staged:
    """Named tensors in one block of memory, twice: `host`, pinned, filled by Python, and `device`, filled by `send` in
    one copy that nobody waits for."""

    def __init__(self, device: torch.device, fields: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        sizes = {n: torch.Size(shape).numel() * dtype.itemsize for n, (shape, dtype) in fields.items()}
        total = sum(-(-size // _ALIGN) * _ALIGN for size in sizes.values())
        self._is_cuda = device.type == "cuda"
        self._here = torch.zeros(total, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._there = torch.zeros(total, dtype=torch.uint8, device=device)
        self._sent: torch.cuda.Event | None = None
        self.host: dict[str, Tensor] = {}
        self.device: dict[str, Tensor] = {}
        at = 0
        for name, (shape, dtype) in fields.items():
            for block, views in ((self._here, self.host), (self._there, self.device)):
                views[name] = block[at : at + sizes[name]].view(dtype).view(shape)
            at += -(-sizes[name] // _ALIGN) * _ALIGN

    def wait(self) -> None:
        """Until the last copy has left `host`, which may then be written again."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        self._there.copy_(self._here, non_blocking=True)
        if self._is_cuda:
            self._sent = self._sent or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record(torch.cuda.current_stream(self._there.device))


def first_line(error: Exception) -> str:
    """What an error is and how its message begins; CUDA's go on for a page."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no reason given')}"


def default_recorder(device: torch.device) -> Recorder | None:
    """CUDA graphs on a CUDA device, nothing elsewhere."""
    return CudaRecorder(device) if device.type == "cuda" else None


def send(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Small arrays to the device, in one copy that nobody waits for. The pinned memory is torch's own to reuse."""
    fields = {n: (a.shape, torch.from_numpy(a[:0].reshape(-1)).dtype) for n, a in arrays.items()}
    staged = Staged(device, fields)
    for name, array in arrays.items():
        staged.host[name].numpy()[...] = array
    staged.send()
    return staged.device


def take_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """A copy of some rows; their numbers go to the tensor's device, and nobody waits for them."""
    if tensor.device.type == "cpu":
        if rows and rows[-1] == len(rows) - 1:  # the first ones, ascending: a slice, no index
            return tensor[: len(rows)].clone()
        return tensor[list(rows)]
    return tensor.index_select(0, send({"rows": np.array(rows)}, tensor.device)["rows"])


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Tensors of four-byte numbers on one device to the CPU, in one transfer, which waits for the device."""
    if all(t.device.type == "cpu" for t in tensors):
        return list(tensors)
    return _unpack(_pack(tensors).cpu(), tensors)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.contiguous().view(torch.int32).flatten() for t in tensors])


def _unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(packed, [t.numel() for t in like])
    return [part.view(t.dtype).view(t.shape) for part, t in zip(parts, like, strict=True)]
