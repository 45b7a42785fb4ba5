"""The protocol of update rules: what a rule says about itself, and what it does in a step.

A matrix takes this path in a step::

    gradient, state ── prepare ──► direction ── transform ──► update ── apply ──► parameter, state
         (on shards)                    (whole, at the owner)            (on shards)

A :class:`MatrixRule` has these three functions. A :class:`ShardRule` needs no whole matrix and has
one: ``update``. All of them work on lists and in place. On a CPU the lists hold one region, on
other devices all regions of a wave, so that the number of kernel launches does not grow with
the number of matrices.

Nothing outside this folder asks which rule it deals with.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from omn_dist.algorithms.scratch import Scratch
from omn_dist.algorithms.team_newton_schulz import Team
from omn_dist.exchange.numbers import Returned, StackNumbers
from omn_dist.kernels import Kernels
from omn_dist.optim.rules.values import check_values
from omn_dist.plan.geometry.layout import Layout
from omn_dist.plan.geometry.matrix import NO_NUMBERS, Matrix, RowNumbers, Work
from omn_dist.plan.geometry.views import View, matrices_of

Extent = Literal["elements", "rows", "once"]


class StateTensor(NamedTuple):
    """A tensor that a rule keeps for each parameter. It starts as zeros and is sharded like it."""

    key: str
    """Its name in ``optimizer.state[parameter]`` and in checkpoints."""
    extent: Extent
    """``elements``: the parameter's shape, in the dtype that the step works in. ``rows``: one fp32
    number for each row of the operator. ``once``: one fp32 number, for shard rules only."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a rule works with. Chosen once, when the optimizer is built."""

    kernels: Kernels
    """The operations that have faster implementations than torch's."""
    scratch: Scratch
    """Working memory that stays from step to step."""
    batch_invariant: bool
    """Whether bits must not depend on what else is in a call, or on where a shard is cut."""


class LocalRegion(Protocol):
    """What this rank holds of one matrix, or one of several regions of it."""

    @property
    def matrix(self) -> Matrix:
        """The whole matrix, as the plan knows it."""
        ...

    @property
    def settings(self) -> Any:
        """What :meth:`Rule.settings` said about the region's group at this step."""
        ...

    @property
    def parameter(self) -> Tensor:
        """``[stored rows, stored columns]``: what the step moves.

        This is the fp32 master where there is one.
        """
        ...

    @property
    def gradient(self) -> Tensor:
        """The same shape; zeros where this rank has none and another rank may have one.

        Rules must not change it.
        """
        ...

    @property
    def state(self) -> Mapping[str, Tensor]:
        """By key.

        ``elements``: the shape of ``parameter``. ``rows``: ``[rows of the operator]``.
        """
        ...


class LocalShard(NamedTuple):
    """What this rank holds of one parameter, for rules that work on shards."""

    parameter: Tensor
    """The local tensor that the step moves, the fp32 master where there is one."""
    gradient: Tensor
    """The same shape and dtype."""
    state: Mapping[str, Tensor]
    """By key: local tensors."""


