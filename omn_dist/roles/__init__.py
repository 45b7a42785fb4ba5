"""Which algorithm updates each parameter, decided by what the parameter does in the network."""

from omn_dist.plan.geometry.views import View
from omn_dist.roles.declare import declare_view
from omn_dist.roles.groups import build_parameter_groups
from omn_dist.roles.role import Route
from omn_dist.roles.routes import route_parameters
from omn_dist.roles.summary import format_groups

__all__ = ["Route", "View", "build_parameter_groups", "declare_view", "format_groups", "route_parameters"]
