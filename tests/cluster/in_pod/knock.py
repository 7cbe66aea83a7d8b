"""Runs in a stranger's pod: asks each control route without the job's token, and prints the answers' codes as JSON."""

import json
import sys
import urllib.error
import urllib.request

coordinator, server, token = sys.argv[1:]
ROUTES = [
    *(
        ("POST", f"http://{server}:8000{path}")
        for path in (
            "/init_process_group",
            "/destroy_process_group",
            "/request_weight_update",
            "/runtime/v1/generate",
            "/v1/chat/completions",
            "/v1/completions",
        )
    ),
    ("GET", f"http://{server}:8000/runtime/v1/status"),
    ("GET", f"http://{server}:8000/v1/models"),
    *(
        ("POST", f"http://{coordinator}:7000/v1/{path}")
        for path in (
            "dataset",
            "leases",
            "leases/renew",
            "leases/release",
            "groups",
            "groups/1/drop",
            "trainer/start",
            "steps/1/commit",
            "checkpoints",
            "members",
            "members/a/leave",
            "members/a/state",
            "fail",
        )
    ),
    *(("GET", f"http://{coordinator}:7000/v1/{path}") for path in ("state", "members", "samples", "steps/1/batch")),
]


def code(method: str, url: str, bearer: str) -> int:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {bearer}"} if bearer else {})}
    request = urllib.request.Request(url, b"{}" if method == "POST" else None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


codes = {
    f"{method} {url} {bearer and 'foreign'}": code(method, url, bearer)
    for method, url in ROUTES
    for bearer in ("", token)
}
sys.stdout.write(json.dumps(codes))
