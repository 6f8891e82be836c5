"""A broker that moves between two ports with its data, as the serving node of a cluster does between machines."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster_nodes import ScriptedNode, free_port
from tests.known import ENVIRONMENT

WAIT_S = 60


class MovingBroker:
    """Serves on one of two ports; on the other a node answers that it follows, and from where the broker serves."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self.ports = (free_port(), free_port())
        self.url = f"headrace://127.0.0.1:{self.ports[0]},127.0.0.1:{self.ports[1]}"
        self._serving = 0
        self._follower = ScriptedNode(port=self.ports[1])
        self._process = self._start()
        self.moves = 0

    @property
    def redirects(self) -> int:
        """How many clients the present follower has sent elsewhere."""
        return len(self._follower.hellos)

    def move(self, *, kill: bool) -> None:
        """Let the broker serve on the other port, after it was killed or ended in peace."""
        self._end(signal.SIGKILL if kill else signal.SIGTERM)
        left = ScriptedNode(port=self.ports[self._serving])
        left.follow()
        self._follower.close()
        self._follower = left
        self._serving = 1 - self._serving
        self._process = self._start()
        self.moves += 1

    def close(self) -> None:
        """End everything."""
        self._end(signal.SIGTERM)
        self._follower.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        port = self.ports[self._serving]
        command = [sys.executable, "-m", "headrace", "serve", "--json", "--data", str(self._data)]
        environment = {name: text for name, text in ENVIRONMENT.items() if not name.startswith("HEADRACE_")}
        process = subprocess.Popen(
            [*command, "--listen", f"headrace://127.0.0.1:{port}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["addresses"]
        self._follower.follow(f"headrace://127.0.0.1:{port}")
        return process

    def _end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        code = self._process.wait(WAIT_S)
        assert code == (0 if number == signal.SIGTERM else -number)
        assert self._process.stdout is not None
        self._process.stdout.close()
