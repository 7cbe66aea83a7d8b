"""The node itself: what the other tests here stand on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.images import Image
from cluster.node import Node, network
from cluster.pods import USER, phase, pod, pod_spec
from control_plane.cluster import KubectlError, eventually

RESOLVE = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode(), end='')"
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2).close()
    print("connected")
except OSError as error:
    print(type(error).__name__, error.errno)
"""
ASK_API = """
import json, ssl, sys, urllib.error, urllib.request as r
place = "/var/run/secrets/kubernetes.io/serviceaccount/"
context = ssl.create_default_context(cafile=place + "ca.crt")
asked = r.Request(
    "https://kubernetes.default.svc/apis/authentication.k8s.io/v1/selfsubjectreviews",
    data=json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}).encode(),
    headers={"Authorization": "Bearer " + open(place + "token").read(), "Content-Type": "application/json"},
)
print(json.load(r.urlopen(asked, timeout=5, context=context))["status"]["userInfo"]["username"])
"""
SERVE = """
import http.server, socket
class Name(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(socket.gethostname().encode())
    def log_message(self, *_): print("asked", flush=True)
http.server.HTTPServer(("", 8080), Name).serve_forever()
"""
OUTSIDE = "inflight-outside"
OUTSIDE_HOST, OUTSIDE_PEER = "203.0.113.1", "203.0.113.2"
"""Addresses for documentation, in a network namespace of the test's own."""


def claim(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def service(name: str, **spec: Any) -> dict[str, Any]:
    ports = [{"name": "http", "port": 80, "targetPort": 8080}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": "web"}, "ports": ports, **spec},
    }


def servers(image: str) -> dict[str, Any]:
    probe = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}
    template = {
        "metadata": {"labels": {"app": "web"}},
        "spec": pod_spec(image, ["python3", "-c", SERVE], readinessProbe=probe),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "web"},
        "spec": {
            "serviceName": "web",
            "replicas": 2,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": "web"}},
            "template": template,
        },
    }


class Client:
    """A pod of the default service account in which a test runs Python."""

    def __init__(self, node: Node, namespace: str, image: str) -> None:
        self._kubectl, self._namespace = node.kubectl, namespace
        spec = pod_spec(image, ["python3", "-c", "import time; print('here', flush=True); time.sleep(3600)"])
        self._kubectl.create([pod("client", spec)], "-n", namespace)
        phase(self._kubectl, namespace, "client", "Running")

    def python(self, script: str, *arguments: str) -> str:
        return self._kubectl("exec", "client", "-n", self._namespace, "--", "python3", "-c", script, *arguments).strip()


@pytest.fixture
def client(node: Node, namespace: str, image: Image) -> Client:
    return Client(node, namespace, image.name)


def test_a_pod_that_is_not_root_writes_to_its_volume_and_the_next_one_reads_it(
    node: Node, namespace: str, image: Image
) -> None:
    kubectl = node.kubectl
    mount = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    volumes = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
    write = ["python3", "-c", "import os; open('/data/who', 'w').write(f'written by {os.getuid()}')"]
    read = ["python3", "-c", "print(open('/data/who').read())"]

    kubectl.create([claim("data"), pod("writer", pod_spec(image.name, write, **mount) | volumes)], "-n", namespace)
    phase(kubectl, namespace, "writer", "Succeeded")
    kubectl.create([pod("reader", pod_spec(image.name, read, **mount) | volumes)], "-n", namespace)
    phase(kubectl, namespace, "reader", "Succeeded")

    assert kubectl("logs", "reader", "-n", namespace) == f"written by {USER}\n"


def test_a_pod_that_is_not_restricted_is_refused(node: Node, namespace: str, image: Image) -> None:
    spec = pod_spec(image.name, ["true"])
    del spec["securityContext"]
    with pytest.raises(KubectlError, match='violates PodSecurity "restricted'):
        node.kubectl.create([pod("careless", spec)], "-n", namespace)


