"""Compares this server with llama.cpp's llama-server, and with vLLM for CPU, on the same GGUF files, over HTTP.

    python -m benchmarks.real_models --gguf FILE ... --llama-server PATH [--vllm-python VENV/bin/python] [--rounds 3]
        [--parts load,prompts,streams,chats] [--full N] [--patience-s 60] [--out BASE]

Servers run in turn, one at a time, on all cores. Each is started once before the rounds, with empty caches, and then
in each round. Prompts are token ids of the same lengths, and answers have full length. No two prompts have a common
prefix, so no cache helps. A figure is measured while others use at most a tenth of the machine, if there is such a time
within `--patience-s` seconds, and up to three times if they use more.

- load: seconds from the start of the process until it has answered one token, with the file in the page cache, and the
  memory of all its processes two seconds later. Memory is the proportional set size (PSS).
- prompts: time to the first token of one request alone, for prompts of 30, 500 and 4,000 tokens
- streams: 1, 4, 8 and 32 requests at once, each with a prompt of 32 tokens and an answer of 64
- chats: one chat per second in Poisson arrivals, alone, and then beside 16 best-effort requests that are always in
  flight. Ours are of `service_tier` flex. The others have no classes, so theirs are plain.

This server is measured as it starts by default, with a prefill and a decode instance of one thread each, and with one
colocated instance of two threads. llama-server has its defaults for load and prompts. For streams and chats it has 32
slots of 512 tokens. Its caches of earlier prompts are off. vLLM cannot read these files on a CPU, so it gets the same
weights in bfloat16, as a directory that transformers writes. By default it keeps one core free for its own work.
With `--full N`, only the first N files are measured with vLLM and with chats.
"""
