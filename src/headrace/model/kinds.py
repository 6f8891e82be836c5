"""The kinds of frames of the native protocol. A request class names its kind when it is declared."""

from enum import IntEnum


class Kind(IntEnum):
    """What a frame is: a request, or something that the broker sends."""

    HELLO = 1
    PING = 2
    INFO = 3

    TOPIC_CREATE = 10
    TOPIC_ALTER = 11
    TOPIC_DELETE = 12
    TOPIC_LIST = 13
    TOPIC_DESCRIBE = 14
    TOPIC_TRIM = 15

    PUBLISH = 20

    FETCH = 30
    OFFSETS = 31
    STREAM_OPEN = 32
    STREAM_CREDIT = 33
    STREAM_CLOSE = 34

    GROUP_JOIN = 40
    GROUP_RELEASE = 41
    GROUP_LEAVE = 42
    GROUP_LIST = 43
    GROUP_DESCRIBE = 44
    GROUP_SEEK = 45
    GROUP_DELETE = 46
    COMMIT = 47

    TRANSACTION_BEGIN = 50
    TRANSACTION_STAGE = 51
    TRANSACTION_COMMIT = 52
    TRANSACTION_ABORT = 53

    SUBSCRIPTION_CREATE = 60
    SUBSCRIPTION_ALTER = 61
    SUBSCRIPTION_DELETE = 62
    SUBSCRIPTION_LIST = 63
    SUBSCRIPTION_DESCRIBE = 64
    SUBSCRIPTION_RESET = 65

    LEASE = 70
    ACK = 71
    EXTEND = 72
    RELEASE = 73
    REJECT = 74
    LEASE_STOP = 75
    LEASE_OPEN = 76
    LEASE_CREDIT = 77
    LEASE_CLOSE = 78

    FIND = 80
    FORECAST = 81
    EDIT = 82
    EDIT_MATCHING = 83
    REDRIVE = 84

    SCHEDULE_SET = 90
    SCHEDULE_REMOVE = 91
    SCHEDULE_LIST = 92
    SCHEDULE_PAUSE = 93
    SCHEDULE_RUN = 94
    SCHEDULE_NEXT = 95

    ROUTE_SET = 110
    ROUTE_REMOVE = 111
    ROUTE_LIST = 112
    ROUTE_EXPLAIN = 113

    # From the broker.
    ANSWER = 128
    FAILURE = 129
    DELIVERY = 130
    STREAM_END = 131
    ASSIGNMENT = 132
    DRAIN = 133
    LEASE_DELIVERY = 134
    LEASE_END = 135
