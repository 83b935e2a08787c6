"""A Grafana that is none: the few endpoints that `grafana push` and the annotations use, over real HTTP."""

from __future__ import annotations

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "glsa_secretsecretsecret"


class FakeGrafana:
    """State is public, so that a test may change it as somebody at Grafana's own pages would."""

    def __init__(self, token=TOKEN, prefix=""):
        self.token = token
        self.prefix = prefix
        self.folders = {}
        self.sources = {}
        self.boards = {}
        """uid -> {"dashboard", "folderUid", "versions": newest first}."""
        self.rules = {}
        self.annotations = []
        self.calls = []
        self.failures = []
        """(status, message) answered to the next calls, instead of doing anything."""
        self.has_alerting = True
        grafana = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet per answer: else each waits 40 ms for an acknowledgement

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, tree = grafana.take(
                    self.command, self.path, json.loads(body) if body else None, self.headers.get("Authorization", "")
                )
                text = json.dumps(tree).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, format, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}{prefix}"

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def written(self):
        return [(method, path) for method, path in self.calls if method != "GET"]

    def take(self, method, path, body, authorization):
        if self.failures:
            status, message = self.failures.pop(0)
            return status, {"message": message}
        if authorization != f"Bearer {self.token}":
            return 401, {"message": f"invalid API key {authorization}"}
        path = path.removeprefix(f"{self.prefix}/api")
        self.calls.append((method, path))
        parts = path.split("?")[0].strip("/").split("/")
        match method, parts:
            case "GET", ["folders", uid]:
                return self._found(self.folders.get(uid))
            case "POST", ["folders"]:
                if body["uid"] in self.folders:
                    return 412, {"message": "a folder with that uid exists"}
                self.folders[body["uid"]] = body
                return 200, body
            case "GET", ["datasources"]:
                return 200, list(self.sources.values())
            case "GET", ["datasources", "uid", uid]:
                return self._found(self.sources.get(uid))
            case ("POST", ["datasources"]) | ("PUT", ["datasources", "uid", _]):
                self.sources[body["uid"]] = body
                return 200, {"datasource": body}
            case "GET", ["dashboards", "uid", uid]:
                return self._found(self.boards.get(uid), "dashboard")
            case "GET", ["dashboards", "uid", uid, "versions"]:
                return 200, {"versions": self.boards[uid]["versions"], "continueToken": ""}
            case "POST", ["dashboards", "db"]:
                return self._save(body)
            case _, ["v1", "provisioning", "folder", _, "rule-groups", name] if self.has_alerting:
                if method == "PUT":
                    self.rules[name] = self._completed(body)
                return self._found(self.rules.get(name))
            case "POST", ["annotations"]:
                self.annotations.append(body)
                return 200, {"id": len(self.annotations)}
        return 404, {"message": "Not found"}

    @staticmethod
    def _found(thing, key=None):
        if thing is None:
            return 404, {"message": "not found"}
        return 200, {key: thing[key], "meta": {}} if key else thing

    def _save(self, body):
        board = copy.deepcopy(body["dashboard"])
        uid, known = board["uid"], self.boards.get(board["uid"])
        version = known["dashboard"]["version"] if known else 0
        if known and not body["overwrite"] and board.get("version") != version:
            return 412, {"status": "version-mismatch", "message": "The dashboard has been changed by someone else"}
        board |= {"version": version + 1, "id": 7}
        said = {"version": version + 1, "message": body.get("message", "")}
        versions = [said, *(known["versions"] if known else [])]
        self.boards[uid] = {"dashboard": board, "folderUid": body.get("folderUid"), "versions": versions}
        return 200, {"status": "success", "uid": uid, "version": version + 1}

    @staticmethod
    def _completed(group):
        """As Grafana gives rules back: with ids and times of its own."""
        group = copy.deepcopy(group)
        for number, rule in enumerate(group["rules"]):
            rule |= {"id": number, "updated": "2026-01-01T00:00:00Z", "isPaused": False, "provenance": ""}
            rule["data"][0] |= {"queryType": ""}
        return group

    def edit_in_the_ui(self, uid, **changes):
        """Somebody saves a board with other contents."""
        board = copy.deepcopy(self.boards[uid]["dashboard"]) | changes
        self._save({"dashboard": board, "overwrite": True, "message": "", "folderUid": self.boards[uid]["folderUid"]})
