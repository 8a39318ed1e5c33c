"""`stoker serve`: answer searches over HTTP, warmed before the first one."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from stoker.service.configuration import add_config_flags, config_from_args

if TYPE_CHECKING:
    from stoker.service.engine import Engine


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="answer searches over HTTP, warmed before the first one",
        description="Opens an index, warms what the heat says will be asked, and answers searches. "
        "/readyz opens once all that is loaded; searches are answered from the first moment, and "
        "say how complete they are. SIGTERM lets running requests finish.",
        epilog="example: stoker serve ./my-index --embed-model bundled",
    )
    parser.add_argument("index", metavar="INDEX", help="folder that `stoker index` made")
    parser.add_argument("--host", help="address to listen on (service.host)")
    parser.add_argument(
        "--port", type=int, help="port to listen on; 0 takes a free one (service.port)"
    )
    parser.add_argument(
        "--warm", choices=["auto", "none", "all"], help="what to load at start (service.warm)"
    )
    parser.add_argument(
        "--embed-model",
        metavar="MODEL",
        help="model for text: bundled, a folder or a hub name (service.embed_model)",
    )
    parser.add_argument(
        "--kafka", metavar="HOST:PORT", help="keep events in Kafka instead of on this disk"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="budget of the page pool, e.g. 2GiB (index.memory_bytes)"
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", help="folder of heat, events, receipt (service.state_dir)"
    )
    parser.add_argument(
        "--read-only", action="store_true", help="take no document writes (service.writes=off)"
    )
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    # Until there is something to drain. The first process of a container ignores what it does not
    # handle, and would be waited for in vain.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    loaded = config_from_args(
        args,
        {
            "service.host": ("--host", args.host),
            "service.port": ("--port", args.port),
            "service.warm": ("--warm", args.warm),
            "service.embed_model": ("--embed-model", args.embed_model),
            "service.kafka_bootstrap": ("--kafka", args.kafka),
            "service.event_log": ("--kafka", "kafka" if args.kafka else None),
            "index.memory_bytes": ("--memory", args.memory),
            "service.state_dir": ("--state-dir", args.state_dir),
            "service.writes": ("--read-only", "off" if args.read_only else None),
        },
    )
    # Imported only now: the settings may be wrong, and that should be said at once.
    from stoker.service.collector import kept_for_good

    settings = loaded.config.service
    with kept_for_good():
        from stoker.service.app import serve
        from stoker.service.engine_opening import open_engine
        from stoker.service.logging import configure_logging

        configure_logging(settings.log_level, settings.log_format)
        engine = open_engine(args.index, loaded.config)
    told = _Teller(engine, as_json=args.json)
    finished = asyncio.run(serve(engine, settings, listening=told.listening))
    told.stopped()
    if not finished:
        # A request hangs in a thread, and the interpreter waits for threads without end. All that
        # was acknowledged is on disk, and the rest is the kernel's to free.
        sys.stderr.flush()
        os._exit(0)
    return 0


class _Teller:
    """Says on standard output where the server listens and how warm it is."""

    def __init__(self, engine: Engine, *, as_json: bool) -> None:
        self._engine = engine
        self._as_json = as_json

    def listening(self, host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
        self._say(
            f"stoker: listening on {url} (pid {os.getpid()})",
            event="listening",
            host=host,
            port=port,
            url=url,
            pid=os.getpid(),
        )
        parts = self._engine.readiness().parts
        off = "; ".join(f"{name} {state}" for name, state in parts.items() if state != "on")
        self._say(f"stoker: all parts on{' but ' + off if off else ''}", event="parts", parts=parts)
        threading.Thread(target=self._follow_warmup, name="teller", daemon=True).start()

    def stopped(self) -> None:
        self._say("stoker: stopped", event="stopped")

    def _follow_warmup(self) -> None:
        status = self._engine.warm_status()
        if status.state == "none":
            self._say("stoker: no warm-up (service.warm is none)", event="warmup", state="none")
            return
        bar = sys.stderr.isatty() and not self._as_json
        if bar:
            self._draw_progress()
        else:
            self._engine.wait_warm(1e9)
        status = self._engine.warm_status()
        receipt = self._engine.receipt
        if receipt is not None and status.state == "done":
            text = f"stoker: warm\n{receipt.render()}".rstrip()
            self._say(text, event="warmup", state="done", receipt=receipt.to_dict())
        else:
            self._say(
                f"stoker: the warm-up failed: {status.error}; searches go on",
                event="warmup",
                state=status.state,
                error=status.error,
            )

    def _draw_progress(self) -> None:
        from rich.console import Console

        from stoker.service.problems import DeadlinePassed

        console = Console(stderr=True, highlight=False)
        with console.status("warming") as line:
            while True:
                try:
                    self._engine.wait_warm(0.2)
                    return
                except DeadlinePassed:
                    progress = self._engine.warm_status().progress or {}
                    mib = progress.get("bytes_read", 0) / (1 << 20)
                    ratio = progress.get("predicted_hit_ratio", 0.0)
                    line.update(f"warming: {mib:,.1f} MiB read, predicted hit ratio {ratio:.2f}")

    def _say(self, text: str, **event: Any) -> None:
        try:
            print(json.dumps(event) if self._as_json else text, flush=True)
        except OSError:
            # Who read it has gone, or its disk is full: no reason to end a server. What is still
            # buffered would fail again at exit, and with it the exit code.
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
