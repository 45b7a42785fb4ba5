"""The state that a parameter must have: which tensors, of which kind; made, checked, converted.

Construction, steps, loads and an exchange of parameters all end here.

==========  =====================================  =============================================
extent      shape and placements                   dtype
==========  =====================================  =============================================
elements    the parameter's                        that of the step (the parameter's; fp32 with a
                                                   master), or a wider one that was loaded
rows        one number for each row                fp32
once        a scalar                               fp32
master      the parameter's                        fp32
==========  =====================================  =============================================
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from omn_dist.optim.row_state import row_placements, row_shape, zeros_for_rows
from omn_dist.optim.rules.registry import FOR_ROWS, rule_by_name
from omn_dist.optim.rules.rule import Extent, StateTensor
from omn_dist.plan.geometry.placement import as_matrix, local_tensor, parameter_layout
from omn_dist.plan.geometry.views import View

MASTER = "master"
"""State key of the fp32 copy of a half-precision parameter."""
_FLOAT32_BYTES = 4


class Due(NamedTuple):
    """A tensor that the state of a parameter must have."""

    extent: Extent | Literal["master"]
    dtype: torch.dtype
    """The narrowest that it may have."""


def kept_tensors(group: Mapping[str, Any]) -> Iterator[StateTensor]:
    """What the rule of a group keeps for each parameter, and what the rule of its AdamW rows keeps.

    Rows of a matrix parameter that AdamW updates have their moments in tensors of the parameter's
    shape: those reshard like it, and cost two more of its size.
    """
    rule = rule_by_name(group["algorithm"])
    view = View.from_group(group)
    yield from rule.state(group)
    if view is not None and view.has_adamw_rows:
        yield from FOR_ROWS.state(group)


def has_master(parameter: Tensor, *, master_weights: bool) -> bool:
    """Whether the parameter's state has an fp32 master."""
    return master_weights and parameter.dtype.itemsize < _FLOAT32_BYTES


def due_state(parameter: Tensor, group: Mapping[str, Any], *, master_weights: bool) -> dict[str, Due]:
    """What the state of a parameter must have, by key; the master comes first."""
    with_master = has_master(parameter, master_weights=master_weights)
    due = {MASTER: Due("master", torch.float32)} if with_master else {}
    working = torch.float32 if with_master else parameter.dtype
    return due | {key: Due(extent, working if extent == "elements" else torch.float32) for key, extent in kept_tensors(group)}


def made(name: str, parameter: Tensor, group: Mapping[str, Any], due: Due) -> Tensor:
    """A new state tensor: zeros, or for a master the parameter's values. Not collective.

    Raises:
        NotImplementedError: ``rows`` for shards that have rows without columns.
    """
    source = parameter.detach()
    if due.extent == "master":
        return source.to(due.dtype, copy=True)
    if due.extent == "elements":
        return torch.zeros_like(source, dtype=due.dtype)
    if due.extent == "rows":
        return zeros_for_rows(name, parameter, group)
    return torch.zeros((), dtype=due.dtype, device=parameter.device if parameter.is_cuda else "cpu")


def settle(state: dict[str, Any], name: str, parameter: Tensor, group: Mapping[str, Any], *, master_weights: bool) -> bool:
    """Bring the state of one parameter to what its rule needs, in place. Not collective.

    What is missing is made. Elements are widened, exactly, where the parameter was cast to a wider
    dtype. A master that is not due any more goes.

    State exists from construction on: if it came with the first step, torch's state-dict helpers
    would run a hidden step.

    Returns:
        Whether something was missing.

    Raises:
        ValueError: a tensor of another kind, shape, placement or dtype, or one that the rule does
            not know.
    """
    due = due_state(parameter, group, master_weights=master_weights)
    if MASTER not in due:
        state.pop(MASTER, None)
    check_keys(name, state, due)
    for key, value in state.items():
        check_fits(f"parameter {name}: {key}", value, parameter, group, due[key])
    missing = [key for key in due if key not in state]
    for key in missing:
        state[key] = made(name, parameter, group, due[key])
    # In the order of the rule, the same on all ranks: a change of placements is collective.
    for key in due:
        if key not in missing and not _is_due(state[key], parameter, group, due[key]):
            state[key] = converted(name, state[key], parameter, group, due[key])
    return bool(missing)


