"""What a node remembers on its own disk, in node.json: how far it was, and how far it has seen the store to be."""

import msgspec

from headrace.model.errors import CorruptFile
from headrace.storage.disk import Disk
from headrace.storage.replicated.keys import NODE_STATE_NAME, Position
from headrace.storage.replicated.log_size import LogPart

_FORMAT = 1


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a node between two processes."""

    format: int = _FORMAT
    cluster: str = ""
    node: str = ""
    process: str = ""
    """Its last process, as in its record in the store."""
    whole: bool = False
    """Whether the directory of the shard has a state of it, rather than a part that was being restored."""
    clean: bool = False
    """Whether the directory of the shard has exactly the state at the position: the node stopped in order."""
    boot: str = ""
    """The boot of the machine in which it stopped: a power loss since may have taken what was never synced."""
    applied: tuple[int, int] = (0, 0)
    """The epoch, and the number of its objects, up to which the directory has the log; if not clean, at least."""
    seen: tuple[int, int] = (0, 0)
    """The highest position that the node has seen: a store that does not have it went back in time."""
    bindings: dict[int, str] = {}
    """The files that have ids at the position."""
    seals: dict[int, int] = {}
    """The position of the seal of each earlier epoch."""
    log_size: list[LogPart] = []
    """The sizes of the last parts of the log up to the position."""
    listing: str = ""
    """The digest of the names and lengths of all files, if clean: others mean that somebody has changed them."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(NodeState)


def read_state(disk: Disk, directory: str) -> NodeState:
    """The state in a node's directory; a new one if there is none."""
    path = f"{directory}/{NODE_STATE_NAME}"
    if not disk.exists(path):
        return NodeState()
    file = disk.open(path)
    try:
        return _decoder.decode(disk.read(file, 0, disk.size(file)))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptFile(
            f"{path} cannot be read: {error}; remove the directory, which the store can replace"
        ) from error


def write_state(disk: Disk, directory: str, state: NodeState) -> None:
    """Replace the state; it is on the disk when this returns."""
    path = f"{directory}/{NODE_STATE_NAME}"
    temporary = f"{path}.new"
    disk.remove(temporary, sync=False)
    file = disk.open(temporary, create=True)
    disk.write(file, 0, _encoder.encode(state))
    disk.sync(file)
    disk.rename(temporary, path)


def seen_position(state: NodeState) -> Position:
    """The highest position that the node has seen."""
    return Position(*state.seen)
