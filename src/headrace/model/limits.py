"""Every bound of Headrace, with its unit."""

MESSAGE_BYTES_MAX = 16 << 20
"""One message: value, key and headers together."""

BATCH_BYTES_MAX = 32 << 20
"""One batch as stored, and its body before compression."""

BATCH_COUNT_MAX = 65_536
"""Messages in one batch."""

BODY_EXPANSION_MAX = 256
"""Times that a compressed body may grow when it is decompressed; an LZ4 block cannot grow more."""

TIMESTAMP_US_MIN = -62_135_424_000_000_000
TIMESTAMP_US_MAX = 253_402_214_399_999_999
"""Earliest and latest time, in microseconds since 1970: 0001-01-03 00:00 and the end of 9999-12-30, UTC.

In every time zone these are times that Python's datetime can express, and with it Spark's rows in Python.
"""

SEGMENT_BYTES_MIN = 4 << 10
SEGMENT_BYTES_MAX = 2 << 30
"""Bounds of the size at which a log starts a new file."""

TOPIC_NAME_CHARS_MAX = 249
TENANT_NAME_CHARS_MAX = 40
GROUP_NAME_CHARS_MAX = 249
PLAIN_NAME_CHARS_MAX = 120

SUBJECT_CHARS_MAX = 249
"""Characters of a subject, and of a pattern of subjects."""

SUBJECT_TOKENS_MAX = 32
"""Tokens of a subject, and of a pattern of subjects."""

PATTERN_RUNS_MAX = 2
"""How often `#` can stand in a pattern before its end, after those beside each other are taken together."""

MATCH_NODES_MAX = 10_000
"""Nodes that a subject can visit, at most, while the patterns that it matches are found: two to three milliseconds.

Of the live subscriptions of a tenant, of its responders, and of the routes of a topic, each.
"""

LIVE_SUBSCRIPTIONS_MAX = 10_000
"""Live subscriptions and responders of one connection, each."""

LIVE_SUBSCRIPTIONS_IN_ALL_MAX = 1_000_000
"""Live subscriptions and responders of a broker, each."""

LIVE_BACKLOG_BYTES_MAX = 64 << 20
"""Messages to subjects of one tenant that wait because those before them go to many subscribers."""

REQUESTS_OPEN_MAX = 768
"""Unanswered requests to subjects of one connection; fewer than a gateway takes requests before it stops reading."""

REQUESTS_WAITING_MAX = 10_000
"""Requests of one tenant that wait because all responders of their subject are busy."""

REQUESTS_WAITING_BYTES_MAX = 64 << 20
"""Values and headers of all requests that wait so."""

REPLIES_UNSENT_BYTES_MAX = 64 << 20
"""Values of replies to one connection that arrive while its client does not take what it is sent."""

WAITING_SUBJECTS_MAX = 1_000
"""Subjects of one tenant to which requests wait."""

REQUEST_SECONDS_MAX = 86_400
"""The longest time that a reply can be waited for."""

RESPONDER_CONCURRENCY_MAX = 10_000
"""Requests that one responder can have at once."""

ERROR_CODE_CHARS_MAX = 120
ERROR_TEXT_CHARS_MAX = 4_000
ERROR_DETAILS_BYTES_MAX = 16 << 10
"""Bounds of the error object with which a responder answers."""

PARTITIONS_MAX = 1024
"""Partitions of one topic."""

FRAME_BYTES_MAX = BATCH_BYTES_MAX + (64 << 10)
"""One frame of the native protocol: a batch and what is said about it."""

STREAMS_MAX = 4096
"""Streams open at once on one connection."""

STANDING_LEASES_MAX = 1024
"""Standing lease requests open at once on one connection."""

IN_FLIGHT_MAX = 64
"""Batches of one producer to one partition that are sent and not acknowledged; as many are recognised when repeated."""

LEASE_SECONDS_MAX = 7 * 86_400
"""The longest time that a lease can be asked for at once; it can be extended."""

LEASE_MESSAGES_MAX = 10_000
"""Messages that can be leased, settled or edited with one request."""

AHEAD_SECONDS_MAX = 60
"""How long before they are due messages can be leased by one who holds them back until then."""

DELIVERIES_MAX = 255
"""Deliveries of a message that are counted."""

PRIORITY_MAX = 32_767
PRIORITY_MIN = -32_768
"""Bounds of priorities that make a difference; what is beyond counts as the bound."""

PRIORITY_STORED_MAX = (1 << 31) - 1
PRIORITY_STORED_MIN = -(1 << 31)
"""Bounds of priorities that a message can have."""

MULTICAST_TOPICS_MAX = 1000
"""Topics that one message can be published to at once."""

VERSIONED_BATCH_MESSAGES_MAX = 4096
"""Messages in one batch for a topic with key_versions: the broker writes a header into each."""

