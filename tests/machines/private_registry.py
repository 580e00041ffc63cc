"""A registry with a password, for test_gpu_pods.py: the lab's mirror behind HTTP basic authentication."""

from __future__ import annotations

import base64
import shutil
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOGIN = "Basic " + base64.b64encode(b"robot:correct-horse").decode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers["Authorization"] != LOGIN:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="lab"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        request = urllib.request.Request(f"http://mirror.lab{self.path}", method=self.command)
        with urllib.request.urlopen(request) as answer:  # noqa: S310 - the lab's own server
            self.send_response(answer.status)
            for name in ("Content-Type", "Content-Length", "Docker-Content-Digest"):
                if answer.headers[name]:
                    self.send_header(name, answer.headers[name])
            self.end_headers()
            shutil.copyfileobj(answer, self.wfile)

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls


ThreadingHTTPServer(("127.0.0.1", 5000), Handler).serve_forever()
