"""A stand-in for Ray Serve's REST and for the directory that runs on it: what is deployed runs at once."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from appliance.core.cluster import DIRECTORY, PREFIX

STARTED_AT = 1_700_000_000.0


class FakeServe:
    """Both listen on one port. states: of the replicas of an application, where they are not all RUNNING. messages: of
    an application. token: that callers have to show; refuses: the words with which a deployment is refused."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.deployed: dict[str, Any] = {"applications": []}
        self.puts: list[Any] = []
        self.states: dict[str, list[str]] = {}
        self.statuses: dict[str, str] = {}
        self.messages: dict[str, str] = {}
        self.incomplete: list[str] = []
        self.woken: list[str] = []
        self.refuses = ""
        handler = type("Handler", (Handler,), {"serve": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.port = self.server.server_port

    def __enter__(self) -> FakeServe:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.server.shutdown()
        self.server.server_close()

    def applications(self) -> dict[str, Any]:
        return {each["name"]: self.application(each) for each in self.deployed["applications"]}

    def application(self, config: dict[str, Any]) -> dict[str, Any]:
        name, (deployment,) = config["name"], config["deployments"]
        replicas = [
            {"replica_id": f"{name}-{at}", "state": state, "node_ip": "10.0.0.1", "start_time_s": STARTED_AT + at}
            for at, state in enumerate(self.states_of(name, deployment))
        ]
        return {
            "status": self.statuses.get(name, "RUNNING"),
            "message": self.messages.get(name, ""),
            "deployed_app_config": config,
            "deployments": {deployment["name"]: {"message": "", "replicas": replicas}},
        }

    def states_of(self, name: str, deployment: dict[str, Any]) -> list[str]:
        scaling = deployment.get("autoscaling_config", {})
        return self.states.get(name, ["RUNNING"] * deployment.get("num_replicas", scaling.get("min_replicas", 0)))

    def replicas(self) -> dict[str, Any]:
        """As the directory tells them."""
        configs = {each["name"]: each for each in self.deployed["applications"]}
        tables = configs[DIRECTORY]["deployments"][0]["user_config"]["instances"] if configs else []
        known = {}
        for table in tables:
            name = f"{PREFIX}{table['name']}"
            states = self.states_of(name, configs[name]["deployments"][0])
            known[table["name"]] = [
                {"id": f"{name}-{at}", "address": f"10.0.0.1:{4000 + at}", "pid": 70 + at}
                for at, state in enumerate(states)
                if state == "RUNNING"
            ]
        instances = [
            {**table, "addresses": [each["address"] for each in known[table["name"]]], "arrival": "starting"}
            for table in tables
        ]
        return {"instances": instances, "replicas": known, "incomplete": self.incomplete}


class Handler(BaseHTTPRequestHandler):
    serve: FakeServe

    def log_message(self, *words: Any) -> None:
        pass

    def reply(self, status: int, body: Any) -> None:
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def is_let_in(self) -> bool:
        if self.serve.token and self.headers.get("Authorization") != f"Bearer {self.serve.token}":
            self.reply(401, "no valid token")
            return False
        return True

    def do_GET(self) -> None:
        if self.path == "/replicas":
            self.reply(200, self.serve.replicas())
        elif self.is_let_in():
            self.reply(200, {"applications": self.serve.applications()})

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_let_in():
            return
        if self.serve.refuses:
            self.reply(400, self.serve.refuses)
            return
        self.serve.puts.append(body)
        self.serve.deployed = body
        self.reply(200, "")

    def do_POST(self) -> None:
        name = self.path.partition("instance=")[2]
        self.serve.woken.append(name)
        self.reply(200, {"begun": name != "unknown"})