HISTORY_MESSAGES_MAX = 1000
HISTORY_BYTES_MAX = 8 << 20
"""Bounds of one page of a key's history; a page has at least one message, however large."""

WAITING_PUBLISH_BYTES_MAX = 32 << 20
"""Batches that wait in one partition until the index of its keys is loaded, or a transaction is appended."""

STATE_BYTES_MAX = 64 << 10
"""What one holder of a message can tell the next one when it gives the message back."""

REASON_CHARS_MAX = 8_000
"""Why a message was given back or rejected, such as a traceback; what is longer loses its middle."""

SCHEDULES_MAX = 10_000
"""Schedules of one broker."""

SERVICE_INSTANCES_MAX = 10_000
"""Registered instances of services of one broker."""

SERVICE_BYTES_MAX = 16 << 10
"""What one instance of a service says of itself, encoded: metadata, topics, subjects and schemas together."""

SERVICES_BYTES_MAX = 64 << 20
SERVICES_TENANT_BYTES_MAX = 16 << 20
"""What all instances say of themselves, of all tenants together and of one."""

SERVICE_VERSION_CHARS_MAX = 100
"""The version of a service."""

SERVICE_TTL_MS_MIN = 100
SERVICE_TTL_MS_MAX = 3_600_000
"""Bounds of the time that an instance of a service stays without a sign of life."""

ERRORS_REPORTED_MAX = 100
"""Errors of a service in one report."""

ERROR_BYTES_MAX = 64 << 10
"""One reported error, encoded, its traceback and details included."""

ERRORS_KEPT_BYTES_MAX = 32 << 20
ERRORS_KEPT_TENANT_BYTES_MAX = 2 << 20
"""Excerpts of the newest errors of services in memory, of all tenants together and of one."""

LOG_RULES_MAX = 1000
"""Logging levels that are set in one broker."""

AUDIT_PENDING_MAX = 10_000
"""Records of an audit trail that wait to be stored; what is more is counted, and the trail tells how many."""

EVENTS_PENDING_MAX = 100_000
"""Events about the bus that wait to be recorded; what is more is counted and dropped."""

SECONDS_MAX = 1e10
"""Settings in seconds are less: more than 300 years, and still exact in microseconds."""

IDEMPOTENCY_KEYS_MAX = 50_000
"""Idempotency keys that a topic remembers."""

IDEMPOTENCY_KEYS_TOTAL_MAX = 500_000
"""Idempotency keys that a broker remembers, of all topics together."""

IDEMPOTENCY_KEY_CHARS_MAX = 255
"""Characters of an idempotency key."""

IDEMPOTENCY_SECONDS = 86_400
"""How long an idempotency key is remembered."""

MIDDLEWARE_MAX = 16
"""Middleware that one topic can have."""

MIDDLEWARE_BYTES_MAX = 64 << 10
"""A topic's setting `middleware` as JSON."""

MIDDLEWARE_THREADS_MAX = 4
"""Threads on which middleware runs that is not inline, besides those that are stuck."""

MIDDLEWARE_STUCK_MAX = 16
"""Threads that middleware may hold beyond its deadline; then all middleware that needs a thread is refused."""

MIDDLEWARE_QUEUED_BYTES_MAX = 64 << 20
"""Batches of one topic that wait for its middleware."""

INLINE_BYTES_MAX = 64 << 10
INLINE_COUNT_MAX = 256
"""The largest batch that inline middleware processes on the broker's event loop; larger ones go to a thread."""
ROUTES_MAX = 10_000
"""Routes of one broker."""

ROUTE_TARGETS_MAX = 100
"""Topics that one route carries messages to."""

ROUTE_HEADERS_MAX = 32
"""Headers in the condition of one route."""

ROUTE_CONTENT_MAX = 100
"""Routes from one topic that look into the content of messages: each of them looks at each message."""

ROUTE_GRAPH_MAX = 10_000
"""Steps between topics that are followed to find out whether a new route would close a loop."""

CONTENT_QUERY_BYTES_MAX = 16 << 10
"""A content query as JSON: what `exact` and `partial` compare with."""

CONTENT_PATTERN_CHARS_MAX = 1_000
"""A regular expression or a JSONPath of a content query."""

CONTENT_QUERY_DEPTH_MAX = 32
"""Nesting of a content query: of the objects and arrays that it compares with, and of the filters of a JSONPath."""

CONTENT_PROGRAM_MAX = 1_000
"""Instructions of a compiled regular expression."""

CONTENT_BYTES_MAX = 1 << 20
"""The largest value that a JSON query decodes; a larger one counts as failed."""

CONTENT_DEPTH_MAX = 128
"""The deepest nesting of a value that a JSON query looks into; a deeper one counts as failed."""

