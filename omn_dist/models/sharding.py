"""FSDP2 wrapping: one group of parameters a block, and the rest at the root."""

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
    """Shard ``model`` in place with ``fully_shard`` over ``mesh`` and return it. All ranks of the mesh must call.

    Embedding, head and final norm form the root group, so the tied head shares the gathered embedding. The root group
    stays gathered between forward and backward, because backward starts with it.

    Args:
        model: on the meta device (then ``to_empty`` and ``initialize_weights`` follow) or with its weights in place.
        mesh: one axis (sharded) or two (replicated, sharded).
        reshard_after_forward: free the gathered weights of a block after its forward and gather them again in backward;
            false keeps them: one all-gather a block less, the memory of the whole model more.
        mixed_precision: FSDP2's own casting. ``None`` leaves the parameters in fp32 on the wire and in use; autocast
            around forward then chooses the dtype of the products.

    Raises:
        SettingsError: the model is sharded already, or the mesh has more than two axes.
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
