"""The wing of the optimizer: groups, state, domains, the step, and the rules."""
