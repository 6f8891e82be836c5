"""Acts on trade alerts the moment they come: any number of these may run, each alert goes to one of them.

    python pipelines/act_on_alerts.py [ADDRESS]

It reads `trade-alerts` through a leased subscription and publishes what is to be done to `trading-actions`.
"""

import json
import sys

import headrace

ACTIONS = {"spike": "pause", "burst": "watch", "wash": "freeze", "silence": "ask"}


def acting(bus: headrace.Bus) -> headrace.App:
    """An app that does something about every alert."""
    app = headrace.App(bus)

    @app.on("trade-alerts", subscription="actions", concurrency=4, deserializer="json")
    def act(job: headrace.Job) -> None:
        alert = job.value
        if alert["kind"] not in ACTIONS:
            raise headrace.Reject(f"nobody knows what to do about {alert['kind']}")
        on = alert.get("account") or alert["instrument"]
        # If this process dies between the two, the alert is handed out again: its name goes with the action, so
        # that whoever carries it out can see that it has been.
        action = {"alert": alert["alert"], "action": ACTIONS[alert["kind"]], "on": on}
        bus.publish("trading-actions", json.dumps(action).encode(), key=on)

    return app


if __name__ == "__main__":
    with headrace.connect(*sys.argv[1:2], wait=30.0) as bus:
        acting(bus).run()