def _is_due(value: Any, parameter: Tensor, group: Mapping[str, Any], due: Due) -> bool:
    """Whether a value that fits can stay as it is."""
    if not isinstance(value, Tensor) or torch.promote_types(value.dtype, due.dtype) != value.dtype:
        return False
    if due.extent == "once":
        return value.ndim == 0 and value.is_cuda == parameter.is_cuda
    if value.device != parameter.device or isinstance(value, DTensor) != isinstance(parameter, DTensor):
        return False
    if not isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return True
    placements = row_placements(parameter, group) if due.extent == "rows" else list(parameter.placements)
    return list(value.placements) == placements


def check_keys(name: str, state: Mapping[str, Any], due: Mapping[str, Due]) -> None:
    """Refuse state with tensors that the rule does not keep, or with some of its tensors only.

    A master may be missing, or be there without need. No state at all is refused by nobody.

    Raises:
        ValueError: what was found, and what was expected.
    """
    found, expected = set(state) - {MASTER}, set(due) - {MASTER}
    if found and found != expected:
        raise ValueError(
            f"parameter {name}: found the state {', '.join(sorted(map(str, found)))}, expected {', '.join(sorted(expected))}; "
            "it is the state of another algorithm, so give it to the optimizer that it was saved from, or leave it out"
        )


def check_fits(what: str, value: Any, parameter: Tensor, group: Mapping[str, Any], due: Due) -> None:
    """Refuse a value that neither is the tensor that is due nor can be converted to it exactly.

    A full plain tensor can be converted to a shard, a narrower floating dtype to a wider one, a
    placement to another one on the same mesh, a number to a scalar. Not collective.

    Raises:
        ValueError: what was found, and what was expected.
    """
    if due.extent == "once":
        size = value.numel() if isinstance(value, Tensor) else 1
        if not isinstance(value, int | float | Tensor) or size != 1:
            raise ValueError(f"{what}: found {_described(value)}, expected one number")
        return
    shape = tuple(row_shape(parameter, group)) if due.extent == "rows" else tuple(parameter.shape)
    if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided or not value.is_floating_point():
        raise ValueError(f"{what}: found {_described(value)}, expected a dense floating tensor of shape {shape}")
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{what}: found {_described(value)}, expected shape {shape}; the shard of one rank cannot be told from another "
            "tensor, so save a full state dict, or use torch.distributed.checkpoint"
        )
    if due.extent != "elements" and torch.promote_types(value.dtype, due.dtype) != due.dtype:
        raise ValueError(f"{what}: found {_described(value)}, expected {due.dtype} or a narrower dtype")
    if isinstance(value, DTensor):
        _check_placed(what, value, parameter, group, due)


def _check_placed(what: str, value: DTensor, parameter: Tensor, group: Mapping[str, Any], due: Due) -> None:
    """Raise ``ValueError`` for a DTensor that cannot be brought to the parameter's placements."""
    if not isinstance(parameter, DTensor):
        if value.device_mesh.size() > 1 and any(not placement.is_replicate() for placement in value.placements):
            raise ValueError(f"{what}: found {_described(value)}, expected a plain tensor like the parameter; {_REMEDY}")
        return
    mesh = parameter.device_mesh
    if value.device_mesh != mesh:
        raise ValueError(f"{what}: found {_described(value)}, expected a mesh of shape {tuple(mesh.shape)}; {_REMEDY}")
    placements = row_placements(parameter, group) if due.extent == "rows" else list(parameter.placements)
    if list(value.placements) == placements:
        template = local_tensor(parameter)
        if due.extent != "rows" and value.to_local().shape != template.shape:
            raise ValueError(
                f"{what}: found {_described(value)} with a local shape {tuple(value.to_local().shape)}, expected "
                f"{tuple(template.shape)}; {_REMEDY}"
            )
    elif any(type(placement) not in (Shard, Replicate) for placement in (*value.placements, *placements)):
        raise ValueError(f"{what}: found {_described(value)}, expected placements {placements}; {_REMEDY}")


