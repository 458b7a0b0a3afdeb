"""The gateway's HTTP side: routes, authentication, bodies, error replies, limits on slow clients."""
