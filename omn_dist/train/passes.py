"""Forward and backward passes over this rank's share of a global batch."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from omn_dist.models import LanguageModel
from omn_dist.optim.optimizer import DualOptimizer
from omn_dist.train.config import RunConfig
from omn_dist.train.data import BatchSource, rank_share
from omn_dist.train.precision import forward_context
from omn_dist.train.ranks import Ranks


def accumulate_window(
    model: LanguageModel, optimizer: DualOptimizer, source: BatchSource, config: RunConfig, ranks: Ranks, window: int
) -> Tensor:
    """Forward and backward over all micro-batches of a window.

    Afterwards the sharded ``grad`` of each parameter holds the gradient of the mean loss over the
    tokens of the window. Every sequence has the same number of targets, so that is the mean of the
    micro-batches' means; FSDP2 divides by the number of ranks. Gradients are reduced over ranks
    once, in the last backward. Collective: all ranks must call.

    Returns:
        This rank's mean loss, an fp32 scalar on the device, not reduced over ranks. Does not wait
        for the device.
    """
    start, count = rank_share(config.batch.global_batch, ranks.rank, ranks.world_size)
    first = window * config.batch.global_batch + start
    micro_batch = config.batch.sequences_per_pass(ranks.world_size)
    num_passes = count // micro_batch
    total = torch.zeros((), device=ranks.device, dtype=torch.float32)
    root = _fsdp(model)
    for position in range(num_passes):
        last = position == num_passes - 1
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        loss = _loss(model, source, config, ranks, first + position * micro_batch) / num_passes
        with optimizer.overlap_backward() if last and config.optimizer.overlap_backward else nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@torch.no_grad()
def validation_loss(model: LanguageModel, source: BatchSource, config: RunConfig, ranks: Ranks) -> float:
    """Mean loss over the first ``validation_batches`` global batches of ``source``.

    The same on all ranks. Collective: all ranks must call.
    """
    global_batch, micro_batch = config.batch.global_batch, config.batch.sequences_per_pass(ranks.world_size)
    start, count = rank_share(global_batch, ranks.rank, ranks.world_size)
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    model.eval()
    for batch in range(config.logging.validation_batches):
        for offset in range(0, count, micro_batch):
            total += _loss(model, source, config, ranks, batch * global_batch + start + offset)
    model.train()
    # FSDP2 keeps the weights of the root module gathered after a forward without a backward. The
    # next forward would then not see the step that is taken in between.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    dist.all_reduce(total)
    passes = config.logging.validation_batches * (global_batch // micro_batch)
    return float(total.item() / passes)


def _loss(model: LanguageModel, source: BatchSource, config: RunConfig, ranks: Ranks, first: int) -> Tensor:
    tokens, targets = source.read(first, config.batch.sequences_per_pass(ranks.world_size))
    if ranks.device.type == "cuda":
        tokens, targets = (batch.pin_memory().to(ranks.device, non_blocking=True) for batch in (tokens, targets))
    with forward_context(config.precision, ranks.device):
        loss: Tensor = model(tokens, targets)
    return loss


def _fsdp(model: LanguageModel) -> FSDPModule:
    assert isinstance(model, FSDPModule), "build_model shards the model"
    return model
