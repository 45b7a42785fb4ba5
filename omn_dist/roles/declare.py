"""Views that a model declares for its own parameters, as metadata on its modules.

Parameters, their names and forward stay as they are.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from omn_dist.plan.geometry.views import SplitAlgorithm, View

VIEWS_ATTRIBUTE = "muon_views"
"""Attribute of a module or of its class: a view, or a ``muon_shape`` tuple, by parameter path.

Paths start below the module.
"""


class FoundView(NamedTuple):
    """A view, and where it comes from."""

    view: View
    source: str


def declare_view(
    module: nn.Module,
    shape: tuple[int, ...],
    *,
    parameter: str = "weight",
    split_sizes: tuple[int, ...] = (),
    split_names: tuple[str, ...] = (),
    split_algorithms: tuple[SplitAlgorithm, ...] = (),
    joined_axes: tuple[int, ...] = (),
    transposed: bool = False,
) -> View:
    """Declare which matrices a parameter of ``module`` holds.

    The module stores the view, so the view survives ``fully_shard``, meta initialisation,
    ``deepcopy`` and ``torch.compile``. The attribute
    ``self.muon_views = {"qkv.weight": (3, H, D, C)}`` does the same without a call.

    Args:
        module: the module that holds the parameter, or one above it.
        shape: ``(*axes, rows, columns)`` of the operator.
        parameter: path of the parameter below ``module``.
        split_sizes, split_names, split_algorithms, joined_axes, transposed: see
            :class:`~omn_dist.plan.geometry.views.View`.

    Raises:
        ValueError: the view is impossible, does not fit the stored shape, or differs from an
            earlier declaration.

    Not collective.
    """
    view = View(
        shape=tuple(shape),
        split_sizes=tuple(split_sizes),
        split_names=tuple(split_names),
        split_algorithms=tuple(split_algorithms),
        joined_axes=tuple(joined_axes),
        transposed=transposed,
    )
    view.check(parameter, _parameter_at(module, parameter, type(module).__name__).shape)
    views = dict(getattr(module, VIEWS_ATTRIBUTE, {}))
    before = views.get(parameter)
    if before is not None and _as_view(before, parameter) != view:
        raise ValueError(
            f"parameter {parameter} of {type(module).__name__}: found the view {view.as_fields()}, expected the one that was "
            f"declared before, {_as_view(before, parameter).as_fields()}; a parameter has one view"
        )
    views[parameter] = view
    setattr(module, VIEWS_ATTRIBUTE, views)
    return view


def declared_views(model: nn.Module) -> dict[int, FoundView]:
    """All declared views of a model, by ``id`` of the parameter.

    Raises:
        ValueError: a parameter that does not exist, a view that does not fit the stored shape, or
            two different views of one (shared) parameter.
    """
    found: dict[int, FoundView] = {}
    for path, module in model.named_modules():
        views: Any = getattr(module, VIEWS_ATTRIBUTE, None)
        if views is None or isinstance(views, nn.Module | Tensor):
            continue
        where = path or type(module).__name__
        if not isinstance(views, Mapping):
            raise ValueError(f"{where}.{VIEWS_ATTRIBUTE}: found {views!r}, expected parameter paths to views")
        for parameter_path, value in views.items():
            name = f"{path}.{parameter_path}" if path else parameter_path
            parameter = _parameter_at(module, parameter_path, where)
            view = _as_view(value, name)
            view.check(name, parameter.shape)
            add_view(found, parameter, FoundView(view, f"view declared on {where}"))
    return found


def add_view(views: dict[int, FoundView], parameter: Tensor, new: FoundView) -> None:
    """Add a view; raise ``ValueError`` if the parameter already has a different one."""
    before = views.setdefault(id(parameter), new)
    if before.view != new.view:
        raise ValueError(
            f"shared parameter of shape {tuple(parameter.shape)}: found {new.view.as_fields()} ({new.source}) beside "
            f"{before.view.as_fields()} ({before.source}), expected one view of a shared weight"
        )


def _as_view(value: Any, name: str) -> View:
    if isinstance(value, View):
        return value
    if isinstance(value, list | tuple):
        return View(shape=tuple(value))
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - set(View.__dataclass_fields__))
        if not unknown:
            fields: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
            return View(**fields)
    raise ValueError(f"parameter {name}: found {value!r} as its view, expected a View, its fields, or a muon_shape tuple")


def _parameter_at(module: nn.Module, path: str, where: str) -> Tensor:
    target: Any = module
    for part in path.split("."):
        target = getattr(target, part, None)
    if not isinstance(target, nn.Parameter):
        raise ValueError(f"{where}: found no parameter {path!r} for a declared view, expected a path such as 'qkv.weight'")
    return target
