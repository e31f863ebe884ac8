"""Requests with exactly the headers that a test says."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

COMPLETION = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
JSON = "application/json"


def ask(url, path="/v1/completions", body=COMPLETION, method="POST", **headers):
    """Return (status, body) for a request with exactly these headers."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def refused(url, status, said, **request):
    """Check that a request is refused with these words, in the form of llama-server's own errors."""
    found, text = ask(url, **request)
    assert found == status, text
    error = json.loads(text)["error"]
    assert error["code"] == status
    assert said in error["message"]
