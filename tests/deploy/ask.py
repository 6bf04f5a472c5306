"""Sends requests to a server from a host that can reach it: `python -m tests.deploy.ask URL WHAT...`. WHAT is

- `streams`: asks all questions at once. It prints a line when all streams have begun, continues when it reads a line,
  and prints the answers as JSON.
- `calls`: makes short calls, over new connections and one that is kept, until it reads a line. It prints a line after
  the first calls, and then the number of answers and the failures, as JSON.
- `submit N`: submits a batch job with N lines. It prints the job's id.
- `check JOB N`: waits until the job is done, and checks its answers.
"""

from __future__ import annotations

import json
import sys
import time

import openai

from tests.launch.batch_job import check_answers, submit
from tests.launch.callers import Callers
from tests.launch.streams import ask_all


def middle() -> None:
    print("in the middle", flush=True)
    sys.stdin.readline()


def main() -> None:
    url, what, *arguments = sys.argv[1:]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    match what:
        case "streams":
            texts, silence_s = ask_all(url, middle)
            print(json.dumps({"texts": texts, "silence_s": silence_s}), flush=True)
        case "calls":
            with Callers(url) as callers:
                while not callers.num_answered and not callers.failures:
                    time.sleep(0.05)
                middle()
            print(
                json.dumps({"num_answered": callers.num_answered, "failures": callers.failures}), flush=True
            )
        case "submit":
            print(submit(client, int(arguments[0])))
        case "check":
            check_answers(client, arguments[0], int(arguments[1]))


if __name__ == "__main__":
    main()
