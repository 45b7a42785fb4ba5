"""How many kernels a device would be asked to launch, counted on the CPU: by operators, and torch's rule for multi-tensor ones."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts launches by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.counts.total()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name.startswith("_foreach_"):
            self.counts[name] += 1 if takes_fast_route(name, arguments) else len(arguments[0])
        elif not function.is_view and name not in ("empty", "empty_like", "promote_types"):
            self.counts[name] += 1
        return function(*arguments, **(keywords or {}))


def takes_fast_route(name: str, arguments: Any) -> bool:
    """Whether torch takes these lists in one launch on CUDA (``ForeachUtils.h``), few and short as those of tests are."""
    lists = [argument for argument in arguments if isinstance(argument, (list, tuple))]
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    alike = all(len(found) == 1 for found in dtypes) and (name == "_foreach_copy_" or len(set.union(*dtypes)) == 1)
    return alike and all(_dense_and_alike(tensors) for tensors in zip(*lists, strict=True))


def _dense_and_alike(tensors: tuple[Tensor, ...]) -> bool:
    # Strides of dims of one element do not count.
    strides = {tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in tensors}
    return len(strides) == 1 and len({t.shape for t in tensors}) == 1 and all(t.is_contiguous() for t in tensors)
