"""Security releases of Redis and Valkey since October 2024 that concern a server as Millrace uses it.

Read on LISTED_ON off the projects' own notes: github.com/redis/redis/releases ("Redis Open Source release notes" on
redis.io/docs, 00-RELEASENOTES of each branch), github.com/valkey-io/valkey/releases, and osv.dev for the versions of
CVE-2026-81934 and CVE-2026-56684. Left out is what needs a module, RDMA or the bus of Redis Cluster, and what only
crashes a server for a user who has commands that no user of `millrace acl` has.

Whoever may submit may load a script (SCRIPT LOAD, EVALSHA), so a hole in Lua is open to every holder of a password.
"""

from __future__ import annotations

from worker.doctor.advisory import Advisory

LISTED_ON = "2026-11-22"

_LUA_STACK = "a script may overflow the stack and run code on the server"
_LUA_COLLECTOR = "a script may run code on the server"
_LUA_2025 = "a script may run code on the server, and act as another user"
_OUTPUT_BUFFERS = "who has no password may fill the server's memory"
_CONNECTIONS = "who has no password may keep others from connecting"
_LUA_ERRORS = "a script may forge replies that others' connections read"
_UNBLOCKING = "a user may run code on the server, by a script or by unblocking a client"
_RESTORE = "a user who may RESTORE (none of Millrace's) may run code on the server"
_TLS = "who reaches the TLS port may run code on the server, without a password"
_TLS_KILL = "a user who may CLIENT KILL (none of Millrace's) may run code on a server with TLS"

_LUA_2025_CVES = ("CVE-2025-49844", "CVE-2025-46817", "CVE-2025-46818", "CVE-2025-46819")

REDIS = (
    Advisory(("CVE-2024-31449",), "2024-10-02", _LUA_STACK, {(6, 2): 16, (7, 2): 6, (7, 4): 1}),
    Advisory(("CVE-2024-46981",), "2025-01-06", _LUA_COLLECTOR, {(6, 2): 17, (7, 2): 7, (7, 4): 2}),
    Advisory(("CVE-2025-21605",), "2025-04-23", _OUTPUT_BUFFERS, {(6, 2): 18, (7, 2): 8, (7, 4): 3}),
    Advisory(("CVE-2025-48367",), "2025-07-06", _CONNECTIONS, {(6, 2): 19, (7, 2): 10, (7, 4): 5, (8, 0): 3}),
    Advisory(_LUA_2025_CVES, "2025-10-03", _LUA_2025, {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2}),
    Advisory(
        ("CVE-2026-23479", "CVE-2026-23631"),
        "2026-05-05",
        _UNBLOCKING,
        {(7, 2): 14, (7, 4): 9, (8, 2): 6, (8, 4): 3, (8, 6): 3},
        since=(7, 0),
    ),
    Advisory(
        ("CVE-2026-25243", "CVE-2026-66373"),  # the fix of the first, in May, was not complete
        "2026-07-23",
        _RESTORE,
        {(6, 2): 23, (7, 2): 15, (7, 4): 10, (8, 2): 8, (8, 4): 5, (8, 6): 5},
    ),
    Advisory(
        ("CVE-2026-81934",),
        "2026-08-18",
        _TLS,
        {(6, 2): 24, (7, 2): 16, (7, 4): 11, (8, 2): 9, (8, 4): 6, (8, 6): 6, (8, 8): 2, (8, 10): 1},
    ),
)

VALKEY = (
    Advisory(("CVE-2024-31449",), "2024-10-02", _LUA_STACK, {(7, 2): 7, (8, 0): 1}),
    Advisory(("CVE-2024-46981",), "2025-01-06", _LUA_COLLECTOR, {(7, 2): 8, (8, 0): 2}),
    Advisory(("CVE-2025-21605",), "2025-04-23", _OUTPUT_BUFFERS, {(7, 2): 9, (8, 0): 3, (8, 1): 1}),
    Advisory(_LUA_2025_CVES, "2025-10-03", _LUA_2025, {(7, 2): 11, (8, 0): 6, (8, 1): 4}),
    Advisory(("CVE-2025-67733",), "2026-02-23", _LUA_ERRORS, {(7, 2): 12, (8, 0): 7, (8, 1): 6, (9, 0): 3}),
    Advisory(
        ("CVE-2026-23479", "CVE-2026-23631"),
        "2026-05-05",
        _UNBLOCKING,
        {(7, 2): 13, (8, 0): 9, (8, 1): 7, (9, 0): 4},
    ),
    Advisory(
        ("CVE-2026-25243", "CVE-2026-63639"),
        "2026-07-21",
        _RESTORE,
        {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1},
    ),
    Advisory(("CVE-2026-56684",), "2026-07-21", _TLS_KILL, {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1}),
)
