"""Read numbers from a device without waiting for it."""

import torch
from torch import Tensor

from pgcl_losses._modes import is_capturing, is_eager


def can_arrive(values: Tensor) -> bool:
    """Whether Python can read the numbers: not in a graph or transform, nor if there are none."""
    return (
        is_eager()
        and type(values) is Tensor
        and values.device.type in ("cpu", "cuda")
        and not is_capturing(values.device)
    )


class Arrival:
    """A number that is sent from its device to be read later."""

    def __init__(self, number: Tensor) -> None:
        self.arrived: torch.cuda.Event | None = None
        self.number = number
        if number.is_cuda:
            self.number = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
            self.number.copy_(number, non_blocking=True)
            self.arrived = torch.cuda.current_stream(number.device).record_event()

    def read(self) -> float | None:
        """None until it has arrived."""
        if self.arrived is not None and not self.arrived.query():  # type: ignore[no-untyped-call]  # torch has no type there
            return None
        return float(self.number)
