from alignedserve import LLM, SamplingParams

llm = LLM("demo")
question = [{"role": "user", "content": "Count from 7 to 12."}]
outputs = llm.chat([question], SamplingParams(temperature=0, max_tokens=100))
print(outputs[0].outputs[0].text)
