"""Packages that are installed and do not work, because they were built for another torch."""

from __future__ import annotations

import functools
import importlib.util
import signal
import subprocess
import sys

_ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
"""


@functools.cache
def is_torchvision_broken() -> bool:
    """Whether torchvision is installed and cannot be imported; transformers and lightning import it if it is there."""
    if importlib.util.find_spec("torchvision") is None:
        return False
    return (
        subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode != 0
    )


@functools.cache
def is_nccl_a_stub() -> bool:
    """Whether a collective aborts the process, because torch calls a function of a newer NCCL that is a stub here."""
    done = subprocess.run([sys.executable, "-c", _ALL_REDUCE], capture_output=True, timeout=120, check=False)
    return done.returncode == -signal.SIGABRT
