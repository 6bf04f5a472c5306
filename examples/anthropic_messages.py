import anthropic

client = anthropic.Anthropic(base_url="http://127.0.0.1:8000", api_key="none")
question = {"role": "user", "content": "Count from 7 to 12."}
message = client.messages.create(model="demo", messages=[question], max_tokens=100)
print(message.content[0].text)
