"""The composition root: puts store, broker and gateways together, in a process of its own or inside a program."""

from typing import TYPE_CHECKING

from headrace.gateways.http.installation import DEFAULT_HTTP_ADDRESS as DEFAULT_HTTP_ADDRESS
from headrace.gateways.http.installation import missing_packages as missing_packages
from headrace.runtime.event_loop import new_event_loop as new_event_loop
from headrace.server.cluster_server import ClusterServer as ClusterServer
from headrace.server.cluster_transfer import ClusterCopy as ClusterCopy
from headrace.server.cluster_transfer import NodeOrigin as NodeOrigin
from headrace.server.cluster_transfer import RestorePoint as RestorePoint
from headrace.server.cluster_transfer import import_directory as import_directory
from headrace.server.cluster_transfer import list_restorable as list_restorable
from headrace.server.cluster_transfer import restore_directory as restore_directory
from headrace.server.data_repair import data_bytes as data_bytes
from headrace.server.data_repair import repair_data as repair_data
from headrace.server.data_repair import verify_data as verify_data
from headrace.server.directory_lock import DirectoryLock as DirectoryLock
from headrace.server.embedded import EmbeddedServer as EmbeddedServer
from headrace.server.server import Server as Server
from headrace.server.server import version as version
from headrace.server.settings import MEMORY as MEMORY
from headrace.server.settings import SOCKET_NAME as SOCKET_NAME
from headrace.server.settings import EmbeddedSettings as EmbeddedSettings
from headrace.server.settings import ServerSettings as ServerSettings
from headrace.server.settings import replaced_by_listen as replaced_by_listen
from headrace.server.settings import server_settings as server_settings

if TYPE_CHECKING:
    from headrace.broker.repair import CheckedLog as CheckedLog
    from headrace.broker.repair import Repaired as Repaired
    from headrace.broker.repair import Verified as Verified
