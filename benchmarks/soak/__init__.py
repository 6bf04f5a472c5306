"""Uses its own server while processes are killed and stopped, to show what virtual time can't.

    python -m benchmarks.soak --minutes 30 --seed 7 --out DIR

It starts `alignedserve serve` with the demo model, on real Ray, Redis, shared memory and sockets. Chats in both classes
and batch jobs run all the time; some clients disconnect, some read slowly. Meanwhile processes of every role, including
Redis, are killed (SIGKILL), or stopped for a while (SIGSTOP, SIGCONT): alone, two at once, and again during recovery.
The seed determines the requests, and which process is struck when; their interleaving varies.

Each stream and each line of a job must equal the output of an `LLM` in this process; every piece is compared. If a
client's connection breaks because its gateway died, or it gets an error that docs/reference/api.md lists while
something is down, it tries again. Such retries are counted separately. At the end every batch must be present with each
line once, nothing may be left of any request, and memory may not have grown without bound. After the server's end, none
of its processes, files or shared memory may be left. Exit status 1 means that one of these failed; the last lines name
the failure and the seed.
"""