CONTENT_STEPS_MAX = 32_768
"""Steps that a content query may take for one message, about 0.3 microseconds each; with more it counts as failed."""

ROUTE_STEPS_MAX = 2 * CONTENT_STEPS_MAX
"""Steps that all content routes of a topic may take for one message; those that come too late count as failed."""

SOCKET_FRAME_BYTES_MAX = 1 << 20
"""A frame that a client sends over a WebSocket: it is decoded in one go."""

SOCKET_FRAGMENTS_MAX = 1000
"""Frames of one message over a WebSocket."""

SOCKET_CONTROL_FRAMES_MAX = 200
"""Pings and pongs that a client may send over a WebSocket per second."""

SOCKET_REQUESTS_MAX = 256
"""Unanswered requests at which the gateway stops reading a WebSocket, until half of them are answered."""

SOCKET_STREAMS_MAX = 64
"""Streams of a WebSocket, each over all partitions of a topic."""

RESULT_BYTES_MAX = 1 << 20
"""The result of a job."""

WEBHOOKS_MAX = 10_000
"""Webhooks of one broker."""

WEBHOOK_BATCH_MAX = 1_000
"""Messages in one request of a webhook."""

WEBHOOK_CONCURRENCY_MAX = 64
"""Requests of one webhook at once."""

WEBHOOK_TIMEOUT_SECONDS_MAX = 300.0
"""How long the receiver of a webhook may take for its answer."""

WEBHOOK_HEADERS_MAX = 32
WEBHOOK_HEADERS_BYTES_MAX = 8 << 10
"""Headers that are added to each request of a webhook, and their names and values together."""

WEBHOOK_LEASED_BYTES = 1 << 20
"""Messages that one webhook has in memory; the last one may exceed it."""

PUSH_BYTES_MAX = 64 << 20
"""Messages that all webhooks together have in memory, those of one tenant half of it; see push/shared_limits.py."""

WEBHOOK_LOG_MAX = 50
"""Requests of one webhook that its log of deliveries has."""

PUSH_REQUESTS_MAX = 256
"""Requests of all webhooks together that wait for their answers; how they share them, push/shared_limits.py says."""

WEBSUB_SUBSCRIPTIONS_MAX = 5_000
WEBSUB_TOPIC_SUBSCRIPTIONS_MAX = 1_000
"""WebSub subscriptions of one broker, and of one topic; they are webhooks, too."""

WEBSUB_LEASE_SECONDS = 10 * 86_400
WEBSUB_LEASE_SECONDS_MIN = 1
WEBSUB_LEASE_SECONDS_MAX = 30 * 86_400
"""How long a WebSub subscription lasts by default, at least and at most."""

WEBSUB_SECRET_BYTES_MAX = 199
"""The secret of a WebSub subscriber: fewer than 200 bytes by the recommendation."""

WEBSUB_REQUESTS_PER_SECOND = 10
WEBSUB_REQUESTS_BURST = 50
"""Callbacks that a hub asks for confirmation, on average and in a burst: it must not amplify an attack on somebody."""

WEBSUB_PENDING_MAX = 64
WEBSUB_PENDING_HOST_MAX = 4
"""Callbacks that are being asked, and those of one host."""

TLS_HANDSHAKES_MAX = 512
"""Unfinished TLS handshakes of one address on which a broker listens; beyond that the oldest are dropped."""

TOKENS_MAX = 10_000
"""Tokens of one broker, with those that were revoked or have expired until a new one takes their place."""

ROLES_MAX = 1_000
"""Roles of one broker beside the built-in ones."""

BINDINGS_MAX = 10_000
"""Bindings of roles to identities in one broker."""

GRANTS_MAX = 100
"""Grants of one role, scopes of one token, and patterns of one grant."""

GRANT_PATTERN_CHARS_MAX = 512
"""Characters of a pattern in a grant or a binding."""

IDENTITY_CHARS_MAX = 249
"""Characters of an identity's name."""

DESCRIPTION_CHARS_MAX = 500
"""Characters of the description of a token or a tenant."""

TRANSACTIONS_MAX = 100_000
"""Open transactions of one broker."""

TENANTS_MAX = 10_000
"""Tenants of one broker."""

RATE_MAX = 1 << 50
"""The largest quota of a tenant."""

RATE_BURST_SECONDS = 1
"""A tenant's rate is kept on average over this time: so much may come at once."""

THROTTLE_SECONDS_MAX = 10
"""The longest time that a request waits because of its tenant's rate, before it is refused."""

ASYNCAPI_TOPICS_MAX = 10_000
ASYNCAPI_SERVICES_MAX = 1000
"""Topics and services that one AsyncAPI document tells of."""
ASYNCAPI_BYTES_MAX = 16 << 20
"""About how large an AsyncAPI document becomes; one that is cut off says where to go on."""
