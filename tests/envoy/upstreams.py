"""The servers behind both proxies: a worker that tells what reached it, and what filters call over HTTP and gRPC."""

import json
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import h2.config
import h2.connection
import h2.events

PROBES = {
    "/ready": {"status": "ready"},
    "/health": {"status": "ready"},
    "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "sglang"}]},
    "/server_info": {
        "version": "0.5.23",
        "enable_session_radix_cache": False,
        "enable_streaming_session": False,
        "enable_priority_scheduling": False,
        "enable_cache_report": False,
        "dp_size": 1,
        "max_running_requests": 512,
        "max_total_num_tokens": 4000000,
        "page_size": 1,
    },
    "/v1/loads": {
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": 0,
                "num_waiting_reqs": 0,
                "num_waiting_uncached_tokens": 0,
                "num_used_tokens": 0,
                "max_total_num_tokens": 4000000,
                "max_running_requests": 512,
                "total_prefill_uncached_tokens": 0,
                "total_prefill_busy_us": 0,
            }
        ]
    },
}


class Origin:
    """The worker. What an exchange brought it is kept under the exchange's name, from the header `x-exchange`."""

    def __init__(self):
        self.seen = {}
        self.lock = threading.Lock()
        origin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self):
                try:
                    body = self.body()
                except ConnectionAbortedError:
                    self.close_connection = True
                    return None
                exchange = self.headers.get("x-exchange")
                if exchange is None:
                    return self.probe()
                headers = [(name.lower(), value) for name, value in self.headers.items()]
                with origin.lock:
                    origin.seen.setdefault(exchange, []).append(
                        {"method": self.command, "path": self.path, "headers": headers, "body": body}
                    )
                self.reply(self.headers)
                return None

            do_GET = do_POST = do_HEAD = answer

            def body(self):
                if self.headers.get("transfer-encoding", "").lower() == "chunked":
                    whole = b""
                    while True:
                        line = self.rfile.readline()
                        if not line:
                            raise ConnectionAbortedError
                        size = int(line.split(b";")[0], 16)
                        whole += self.rfile.read(size)
                        self.rfile.readline()
                        if size == 0:
                            return whole
                return self.rfile.read(int(self.headers.get("content-length", 0)))

            def probe(self):
                page = PROBES.get(self.path.split("?")[0])
                text = json.dumps(page or {}).encode()
                self.send_response_only(200 if page else 404)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def reply(self, asked):
                status = int(asked.get("x-origin-status", "200"))
                text = asked.get("x-origin-body", '{"padding":"abcdef"}').encode() * int(asked.get("x-origin-times", "1"))
                self.send_response_only(status)
                self.send_header("content-type", "application/json")
                self.send_header("x-response-replaced", "old")
                self.send_header("x-response-removed", "gone")
                self.send_header("x-pair", "one")
                self.send_header("x-pair", "two")
                bare = status in (204, 304)
                pieces = int(asked.get("x-origin-pieces", "0"))
                if pieces:
                    self.send_header("transfer-encoding", "chunked")
                elif not bare:
                    self.send_header("content-length", str(len(text)))
                self.end_headers()
                if bare or self.command == "HEAD":
                    return
                if not pieces:
                    self.wfile.write(text)
                    return
                step = max(1, len(text) // pieces)
                for start in range(0, len(text), step):
                    piece = text[start : start + step]
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()
                    time.sleep(0.01)
                self.wfile.write(b"0\r\n\r\n")

        self.port = serve(ThreadingHTTPServer(("127.0.0.1", 0), Handler))


class Auth:
    """What filters call over HTTP: the path says what it answers."""

    def __init__(self):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self):
                self.rfile.read(int(self.headers.get("content-length", 0)))
                path, status = self.path, 200
                if path == "/drop":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if path == "/hang":
                    time.sleep(2)
                    self.close_connection = True
                    return
                if path.startswith("/slow/"):
                    time.sleep(0.1)
                if path.startswith("/status/"):
                    status = int(path.rsplit("/", 1)[1])
                text = {"/yes": b"yes", "/no": b"no", "/big": b"y" * 1_000_000}.get(path, path.encode())
                bare = status in (204, 304)
                self.send_response_only(status)
                self.send_header("x-origin", "auth")
                if not bare:
                    self.send_header("content-length", str(len(text)))
                self.end_headers()
                if not bare and self.command != "HEAD":
                    self.wfile.write(text)

            do_GET = do_POST = do_HEAD = answer

        self.port = serve(ThreadingHTTPServer(("127.0.0.1", 0), Handler))


class Grpc:
    """What filters call over gRPC: the method says what it answers."""

    def __init__(self):
        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                try:
                    converse(self.request)
                except (ConnectionError, OSError):
                    pass

        socketserver.ThreadingTCPServer.allow_reuse_address = True
        self.port = serve(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler))


def serve(server):
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def converse(stream):
    """One HTTP/2 connection."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
    connection.initiate_connection()
    stream.sendall(connection.data_to_send())
    methods = {}
    while data := stream.recv(65536):
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                methods[event.stream_id] = dict(event.headers)[":path"].rsplit("/", 1)[-1]
            elif isinstance(event, h2.events.DataReceived):
                connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                verdict(connection, event.stream_id, methods.pop(event.stream_id, ""))
        stream.sendall(connection.data_to_send())


def verdict(connection, stream_id, method):
    start = [(":status", "200"), ("content-type", "application/grpc")]
    if method == "Hang":
        return
    if method in ("Yes", "No"):
        text = method.lower().encode()
        connection.send_headers(stream_id, start)
        connection.send_data(stream_id, b"\0" + len(text).to_bytes(4, "big") + text)
        connection.send_headers(stream_id, [("grpc-status", "0"), ("x-trailer", "1")], end_stream=True)
    elif method == "Reset":
        connection.reset_stream(stream_id, 2)
    else:
        ending = [("grpc-status", "7"), ("grpc-message", "not for you")]
        connection.send_headers(stream_id, start + ending, end_stream=True)
