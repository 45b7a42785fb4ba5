"""Three steps of several presets: prints the hash of weights and state, logs to standard error."""

import hashlib
import logging

import torch
from torch import nn

from omn_dist import DualOptimizer


def _hashed() -> str:
    digest = hashlib.sha256()
    for preset in ("torch", "omn", "normuon", "moonlight"):
        generator = torch.Generator().manual_seed(0)
        matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((24, 40), (40, 24), (130, 200), (200, 130))]
        vectors = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((33,), (), (70, 1001))]
        groups = [{"params": matrices, "algorithm": "muon"}, {"params": vectors, "algorithm": "adamw"}]
        optimizer = DualOptimizer(groups, preset=preset, weight_decay=0.1)
        for _ in range(3):
            for parameter in (*matrices, *vectors):
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        for parameter in (*matrices, *vectors):
            for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
                digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    logging.basicConfig(format="%(name)s %(levelname)s %(message)s", level=logging.INFO)
    print(_hashed())
