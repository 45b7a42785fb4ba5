"""What each parameter does in the network, and so which algorithm updates it."""

from omn_dist.roles.groups import build_parameter_groups
from omn_dist.roles.routes import Route, route_parameters
from omn_dist.roles.summary import format_groups

__all__ = ["Route", "build_parameter_groups", "format_groups", "route_parameters"]
