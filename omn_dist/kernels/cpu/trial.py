"""Where trials of kernels run."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from omn_dist.algorithms.switches import default_products

Result = TypeVar("Result")


def in_own_thread(call: Callable[[], Result]) -> Result:
    """What a call returns in a thread of its own, which no mode of the caller's thread reaches.

    Default devices, fake tensors, dispatch and function modes, inference mode and autocast belong
    to a thread; the only default that all threads share is the dtype, so a trial names its dtypes.
    Switches of matrix products, which all threads share, are at torch's defaults.
    """
    with default_products, ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(call).result()
