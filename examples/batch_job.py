import json
import time

import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
ask = {"method": "POST", "url": "/v1/responses"}
lines = [ask | {"custom_id": f"{n}", "body": {"input": f"Count from {n} to 12."}} for n in range(7, 10)]
file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
job = client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
while (job := client.batches.retrieve(job.id)).status not in ("completed", "failed", "expired"):
    time.sleep(0.5)
print(client.files.content(job.output_file_id).text)
