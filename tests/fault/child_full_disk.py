"""Append until the disk is full, then say what was acknowledged and what the failure was.

Usage: child_full_disk.py FOLDER BYTES. Files of this process may not grow over BYTES, which stands
for a full disk; then there is room again, and one more append has to work.
"""

from __future__ import annotations

import resource
import signal
import sys

from stoker.service.embedded_log import EmbeddedLog
from stoker.service.streams import LogFull, LogUnavailable, TopicSpec


def main() -> None:
    folder, bound = sys.argv[1], int(sys.argv[2])
    log = EmbeddedLog(folder)
    log.ensure_topic(TopicSpec("t", partition_count=1, retention_s=None))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bound, before[1]))
    acknowledged = 0
    failure = ""
    while not failure:
        try:
            log.append("t", b"k", [b"%d %s" % (acknowledged, b"." * 300)])
            acknowledged += 1
        except (LogFull, LogUnavailable) as error:
            failure = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.append("t", b"k", [b"%d after" % acknowledged])
    log.check()
    log.close()
    print(acknowledged + 1)
    print(failure)


main()
