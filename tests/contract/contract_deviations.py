"""Where DualOptimizer does other than torch's optimizers on purpose: the reason, and what happens instead."""

from typing import NamedTuple


class Deviation(NamedTuple):
    """A check that every preset fails in the same way, plain and under FSDP2."""

    reason: str
    seen: str
    """A pattern that the first line of the error matches."""


DEVIATIONS: dict[str, Deviation] = {
    # --- parameters and groups ---
    "plain_parameters_are_taken": Deviation(
        "A shape does not say whether a matrix is a projection, an embedding or a head, so the rule of bare parameters cannot be "
        "chosen. The error has the line to write instead.",
        r"model",
    ),
    "named_parameters_are_taken": Deviation(
        "Names alone do not say what a parameter does in the network: that is read from its module. The error has the line to "
        "write instead.",
        r"model",
    ),
    "groups_without_an_algorithm_are_taken": Deviation(
        "Each group names its rule, since Muon and AdamW on the wrong parameters train badly without an error.",
        r"(Settings|Value)Error: .*algorithm",
    ),
    "a_named_group_beside_an_unnamed_one_is_refused": Deviation(
        "Plans, logs and messages need a name for each parameter, so one without gets a number for a name.",
        r"DID NOT RAISE",
    ),
    "complex_parameters_are_taken": Deviation(
        "Newton-Schulz is implemented for real matrices, and torch.optim.Muon refuses complex ones too.",
        r"TypeError: .*complex64",
    ),
    "betas_of_two_kinds_are_refused": Deviation(
        "A tensor of one element given as a number is read once, as that number, so both kinds mean the same.",
        r"DID NOT RAISE",
    ),
    # --- fields that would not act ---
    "maximize_goes_the_other_way": Deviation(
        "maximize is not implemented; negate the loss. Taken in silence it would descend.",
        r"(Settings|Value)Error: .*maximize",
    ),
    "amsgrad_keeps_the_largest_moment": Deviation(
        "amsgrad is not implemented. Taken in silence it would not act.",
        r"(Settings|Value)Error: .*amsgrad",
    ),
    "a_differentiable_step_has_a_gradient": Deviation(
        "Steps write in place and through process groups, and autograd records neither. Parameters are leaves.",
        r"ValueError: .*non-leaf",
    ),
    # --- state ---
    "state_exists_from_the_first_step_only": Deviation(
        "State is made at construction. Otherwise torch's state-dict helpers run a hidden step to make it, a collective one.",
        r"AssertionError: state before the first step",
    ),
    "names_do_not_decide_what_loads": Deviation(
        "Momentum under another parameter's name is the wrong momentum as a rule, so names that differ are refused. Saved groups "
        "without names load by position, and a load_state_dict pre-hook may rename.",
        r"ValueError: .*group 0",
    ),
}
