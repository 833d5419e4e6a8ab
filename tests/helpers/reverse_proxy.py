"""Reverse proxy that signs users in, as oauth2-proxy does: ``python -m tests.helpers.reverse_proxy UPSTREAM_PORT``.

The cookie ``session`` of a request contains the user, the e-mail address and the groups in JSON. The proxy replaces the
client's headers ``X-Forwarded-*`` and adds its own. It prints its port when it listens.
"""

from __future__ import annotations

import http.client
import json
import sys
from contextlib import suppress
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

OWN = {"user": "X-Forwarded-User", "email": "X-Forwarded-Email", "groups": "X-Forwarded-Groups"}


def main() -> None:
    upstream = int(sys.argv[1])

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent = int(self.headers.get("Content-Length") or 0)
            connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=30)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if not name.lower().replace("_", "-").startswith("x-forwarded-") and name.lower() != "cookie":
                    connection.putheader(name, value)
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get("session")
            for key, value in json.loads(unquote(cookie.value)).items() if cookie else ():
                connection.putheader(OWN[key], value)
            connection.putheader("X-Forwarded-Proto", "https")
            connection.endheaders(self.rfile.read(sent) if sent else None)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            with suppress(ConnectionError):  # the browser has closed a stream
                while part := answer.read1():
                    self.wfile.write(part)
                    self.wfile.flush()
            connection.close()
            self.close_connection = True

        do_POST = do_DELETE = do_PUT = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        sys.stdout.write(f"{server.server_port}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
