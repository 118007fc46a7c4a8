"""The one place where values leave the device, so that waits can be counted."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class _Counter(threading.local):
    copies = 0


_counter = _Counter()


def host_copies() -> int:
    """Device-to-host copies made by this thread so far."""
    return _counter.copies


def to_host(integers: Tensor, floats: Tensor | None = None) -> tuple[list[int], list[float]]:
    """Bring one vector of integers, and one of float32 with it, to the host in a single copy.

    Args:
        integers: [m], any integer or boolean dtype.
        floats: [n] float32, sent as bits in the same copy.

    Returns:
        The two vectors as lists.
    """
    _counter.copies += 1
    packed = integers.long()
    if floats is None:
        return packed.tolist(), []
    packed = torch.cat([packed, floats.contiguous().view(torch.int32).long()]).cpu()
    bits = packed[len(integers) :].to(torch.int32)
    return packed[: len(integers)].tolist(), bits.view(torch.float32).tolist()
