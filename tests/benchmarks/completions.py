"""A server of the completions API that answers at once: `python -m tests.benchmarks.completions --port PORT`."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Completions(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        piece = {"choices": [{"text": "word "}]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        events = [piece] * body["max_tokens"] + [{"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.send_response(200)
        self.end_headers()
        for line in [*lines, "data: [DONE]\n\n"] if body.get("stream") else [json.dumps(piece)]:
            self.wfile.write(line.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Server(ThreadingHTTPServer):
    # The most connections at once.
    request_queue_size = 64


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    print("CPU_Mapped model buffer size =    12.50 MiB", flush=True)
    Server(("127.0.0.1", parser.parse_known_args()[0].port), Completions).serve_forever()