_REMEDY = "what single ranks saved loads on the same ranks only: save a full state dict, or use torch.distributed.checkpoint"


def check_local(name: str, local: Tensor, kept: Mapping[str, Tensor]) -> None:
    """Refuse state of a shard that has not the shard's shape. Not collective.

    Raises:
        ValueError: a program put it there after the last check.
    """
    for key, tensor in kept.items():
        if tensor.shape != local.shape:
            raise ValueError(
                f"parameter {name}: found {key} of local shape {tuple(tensor.shape)}, expected {tuple(local.shape)}; state has the "
                "placements of its parameter"
            )


def converted(name: str, value: Any, parameter: Tensor, group: Mapping[str, Any], due: Due) -> Tensor:
    """A new tensor with the values of one that :func:`check_fits` has passed.

    Collective where a DTensor changes its placements.
    """
    if not isinstance(value, Tensor):
        return torch.full_like(made(name, parameter, group, due), value)
    value = value.detach().resolve_conj().resolve_neg()
    if due.extent == "elements":
        due = due._replace(dtype=torch.promote_types(value.dtype, due.dtype))
    target = made(name, parameter, group, due)
    if not isinstance(target, DTensor):
        return target.copy_(local_tensor(value).reshape(target.shape))
    if isinstance(value, DTensor):
        if value.placements != target.placements:
            # The mesh of a loaded tensor has no process groups.
            here = DTensor.from_local(
                value.to_local(), target.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
            value = here.redistribute(placements=target.placements)
        target.to_local().copy_(value.to_local())
        return target
    place = parameter_layout(name, target)
    whole, local = as_matrix(value, read_only=True), as_matrix(target.to_local())
    for region in place.layout.regions(place.ranks.index(target.device_mesh.get_rank())):
        part = local[region.at_row : region.at_row + region.num_rows, region.at_column : region.at_column + region.num_columns]
        part.copy_(whole[region.row : region.row + region.num_rows, region.column : region.column + region.num_columns])
    return target


def follow_parameter(master: Tensor, rounded: Tensor) -> None:
    """Take over what somebody else wrote into a half-precision parameter since the last step.

    Both are local. Where the parameter is not the rounded master, bit by bit, the master takes its
    value; elsewhere it keeps its bits. On a GPU there is no host synchronisation.
    """
    expected = master.to(rounded.dtype)
    if rounded.device.type == "cpu" and _have_same_bits(expected, rounded):
        return
    bits = _bits_of(rounded)
    is_written = expected.view(bits) != rounded.view(bits)
    torch.where(is_written, rounded.to(master.dtype), master, out=master)


def _have_same_bits(first: Tensor, second: Tensor) -> bool:
    """Compared eight bytes at a time where that is possible, which takes a quarter of the time."""
    if all(tensor.is_contiguous() and _fills_words(tensor) for tensor in (first, second)):
        return torch.equal(first.view(-1).view(torch.int64), second.view(-1).view(torch.int64))
    bits = _bits_of(first)
    return torch.equal(first.view(bits), second.view(bits))


def _fills_words(tensor: Tensor) -> bool:
    word = torch.int64.itemsize
    return tensor.numel() * tensor.itemsize % word == 0 and tensor.storage_offset() * tensor.itemsize % word == 0


def _bits_of(tensor: Tensor) -> torch.dtype:
    return torch.int16 if tensor.dtype.itemsize == torch.int16.itemsize else torch.int8


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value!r:.60}"
    text = f"a {value.dtype} tensor of shape {tuple(value.shape)}".replace("torch.", "")
    if isinstance(value, DTensor):
        text += f" with placements {tuple(value.placements)} on a mesh of shape {tuple(value.device_mesh.shape)}"
    return text + (" on the meta device" if value.is_meta else "")
