"""Role configs: the models (:mod:`.roles`), their rendering from a job (:mod:`.render`), checks (:mod:`.checks`)."""

from inflight_runtime.config.render import (
    ActorAddress,
    Addresses,
    LocalLayout,
    RenderedRun,
    ServerAddress,
    actor_count,
    render_local,
    render_roles,
    server_count,
    write_role_configs,
)

__all__ = [
    "ActorAddress",
    "Addresses",
    "LocalLayout",
    "RenderedRun",
    "ServerAddress",
    "actor_count",
    "render_local",
    "render_roles",
    "server_count",
    "write_role_configs",
]
