"""One process, or several under `accelerate` or `torchrun`: how gradients meet, and what only the first one does.

Every process knows the whole run: the data, the order, and which rows of which sequences an update draws. It computes
those of its own sequences. Rows carry their weight over the whole update, so gradients are summed, not averaged.

DDP: each process holds the drafter, its gradients and its optimiser. FSDP2: each holds a part of all three. Either way
each holds the whole target, frozen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dartspec.errors import DartspecError


class Processes:
    """This process alone. `_Several` is one among others."""

    index = 0
    count = 1
    loss_scale = 1.0  # of a process's loss, so that what reaches the weights is the sum over processes
    is_sharded = False

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose forward and backward are shared with the others. Its parameters may be replaced: make the
        optimiser afterwards."""
        return module

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Around all but the last forward and backward of an update: gradients stay with their process."""
        return nullcontext()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes."""
        return tensor

    def wait(self) -> None:
        """Until all are here."""

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """The first process runs the block alone, then the others do: what it wrote is there."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor of which this process may hold a part."""
        return tensor

    def place(self, whole: Tensor, like: Tensor) -> Tensor:
        """This process's part of a whole tensor, laid out as `like`."""
        return whole.to(like.device)


class _Several(Processes):
    def __init__(self, device: torch.device) -> None:
        try:
            from accelerate import Accelerator
        except ImportError:
            raise DartspecError(
                "several processes were started, which needs the package accelerate: pip install 'dartspec[train]'"
            ) from None
        self.accelerator: Any = Accelerator(cpu=device.type == "cpu", mixed_precision="no")
        self.index, self.count = self.accelerator.process_index, self.accelerator.num_processes
        self.device = device
        if device.type != "cpu" and device != self.accelerator.device:
            raise DartspecError(
                f"process {self.index} has its target on {device}, and its own device is {self.accelerator.device}: "
                "give no device, each process then takes its own"
            )

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self.device, copy=True)
        torch.distributed.all_reduce(total)
        return total.to(tensor.device)

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()


class _Copied(_Several):
    """Distributed data parallel."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.loss_scale = float(self.count)  # it averages
        if str(self.accelerator.distributed_type).endswith("FSDP"):
            raise DartspecError("accelerate was told to shard, the config says parallel = ddp: say parallel = fsdp2")

    def wrap(self, module: nn.Module) -> nn.Module:
        return self.accelerator.prepare_model(module)  # type: ignore[no-any-return]

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        return self.accelerator.no_sync(module)  # type: ignore[no-any-return]


class _Sharded(_Several):
    """FSDP2. torch's own call: accelerate's plugin shards on accelerators only, and this runs on CPUs too."""

    is_sharded = True

    def wrap(self, module: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # one unit: a method reads weights outside of their layer's own forward
        sharded: Any = fully_shard(module.to(self.device), mesh=init_device_mesh(self.device.type, (self.count,)))
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        return sharded  # type: ignore[no-any-return]

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        return _without_sync(module)

    def whole(self, tensor: Tensor) -> Tensor:
        full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
        return tensor if full is None else full()

    def place(self, whole: Tensor, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor):
            return super().place(whole, like)
        return distribute_tensor(whole.to(self.device), like.device_mesh, like.placements)


@contextmanager
def _without_sync(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def processes(device: torch.device, parallel: str) -> Processes:
    """What the launcher started: `accelerate launch` and `torchrun` say so in the environment."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    return _Sharded(device) if parallel == "fsdp2" else _Copied(device)


def own_device() -> str:
    """The device of this process where a launcher started several, each with a GPU; else empty."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not torch.cuda.is_available():
        return ""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def own_index() -> int:
    """This process's number among those that a launcher started."""
    return int(os.environ.get("RANK", "0"))
