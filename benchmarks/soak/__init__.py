"""A server of its own, in use, while its processes are killed and stopped: what virtual time cannot show.

    python -m benchmarks.soak --minutes 30 --seed 7 --out DIR

It starts `alignedserve serve` with the demo model, on real Ray, Redis, shared memory and sockets. Chats in both classes
and batch jobs go on all the time: some clients leave, some read slowly. Meanwhile processes of every role, Redis too,
are killed (SIGKILL), or stopped for a while (SIGSTOP, SIGCONT): alone, two at once, and again while the system
recovers. What is asked, and which process is struck when, follow from the seed; how they meet does not.

Each stream and each line of a job has to say what an `LLM` says in this process: every piece of it is compared. A
client whose connection breaks because its gateway died, or which gets an error that docs/reference/api.md lists while
something is down, asks again; that is counted apart. At the end every batch is there with each line once, nothing is
left of any request, memory has not grown without bound, and when the server has ended there is no process, file or
shared memory of it. Exit status 1 says that something of this was not so: the last lines say what, and the seed.
"""
