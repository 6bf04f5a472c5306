import time

import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
response = client.responses.create(model="demo", input="Count from 7 to 12.", temperature=0, background=True)
while response.status in ("queued", "in_progress"):
    time.sleep(0.2)
    response = client.responses.retrieve(response.id)
print(response.output_text)
