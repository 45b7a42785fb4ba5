"""DualOptimizer: groups, state, plans and rules joined into one ``torch.optim.Optimizer``."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Private: torch.compiler.disable does the same, but imports the compiler at once, half a second of
# every command. Seen in torch 2.9 and 2.13.
from torch._compile import _disable_dynamo
from typing_extensions import override

from omn_dist.algorithms.scratch import Scratch
from omn_dist.algorithms.switches import default_products
from omn_dist.exchange.process_groups import SharedGroups
from omn_dist.kernels import choose_kernels
from omn_dist.optim.agreement import check_agreement, shared_parameters
from omn_dist.optim.domains import Domain, build_domains
from omn_dist.optim.exchanged import looks_replaced
from omn_dist.optim.given import given_groups, report_rates_of_muon
from omn_dist.optim.groups import check_parameter, complete_group, warn_of_half_precision, warn_of_unknown_fields
from omn_dist.optim.keeper import StateKeeper
from omn_dist.optim.loading import checked_and_converted
from omn_dist.optim.options import Options
from omn_dist.optim.overlap import EarlyGathers, can_leave_early
from omn_dist.optim.presets import Preset, resolve_preset
from omn_dist.optim.replicas import check_state_copies, warn_of_unequal_copies
from omn_dist.optim.rules.registry import rule_by_name
from omn_dist.optim.rules.rule import Tools
from omn_dist.optim.shard_step import Rows, find_rows, step_rows, step_shards
from omn_dist.optim.shards import checked_gradient
from omn_dist.plan.plan import Plan

logger = logging.getLogger(__name__)


class DualOptimizer(torch.optim.Optimizer):
    """Muon on whole matrices and AdamW on the rest, for parameters sharded with FSDP2.

    It is a plain optimizer: schedulers, ``closure``, ``zero_grad``, ``state_dict``,
    ``add_param_group`` and ``deepcopy`` work, and ``param_groups`` are read at every step. Momentum
    is a DTensor with the parameter's mesh and placements. The weights after a step are bitwise
    those of one process that runs the same algorithm on whole tensors.

    Args:
        groups: a model, whose groups are then those of ``build_parameter_groups``; or groups: of
            ``build_parameter_groups``, or your own dictionaries with ``params``, ``algorithm`` and,
            if you like, ``param_names`` and any field of the algorithm. ``"muon"`` means matrices,
            on the preset's matrix rule. ``"normuon"``, ``"adamw"``, ``"vector"`` (parameters with
            one dim) and the name of a registered rule mean that rule, whatever the preset.
            ``use_muon`` (True or False) may stand for ``algorithm``. A field of a group beats a
            keyword, and a keyword beats the preset. A field of another optimizer that changes
            nothing here stays in the group, with a warning.
        preset: a name of ``PRESETS`` or a :class:`~omn_dist.optim.presets.Preset`.
        rules: for a model: which algorithm or fields some parameters get, as in
            ``build_parameter_groups``.
        process_group: ranks that hold equal copies of the *plain* tensors among the matrices (DDP):
            they then share the work. Without it every rank works on its own plain tensors.
        batch_invariant: bits do not depend on what is computed together. Each matrix is
            orthogonalised alone, so it does not matter which matrices share an owner, and AdamW's
            bits do not depend on where shards are cut. ``False`` is faster and reproducible too, on
            the same ranks: small matrices of one shape go through one batched call, and AdamW takes
            torch's fused kernel on CPUs as well.
        master_weights: keep an fp32 copy of every half-precision parameter in the state (key
            ``master``), step on that, and round it to the parameter. Without it steps below the
            parameter's precision are lost; a warning says so.
        options: further options, and fields of the preset with another value (a tensor of one
            element is read once; put it into a group to change it in place):

            wave_bytes (int): byte budget of one slot of the pipeline and of the stack of whole
                matrices, per rank. By default both slots and the stack together have room for six
                of the largest matrices, 1 to 64 MiB, or less where that makes eight waves of 1 MiB
                or more. It does not depend on the depth of the model.
            transport: ``"all_to_all"``, or ``"all_gather"`` for fabrics without a good all-to-all.
                The same on all ranks.
            owners: owner rank of each matrix by name, instead of the planner's choice.
            copies: what ranks with equal copies of a DTensor (HSDP) do. ``"share"``: they share its
                matrices, and each update is sent to the other copies once. ``"repeat"``: every copy
                does all the work, with no traffic between copies. ``"auto"``: the one whose
                simulated step is faster on a device like this one.
            teams: ``"never"``: each matrix has one owner. ``"auto"``: a team of ranks works on one
                matrix where more ranks than large matrices would leave some idle, and the simulated
                step says that it pays on a device like this one. Or the ranks of a team (ascending,
                numbered as in the plan) by matrix name. A team's results are reproducible, but not
                bitwise those of one process (docs/numerics.md has the tolerance). NorMuon, vectors,
                guards and the Gram form keep one owner. Not together with ``owners``.
            verify_replicas: compare copies of parameters on construction, two blocks of each
                large one, and warn on all ranks when they differ. ``False``: do not, for weights
                that are loaded later. :meth:`check_replicas` compares everything.
            kernels: ``"auto"``: C kernels for what they can take, chosen when the optimizer is
                built. ``"torch"``: none, with the same bits. The environment variable
                ``OMN_DIST_KERNELS=torch`` does the same.

    A parameter without a gradient on any rank is left bit-identical, state included. A matrix whose
    gradient is present on some ranks only takes the others' shards as zeros. An AdamW shard without
    a gradient is left alone on its rank.

    Raises:
        TypeError: parameters instead of a model or groups, or parameters in a set.
        ValueError: no group, an unknown algorithm, field, option or preset, a value of the wrong
            type, a parameter that its rule cannot update, or ranks whose plans, parameters or order
            of parameters differ (on all of them, naming the difference).
        NotImplementedError: a placement that is not supported.

    Collective: all ranks of the parameters' mesh construct it and call ``step``.
    """

    def __init__(
        self,
        groups: nn.Module | Iterable[Mapping[str, Any]],
        *,
        preset: str | Preset = "moonlight",
        rules: Mapping[Any, str | Mapping[str, Any]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        batch_invariant: bool = True,
        master_weights: bool = False,
        **options: Any,
    ) -> None:
        options |= {"batch_invariant": batch_invariant, "master_weights": master_weights}
        self._options = Options.taken_from(options)
        self._preset = resolve_preset(preset, options, other_names=tuple(Options.__dataclass_fields__))
        if not isinstance(process_group, dist.ProcessGroup | None):
            raise TypeError(f"process_group: found {process_group!r}, expected one that this rank is in, or None")
        self._shared = SharedGroups(process_group)
        self._domains: list[Domain] | None = None
        self._early: list[EarlyGathers] = []
        self._rows: list[Rows] = []
        self._keeper = StateKeeper(master_weights=master_weights)
        self._saw_gradient = False
        given = given_groups(groups, rules)
        report_rates_of_muon(given, self._preset)
        self._tools = self._make_tools()
        super().__init__(given, {})
        # Schedulers look here for what they may change. Groups are filled from the preset instead.
        self.defaults = self._preset.defaults(has_momentum=any("momentum" in group for group in self.param_groups))
        warn_of_unknown_fields(self.param_groups, self._preset)
        self._domains = self._build_domains()
        if self._options.verify_replicas:
            warn_of_unequal_copies(self.param_groups, self._shared.replicas)

    @property
    def preset(self) -> Preset:
        """The recipe with its overrides; groups may differ from it."""
        return self._preset

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of the sharded matrices and that of the plain ones, as far as there are any."""
        return tuple(domain.plan for domain in self._built())

    @property
    def bytes_sent(self) -> int:
        """Bytes for other ranks that this rank has handed to collectives.

        They are counted from when the pipelines were built.
        """
        return sum(domain.bytes_sent for domain in self._built())

    @property
    def num_collectives(self) -> int:
        """Collectives that this rank has joined, in all steps since the pipelines were built."""
        return sum(domain.pipeline.traffic.num_collectives for domain in self._built())

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like those of the constructor.

        Collective once the optimizer is built, since all ranks then make new plans.
        """
        if not isinstance(param_group, dict):
            raise TypeError(
                f"param_group: found a {type(param_group).__name__}, expected a dictionary with 'params' and 'algorithm'"
            )
        self._take_exchanged()
        num_parameters = sum(len(group["params"]) for group in self.param_groups)
        group = complete_group(dict(param_group), self._preset, num_parameters)
        if self.defaults:  # else the constructor adds its groups, and warns once of all
            warn_of_unknown_fields([group], self._preset)
        own = set(group)
        super().add_param_group(group)
        for field in set(group) - own:
            del group[field]
        named = list(zip(group["param_names"], group["params"], strict=True))
        try:
            for name, parameter in named:
                check_parameter(name, parameter, group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._keeper.add(group, self.state)
        if not self._options.master_weights:
            warn_of_half_precision(group)
        if self._domains is not None:
            try:
                self._domains = self._build_domains()
            except (ValueError, NotImplementedError):
                self._remove_last_group()
                raise
            if self._options.verify_replicas:
                warn_of_unequal_copies([group], self._shared.replicas)

    def _remove_last_group(self) -> None:
        """Undo the addition of a group that cannot be planned."""
        for parameter in self.param_groups.pop()["params"]:
            self.state.pop(parameter, None)
        self._keeper.know(self.param_groups)
        self._rows = find_rows(self._groups(needs_owner=True))

    def check_replicas(self) -> None:
        """Check that ranks which hold copies of a parameter have the same bits, state included.

        Copies are DTensors on the mesh axes that replicate them (HSDP), and plain tensors on the
        ranks of ``process_group`` (DDP). They are compared by checksums of their bits, in a few
        small collectives for all parameters together. The host waits for the device. Nothing
        changes.

        Raises:
            ValueError: on all ranks that share the parameter. It names the first one that differs,
                or its state, and two ranks that hold different copies.

        Collective: all ranks call it between the same steps.
        """
        check_state_copies(self.param_groups, self.state, self._shared.replicas)

    @contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Start gathers during backward, as soon as gradients are reduced.

        Use it around the last backward before a step. The step then finds most of its gathers done.
        Its bits are the same, and momentum changes in the step only. If no step follows (a rejected
        window), what was sent is discarded when this is entered again. It needs memory for the
        gathers of all waves at once: one shard of the matrices and one share of whole ones, in the
        communication dtype. Matrices that are plain tensors are not sent early.

        From the backward to the step, gradients of matrices must not change, nor the momentum
        settings of a group: :meth:`step` raises ``RuntimeError`` before anything moves when one did
        (clipping, unscaling, another backward). AdamW gradients and learning rates may change.

        Collective: all ranks enter it before the same steps.

        Raises:
            ValueError: the transport is ``"all_gather"``, which has room for one wave only.
        """
        if self._options.transport == "all_gather":
            raise ValueError("overlap_backward: found transport 'all_gather', expected 'all_to_all'")
        self._early = []
        self._settle()
        with ExitStack() as stack:
            for domain in self._built():
                if can_leave_early(domain):
                    domain.pipeline.begin_early()
                    early = EarlyGathers(domain)
                    stack.enter_context(early.sending())
                    self._early.append(early)
            yield

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; gradients are not changed.

        Collective over the parameters' mesh. On CUDA there is no host synchronisation unless a
        gradient is missing. Autocast, torch.compile and torch's switches of matrix products
        (``set_float32_matmul_precision``, TF32) have no effect. Returns what ``closure`` returns.

        A step without any gradient changes nothing. State that a program removed is made anew, and
        parameters that it exchanged in ``param_groups`` are taken over, with a line in the log.

        Raises:
            RuntimeError: no gradient was ever there, and the model holds other parameters than the
                groups (the optimizer was built before ``fully_shard`` replaced them).
            ValueError: a gradient of another shape, mesh, placement or layout than its parameter,
                or state that does not fit; raised before anything moves.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        device = next((parameter.device for group in self.param_groups for parameter in group["params"]), torch.device("cpu"))
        with torch.autocast(device.type, enabled=False):
            self._step()
        return loss

    @_disable_dynamo
    @default_products
    def _step(self) -> None:
        self._settle()
        domains = self._built()
        gradients = {
            parameter: checked_gradient(name, parameter)
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        for early in self._early:
            early.check()
        self._early = []
        for domain in domains:
            domain.step.begin(gradients)

        def run_local() -> None:
            step_shards(self._groups(needs_owner=False), self.state, gradients, self._tools)
            step_rows(self._rows, self.state, gradients, self._tools)

        if not domains:
            run_local()
        for number, domain in enumerate(domains):
            domain.pipeline.run(domain.step, run_local if number == 0 else lambda: None)
            domain.step.end()
        self._check_any_gradient(gradients)

    def _check_any_gradient(self, gradients: Mapping[Tensor, Tensor | None]) -> None:
        """Raise ``RuntimeError`` when gradients go to other parameters than these, as it seems."""
        if self._saw_gradient:
            return
        self._saw_gradient = any(gradient is not None for gradient in gradients.values()) or any(
            domain.step.saw_gradient() for domain in self._built()
        )
        if not self._saw_gradient and looks_replaced(self.param_groups):
            raise RuntimeError(
                f"step: found no gradient on any of {len(gradients)} parameters, while a model holds others of their names, "
                "expected those; the optimizer was built before fully_shard replaced the parameters: build it afterwards"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Groups and state, as ``torch.optim.Optimizer.state_dict``; tensors are not copied.

        Collective only after parameters were exchanged.
        """
        self._settle()
        self._keeper.follow_parameters(self.state)
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of an optimizer with the same groups. Tensors are copied.

        Everything is checked before anything changes. What can be converted exactly is: a whole
        tensor to a shard, a dtype to a wider one. State in a wider dtype keeps it. Missing state is
        made, and fields that the saved groups lack stay. State dicts of ``torch.optim.AdamW`` and
        ``torch.optim.Muon`` with the same groups load (:func:`omn_dist.optim.loading.joined`).

        Collective over the parameters' meshes.

        Raises:
            ValueError: on all ranks, when what one of them was given does not fit: other
                parameters, algorithms or views, state of another algorithm, shape, mesh or kind.
                The message names the first difference.
        """
        self._take_exchanged()
        states: dict[Tensor, dict[str, Any]] = {}

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            grids = [shared.grid for shared in shared_parameters(self.param_groups, self._shared.replicas)]
            found, loaded = checked_and_converted(given, self.param_groups, grids, master_weights=self._options.master_weights)
            states.update(found)
            return {"state": {}, "param_groups": loaded}

        def put(_: torch.optim.Optimizer) -> None:
            self.state.update(states)
            self._keeper.settle(self.param_groups, self.state)

        # torch would cast state to the dtype of the parameter. It gets none, and these two see what
        # other hooks have made of the dict, and put the state in place before others look at it.
        handles = (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
        # Ranks compare their plans again before the next step.
        self._drop_early()
        self._domains = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        # A copy cannot know which parameters exchanged ones took the place of.
        self._take_exchanged()
        # Pipelines, views and kernels belong to this process: a copy makes its own.
        own = {name: getattr(self, name) for name in ("_preset", "_options", "_shared")}
        rebuilt: dict[str, Any] = {"_domains": None, "_rows": [], "_early": [], "_tools": None, "_saw_gradient": False}
        return {**super().__getstate__(), **own, **rebuilt}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._keeper = StateKeeper(master_weights=self._options.master_weights)
        self._keeper.know(self.param_groups)

    def _settle(self) -> None:
        """Take over exchanged parameters, and make the state that is missing or was cast.

        Next to free when nothing happened. Collective after parameters were exchanged.
        """
        self._take_exchanged()
        if self._keeper.settle(self.param_groups, self.state):
            for domain in self._domains or ():
                domain.step.states = self.state

    def _take_exchanged(self) -> None:
        if self._keeper.take_exchanged(self.param_groups, self.state):
            self._drop_early()
            self._domains = None

    def _drop_early(self) -> None:
        """Discard early gathers whose step was never taken, before their pipelines go."""
        for domain in self._domains or ():
            domain.pipeline.drop_early()
        self._early = []

    def _groups(self, *, needs_owner: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if rule_by_name(group["algorithm"]).needs_owner == needs_owner]

    def _built(self) -> list[Domain]:
        if self._domains is None:
            self._tools = self._make_tools()
            self._domains = self._build_domains()
        return self._domains

    def _make_tools(self) -> Tools:
        return Tools(choose_kernels(self._options.kernels), Scratch(), self._options.batch_invariant)

    def _build_domains(self) -> list[Domain]:
        check_agreement(self.param_groups, self._shared.replicas)
        groups = self._groups(needs_owner=True)
        self._rows = find_rows(groups)
        domains = build_domains(groups, self._preset.communication_dtype, self._options, self._shared, self.state, self._tools)
        for domain in domains:
            if not dist.is_initialized() or dist.get_rank() == 0:
                logger.info("%s", domain.plan)
        return domains
