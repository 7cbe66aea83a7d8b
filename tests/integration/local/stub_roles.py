"""Roles of a run reduced to what the local executor sees of them: readiness, state, signals, exit codes.

Run as ``python -S stub_roles.py ROLE --config FILE`` in place of ``python -m inflight_runtime.ROLE``. Each life of a
role and each signal it gets is one line in ``order.txt`` of the run directory; ``behaviour.json`` beside the run
directory says who misbehaves.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROLE = sys.argv[1]
CONFIG_FILE = Path(sys.argv[3])
NAME = CONFIG_FILE.stem
CONFIG = json.loads(CONFIG_FILE.read_text())
RUN_DIR = CONFIG_FILE.parent.parent
STATE = RUN_DIR / "state.json"
BEHAVIOUR = json.loads((RUN_DIR.parent / "behaviour.json").read_text()).get(NAME, "")


def note(text: str) -> None:
    with (RUN_DIR / "order.txt").open("a") as handle:
        handle.write(f"{NAME} {text}\n")


def initial_state() -> dict:
    steps = CONFIG["steps"]
    version = {"epoch": 1, "step": 0}
    return {
        "job": CONFIG["job"], "outcome": "running", "reason": "", "epoch": 1, "step": 0, "steps": steps,
        "policy_version": version, "groups": {}, "dropped": {}, "attempts_failed": 0, "duplicates": 0, "fenced": 0,
        "leases_expired": 0, "capacity": {"bound": 8}, "metrics": {},
        "members": [
            {
                "server_id": "inference-0", "boot_id": "b", "url": "u", "engine": "vllm", "world_size": 1,
                "capacity": 64, "max_length": 128, "state": "READY", "version": version, "running": 12,
                "last_pause_ms": 8.4, "last_update_ms": 21.0,
            }
        ],
    }  # fmt: skip


def write_state(**changes: object) -> dict:
    state = json.loads(STATE.read_text()) | changes
    temporary = STATE.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(state))
    temporary.replace(STATE)
    return state


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer " + Path(CONFIG["token_file"]).read_text()
        body = STATE.read_bytes() if self.path == "/v1/state" and allowed else b"{}"
        self.send_response(200 if allowed or self.path == "/readyz" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def serve(port: int) -> None:
    threading.Thread(target=ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever, daemon=True).start()


def on_sigterm(*_: object) -> None:
    note("SIGTERM")
    if BEHAVIOUR == "ignore SIGTERM":
        return
    if ROLE == "trainer":
        (RUN_DIR / "checkpoints" / "step-00000001").mkdir(exist_ok=True)
        (RUN_DIR / "checkpoints" / "LATEST").write_text("step-00000001\n")
    os._exit(143 if ROLE == "trainer" else 0)


def train() -> None:
    with (RUN_DIR / "metrics.jsonl").open("a") as metrics:
        for step in range(1, CONFIG["steps"] + 1):
            time.sleep(0.02)
            numbers = {"step": step, "reward_mean": step / CONFIG["steps"], "staleness_mean": 1.5}
            metrics.write(json.dumps(numbers) + "\n")
            metrics.flush()
            write_state(step=step, metrics={**numbers, "tokens_per_second": 4321.0})
    write_state(outcome="succeeded")


def main() -> None:
    signal.signal(signal.SIGTERM, on_sigterm)
    sys.stdout.write(f"{NAME} is up\n")
    if ROLE == "coordinator":
        if not STATE.exists():
            STATE.write_text(json.dumps(initial_state()))
        serve(CONFIG["port"])
    elif BEHAVIOUR == "never ready":
        sys.stdout.write("RuntimeError: no room for the KV cache\n")
        sys.stdout.flush()
    elif ROLE == "inference":
        serve(CONFIG["port"])
    elif ROLE == "actor":
        serve(CONFIG["health_port"])
    note(f"up {os.getpid()}")
    if BEHAVIOUR == "bad input":
        sys.stdout.write("cannot train: there is no whole checkpoint\n")
        sys.exit(2)
    if BEHAVIOUR == "declare the run failed":
        write_state(outcome="failed", reason="the environment failed 8 times in a row: KeyError: 'letters'")
    if ROLE == "trainer" and not BEHAVIOUR:
        train()
        return
    while True:
        time.sleep(0.05)  # short: the signal may reach another thread, and the handler runs in this one


main()
