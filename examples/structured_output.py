from typing import Literal

import openai
import pydantic

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
City = pydantic.create_model("City", name=(Literal["Rome", "Oslo"], ...), is_capital=(bool, ...))
question = {"role": "user", "content": "Name a city."}
chat = client.chat.completions.parse(model="demo", messages=[question], response_format=City)
print(chat.choices[0].message.parsed)