class Rule(ABC):
    """What every rule says about itself. Subclass :class:`MatrixRule` or :class:`ShardRule`."""

    name: ClassVar[str]
    """The ``algorithm`` of parameter groups."""
    label: ClassVar[str]
    """The name in tables, such as ``NorMuon``."""
    needs_owner: ClassVar[bool]
    """Whether an owner must see a whole matrix (:class:`MatrixRule`)."""
    takes_matrices: ClassVar[bool]
    """Whether its parameters are matrices, so that groups may have a view (``muon_shape`` ...)."""
    depends_on_gradient_scale: ClassVar[bool]
    """Whether gradients twice as large make another update, so that clipping them matters."""
    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of its groups that a preset fills, for messages about unknown ones. Empty where
    :meth:`defaults` alone says which."""
    own_fields: ClassVar[Mapping[str, Any]] = {}
    """Fields of its groups that no preset has, with their defaults."""

    def defaults(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a group on this rule, filled from the fields of a preset."""
        return {field: recipe.get(field, default) for field, default in self.own_fields.items()}

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ``SettingsError`` for a value in a complete group that the rule cannot use."""
        check_values(group)

    def check_parameter(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:  # noqa: B027
        """Raise ``ValueError`` for a parameter that the rule cannot update.

        By default a rule takes every parameter.
        """

    def check_saved(self, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:  # noqa: B027
        """Raise ``ValueError`` when the state of a saved group would mean something else here.

        Args:
            saved: a group of a state dict, perhaps of another optimizer with the same state keys.
            group: the complete group into which it is loaded.
        """

    @abstractmethod
    def state(self, group: Mapping[str, Any]) -> tuple[StateTensor, ...]:
        """The tensors that it keeps for each parameter of the group."""

    @abstractmethod
    def settings(self, group: Mapping[str, Any]) -> Any:
        """What a group says at this step, as a frozen, hashable object."""


class ShardRule(Rule):
    """A rule for which a shard is enough: nothing is sent."""

    needs_owner = False
    takes_matrices = False
    depends_on_gradient_scale = True

    @abstractmethod
    def update(self, shards: Sequence[LocalShard], settings: Any, tools: Tools) -> None:
        """One step of local shards that have a gradient, in place. Not collective."""


class MatrixRule(Rule):
    """A rule whose update needs the whole matrix. Its results are those of one process.

    ``prepare`` and ``apply`` are elementwise, or use numbers that are equal for all shards of a
    row. Then the bits of a shard are those of the whole, on any number of ranks.
    """

    needs_owner = True
    takes_matrices = True
    depends_on_gradient_scale = False
    numbers: ClassVar[RowNumbers] = NO_NUMBERS
    """fp32 numbers that are sent in the messages beside directions and updates."""

    def matrices(self, name: str, view: View | None, layout: Layout, group: Mapping[str, Any]) -> list[Matrix]:
        """What is sent to owners of the parameter ``name``: its matrices, with the owner's work."""
        return [matrix.with_work(self.work(group, matrix)) for matrix in matrices_of(name, view, layout)]

    def work(self, group: Mapping[str, Any], matrix: Matrix) -> Work:
        """What the owner of ``matrix`` does in a step, for the plan, its bytes and its costs.

        ``Work.ns_steps`` is the cost in steps of Newton-Schulz; 0 for next to nothing.
        """
        return Work(row_numbers=self.numbers, whole_only=f"algorithm {self.name}")

    def communication_dtype(self, group: Mapping[str, Any]) -> torch.dtype | None:
        """The narrowest dtype in which a direction loses nothing; ``None``: any will do."""
        return torch.float32

    @override
    def check_parameter(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the parameter is a matrix, or what the group's view says."""
        view = View.from_group(group)
        if view is not None:
            view.check(name, parameter.shape)
        elif parameter.ndim != 2:
            raise ValueError(
                f"parameter {name}: found shape {tuple(parameter.shape)} in a group on {group['algorithm']}, expected a matrix; "
                "put it on adamw or a vector on vector, or give muon_shape for a stack of matrices"
            )

    def warm_up(self, matrix: Matrix, group: Mapping[str, Any], tools: Tools) -> None:
        """Make the trials that a matrix needs once, before the first step. Not collective.

        It is called for matrices that this rank owns. By default there are none to make.
        """

    @abstractmethod
    def prepare(
        self,
        regions: Sequence[LocalRegion],
        directions: Sequence[Tensor],
        numbers: Sequence[Tensor],
        tools: Tools,
        *,
        commit: bool,
    ) -> None:
        """Write the directions of regions, and the numbers of their rows for the owner.

        Args:
            regions: of matrices of this rule; gradients are not changed.
            directions: where they go, in the communication dtype.
            numbers: ``[numbers.to_owner, rows of the operator]`` each, fp32.
            tools: kernels and working memory.
            commit: whether state becomes that of this step; else nothing changes, and
                :meth:`commit` follows, or the step does not happen.
        """

    @abstractmethod
    def commit(self, regions: Sequence[LocalRegion], tools: Tools) -> None:
        """Bring the state of regions up to date that were prepared without ``commit``."""

    @abstractmethod
    def transform(
        self,
        matrices: Sequence[Matrix],
        directions: Tensor,
        settings: Any,
        numbers: Sequence[StackNumbers],
        tools: Tools,
    ) -> None:
        """Whole directions to updates, in place. At the owner; not collective.

        Args:
            matrices: of one stored shape, one group's settings, all transposed or none.
            directions: ``[matrices, stored rows, stored columns]``.
            settings: of :meth:`settings`.
            numbers: of each matrix: ``received`` from the shards; ``returned`` is written here.
            tools: kernels and working memory.
        """

    def transform_slice(self, matrix: Matrix, direction: Tensor, settings: Any, team: Team, tools: Tools) -> None:
        """The direction of a slice to its update, in place. Collective in the team.

        Only for rules whose :meth:`work` has no ``whole_only``.
        """
        raise NotImplementedError(f"matrix {matrix.name}: a team cannot do the update of {self.name}")

    @abstractmethod
    def apply(self, regions: Sequence[LocalRegion], updates: Sequence[Tensor], returned: Sequence[Returned], tools: Tools) -> None:
        """Move the parameters of regions by their updates, and commit the rest of the state.

        Both change in place.

        Args:
            regions: of matrices of this rule, whose :meth:`prepare` or :meth:`commit` was called.
            updates: of the shape of each region, in the communication dtype.
            returned: what the owner wrote about the rows of each region and about its matrix.
            tools: kernels and working memory.
        """