def test_names_services_logs_and_exec(node: Node, namespace: str, image: Image, client: Client) -> None:
    kubectl = node.kubectl
    kubectl.create([service("web", clusterIP="None"), service("any-web"), servers(image.name)], "-n", namespace)
    kubectl("rollout", "status", "statefulset/web", "-n", namespace, "--timeout=60s", deadline_s=70)

    second = kubectl.get("pod/web-1", "-n", namespace)["status"]["podIP"]
    full = f"web-1.web.{namespace}.svc.cluster.local"

    # The name server and the Service's rules hear of ready pods a moment after the StatefulSet does.
    def known() -> bool:
        return client.python(RESOLVE, full) == second and client.python(FETCH, "http://any-web") != ""

    eventually("name and Service lead to the pods", lambda: resolved(known), 30)
    assert client.python(RESOLVE, full) == second
    assert client.python(RESOLVE, "web-1.web") == second
    assert client.python(FETCH, "http://web-1.web:8080") == "web-1"
    # By the Service's own address, from a pod and from the machine.
    address = kubectl.get("service/any-web", "-n", namespace)["spec"]["clusterIP"]
    assert client.python(RESOLVE, "any-web") == address
    assert client.python(FETCH, "http://any-web") in {"web-0", "web-1"}
    here = [sys.executable, "-c", FETCH, f"http://{address}"]
    assert subprocess.run(here, capture_output=True, timeout=10, check=True).stdout in {b"web-0", b"web-1"}
    assert kubectl("logs", "client", "-n", namespace) == "here\n"
    assert "asked" in kubectl("logs", "web-1", "-n", namespace)

    # One that comes back has another address under the same name, which nobody keeps from looking it up.
    kubectl("delete", "pod/web-1", "-n", namespace, "--wait=false")

    def moved() -> bool:
        return client.python(RESOLVE, "web-1.web") not in {second, ""}

    eventually("the name leads to the new pod", lambda: resolved(moved), 30)


def resolved(probe: Any) -> bool:
    """A name that is not there at the moment is no failure."""
    try:
        return bool(probe())
    except KubectlError:
        return False


def test_a_pod_asks_the_api_server_with_its_own_token(namespace: str, client: Client) -> None:
    assert client.python(ASK_API) == f"system:serviceaccount:{namespace}:default"


@pytest.fixture
def outside() -> Iterator[subprocess.Popen[bytes]]:
    """A network namespace that plays the world outside: a server in it, a cable to it, a route to this machine."""
    interface, peer = "inflight-out0", "inflight-out1"
    inside = ["ip", "netns", "exec", OUTSIDE]
    network.run(["ip", "netns", "add", OUTSIDE])
    process = None
    try:
        network.run(["ip", "link", "add", interface, "type", "veth", "peer", "name", peer, "netns", OUTSIDE])
        network.run(["ip", "address", "add", f"{OUTSIDE_HOST}/24", "dev", interface])
        network.run(["ip", "link", "set", interface, "up"])
        network.run([*inside, "ip", "address", "add", f"{OUTSIDE_PEER}/24", "dev", peer])
        network.run([*inside, "ip", "link", "set", peer, "up"])
        network.run([*inside, "ip", "route", "add", "default", "via", OUTSIDE_HOST])
        process = subprocess.Popen([*inside, sys.executable, "-u", "-m", "http.server", "8080"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"Serving")
        yield process
    finally:
        if process is not None:
            process.kill()
            process.wait(10)
        subprocess.run(["ip", "link", "delete", interface], check=False)
        subprocess.run(["ip", "netns", "delete", OUTSIDE], check=False)


def test_nothing_of_the_cluster_goes_out_and_nothing_comes_in(
    node: Node, client: Client, outside: subprocess.Popen[bytes]
) -> None:
    def from_here(*target: str, where: tuple[str, ...] = ()) -> str:
        command = [*where, sys.executable, "-c", CONNECT, *target]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    from_outside = ("ip", "netns", "exec", OUTSIDE)
    assert from_here(OUTSIDE_PEER, "8080") == "connected"

    began = time.monotonic()
    assert client.python(CONNECT, OUTSIDE_PEER, "8080").startswith("ConnectionRefusedError")
    assert time.monotonic() - began < 2  # it is told, not left waiting

    api_port = str(node.kubectl.get("endpoints/kubernetes", "-n", "default")["subsets"][0]["ports"][0]["port"])
    assert from_here(network.NODE_ADDRESS, api_port) == "connected"
    assert client.python(CONNECT, network.NODE_ADDRESS, api_port) == "connected"
    assert from_here(network.NODE_ADDRESS, api_port, where=from_outside).startswith("TimeoutError")
    pod_address = json.loads(node.kubectl("get", "pods", "-A", "-o", "json"))["items"][0]["status"]["podIP"]
    assert from_here(pod_address, "8080", where=from_outside).startswith("TimeoutError")
