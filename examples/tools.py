import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "additionalProperties": False}
weather = {"type": "function", "function": {"name": "weather", "parameters": city}}
named = {"type": "function", "function": {"name": "weather"}}
question = {"role": "user", "content": "How is the weather in Rome?"}
try:
    chat = client.chat.completions.create(
        model="demo", messages=[question], tools=[weather], tool_choice=named
    )
except openai.BadRequestError as error:
    raise SystemExit(f"This example needs a chat template with tools. {error}") from None
for call in chat.choices[0].message.tool_calls:
    print(call.function.name, call.function.arguments)
