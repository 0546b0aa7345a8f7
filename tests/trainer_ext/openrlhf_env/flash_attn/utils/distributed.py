"""OpenRLHF imports this for ring attention, which needs kernels that a CPU has not."""

from __future__ import annotations

from typing import NoReturn


def all_gather(*args: object) -> NoReturn:
    raise NotImplementedError("ring attention needs a GPU")
