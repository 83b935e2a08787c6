"""What the ranks of one actor settle among themselves before they do something that all must do alike.

A rank that enters a collective call alone waits for ever, so it is first known that every rank has this code: each
signs in to the store of the process group when it is built, and no call is entered unless all have.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlc_sentinel.integrations.verl_wraps import quietly


@quietly
def sign_in(what: str) -> None:
    """This rank has `what`."""
    _store_add(what, 1)


@quietly
def all_have(what: str) -> bool:
    """True when every rank signed in. The same answer on each: all are built before the first of them trains."""
    import torch

    return _store_add(what, 0) == int(torch.distributed.get_world_size())


def highest(values: Sequence[int]) -> list[int]:
    """The largest value of any rank, place by place. Every rank must call it, with as many values."""
    import torch
    from verl.utils.device import get_device_name

    agreed = torch.tensor(list(values), dtype=torch.int64, device=get_device_name())
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
    return [int(value) for value in agreed.tolist()]


def _store_add(what: str, amount: int) -> int:
    from torch.distributed import distributed_c10d

    return int(distributed_c10d._get_default_store().add(f"dlc_sentinel/{what}", amount))
