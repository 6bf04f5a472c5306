import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
question = {"role": "user", "content": "Count from 7 to 12."}
chat = client.chat.completions.create(model="demo", messages=[question], temperature=0, service_tier="flex")
print(chat.service_tier, chat.choices[0].message.content)
