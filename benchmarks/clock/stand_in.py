# SPDX-License-Identifier: Apache-2.0
"""What others' host code asks of CUDA, answered for an emulated device and tensors of the CPU.

Everything that is replaced in torch is replaced here, and only in a process that runs one case: nothing is put back.
The kernels themselves, and the code that chooses, compiles and calls them, are as their packages ship them.
"""

import contextlib
import os
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# Where `make peers` installs them (tools/setup_peers.py).
PEERS = Path(__file__).resolve().parents[2] / os.environ.get("PEERS", ".peers")
EXAMPLES = "cutlass_examples"  # in it, those of CUTLASS, which may be missing
SMS = 4
CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}


def ready(peers: Path) -> None:
    """What a process needs on a GPU as well; before the kernels' packages are imported."""
    # Compiled functions on disk would come without their PTX, and from another version.
    os.environ.update(QUACK_CACHE_ENABLED="0", FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="0")
    # Last, so that it adds packages to the environment and hides none of them.
    sys.path += [str(peers), str(peers / EXAMPLES)]
    # Outputs begin as NaN: memory that a call before has filled would hide what this one leaves out.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@cache
def pretend(arch: str, peers: Path, sms: int = SMS) -> None:
    """Make this process believe that it has a GPU of the arch; before the kernels' packages are imported."""
    capability = CAPABILITIES[arch]
    number = arch.removeprefix("sm_").removesuffix("a")
    os.environ.update(
        FLASH_ATTENTION_ARCH=f"sm_{number}",
        QUACK_ARCH=number,
        # quack's quantizers are compiled by torch, which asks the GPU for its random state first.
        TORCHDYNAMO_DISABLE="1",
    )
    ready(peers)
    properties = SimpleNamespace(
        multi_processor_count=sms, major=capability[0], minor=capability[1], name=arch, L2_cache_size=50 << 20
    )
    stream = SimpleNamespace(cuda_stream=0)
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda *_, **__: capability
    cuda.get_device_properties = lambda *_, **__: properties
    cuda.current_device = lambda: 0
    cuda.current_stream = lambda *_: stream
    cuda.synchronize = lambda *_: None
    cuda.device = lambda *_: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda _: True)
    _custom_ops_on_every_device()


def _custom_ops_on_every_device() -> None:
    """Operators that quack restricts to CUDA's dispatch key also take tensors of the CPU."""
    original = torch.library.custom_op

    def custom_op(*arguments: Any, **options: Any) -> Any:
        options.pop("device_types", None)
        return original(*arguments, **options)

    library: Any = torch.library
    library.custom_op = custom_op
