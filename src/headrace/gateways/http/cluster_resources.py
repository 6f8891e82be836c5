"""The cluster as a resource: its state, and what moves in it."""

from headrace.gateways.http.route import request_route
from headrace.model.cluster_requests import ClusterDescribe, ClusterDrain, ClusterMove, ClusterUpgrade

CLUSTER = "cluster"

CLUSTER_ROUTES = [
    request_route(ClusterDescribe, "GET", "/v1/cluster", tag=CLUSTER, errors=("unsupported_operation",)),
    request_route(
        ClusterMove, "POST", "/v1/cluster/moves", tag=CLUSTER, status=202, errors=("unsupported_operation",),
        example={"shard": 0, "node": "b"},
    ),
    request_route(
        ClusterDrain, "POST", "/v1/cluster/nodes/{node}/drain", tag=CLUSTER, status=202,
        errors=("unsupported_operation",), example={"drained": True},
    ),
    request_route(ClusterUpgrade, "POST", "/v1/cluster/upgrade", tag=CLUSTER, errors=("unsupported_operation",)),
]  # fmt: skip
"""The routes about the cluster."""
