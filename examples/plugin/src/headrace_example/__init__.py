"""Plug-ins for Headrace: a gateway, a middleware, a sink and a command."""
