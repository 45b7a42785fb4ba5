"""FSDP2 sharding: one group of parameters a block, and one for the rest of the model."""

from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from omn_dist.models.huggingface import HuggingFaceModel
from omn_dist.models.omn import OMN
from omn_dist.settings import SettingsError

Model = TypeVar("Model", OMN, HuggingFaceModel)


def shard_model(
    model: Model,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    mixed_precision: MixedPrecisionPolicy | None = None,
) -> Model:
    """Shard ``model`` in place with ``fully_shard`` over ``mesh`` and return it.

    Embedding, head and final norm form the root group, so a tied head uses the gathered embedding.
    The root group stays gathered after forward, because backward starts with it.

    Args:
        model: on the meta device (call ``to_empty`` and ``initialize_weights`` afterwards), or with
            its weights.
        mesh: one axis (sharded) or two (replicated, sharded).
        reshard_after_forward: free the gathered weights of a block after its forward and gather
            them again in backward. False saves one all-gather a block and needs memory for the
            whole model.
        mixed_precision: FSDP2's own casting. ``None`` keeps parameters in fp32, in use and in
            all-gathers; autocast around forward then chooses the dtype of the products.

    Raises:
        SettingsError: the model is already sharded, or the mesh has more than two axes.

    All ranks of the mesh must call.
    """
    if isinstance(model, FSDPModule):
        raise SettingsError("shard_model: found a model that is sharded already, expected a plain one; call it once")
    if mesh.ndim > 2:
        raise SettingsError(
            f"shard_model: found a mesh of {mesh.ndim} axes {mesh.mesh_dim_names}, expected one (sharded) or two "
            "(replicated, sharded)"
        )
    policy = MixedPrecisionPolicy() if mixed_precision is None else mixed_precision
    block: nn.Module
    blocks = model.layers if isinstance(model, OMN) else model.blocks
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model
