import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
texts = ["Count from 7 to 12.", "Count from 8 to 12.", "Write the word bread backwards."]
query, *others = (each.embedding for each in client.embeddings.create(model="demo", input=texts).data)
nearness = [sum(a * b for a, b in zip(query, other, strict=True)) for other in others]
print(texts[1 + nearness.index(max(nearness))], "is nearer")
