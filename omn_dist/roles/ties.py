"""Embeddings and heads that should be one parameter and are two, so that they train apart."""

import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from omn_dist.plan.geometry.placement import local_tensor
from omn_dist.roles.role import Route, plain_name


def warn_of_lost_ties(model: nn.Module, routes: Sequence[Route]) -> None:
    """Warn once of weights that the model ties, or that look tied, and that are two parameters.

    Sharding an embedding and its head in two calls of ``fully_shard`` makes two parameters of one.
    Models of transformers say what they tie. Of other models, an embedding and a head of one shape
    look tied when this rank's parts are equal and not zero. Not collective.
    """
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    trained = {name for route in routes for name in route.names}
    for pairs, why in ((_declared(model), "the model ties them"), (_alike(parameters, routes), "they have equal values")):
        for first, second in pairs:
            one, other = parameters.get(first), parameters.get(second)
            if one is None or other is None or one is other or not {first, second} & trained:
                continue
            warnings.warn(
                f"{first} and {second}: found two parameters though {why}, so they are trained apart; shard both in one call of "
                "fully_shard, such as the root's, and build the optimizer afterwards",
                stacklevel=4,
            )
            return


def _declared(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of weights that a model of transformers ties."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        tied = getattr(module, "all_tied_weights_keys", None)
        if isinstance(tied, Mapping):
            yield from ((plain_name(f"{prefix}{target}"), plain_name(f"{prefix}{source}")) for target, source in tied.items())
        elif getattr(getattr(module, "config", None), "tie_word_embeddings", False) is True:
            names = {id(parameter): name for name, parameter in module.named_parameters(remove_duplicate=False)}
            weights = [_weight(module, get) for get in ("get_output_embeddings", "get_input_embeddings")]
            found = [names[id(weight)] for weight in weights if id(weight) in names]
            if len(found) == len(weights):
                yield plain_name(prefix + found[0]), plain_name(prefix + found[1])


def _weight(module: nn.Module, get: str) -> Tensor | None:
    try:
        weight = getattr(getattr(module, get)(), "weight", None)
    except (AttributeError, NotImplementedError):
        return None
    return weight if isinstance(weight, Tensor) else None


def _alike(parameters: Mapping[str, Tensor], routes: Sequence[Route]) -> Iterator[tuple[str, str]]:
    """Names of a head and an embedding with one shape and equal values on this rank."""
    embeddings = [route for route in routes if route.role == "embedding"]
    for head in routes:
        for embedding in embeddings if head.role == "head" else ():
            if head.shape == embedding.shape and _are_equal(parameters[head.name], parameters[embedding.name]):
                yield head.name, embedding.name


def _are_equal(one: Tensor, other: Tensor) -> bool:
    first, second = (local_tensor(tensor.detach()) for tensor in (one, other))
    if first.is_meta or second.is_meta or first.shape != second.shape or first.numel() == 0 or first.device != second.device:
        return False
    # The first row, so that other weights cost no pass over them.
    return torch.equal(first[:1], second[:1]) and torch.equal(first, second) and bool(first.any())
