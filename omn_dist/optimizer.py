"""DualOptimizer: the thin shell that joins groups, plan, pipeline and update rules into a ``torch.optim.Optimizer``."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from typing_extensions import override

from omn_dist._domains import Domain, SharedGroups, Teams, build_domains
from omn_dist._early import EarlyDirections, can_leave_early
from omn_dist._grouping import MATRIX_GROUP_FIELDS, check_saved_groups, complete_view
from omn_dist._multi_tensor_step import matrix_step
from omn_dist._row_moment import STATE_KEY as ROW_MOMENT
from omn_dist._row_moment import row_moment_like
from omn_dist._rows import Rows, RowsStep, build_rows
from omn_dist._step import AdamWStep, checked_gradient
from omn_dist.algorithms.row_numbers import MATRIX_ALGORITHMS
from omn_dist.plan.ownership import Plan
from omn_dist.plan.placement import Copies, as_matrix, local_tensor
from omn_dist.plan.traffic import Transport
from omn_dist.plan.views import View
from omn_dist.presets import Preset, check_group, resolve_preset
from omn_dist.settings import SettingsError, unknown_name

logger = logging.getLogger(__name__)

_MOMENTUM_FIELDS = ("lr", "weight_decay", "momentum", "momentum_rule", "nesterov", "cautious_decay")
_MUON_FIELDS = (
    *_MOMENTUM_FIELDS,
    "newton_schulz",
    "schedule",
    "num_steps",
    "newton_schulz_dtype",
    "form",
    "scale",
    "spectral_cap",
    "stable_rank_floor",
)
_GROUP_FIELDS: dict[str, dict[str, str]] = {
    # Field of a group to the preset's field that fills it.
    "muon": {name: name for name in _MUON_FIELDS},
    "normuon": {name: name for name in (*_MUON_FIELDS, "row_beta", "row_epsilon", "rescale")},
    "vector": {name: name for name in (*_MOMENTUM_FIELDS, "segments")},
    "adamw": {"lr": "adamw_lr", "betas": "adamw_betas", "eps": "adamw_epsilon", "weight_decay": "adamw_weight_decay"},
}


class DualOptimizer(torch.optim.Optimizer):
    """Muon on whole matrices and AdamW on the rest, for parameters sharded with FSDP2.

    A plain optimizer: schedulers, ``closure``, ``zero_grad``, ``state_dict``, ``add_param_group`` and ``deepcopy`` work, and
    ``param_groups`` are read at every step. Momentum is a DTensor with the parameter's mesh and placements. The weights after a
    step are bitwise those of one process that runs the same algorithm on whole tensors.

    Args:
        groups: of ``build_parameter_groups``, or your own dictionaries with ``params``, ``algorithm`` and, if you like,
            ``param_names`` and any field of the algorithm. ``"muon"`` are matrices for the preset's matrix algorithm;
            ``"normuon"``, ``"adamw"`` and ``"vector"`` (parameters with one dim) are those, whatever the preset.
        preset: a name of ``PRESETS`` or a :class:`~omn_dist.presets.Preset`.
        wave_bytes: byte budget of one slot of the pipeline and of the stack of whole matrices, per rank. ``None`` gives
            both slots and the stack together room for six of the largest matrices, a budget within 1 to 64 MiB, whatever the
            depth of the model, or less where that makes eight waves of 1 MiB or more.
        transport: ``"all_to_all"``, or ``"all_gather"`` for fabrics without a good all-to-all. The same on all ranks.
        process_group: ranks that hold equal copies of the *plain* tensors among the matrices (DDP): they then share the work.
            Without it every rank works on its own plain tensors.
        owners: owner rank of each matrix by parameter name, instead of the planner's choice.
        deterministic: orthogonalise one matrix after the other, so that bits do not depend on which matrices share an owner.
            Without it matrices of one shape go through one batched call where they are small, and AdamW takes torch's fused
            kernel on CPU too: faster, with bits that depend on owners and on where shards are cut.
        copies: ranks with equal copies of a DTensor (HSDP) ``"share"`` its matrices, each update crossing to the other copies
            once, or ``"repeat"`` the work in every copy with no traffic between them. ``"auto"`` takes what the simulated step
            of both plans says for a device like this one.
        teams: ``"never"``: each matrix has one owner. ``"auto"``: a team of ranks works on one matrix where more ranks than
            large matrices would leave some idle, and the simulated step says that it pays on a device like this one. Or the
            ranks of a team (ascending, numbered as in the plan) by matrix name, the others keeping one owner. Results of teams are
            deterministic, but not bitwise those of one process (docs/numerics.md has the tolerance). NorMuon, vectors, guards,
            the Gram form and, where it runs, the symmetric form keep one owner. Not together with ``owners``.
        master_weights: keep an fp32 copy of every half-precision parameter in the state (key ``master``), step on that, and
            round it to the parameter. Without it steps below the parameter's precision are lost; a warning says so.
        overrides: fields of the preset.

    A parameter without a gradient on any rank is left bit-identical, state included. A matrix whose gradient is present on some
    ranks only takes the others' shards as zeros; an AdamW shard without a gradient is left alone on its rank.

    Raises:
        ValueError: no group, an unknown algorithm, field or preset, a parameter that its algorithm cannot take, or ranks whose
            plans differ (on all of them, naming the difference).
        NotImplementedError: a placement that is not supported.

    Collective: all ranks of the parameters' mesh construct it and call ``step``.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        preset: str | Preset = "omn",
        wave_bytes: int | None = None,
        transport: Transport = "all_to_all",
        process_group: dist.ProcessGroup | None = None,
        owners: Mapping[str, int] | None = None,
        deterministic: bool = True,
        copies: Copies | Literal["auto"] = "share",
        teams: Teams = "never",
        master_weights: bool = False,
        **overrides: Any,
    ) -> None:
        self._preset = resolve_preset(preset, overrides)
        if transport not in ("all_to_all", "all_gather"):
            raise ValueError(unknown_name("transport", transport, ("all_to_all", "all_gather")))
        self._wave_bytes = wave_bytes
        self._deterministic = deterministic
        if copies not in ("share", "repeat", "auto"):
            raise ValueError(unknown_name("choice of copies", copies, ("share", "repeat", "auto")))
        self._copies: Copies | Literal["auto"] = copies
        if isinstance(teams, str) and teams not in ("never", "auto"):
            raise ValueError(unknown_name("choice of teams", teams, ("never", "auto")))
        if owners and teams != "never":
            raise ValueError(
                f"teams: found {teams!r} together with owners for every matrix, expected one of them; give teams as a mapping"
            )
        self._teams: Teams = teams
        self._master_weights = master_weights
        self._transport: Transport = transport
        self._owners = dict(owners or {})
        self._shared = SharedGroups(process_group)
        self._domains: list[Domain] | None = None
        self._early: list[EarlyDirections] = []
        self._rows: list[Rows] = []
        given = [dict(group) for group in groups]
        if not given:
            raise ValueError("groups: found none, expected those of build_parameter_groups(model)")
        super().__init__(given, {"lr": self._preset.lr})
        self._domains = self._build_domains()

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
        """Bytes that this rank has handed to collectives for other ranks, in all steps since the pipelines were built."""
        return sum(domain.bytes_sent for domain in self._built())

    @property
    def num_collectives(self) -> int:
        """Collectives that this rank has taken part in, in all steps since the pipelines were built."""
        return sum(domain.pipeline.traffic.num_collectives for domain in self._built())

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like those of the constructor. Collective once the optimizer is built: the plan is made anew."""
        group = self._completed(dict(param_group))
        super().add_param_group(group)
        try:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                self._check_parameter(name, parameter, group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            self._allocate_state(name, parameter, group)
        self._warn_of_half_precision(group)
        if self._domains is not None:
            self._domains = self._build_domains()

    @contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Around the last backward before a step: directions leave for their owners as soon as gradients are reduced.

        The step then finds most of its gathers done; its bits are the same, and momentum changes in the step only. If no step
        follows (a rejected window), what was sent is dropped when this is entered again. It takes memory for the gathers of all
        waves at once: in the dtype of the wire one shard of the matrices, and one share of whole ones. Matrices among plain
        tensors take no part.

        From the backward on to the step, gradients of matrices must not change: :meth:`step` raises ``RuntimeError`` before
        anything moves when one did (clipping, unscaling, another backward), or when the momentum of a group did. AdamW gradients
        and learning rates may.

        Collective: all ranks enter it before the same steps.

        Raises:
            ValueError: the transport is ``"all_gather"``, which has room for one wave only.
        """
        if self._transport == "all_gather":
            raise ValueError("overlap_backward: found transport 'all_gather', expected 'all_to_all'")
        self._early = []
        with ExitStack() as stack:
            for domain in self._built():
                if can_leave_early(domain):
                    domain.pipeline.begin_early()
                    early = EarlyDirections(domain, self.state, deterministic=self._deterministic)
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
        """One update of every parameter that has a gradient; gradients are not changed.

        Collective over the parameters' mesh. No host synchronisation on CUDA while all gradients are there. Neither autocast nor
        torch.compile reaches it. Returns what ``closure`` returns.

        Raises:
            RuntimeError: no parameter has a gradient on any rank (backward did not run, or the optimizer was built before
                ``fully_shard`` replaced the parameters).
            ValueError: a gradient of another shape, mesh, placement or layout than its parameter; raised before anything moves.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        device = next((parameter.device for group in self.param_groups for parameter in group["params"]), torch.device("cpu"))
        with torch.autocast(device.type, enabled=False):
            self._step()
        return loss

    # Not torch.compiler.disable, which imports the compiler at once: half a second of every command.
    @_disable_dynamo
    def _step(self) -> None:
        domains = self._built()
        gradients = {
            parameter: checked_gradient(name, parameter)
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        for early in self._early:
            early.check()
        self._early = []
        adamw = AdamWStep(
            [group for group in self.param_groups if group["algorithm"] == "adamw"],
            self.state,
            gradients,
            deterministic=self._deterministic,
        )
        steps = [matrix_step(domain, self.state, gradients, deterministic=self._deterministic) for domain in domains]
        rows = RowsStep(self._rows, self.state, gradients)

        def run_local() -> None:
            adamw.run()
            rows.run()

        if not domains:
            run_local()
        for number, (domain, step) in enumerate(zip(domains, steps, strict=True)):
            domain.pipeline.run(step, run_local if number == 0 else lambda: None)
        has_none = all(gradient is None for gradient in gradients.values())
        # A rank that holds no element hears of nobody's gradients.
        if has_none and any(local_tensor(held).numel() for held in gradients) and not any(step.saw_gradient() for step in steps):
            raise RuntimeError(
                f"step: found no gradient on any of {len(gradients)} parameters, expected a backward before it; if there was one, "
                "the optimizer was built before fully_shard replaced the parameters: build it afterwards"
            )

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of an optimizer with the same groups; state keeps the dtypes that it was saved with.

        Raises:
            ValueError: the saved groups hold other parameters, shapes, algorithms or views; the first difference is named.
        """
        check_saved_groups(state_dict["param_groups"], self.param_groups)
        super().load_state_dict(state_dict)
        identities = [identity for group in state_dict["param_groups"] for identity in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for identity, parameter in zip(identities, parameters, strict=True):
            # torch casts floating state to the parameter's dtype, which would round fp32 momentum of bf16 parameters.
            for key, value in state_dict["state"].get(identity, {}).items():
                if isinstance(value, Tensor) and self.state[parameter][key].dtype != value.dtype:
                    self.state[parameter][key] = value.to(parameter.device, copy=True)
        # The plan is compared across ranks again before the next step.
        self._drop_early()
        self._domains = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        own = (
            "_preset",
            "_wave_bytes",
            "_deterministic",
            "_copies",
            "_teams",
            "_master_weights",
            "_transport",
            "_owners",
            "_shared",
        )
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in own},
            "_domains": None,
            "_rows": [],
            "_early": [],
        }

    def _drop_early(self) -> None:
        """Before pipelines go: what left early for a step that will not come."""
        for domain in self._domains or ():
            domain.pipeline.drop_early()
        self._early = []

    def _built(self) -> list[Domain]:
        if self._domains is None:
            self._domains = self._build_domains()
        return self._domains

    def _build_domains(self) -> list[Domain]:
        matrix_groups = [group for group in self.param_groups if group["algorithm"] in MATRIX_ALGORITHMS]
        self._rows = build_rows(matrix_groups)
        domains = build_domains(
            [group for group in self.param_groups if group["algorithm"] != "adamw"],
            wire=self._preset.wire,
            wave_bytes=self._wave_bytes,
            transport=self._transport,
            shared=self._shared,
            owners=self._owners,
            copies=self._copies,
            teams=self._teams,
        )
        for domain in domains:
            if not dist.is_initialized() or dist.get_rank() == 0:
                logger.info("%s", domain.plan)
        return domains

    def _completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with every field of its algorithm, those that it lacks from the preset."""
        algorithm = group.get("algorithm")
        if algorithm not in _GROUP_FIELDS:
            if algorithm is None:
                raise SettingsError("group: found no 'algorithm', expected 'muon' or 'adamw'")
            raise SettingsError(unknown_name("algorithm", str(algorithm), _GROUP_FIELDS))
        if algorithm == "muon":
            # Groups say which parameters are matrices; which matrix algorithm that means is the recipe's choice.
            algorithm = group["algorithm"] = self._preset.algorithm
        fields = _GROUP_FIELDS[algorithm]
        known = [*fields, "params", "param_names", "param_shapes", "algorithm", "initial_lr"]
        if algorithm in MATRIX_ALGORITHMS:
            known.extend(MATRIX_GROUP_FIELDS)
        for key in group:
            if key not in known:
                raise SettingsError(unknown_name(f"field of a group on {algorithm}", key, known))
        if isinstance(group["params"], Tensor):
            group["params"] = [group["params"]]
        group["params"] = list(group["params"])
        if "param_names" not in group:
            first = sum(len(other["params"]) for other in self.param_groups)
            named = [item for item in group["params"] if isinstance(item, tuple)]
            group["param_names"] = [name for name, _ in named] or [
                f"parameter_{first + position}" for position in range(len(group["params"]))
            ]
            group["params"] = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
        if len(group["param_names"]) != len(group["params"]):
            raise SettingsError(
                f"group: found {len(group['param_names'])} param_names for {len(group['params'])} params, expected one each"
            )
        if algorithm == "vector":
            group.setdefault("segments", None)
        for field, source in fields.items():
            if field not in group:
                group[field] = getattr(self._preset, source)
        group["param_shapes"] = [tuple(parameter.shape) for parameter in group["params"]]
        if algorithm in MATRIX_ALGORITHMS:
            complete_view(group, self._preset)
        check_group(group)
        return group

    def _check_parameter(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name}: found it on the meta device, expected real memory; build the optimizer after to_empty, or use "
                "plan_ownership for a plan of meta parameters"
            )
        if not parameter.is_floating_point():
            raise TypeError(f"parameter {name}: found dtype {parameter.dtype}, expected a real floating one")
        if group["algorithm"] == "vector" and parameter.ndim != 1:
            raise ValueError(
                f"parameter {name}: found shape {tuple(parameter.shape)} in a group on vector, expected one dim; put it on adamw"
            )
        if group["algorithm"] not in MATRIX_ALGORITHMS:
            return
        if (view := View.from_group(group)) is not None:
            view.check(name, parameter.shape)
            local = local_tensor(parameter.detach())
            try:
                as_matrix(local)
            except RuntimeError:
                raise ValueError(
                    f"parameter {name}: found a local shape {tuple(local.shape)} with strides {local.stride()}, expected leading "
                    "dims that are the rows of one matrix in memory; make it contiguous before the optimizer is built"
                ) from None
        elif parameter.ndim != 2:
            raise ValueError(
                f"parameter {name}: found shape {tuple(parameter.shape)} in a group on {group['algorithm']}, expected a matrix; "
                "put it on adamw or a vector on vector, or give muon_shape for a stack of matrices"
            )

    def _warn_of_half_precision(self, group: Mapping[str, Any]) -> None:
        half = [
            (name, parameter.dtype)
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if parameter.dtype.itemsize < 4
        ]
        if half and not self._master_weights:
            name, dtype = half[0]
            warnings.warn(
                f"{len(half)} parameters on {group['algorithm']} such as {name} are {dtype}: a step or a decay of less than about "
                f"{torch.finfo(dtype).eps / 2:.1g} of a weight rounds away; keep parameters in float32 and cast in forward, or "
                "pass master_weights=True",
                stacklevel=4,
            )

    def _allocate_state(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Zero state at once: a lazy one would make torch's state-dict helpers run a hidden step.

        Rows that AdamW updates inside a matrix parameter have their moments in tensors like the parameter: those reshard like
        it, and cost two more of its size.
        """
        state = self.state[parameter]
        if state:
            return
        source = parameter.detach()
        if self._master_weights and source.dtype.itemsize < 4:
            source = state["master"] = source.float()
        view = View.from_group(group) if group["algorithm"] in MATRIX_ALGORITHMS else None
        if group["algorithm"] == "normuon":
            state[ROW_MOMENT] = row_moment_like(name, parameter, group)
        if group["algorithm"] != "adamw":
            state["momentum_buffer"] = torch.zeros_like(source)
        if group["algorithm"] == "adamw" or (view is not None and view.has_adamw_rows):
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if parameter.is_cuda else "cpu")
            state["exp_avg"] = torch.zeros_like(source)
            state["exp_avg_sq"] = torch.zeros_like(source)
