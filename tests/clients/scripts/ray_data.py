"""Ray Data's HTTP processor: rows of a data set, sent as best effort."""

import os

import ray
from ray.data.llm import HttpRequestProcessorConfig, build_processor

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False

config = HttpRequestProcessorConfig(
    url=os.environ["BASE_URL"] + "/chat/completions", batch_size=4, concurrency=1
)
processor = build_processor(
    config,
    preprocess=lambda row: {
        "payload": {
            "model": "demo",
            "messages": [{"role": "user", "content": row["question"]}],
            "temperature": 0,
            "service_tier": "flex",
        }
    },
    postprocess=lambda row: {
        "answer": row["http_response"]["choices"][0]["message"]["content"],
        "tier": row["http_response"]["service_tier"],
    },
)
questions = ray.data.from_items([{"question": f"Count from {first} to 9."} for first in range(2, 8)])
rows = processor(questions).take_all()
assert {row["tier"] for row in rows} == {"flex"}
answers = {row["answer"] for row in rows}
assert len(rows) == 6 and "7, 8, 9" in answers, rows
