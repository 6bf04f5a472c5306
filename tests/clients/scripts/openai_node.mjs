// OpenAI's client for Node: chats, streams, tools, responses, files and batches.
import assert from "node:assert/strict";
import { setTimeout } from "node:timers/promises";
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none" });
const messages = [{ role: "user", content: "Count from 7 to 9." }];
const ANSWER = "7, 8, 9";

const chat = await client.chat.completions.create({ model: "demo", messages, temperature: 0 });
assert.equal(chat.choices[0].message.content, ANSWER);

const stream = client.chat.completions.stream({ model: "demo", messages, temperature: 0 });
let text = "";
for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
assert.equal(text, ANSWER);
assert.equal(await stream.finalContent(), ANSWER);

// runTools calls the function, and asks again with its result
let cities = 0;
const runner = client.chat.completions.runTools({
  model: "demo",
  messages,
  temperature: 0,
  tool_choice: { type: "function", function: { name: "weather" } },
  tools: [{
    type: "function",
    function: {
      name: "weather",
      parse: JSON.parse,
      parameters: { type: "object", properties: { city: { enum: ["Rome", "Oslo"] } }, required: ["city"], additionalProperties: false },
      function: ({ city }) => {
        assert.ok(["Rome", "Oslo"].includes(city));
        cities += 1;
        return "Count from 7 to 9.";
      },
    },
  }],
});
await runner.done();
assert.equal(cities, 1);

const response = await client.responses.create({ model: "demo", input: "Count from 7 to 9.", temperature: 0 });
assert.equal(response.output_text, ANSWER);
const events = await client.responses.create({ model: "demo", input: messages, temperature: 0, stream: true });
text = "";
for await (const event of events) if (event.type === "response.output_text.delta") text += event.delta;
assert.equal(text, ANSWER);

const line = { custom_id: "1", method: "POST", url: "/v1/responses", body: { model: "demo", input: "Count from 7 to 9.", temperature: 0 } };
const file = await client.files.create({ file: await toFile(Buffer.from(JSON.stringify(line)), "in.jsonl"), purpose: "batch" });
let batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/responses", completion_window: "24h" });
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await setTimeout(100);
  batch = await client.batches.retrieve(batch.id);
}
assert.equal(batch.request_counts.completed, 1, JSON.stringify(batch));
const answered = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
assert.equal(answered.response.body.output[0].content[0].text, ANSWER);
