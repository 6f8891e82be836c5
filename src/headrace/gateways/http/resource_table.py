"""All routes: the one table from which the dispatch, the OpenAPI document and the page for people are made."""

import json
from functools import cache
from typing import Any

from headrace.gateways.http.asyncapi_resources import AsyncApiQuery, serve_asyncapi, serve_asyncapi_page
from headrace.gateways.http.auth_resources import AUTH_ROUTES
from headrace.gateways.http.call import Call, Reply
from headrace.gateways.http.cluster_resources import CLUSTER_ROUTES
from headrace.gateways.http.configuration_resources import CONFIGURATION_ROUTES
from headrace.gateways.http.docs_page import CONTENT_POLICY, make_page
from headrace.gateways.http.event_stream import STREAM_ROUTES
from headrace.gateways.http.job_resources import JOB_ROUTES
from headrace.gateways.http.key_resources import KEY_ROUTES
from headrace.gateways.http.metrics import METRICS_ROUTES
from headrace.gateways.http.openapi import make_document
from headrace.gateways.http.publishing import PUBLISH_ROUTES
from headrace.gateways.http.reading import READ_ROUTES
from headrace.gateways.http.request_resources import REQUEST_ROUTES
from headrace.gateways.http.route import Route
from headrace.gateways.http.route_resources import ROUTE_ROUTES
from headrace.gateways.http.schedule_resources import SCHEDULE_ROUTES
from headrace.gateways.http.service_resources import SERVICE_ROUTES
from headrace.gateways.http.subject_resources import SUBJECT_ROUTES
from headrace.gateways.http.subscription_resources import SUBSCRIPTION_ROUTES
from headrace.gateways.http.tenant_resources import TENANT_ROUTES
from headrace.gateways.http.timeline_resources import TIMELINE_ROUTES
from headrace.gateways.http.topic_resources import TOPIC_ROUTES, TOPICS
from headrace.gateways.http.transaction_resources import TRANSACTION_ROUTES
from headrace.gateways.http.upgrade import UPGRADE_ROUTES
from headrace.gateways.http.webhook_resources import WEBHOOK_ROUTES
from headrace.gateways.http.websocket.handshake import SOCKET_ROUTES
from headrace.gateways.http.websub_hub import WEBSUB_ROUTES
from headrace.model.type_info import build_type_info

DOCUMENTS = "documents"


async def serve_document(call: Call) -> Reply:
    """Answer the OpenAPI document."""
    return Reply(200, _encoded_document(_version(call)))


async def serve_page(call: Call) -> Reply:
    """Answer the page for people."""
    page = _encoded_page(_version(call))
    return Reply(200, page, b"text/html; charset=utf-8", ((b"content-security-policy", CONTENT_POLICY),))


def _version(call: Call) -> str:
    return call.gateway.settings.server.rpartition(" ")[2]


@cache
def _encoded_document(version: str) -> bytes:
    return json.dumps(make_document(ROUTES, version), separators=(",", ":")).encode()


@cache
def _encoded_page(version: str) -> bytes:
    return make_page(make_document(ROUTES, version))


ROUTES: list[Route] = [
    *TOPIC_ROUTES,
    *PUBLISH_ROUTES,
    *READ_ROUTES,
    *STREAM_ROUTES,
    *KEY_ROUTES,
    *SUBSCRIPTION_ROUTES,
    *TIMELINE_ROUTES,
    *SCHEDULE_ROUTES,
    *TRANSACTION_ROUTES,
    *TENANT_ROUTES,
    *CLUSTER_ROUTES,
    *WEBHOOK_ROUTES,
    *WEBSUB_ROUTES,
    *JOB_ROUTES,
    *ROUTE_ROUTES,
    *SUBJECT_ROUTES,
    *REQUEST_ROUTES,
    *SERVICE_ROUTES,
    *CONFIGURATION_ROUTES,
    *AUTH_ROUTES,
    *METRICS_ROUTES,
    *UPGRADE_ROUTES,
    Route(
        "GET", "/v1/asyncapi.json", serve_asyncapi, "The AsyncAPI document of topics and services", TOPICS,
        query=AsyncApiQuery, answer=dict[str, Any],
    ),
    Route(
        "GET", "/v1/asyncapi", serve_asyncapi_page, "Topics and services, as a page for people", TOPICS,
        query=AsyncApiQuery, answer=str, answer_types=("text/html",),
    ),
    *SOCKET_ROUTES,
    Route("GET", "/v1/openapi.json", serve_document, "This document", DOCUMENTS, answer=dict[str, Any], is_public=True),
    Route(
        "GET", "/v1/docs", serve_page, "A page for people", DOCUMENTS, answer=str, answer_types=("text/html",),
        is_public=True,
    ),
]  # fmt: skip
"""Every route."""

build_type_info(*(route.query for route in ROUTES if route.query is not None))
